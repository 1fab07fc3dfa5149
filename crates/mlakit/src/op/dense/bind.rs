//! The operands of dense attention, and their checks.

use half::bf16;

use super::plan::Dense;
use super::spec::QueryDtype;
use crate::memory::Uses;
use crate::op::merge::LseOutput;
use crate::op::spec::rows_of;
use crate::{Cache, E4m3, Error, Input, Output, Plan, Region, Scratch};

/// Queries in their dtype.
pub enum QueryInput<'a, D> {
    /// BF16.
    Bf16(Input<'a, bf16, D>),
    /// E4M3.
    E4m3(Input<'a, E4m3, D>),
}

/// The operands of one call. `R` rows, `B` requests and `W` table width are found from the sizes of `out`, `kv_lens` and `page_table`
/// and may be smaller than the capacities of the `Spec`; `H` heads, `K` query width, `V` value width.
pub struct DenseArgs<'a, D> {
    /// `[R, H, K]`.
    pub q: QueryInput<'a, D>,
    /// The pages.
    pub cache: Cache<'a, D>,
    /// `[B, W]`; entry `i` is the page of tokens `i * page_size ..`. -1 is unused; an id out of the pool is skipped and counted.
    pub page_table: Input<'a, i32, D>,
    /// `[B]`, this step's tokens included; clamped to what the table covers.
    pub kv_lens: Input<'a, i32, D>,
    /// `[B + 1]`: request `b` has the rows `q_offsets[b] .. q_offsets[b + 1]`. Rows of no request are padding.
    pub q_offsets: Input<'a, i32, D>,
    /// `[R]`, where the `Spec` has `row_lengths`: a row sees the keys before this position.
    pub row_kv_lens: Option<Input<'a, i32, D>>,
    /// `[1]`, where the record is scaled.
    pub kv_scale: Option<Input<'a, f32, D>>,
    /// `[1]`, where the query is E4M3 or made so.
    pub q_scale: Option<Input<'a, f32, D>>,
    /// BF16 `[R, H, V]`.
    pub out: Output<'a, bf16, D>,
    /// `[R, H]`.
    pub lse: LseOutput<'a, D>,
    /// As the plan says.
    pub scratch: Scratch<'a, D>,
}

/// The operands of a launch, with the live shape.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct DenseRegions {
    pub rows: usize,
    pub batch: usize,
    pub table_width: usize,
    pub q: Region,
    pub view: Region,
    pub page_table: Region,
    pub kv_lens: Region,
    pub q_offsets: Region,
    pub row_kv_lens: Region,
    pub kv_scale: Region,
    pub q_scale: Region,
    pub out: Region,
    pub lse: Region,
    pub scratch: Region,
}

/// An operand that is there exactly if the `Spec` has it.
pub(crate) fn present<'a, T: crate::Element, D>(
    what: &'static str,
    operand: Option<Input<'a, T, D>>,
    (wanted, needed): (bool, usize),
    uses: &mut Uses<'a>,
) -> Result<Region, Error> {
    match (operand, wanted) {
        (Some(operand), true) => uses.input(what, operand, needed),
        (None, false) => Ok(Region::EMPTY),
        (Some(_), false) => Err(Error::contract(what, "none for this Spec", "one")),
        (None, true) => Err(Error::contract(what, "one for this Spec", "none")),
    }
}

impl<'a, D> DenseArgs<'a, D> {
    pub(super) fn declare(
        self,
        plan: &Plan<Dense>,
        uses: &mut Uses<'a>,
    ) -> Result<DenseRegions, Error> {
        let spec = plan.spec();
        let rows = rows_of("out", self.out.len(), spec.heads * spec.value_width, spec.max_rows)?;
        let batch = rows_of("kv_lens", self.kv_lens.len(), 1, spec.max_batch)?;
        let table_width = self.page_table.len() / batch.max(1);
        if table_width * batch != self.page_table.len() || table_width > spec.max_table_width {
            let needed = format!("[{batch}, W], W at most {} pages", spec.max_table_width);
            let given = format!("{} elements", self.page_table.len());
            return Err(Error::contract("page_table", needed, given));
        }
        let queries = rows * spec.heads * spec.qk_width;
        let q = match (self.q, spec.query) {
            (QueryInput::Bf16(q), QueryDtype::Bf16) => uses.input("q", q, queries)?,
            (QueryInput::E4m3(q), QueryDtype::E4m3) => uses.input("q", q, queries)?,
            (QueryInput::Bf16(_), _) => return Err(Error::contract("q", "E4M3", "BF16")),
            (QueryInput::E4m3(_), _) => return Err(Error::contract("q", "BF16", "E4M3")),
        };
        let scaled = (spec.record.is_scaled(), 1);
        let results = rows * spec.heads;
        Ok(DenseRegions {
            rows,
            batch,
            table_width,
            q,
            view: uses.cache("cache", self.cache, spec.pages())?,
            page_table: uses.input("page_table", self.page_table, batch * table_width)?,
            kv_lens: uses.input("kv_lens", self.kv_lens, batch)?,
            q_offsets: uses.input("q_offsets", self.q_offsets, batch + 1)?,
            row_kv_lens: present("row_kv_lens", self.row_kv_lens, (spec.row_lengths, rows), uses)?,
            kv_scale: present("kv_scale", self.kv_scale, scaled, uses)?,
            q_scale: present("q_scale", self.q_scale, (spec.has_query_scale(), 1), uses)?,
            out: uses.output("out", self.out, results * spec.value_width)?,
            lse: self.lse.declare("lse", (spec.lse, results), uses)?,
            scratch: uses.scratch(self.scratch, plan)?,
        })
    }
}
