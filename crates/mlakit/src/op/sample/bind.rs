//! The operands of sampling, and their checks.

use super::plan::Sample;
use crate::memory::Uses;
use crate::op::dense::present;
use crate::op::spec::rows_of;
use crate::{Error, Input, Output, Plan, Region, Scratch};

/// The operands of one call. `R` rows are found from `ids`.
pub struct SampleArgs<'a, D> {
    /// `[R, vocab]`.
    pub logits: Input<'a, f32, D>,
    /// `[1]`, where the `Spec` has one; 0 or less means greedy.
    pub temperature: Option<Input<'a, f32, D>>,
    /// `[R]`, from 0 to below 1; exactly where there is a temperature.
    pub random: Option<Input<'a, f32, D>>,
    /// `[R]`.
    pub ids: Output<'a, i32, D>,
    /// As the plan says.
    pub scratch: Scratch<'a, D>,
}

/// The operands of a launch.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct SampleRegions {
    pub rows: usize,
    pub logits: Region,
    pub temperature: Region,
    pub random: Region,
    pub ids: Region,
    pub scratch: Region,
}

impl<'a, D> SampleArgs<'a, D> {
    pub(super) fn declare(
        self,
        plan: &Plan<Sample>,
        uses: &mut Uses<'a>,
    ) -> Result<SampleRegions, Error> {
        let spec = plan.spec();
        let rows = rows_of("ids", self.ids.len(), 1, spec.max_rows)?;
        Ok(SampleRegions {
            rows,
            logits: uses.input("logits", self.logits, rows * spec.vocab)?,
            temperature: present("temperature", self.temperature, (spec.temperature, 1), uses)?,
            random: present("random", self.random, (spec.temperature, rows), uses)?,
            ids: uses.output("ids", self.ids, rows)?,
            scratch: uses.scratch(self.scratch, plan)?,
        })
    }
}
