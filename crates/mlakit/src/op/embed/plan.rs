//! The operation `embed`: no scratch of its own, and a probe that is compared bit by bit.

use super::bind::{EmbedArgs, EmbedRegions};
use super::oracle::oracle;
use super::spec::EmbedSpec;
use crate::memory::Uses;
use crate::op::layer::{FloatProbe, eighths};
use crate::op::sealed::Sealed;
use crate::scratch::{Fault, RegionSpec};
use crate::{Choice, Device, Error, Op, Plan, Runs, Warm};

/// The operation.
#[derive(Debug)]
pub struct Embed;

impl Sealed for Embed {}

impl Op for Embed {
    const NAME: &'static str = "embed";
    type Spec = EmbedSpec;
    type Args<'a, D: Device> = EmbedArgs<'a, D>;
    type Regions = EmbedRegions;

    fn scratch(_: &EmbedSpec, _: &Choice) -> Vec<RegionSpec> {
        Vec::new()
    }

    fn operands<'a, D: Device>(
        plan: &Plan<Self>,
        args: EmbedArgs<'a, D>,
        uses: &mut Uses<'a>,
    ) -> Result<EmbedRegions, Error> {
        args.declare(plan, uses)
    }

    /// The ends of the table, padding, and ids before and behind it.
    fn probe<'w, D: Runs<Self>>(warm: &mut Warm<'w, Self, D>) -> Result<(), Error> {
        let spec = warm.spec();
        let vocab = spec.vocab.unwrap_or(5);
        let table: Vec<f32> = (0..vocab * spec.width).map(eighths).collect();
        let on_device = FloatProbe::new(warm, spec.table, &table)?;
        let end = vocab as i32;
        for ids in [end - 1, end, -1, 0, -2, i32::MIN, i32::MAX].chunks(spec.max_rows) {
            let result = oracle(&spec, &table, ids);
            let round = |v: &f32| spec.output.round(f64::from(*v));
            let needed: Vec<f32> = result.y.iter().map(round).collect();

            let ids = warm.probe::<i32>(ids)?;
            let mut y = FloatProbe::new(warm, spec.output, &vec![f32::NAN; needed.len()])?;
            let mut scratch = warm.scratch()?;
            warm.run(EmbedArgs {
                table: on_device.input(),
                ids: (&ids).into(),
                y: y.output(),
                scratch: (&mut scratch).into(),
            })?;
            let given = y.read(warm)?;
            Warm::<Self, D>::expect(&needed, &given, |n, g| n == g)?;
            let faults = warm.faults(&scratch)?[Fault::Id as usize];
            Warm::<Self, D>::expect(&[result.faults], &[faults], |n, g| n == g)?;
        }
        Ok(())
    }
}
