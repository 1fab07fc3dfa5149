//! The operands of a gather, and their checks.

use super::plan::Embed;
use super::spec::MAX_TABLE_ROWS;
use crate::memory::Uses;
use crate::op::layer::{FloatInput, FloatOutput};
use crate::op::spec::rows_of;
use crate::{Error, Input, Plan, Region, Scratch};

/// The operands of one call. `R` rows are found from `y`; `vocab` is that of the `Spec`, or else
/// the whole rows of `table`.
pub struct EmbedArgs<'a, D> {
    /// `[vocab, width]`.
    pub table: FloatInput<'a, D>,
    /// `[R]`; -1 is padding; not trusted.
    pub ids: Input<'a, i32, D>,
    /// `[R, width]`.
    pub y: FloatOutput<'a, D>,
    /// As the plan says; only its fault block is used.
    pub scratch: Scratch<'a, D>,
}

/// The operands of a launch.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct EmbedRegions {
    pub rows: usize,
    /// Rows of `table`: ids from 0 to one below this are in it.
    pub vocab: usize,
    pub table: Region,
    pub ids: Region,
    pub y: Region,
    pub scratch: Region,
}

impl<'a, D> EmbedArgs<'a, D> {
    pub(super) fn declare(
        self,
        plan: &Plan<Embed>,
        uses: &mut Uses<'a>,
    ) -> Result<EmbedRegions, Error> {
        let spec = plan.spec();
        let rows = rows_of("y", self.y.len(), spec.width, spec.max_rows)?;
        let vocab = match spec.vocab {
            Some(vocab) => vocab,
            None => rows_of("table", self.table.len(), spec.width, MAX_TABLE_ROWS)?,
        };
        Ok(EmbedRegions {
            rows,
            vocab,
            table: self.table.declare("table", (spec.table, vocab * spec.width), uses)?,
            ids: uses.input("ids", self.ids, rows)?,
            y: self.y.declare("y", (spec.output, rows * spec.width), uses)?,
            scratch: uses.scratch(self.scratch, plan)?,
        })
    }
}
