//! The operands of a pool of keys, and their checks.

use half::bf16;

use super::plan::Pool;
use crate::memory::Uses;
use crate::op::indexer::width_of_table;
use crate::op::layer::FloatInput;
use crate::op::spec::rows_of;
use crate::{Error, Input, Output, Plan, Region, Scratch};

/// The operands of one call. `R` rows, `B` requests, `W` table width and `S` states are found from the sizes of `slots`, `kv_lens`,
/// `page_table` and `state`; `D` width, `p` tokens of a pool.
pub struct PoolArgs<'a, D> {
    /// `[R, D]`: the keys of this step's tokens.
    pub key: FloatInput<'a, D>,
    /// `[R, D]`: their gates.
    pub gate: FloatInput<'a, D>,
    /// F32 `[p, D]`: what is added to the gate of a token at each place of its pool.
    pub ape: Input<'a, f32, D>,
    /// `[B]`: tokens of a request, this step's included. Its last row is its last token.
    pub kv_lens: Input<'a, i32, D>,
    /// `[B + 1]`: request `b` has the rows `q_offsets[b] .. q_offsets[b + 1]`. Rows of no request are padding.
    pub q_offsets: Input<'a, i32, D>,
    /// `[B]`: which state is the request's. -1: none, which is enough for a request that begins in this step; others out of bounds
    /// are counted and are as -1. No two requests share one.
    pub states: Input<'a, i32, D>,
    /// `[B, W]`: the pages of the request's pools in the index cache.
    pub page_table: Input<'a, i32, D>,
    /// F32 `[S, ring, 2, D]`, read and written.
    pub state: Output<'a, f32, D>,
    /// BF16 `[R, D]`: the key of the pool that the row's token ends, else zeros.
    pub pooled: Output<'a, bf16, D>,
    /// `[R]`: the slot of that pool, else -1.
    pub slots: Output<'a, i64, D>,
    /// As the plan says; only its fault block is used.
    pub scratch: Scratch<'a, D>,
}

/// The operands of a launch, with the live shape.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct PoolRegions {
    pub rows: usize,
    pub batch: usize,
    pub table_width: usize,
    pub state_count: usize,
    pub key: Region,
    pub gate: Region,
    pub ape: Region,
    pub kv_lens: Region,
    pub q_offsets: Region,
    pub states: Region,
    pub page_table: Region,
    pub state: Region,
    pub pooled: Region,
    pub slots: Region,
    pub scratch: Region,
}

impl<'a, D> PoolArgs<'a, D> {
    pub(super) fn declare(
        self,
        plan: &Plan<Pool>,
        uses: &mut Uses<'a>,
    ) -> Result<PoolRegions, Error> {
        let spec = plan.spec();
        let rows = rows_of("slots", self.slots.len(), 1, spec.max_rows)?;
        let batch = rows_of("kv_lens", self.kv_lens.len(), 1, spec.max_batch)?;
        let table_width = width_of_table(self.page_table.len(), batch, spec.max_table_width)?;
        let each = spec.state_elements();
        let state_count = rows_of("state", self.state.len(), each, usize::MAX)?;
        let elements = rows * spec.width;
        Ok(PoolRegions {
            rows,
            batch,
            table_width,
            state_count,
            key: self.key.declare("key", (spec.input, elements), uses)?,
            gate: self.gate.declare("gate", (spec.input, elements), uses)?,
            ape: uses.input("ape", self.ape, spec.pool_size * spec.width)?,
            kv_lens: uses.input("kv_lens", self.kv_lens, batch)?,
            q_offsets: uses.input("q_offsets", self.q_offsets, batch + 1)?,
            states: uses.input("states", self.states, batch)?,
            page_table: uses.input("page_table", self.page_table, batch * table_width)?,
            state: uses.output("state", self.state, state_count * each)?,
            pooled: uses.output("pooled", self.pooled, elements)?,
            slots: uses.output("slots", self.slots, rows)?,
            scratch: uses.scratch(self.scratch, plan)?,
        })
    }
}
