//! The operands of sparse attention, and their checks.

use half::bf16;

use super::plan::Sparse;
use super::spec::{Selection, SparseSpec};
use crate::memory::Uses;
use crate::op::dense::{QueryDtype, QueryInput, present};
use crate::op::merge::LseOutput;
use crate::op::spec::rows_of;
use crate::{Cache, Error, Input, Output, Plan, Region, Scratch};

/// What the rows select, as the `Spec` says. Only the first `counts[row]` entries of a row are looked at; counts are clamped to `T`.
/// Negative entries, wherever they stand, are unused; entries out of bounds are skipped and counted.
pub enum SelectionInput<'a, D> {
    /// Logical positions of the row's request.
    Positions {
        /// `[R, T]`.
        positions: Input<'a, i32, D>,
        /// `[R]`.
        counts: Input<'a, i32, D>,
        /// `[R]`: the request of each row, a row of the page table. Negative: the row selects nothing; out of bounds: the same, and
        /// counted.
        request: Input<'a, i32, D>,
        /// `[B, W]`; entry `i` is the page of tokens `i * page_size ..`. -1 is unused.
        page_table: Input<'a, i32, D>,
        /// `W`, from one request to the next.
        table_width: usize,
    },
    /// Slots: page x page_size + offset.
    Slots {
        /// `[R, T]`.
        slots: Input<'a, i32, D>,
        /// `[R]`.
        counts: Input<'a, i32, D>,
    },
}

/// The second scope.
pub struct ExtraInput<'a, D> {
    /// Its pages.
    pub cache: Cache<'a, D>,
    /// `[R, T2]`.
    pub slots: Input<'a, i32, D>,
    /// `[R]`.
    pub slot_counts: Input<'a, i32, D>,
}

/// The operands of one call. `R` rows, `T` entries of a row, `T2` of the second scope and `B` requests are found from the sizes of
/// `out`, the lists and the page table, and may be smaller than the capacities of the `Spec`; `H` heads, `K` query width, `V` value
/// width.
pub struct SparseArgs<'a, D> {
    /// `[R, H, K]`.
    pub q: QueryInput<'a, D>,
    /// The pages.
    pub cache: Cache<'a, D>,
    /// The tokens of each row.
    pub selection: SelectionInput<'a, D>,
    /// Where the `Spec` has one.
    pub extra: Option<ExtraInput<'a, D>>,
    /// `[H]`, where the `Spec` has one; natural logarithm whatever the base. -inf adds nothing, +inf makes the output 0.
    pub sink: Option<Input<'a, f32, D>>,
    /// `[1]`, where a record is scaled.
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

/// The operands of a launch, with the live shape. `entries` are positions or slots; `request`, `page_table`, the regions of the second
/// scope, sink and scales are empty where the `Spec` has none.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct SparseRegions {
    pub rows: usize,
    pub width: usize,
    pub extra_width: usize,
    pub batch: usize,
    pub table_width: usize,
    pub q: Region,
    pub view: Region,
    pub entries: Region,
    pub counts: Region,
    pub request: Region,
    pub page_table: Region,
    pub extra_view: Region,
    pub extra_slots: Region,
    pub extra_counts: Region,
    pub sink: Region,
    pub kv_scale: Region,
    pub q_scale: Region,
    pub out: Region,
    pub lse: Region,
    pub scratch: Region,
}

/// The regions of a selection.
struct Selected {
    width: usize,
    entries: Region,
    counts: Region,
    tables: Tables,
}

/// The regions of page tables.
struct Tables {
    batch: usize,
    width: usize,
    request: Region,
    table: Region,
}

/// The entries of each of `rows` rows in a list of `len`.
fn width_of(what: &'static str, len: usize, rows: usize, most: usize) -> Result<usize, Error> {
    let width = len / rows.max(1);
    if width * rows != len || width > most {
        let needed = format!("[{rows}, T], T at most {most}");
        return Err(Error::contract(what, needed, format!("{len} elements")));
    }
    Ok(width)
}

