//! The operation `linear`: no scratch of its own.

use super::bind::{LinearArgs, LinearRegions};
use super::spec::LinearSpec;
use crate::memory::Uses;
use crate::op::sealed::Sealed;
use crate::scratch::RegionSpec;
use crate::{Choice, Device, Error, Op, Plan, Runs, Warm};

/// The operation.
#[derive(Debug)]
pub struct Linear;

impl Sealed for Linear {}

impl Op for Linear {
    const NAME: &'static str = "linear";
    type Spec = LinearSpec;
    type Args<'a, D: Device> = LinearArgs<'a, D>;
    type Regions = LinearRegions;

    fn scratch(_: &LinearSpec, _: &Choice) -> Vec<RegionSpec> {
        Vec::new()
    }

    fn operands<'a, D: Device>(
        plan: &Plan<Self>,
        args: LinearArgs<'a, D>,
        uses: &mut Uses<'a>,
    ) -> Result<LinearRegions, Error> {
        args.declare(plan, uses)
    }

    fn probe<'w, D: Runs<Self>>(warm: &mut Warm<'w, Self, D>) -> Result<(), Error> {
        super::probe::probe(warm)
    }
}
