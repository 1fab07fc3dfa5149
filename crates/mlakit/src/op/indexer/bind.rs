//! The operands of an indexer, and their checks.

use half::bf16;

use super::plan::Indexer;
use crate::memory::Uses;
use crate::op::dense::present;
use crate::op::spec::rows_of;
use crate::{Cache, Error, Input, Output, Plan, Region, Scratch};

/// The operands of one call. `R` rows, `B` requests and `W` table width are found from the sizes of `weights`, `kv_lens` and
/// `page_table` and may be smaller than the capacities of the `Spec`; `I` heads, `D` width, `T` = `topk`.
pub struct IndexerArgs<'a, D> {
    /// BF16 `[R, I, D]`.
    pub q: Input<'a, bf16, D>,
    /// F32 `[R, I]`, every scale multiplied in.
    pub weights: Input<'a, f32, D>,
    /// The pages of index keys.
    pub cache: Cache<'a, D>,
    /// `[B, W]`; entry `i` is the page of keys `i * page_size ..`. -1 is unused; an id out of the pool is skipped and counted.
    pub page_table: Input<'a, i32, D>,
    /// `[B]`: keys of a request, this step's included (pooled: complete pools); clamped to what the table covers.
    pub kv_lens: Input<'a, i32, D>,
    /// `[B + 1]`: request `b` has the rows `q_offsets[b] .. q_offsets[b + 1]`. Rows of no request are padding. Its last row sees every
    /// key, the one before it one fewer.
    pub q_offsets: Input<'a, i32, D>,
    /// `[R]`, pooled only: the position of each row's own token, which says what pools it sees; negative for a padding row.
    pub last_position: Option<Input<'a, i64, D>>,
    /// `[R, T]`, ascending, -1 after the last.
    pub positions: Output<'a, i32, D>,
    /// `[R]`: how many positions there are.
    pub counts: Output<'a, i32, D>,
    /// F32 `[R, T]`, where the `Spec` has them: the score of each position, -inf after the last.
    pub scores: Option<Output<'a, f32, D>>,
    /// As the plan says.
    pub scratch: Scratch<'a, D>,
}

/// The operands of a launch, with the live shape; a region that the `Spec` does not have is empty.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct IndexerRegions {
    pub rows: usize,
    pub batch: usize,
    pub table_width: usize,
    pub q: Region,
    pub weights: Region,
    pub view: Region,
    pub page_table: Region,
    pub kv_lens: Region,
    pub q_offsets: Region,
    pub last_position: Region,
    pub positions: Region,
    pub counts: Region,
    pub scores: Region,
    pub scratch: Region,
}

/// The width of a table of `len` entries and `batch` rows.
pub(crate) fn width_of_table(len: usize, batch: usize, widest: usize) -> Result<usize, Error> {
    let width = len / batch.max(1);
    if width * batch == len && width <= widest {
        return Ok(width);
    }
    let needed = format!("[{batch}, W], W at most {widest} pages");
    Err(Error::contract("page_table", needed, format!("{len} elements")))
}

/// An output that is there exactly if the `Spec` has it.
fn wanted<'a, T: crate::Element, D>(
    what: &'static str,
    output: Option<Output<'a, T, D>>,
    (wanted, needed): (bool, usize),
    uses: &mut Uses<'a>,
) -> Result<Region, Error> {
    match (output, wanted) {
        (Some(output), true) => uses.output(what, output, needed),
        (None, false) => Ok(Region::EMPTY),
        (Some(_), false) => Err(Error::contract(what, "none for this Spec", "one")),
        (None, true) => Err(Error::contract(what, "one for this Spec", "none")),
    }
}

impl<'a, D> IndexerArgs<'a, D> {
    pub(super) fn declare(
        self,
        plan: &Plan<Indexer>,
        uses: &mut Uses<'a>,
    ) -> Result<IndexerRegions, Error> {
        let spec = plan.spec();
        let rows = rows_of("weights", self.weights.len(), spec.heads, spec.max_rows)?;
        let batch = rows_of("kv_lens", self.kv_lens.len(), 1, spec.max_batch)?;
        let table_width = width_of_table(self.page_table.len(), batch, spec.max_table_width)?;
        let (heads, selected) = (rows * spec.heads, rows * spec.topk);
        let pooled = (spec.is_pooled(), rows);
        Ok(IndexerRegions {
            rows,
            batch,
            table_width,
            q: uses.input("q", self.q, heads * spec.width)?,
            weights: uses.input("weights", self.weights, heads)?,
            view: uses.cache("cache", self.cache, spec.pages())?,
            page_table: uses.input("page_table", self.page_table, batch * table_width)?,
            kv_lens: uses.input("kv_lens", self.kv_lens, batch)?,
            q_offsets: uses.input("q_offsets", self.q_offsets, batch + 1)?,
            last_position: present("last_position", self.last_position, pooled, uses)?,
            positions: uses.output("positions", self.positions, selected)?,
            counts: uses.output("counts", self.counts, rows)?,
            scores: wanted("scores", self.scores, (spec.scores, selected), uses)?,
            scratch: uses.scratch(self.scratch, plan)?,
        })
    }
}
