//! The operation `hadamard`: no scratch of its own.

use half::bf16;

use super::bind::{HadamardArgs, HadamardRegions};
use super::oracle::oracle;
use super::spec::HadamardSpec;
use crate::memory::Uses;
use crate::op::layer::{FloatProbe, eighths, same_bf16};
use crate::op::sealed::Sealed;
use crate::scratch::RegionSpec;
use crate::{Choice, Device, Error, Op, Plan, Runs, Warm};

/// The operation.
#[derive(Debug)]
pub struct Hadamard;

impl Sealed for Hadamard {}

impl Op for Hadamard {
    const NAME: &'static str = "hadamard";
    type Spec = HadamardSpec;
    type Args<'a, D: Device> = HadamardArgs<'a, D>;
    type Regions = HadamardRegions;

    fn scratch(_: &HadamardSpec, _: &Choice) -> Vec<RegionSpec> {
        Vec::new()
    }

    fn operands<'a, D: Device>(
        plan: &Plan<Self>,
        args: HadamardArgs<'a, D>,
        uses: &mut Uses<'a>,
    ) -> Result<HadamardRegions, Error> {
        args.declare(plan, uses)
    }

    /// Sums of eighths are exact, so only the scale and the last rounding are not.
    fn probe<'w, D: Runs<Self>>(warm: &mut Warm<'w, Self, D>) -> Result<(), Error> {
        let spec = warm.spec();
        let elements = spec.max_rows.min(3) * spec.width;
        let x: Vec<f32> = (0..elements).map(eighths).collect();
        let needed = oracle(&spec, &x);
        let x = FloatProbe::new(warm, spec.input, &x)?;
        let mut y = warm.probe::<bf16>(&vec![bf16::NAN; elements])?;
        let mut scratch = warm.scratch()?;
        warm.run(HadamardArgs {
            x: x.input(),
            y: (&mut y).into(),
            scratch: (&mut scratch).into(),
        })?;
        let given: Vec<f64> = warm.read(&y)?.into_iter().map(f64::from).collect();
        Warm::<Self, D>::expect(&needed, &given, same_bf16(0.0))
    }
}
