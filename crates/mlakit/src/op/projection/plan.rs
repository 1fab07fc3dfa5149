//! The operation `projection`: no scratch of its own.

use half::bf16;

use super::bind::{ProjectionArgs, ProjectionRegions};
use super::oracle::oracle;
use super::spec::ProjectionSpec;
use crate::memory::Uses;
use crate::op::layer::FloatProbe;
use crate::op::sealed::Sealed;
use crate::scratch::RegionSpec;
use crate::{Choice, Device, Error, Op, Plan, Runs, Warm};

/// The operation.
#[derive(Debug)]
pub struct Projection;

impl Sealed for Projection {}

impl Op for Projection {
    const NAME: &'static str = "projection";
    type Spec = ProjectionSpec;
    type Args<'a, D: Device> = ProjectionArgs<'a, D>;
    type Regions = ProjectionRegions;

    fn scratch(_: &ProjectionSpec, _: &Choice) -> Vec<RegionSpec> {
        Vec::new()
    }

    fn operands<'a, D: Device>(
        plan: &Plan<Self>,
        args: ProjectionArgs<'a, D>,
        uses: &mut Uses<'a>,
    ) -> Result<ProjectionRegions, Error> {
        args.declare(plan, uses)
    }

    /// Two rows of small integers over a gap pattern: exact in any order of summation, and gaps must keep their bits.
    fn probe<'w, D: Runs<Self>>(warm: &mut Warm<'w, Self, D>) -> Result<(), Error> {
        let spec = warm.spec();
        let rows = spec.max_rows.min(2);
        let small = |i: usize| bf16::from_f32((i % 5) as f32 - 2.0);
        let x: Vec<bf16> = (0..rows * spec.heads * spec.in_width).map(small).collect();
        let weight: Vec<bf16> =
            (0..spec.heads * spec.in_width * spec.out_width).map(|i| small(i / 3)).collect();
        let values = oracle(&spec, &x, &weight);
        let mut needed = vec![77.0f32; rows * spec.heads * spec.out_stride()];
        for (to, from) in
            needed.chunks_exact_mut(spec.out_stride()).zip(values.chunks_exact(spec.out_width))
        {
            to.iter_mut().zip(from).for_each(|(to, from)| *to = spec.output.round(*from));
        }
        let mut strided = vec![bf16::NAN; rows * spec.heads * spec.in_stride()];
        for (to, from) in
            strided.chunks_exact_mut(spec.in_stride()).zip(x.chunks_exact(spec.in_width))
        {
            to[..spec.in_width].copy_from_slice(from);
        }
        let (x, weight) = (warm.probe::<bf16>(&strided)?, warm.probe::<bf16>(&weight)?);
        let mut y = FloatProbe::new(warm, spec.output, &vec![77.0; needed.len()])?;
        let mut scratch = warm.scratch()?;
        warm.run(ProjectionArgs {
            x: (&x).into(),
            weight: (&weight).into(),
            y: y.output(),
            scratch: (&mut scratch).into(),
        })?;
        let given = y.read(warm)?;
        Warm::<Self, D>::expect(&needed, &given, |n, g| n == g)
    }
}
