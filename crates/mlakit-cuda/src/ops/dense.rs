//! `dense`: on Hopper a kernel of its own where it applies, elsewhere the portable one.

mod hopper;
mod portable;
mod tiling;

use mlakit::op::dense::{Dense, DenseRegions, DenseSpec};
use mlakit::{Choice, Error, Plan, Refusal, Runs};

use super::Compiles;
use crate::device::Cuda;
use crate::facts::Facts;
use crate::module::Source;
use crate::options::DenseFamily;
use crate::stream::Queue;

/// Code of dense attention, of either family.
pub enum Kernels {
    /// One launch that divides, attends and merges.
    Hopper(hopper::Kernels),
    /// A launch for the splits, and a merge.
    Portable(portable::Kernels),
}

impl Runs<Dense> for Cuda {
    type Code = Kernels;

    fn choose(facts: &Facts, spec: &DenseSpec) -> Result<Choice, Refusal> {
        if facts.dense == Some(DenseFamily::Portable) {
            return portable::choose(facts, spec);
        }
        let because = match hopper::choose(facts, spec) {
            Ok(choice) => return Ok(choice),
            Err(because) => because,
        };
        if facts.dense == Some(DenseFamily::Hopper) {
            return Err(Refusal {
                what: format!("dense attention by the Hopper kernel, on {facts}"),
                because,
                instead: "the portable kernel".to_string(),
            });
        }
        let note = hopper::is_hopper(facts).then(|| format!("not the Hopper kernel: {because}"));
        Ok(Choice { note, ..portable::choose(facts, spec)? })
    }

    fn prepare(&self, plan: &Plan<Dense>) -> Result<Kernels, Error> {
        if hopper::is_chosen(plan.choice()) {
            return hopper::prepare(self, plan).map(Kernels::Hopper);
        }
        portable::prepare(self, plan).map(Kernels::Portable)
    }

    /// Launches for calls without rows too: their lengths and offsets are counted like all others.
    fn launch(
        &self,
        code: &Kernels,
        plan: &Plan<Dense>,
        r: &DenseRegions,
        queue: &mut Queue,
    ) -> Result<(), Error> {
        match code {
            Kernels::Hopper(code) => hopper::launch(code, (plan, r), queue),
            Kernels::Portable(code) => portable::launch(self, code, (plan, r), queue),
        }
    }
}

impl Compiles<Dense> for Cuda {
    fn sources(plan: &Plan<Dense>) -> Vec<Source> {
        match hopper::is_chosen(plan.choice()) {
            true => hopper::sources(plan),
            false => portable::sources(plan),
        }
    }
}

/// Both families.
pub(crate) fn manifest() -> Vec<Source> {
    [portable::manifest(), hopper::manifest()].concat()
}
