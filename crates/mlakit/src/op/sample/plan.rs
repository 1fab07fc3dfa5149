//! The operation `sample`: no scratch of its own.

use super::bind::{SampleArgs, SampleRegions};
use super::spec::SampleSpec;
use crate::memory::Uses;
use crate::op::sealed::Sealed;
use crate::scratch::RegionSpec;
use crate::{Choice, Device, Error, Op, Plan, Runs, Warm};

/// The operation.
#[derive(Debug)]
pub struct Sample;

impl Sealed for Sample {}

impl Op for Sample {
    const NAME: &'static str = "sample";
    type Spec = SampleSpec;
    type Args<'a, D: Device> = SampleArgs<'a, D>;
    type Regions = SampleRegions;

    fn scratch(_: &SampleSpec, _: &Choice) -> Vec<RegionSpec> {
        Vec::new()
    }

    fn operands<'a, D: Device>(
        plan: &Plan<Self>,
        args: SampleArgs<'a, D>,
        uses: &mut Uses<'a>,
    ) -> Result<SampleRegions, Error> {
        args.declare(plan, uses)
    }

    fn probe<'w, D: Runs<Self>>(warm: &mut Warm<'w, Self, D>) -> Result<(), Error> {
        super::probe::probe(warm)
    }
}
