//! The operation `route`: no scratch of its own.

use super::bind::{RouteArgs, RouteRegions};
use super::spec::RouteSpec;
use crate::memory::Uses;
use crate::op::sealed::Sealed;
use crate::scratch::RegionSpec;
use crate::{Choice, Device, Error, Op, Plan, Runs, Warm};

/// The operation.
#[derive(Debug)]
pub struct Route;

impl Sealed for Route {}

impl Op for Route {
    const NAME: &'static str = "route";
    type Spec = RouteSpec;
    type Args<'a, D: Device> = RouteArgs<'a, D>;
    type Regions = RouteRegions;

    fn scratch(_: &RouteSpec, _: &Choice) -> Vec<RegionSpec> {
        Vec::new()
    }

    fn operands<'a, D: Device>(
        plan: &Plan<Self>,
        args: RouteArgs<'a, D>,
        uses: &mut Uses<'a>,
    ) -> Result<RouteRegions, Error> {
        args.declare(plan, uses)
    }

    fn probe<'w, D: Runs<Self>>(warm: &mut Warm<'w, Self, D>) -> Result<(), Error> {
        super::probe::probe(warm)
    }
}
