//! The operation `indexer`: all scratch is the device's.

use super::bind::{IndexerArgs, IndexerRegions};
use super::spec::IndexerSpec;
use crate::memory::Uses;
use crate::op::sealed::Sealed;
use crate::scratch::RegionSpec;
use crate::{Choice, Device, Error, Op, Plan, Runs, Warm};

/// The operation.
#[derive(Debug)]
pub struct Indexer;

impl Sealed for Indexer {}

impl Op for Indexer {
    const NAME: &'static str = "indexer";
    type Spec = IndexerSpec;
    type Args<'a, D: Device> = IndexerArgs<'a, D>;
    type Regions = IndexerRegions;

    /// What holds candidates is the device's choice, within the budget of the `Spec`.
    fn scratch(_: &IndexerSpec, _: &Choice) -> Vec<RegionSpec> {
        Vec::new()
    }

    fn operands<'a, D: Device>(
        plan: &Plan<Self>,
        args: IndexerArgs<'a, D>,
        uses: &mut Uses<'a>,
    ) -> Result<IndexerRegions, Error> {
        args.declare(plan, uses)
    }

    fn probe<'w, D: Runs<Self>>(warm: &mut Warm<'w, Self, D>) -> Result<(), Error> {
        let spec = warm.spec();
        let (needed, bytes) = (spec.budget_bytes, warm.plan().scratch_bytes());
        if bytes > needed {
            let needed = format!("scratch within the budget of {needed} bytes");
            return Err(Error::contract("budget_bytes", needed, format!("a plan of {bytes}")));
        }
        super::probe::probe(warm)
    }
}
