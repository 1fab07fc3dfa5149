//! The operands of a selection, and their checks.

use super::plan::Selection;
use crate::memory::Uses;
use crate::op::dense::present;
use crate::op::spec::rows_of;
use crate::{Error, Input, Output, Plan, Region, Scratch};

/// The operands of one call. `R` rows are found from `positions`, `B` requests from `page_table`; `T` = `topk`, `T'` slots a row as the
/// `Spec` says.
pub struct SelectionArgs<'a, D> {
    /// `[R, T]`; negative entries are unused, wherever they stand. Pooled: pools, which must be complete at `last_position`.
    pub positions: Input<'a, i32, D>,
    /// `[R]`: the request of each row, a row of the page table; -1 for a padding row. Others out of bounds are counted, and their row
    /// is as a padding row.
    pub request: Input<'a, i32, D>,
    /// `[B, W]`; -1 is unused.
    pub page_table: Input<'a, i32, D>,
    /// `W`, from one request to the next.
    pub table_width: usize,
    /// `[R]`, pooled only: the position of each row's own token; negative for a padding row.
    pub last_position: Option<Input<'a, i64, D>>,
    /// `[R, T']`, -1 where there is none.
    pub slots: Output<'a, i32, D>,
    /// `[R]`: the live prefix of each row, entries that came to nothing included.
    pub slot_counts: Output<'a, i32, D>,
    /// As the plan says; only its fault block is used.
    pub scratch: Scratch<'a, D>,
}

/// The operands of a launch; `last_position` is empty where entries are tokens.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct SelectionRegions {
    pub rows: usize,
    pub batch: usize,
    pub table_width: usize,
    pub positions: Region,
    pub request: Region,
    pub page_table: Region,
    pub last_position: Region,
    pub slots: Region,
    pub slot_counts: Region,
    pub scratch: Region,
}

impl<'a, D> SelectionArgs<'a, D> {
    pub(super) fn declare(
        self,
        plan: &Plan<Selection>,
        uses: &mut Uses<'a>,
    ) -> Result<SelectionRegions, Error> {
        let spec = plan.spec();
        let rows = rows_of("positions", self.positions.len(), spec.topk, spec.max_rows)?;
        let (table_width, table) = (self.table_width, self.page_table.len());
        let batch = table / table_width.max(1);
        let fits = table_width <= spec.max_table_width && batch <= spec.max_batch;
        if !fits || batch * table_width != table {
            let (most, widest) = (spec.max_batch, spec.max_table_width);
            let needed =
                format!("[B, {table_width}], B at most {most}, the width at most {widest} pages");
            return Err(Error::contract("page_table", needed, format!("{table} elements")));
        }
        let pooled = (spec.is_pooled(), rows);
        Ok(SelectionRegions {
            rows,
            batch,
            table_width,
            positions: uses.input("positions", self.positions, rows * spec.topk)?,
            request: uses.input("request", self.request, rows)?,
            page_table: uses.input("page_table", self.page_table, table)?,
            last_position: present("last_position", self.last_position, pooled, uses)?,
            slots: uses.output("slots", self.slots, rows * spec.slots())?,
            slot_counts: uses.output("slot_counts", self.slot_counts, rows)?,
            scratch: uses.scratch(self.scratch, plan)?,
        })
    }
}
