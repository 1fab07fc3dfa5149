//! The operation `sparse`: its scratch.

use super::bind::{SparseArgs, SparseRegions};
use super::spec::SparseSpec;
use crate::memory::Uses;
use crate::op::sealed::Sealed;
use crate::scratch::RegionSpec;
use crate::splits::Division;
use crate::{Choice, Device, Error, Op, Plan, Runs, Warm};

/// The operation.
#[derive(Debug)]
pub struct Sparse;

impl Sealed for Sparse {}

impl Sparse {
    /// The region of partial outputs, `[splits, rows, heads, value_width]` in the partial dtype.
    pub const PARTIAL_OUT: &'static str = "partial_out";
    /// The region of partial log-sum-exps, F32 `[splits, rows, heads]`, base 2.
    pub const PARTIAL_LSE: &'static str = "partial_lse";
}

impl Plan<Sparse> {
    /// How a row's columns are divided.
    pub fn division(&self) -> Division {
        Division::new(self.spec().splits, self.choice().splits)
    }
}

impl Op for Sparse {
    const NAME: &'static str = "sparse";
    type Spec = SparseSpec;
    type Args<'a, D: Device> = SparseArgs<'a, D>;
    type Regions = SparseRegions;

    /// As in `dense`, exactly what the splits need. Positions become places of the pool inside the kernel, so there is no region for
    /// them, whatever the width of a selection.
    fn scratch(spec: &SparseSpec, choice: &Choice) -> Vec<RegionSpec> {
        let stored = choice.splits > 1 && !choice.partials_stay_on_chip;
        let parts = if stored {
            choice.splits.saturating_mul(spec.max_rows).saturating_mul(spec.heads)
        } else {
            0
        };
        let out = parts.saturating_mul(spec.value_width * spec.partial.dtype().bytes());
        vec![
            RegionSpec::new(Self::PARTIAL_OUT, out),
            RegionSpec::new(Self::PARTIAL_LSE, parts.saturating_mul(4)),
        ]
    }

    fn operands<'a, D: Device>(
        plan: &Plan<Self>,
        args: SparseArgs<'a, D>,
        uses: &mut Uses<'a>,
    ) -> Result<SparseRegions, Error> {
        args.declare(plan, uses)
    }

    fn probe<'w, D: Runs<Self>>(warm: &mut Warm<'w, Self, D>) -> Result<(), Error> {
        super::probe::probe(warm)
    }
}