impl<'a, D> SelectionInput<'a, D> {
    fn declare(
        self,
        spec: &SparseSpec,
        rows: usize,
        uses: &mut Uses<'a>,
    ) -> Result<Selected, Error> {
        match (self, spec.selection) {
            (
                Self::Positions { positions, counts, request, page_table, table_width },
                Selection::Positions,
            ) => {
                let width = width_of("positions", positions.len(), rows, spec.width)?;
                let batch = page_table.len() / table_width.max(1);
                let whole = batch * table_width == page_table.len();
                if !whole || table_width > spec.max_table_width || batch > spec.max_batch {
                    let (most, widest) = (spec.max_batch, spec.max_table_width);
                    let needed = format!(
                        "[B, {table_width}], B at most {most}, the width at most {widest} pages"
                    );
                    let given = format!("{} elements", page_table.len());
                    return Err(Error::contract("page_table", needed, given));
                }
                Ok(Selected {
                    width,
                    entries: uses.input("positions", positions, rows * width)?,
                    counts: uses.input("counts", counts, rows)?,
                    tables: Tables {
                        batch,
                        width: table_width,
                        request: uses.input("request", request, rows)?,
                        table: uses.input("page_table", page_table, batch * table_width)?,
                    },
                })
            }
            (Self::Slots { slots, counts }, Selection::Slots) => {
                let width = width_of("slots", slots.len(), rows, spec.width)?;
                let (request, table) = (Region::EMPTY, Region::EMPTY);
                Ok(Selected {
                    width,
                    entries: uses.input("slots", slots, rows * width)?,
                    counts: uses.input("slot_counts", counts, rows)?,
                    tables: Tables { batch: 0, width: 0, request, table },
                })
            }
            (Self::Positions { .. }, _) => Err(Error::contract("selection", "slots", "positions")),
            (Self::Slots { .. }, _) => Err(Error::contract("selection", "positions", "slots")),
        }
    }
}

/// The regions of the second scope: width, view, slots, counts.
fn declare_extra<'a, D>(
    extra: Option<ExtraInput<'a, D>>,
    (spec, rows): (&SparseSpec, usize),
    uses: &mut Uses<'a>,
) -> Result<(usize, [Region; 3]), Error> {
    match (extra, spec.extra()) {
        (Some(extra), Some(scope)) => {
            let width = width_of("extra_slots", extra.slots.len(), rows, scope.width)?;
            let regions = [
                uses.cache("extra_cache", extra.cache, scope.pages)?,
                uses.input("extra_slots", extra.slots, rows * width)?,
                uses.input("extra_slot_counts", extra.slot_counts, rows)?,
            ];
            Ok((width, regions))
        }
        (None, None) => Ok((0, [Region::EMPTY; 3])),
        (Some(_), None) => Err(Error::contract("extra", "none for this Spec", "one")),
        (None, Some(_)) => Err(Error::contract("extra", "one for this Spec", "none")),
    }
}

impl<'a, D> SparseArgs<'a, D> {
    pub(super) fn declare(
        self,
        plan: &Plan<Sparse>,
        uses: &mut Uses<'a>,
    ) -> Result<SparseRegions, Error> {
        let spec = plan.spec();
        let rows = rows_of("out", self.out.len(), spec.heads * spec.value_width, spec.max_rows)?;
        let queries = rows * spec.heads * spec.qk_width;
        let q = match (self.q, spec.query) {
            (QueryInput::Bf16(q), QueryDtype::Bf16) => uses.input("q", q, queries)?,
            (QueryInput::E4m3(q), QueryDtype::E4m3) => uses.input("q", q, queries)?,
            (QueryInput::Bf16(_), _) => return Err(Error::contract("q", "E4M3", "BF16")),
            (QueryInput::E4m3(_), _) => return Err(Error::contract("q", "BF16", "E4M3")),
        };
        let view = uses.cache("cache", self.cache, spec.pages())?;
        let selected = self.selection.declare(spec, rows, uses)?;
        let (extra_width, [extra_view, extra_slots, extra_counts]) =
            declare_extra(self.extra, (spec, rows), uses)?;
        let results = rows * spec.heads;
        Ok(SparseRegions {
            rows,
            width: selected.width,
            extra_width,
            batch: selected.tables.batch,
            table_width: selected.tables.width,
            q,
            view,
            entries: selected.entries,
            counts: selected.counts,
            request: selected.tables.request,
            page_table: selected.tables.table,
            extra_view,
            extra_slots,
            extra_counts,
            sink: present("sink", self.sink, (spec.sink, spec.heads), uses)?,
            kv_scale: present("kv_scale", self.kv_scale, (spec.has_kv_scale(), 1), uses)?,
            q_scale: present("q_scale", self.q_scale, (spec.has_query_scale(), 1), uses)?,
            out: uses.output("out", self.out, results * spec.value_width)?,
            lse: self.lse.declare("lse", (spec.lse, results), uses)?,
            scratch: uses.scratch(self.scratch, plan)?,
        })
    }
}
