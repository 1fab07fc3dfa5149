//! The operation `dense`: its scratch.

use super::bind::{DenseArgs, DenseRegions};
use super::spec::DenseSpec;
use crate::memory::Uses;
use crate::op::sealed::Sealed;
use crate::scratch::RegionSpec;
use crate::splits::Division;
use crate::{Choice, Device, Error, Op, Plan, Runs, Warm};

/// The operation.
#[derive(Debug)]
pub struct Dense;

impl Sealed for Dense {}

impl Dense {
    /// The region of partial outputs in the partial dtype: `[splits, rows, heads, value_width]`, or as many rows of that width as the
    /// choice says ([`Choice::partial_rows`]).
    pub const PARTIAL_OUT: &'static str = "partial_out";
    /// The region of partial log-sum-exps, F32, one for each row of partial outputs, base 2.
    pub const PARTIAL_LSE: &'static str = "partial_lse";
}

impl Plan<Dense> {
    /// How a row's keys are divided.
    pub fn division(&self) -> Division {
        Division::new(self.spec().splits, self.choice().splits)
    }
}

impl Op for Dense {
    const NAME: &'static str = "dense";
    type Spec = DenseSpec;
    type Args<'a, D: Device> = DenseArgs<'a, D>;
    type Regions = DenseRegions;

    /// Exactly what the splits need: the partial dtype changes the first region alone, and one split, or partials that stay on the chip,
    /// need none.
    fn scratch(spec: &DenseSpec, choice: &Choice) -> Vec<RegionSpec> {
        let stored = choice.splits > 1 && !choice.partials_stay_on_chip;
        let all = choice.splits.saturating_mul(spec.max_rows).saturating_mul(spec.heads);
        let parts = if stored { choice.partial_rows.unwrap_or(all) } else { 0 };
        let out = parts.saturating_mul(spec.value_width * spec.partial.dtype().bytes());
        vec![
            RegionSpec::new(Self::PARTIAL_OUT, out),
            RegionSpec::new(Self::PARTIAL_LSE, parts.saturating_mul(4)),
        ]
    }

    fn operands<'a, D: Device>(
        plan: &Plan<Self>,
        args: DenseArgs<'a, D>,
        uses: &mut Uses<'a>,
    ) -> Result<DenseRegions, Error> {
        args.declare(plan, uses)
    }

    fn probe<'w, D: Runs<Self>>(warm: &mut Warm<'w, Self, D>) -> Result<(), Error> {
        super::probe::probe(warm)
    }
}
