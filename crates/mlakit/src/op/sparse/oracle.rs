//! `sparse` in f64 on decoded records. The only roundings are those that the `Spec` names: the query to E4M3 on request, and partial
//! outputs to their dtype.

use std::ops::Range;

use half::bf16;

use super::columns::{Columns, Entry, Place, Scope};
use super::spec::SparseSpec;
use crate::op::dense::QueryCase;
use crate::op::merge::{Partial, log_add};
use crate::scratch::{FAULT_NAMES, Fault};
use crate::splits::{BLOCK, Division};
use crate::{E4m3, PageGeometry};

/// What the rows select, on the host.
#[derive(Clone, Copy, Debug)]
pub enum SelectionCase<'a> {
    /// Logical positions.
    Positions {
        /// `[R, T]`.
        positions: &'a [i32],
        /// `[R]`.
        counts: &'a [i32],
        /// `[R]`.
        request: &'a [i32],
        /// `[B, W]`.
        page_table: &'a [i32],
        /// `W`.
        table_width: usize,
    },
    /// Slots.
    Slots {
        /// `[R, T]`.
        slots: &'a [i32],
        /// `[R]`.
        counts: &'a [i32],
    },
}

/// The second scope on the host.
#[derive(Clone, Copy, Debug)]
pub struct ExtraCase<'a> {
    /// All pages, raw.
    pub cache: &'a [u8],
    /// From one page to the next.
    pub page_stride_bytes: usize,
    /// `[R, T2]`.
    pub slots: &'a [i32],
    /// `[R]`.
    pub slot_counts: &'a [i32],
}

/// The operands on the host.
#[derive(Clone, Copy, Debug)]
pub struct SparseCase<'a> {
    /// `[R, H, K]`.
    pub q: QueryCase<'a>,
    /// All pages, raw.
    pub cache: &'a [u8],
    /// From one page to the next.
    pub page_stride_bytes: usize,
    /// The tokens of each row.
    pub selection: SelectionCase<'a>,
    /// Where the `Spec` has one.
    pub extra: Option<ExtraCase<'a>>,
    /// `[H]`, natural.
    pub sink: Option<&'a [f32]>,
    /// The scale of scaled records; 1 where there are none.
    pub kv_scale: f32,
    /// The scale of the query; 1 where it has none.
    pub q_scale: f32,
}

/// What the oracle says.
#[derive(Clone, Debug, PartialEq)]
pub struct SparseResult {
    /// `[R, H, V]`, before its rounding to BF16.
    pub out: Vec<f64>,
    /// `[R, H]`, in the base of the `Spec`.
    pub lse: Vec<f64>,
    /// By [`Fault`].
    pub faults: [u32; FAULT_NAMES.len()],
}

/// The result with the columns divided as a plan divides them.
pub fn oracle(spec: &SparseSpec, division: Division, case: &SparseCase<'_>) -> SparseResult {
    let queries = match case.q {
        QueryCase::Bf16(q) => q.len(),
        QueryCase::E4m3(q) => q.len(),
    };
    let rows = queries / (spec.heads * spec.qk_width);
    let mut result = SparseResult {
        out: vec![0.0; rows * spec.heads * spec.value_width],
        lse: vec![f64::NEG_INFINITY; rows * spec.heads],
        faults: [0; FAULT_NAMES.len()],
    };
    let oracle = Oracle { spec, division, case, rows };
    for row in 0..rows {
        let columns = oracle.columns(row, &mut result.faults);
        let parts: Vec<Vec<Vec<f64>>> = (0..division.splits)
            .map(|split| {
                let range = columns.split(division, split);
                oracle.records(row, columns, range, &mut result.faults)
            })
            .collect();
        for head in 0..spec.heads {
            oracle.head((row, head), &parts, &mut result);
        }
    }
    result
}

/// The pages of a scope.
struct Pool<'p> {
    bytes: &'p [u8],
    stride: usize,
    geometry: PageGeometry,
}

impl Pool<'_> {
    fn pages(&self) -> usize {
        self.bytes.len() / self.stride.max(1)
    }

    /// The scale of a scaled cache is multiplied in f64, where its product is exact.
    fn decode(&self, place: Place, kv_scale: f32) -> Vec<f64> {
        let layout = self.geometry.record;
        let page = &self.bytes[place.page * self.stride..];
        let mut values = vec![0.0; layout.width];
        self.geometry.planes().decode(layout, (page, place.token), 1.0, &mut values);
        let scale = if layout.format.is_scaled() { f64::from(kv_scale) } else { 1.0 };
        values.into_iter().map(|value| f64::from(value) * scale).collect()
    }
}

struct Oracle<'o> {
    spec: &'o SparseSpec,
    division: Division,
    case: &'o SparseCase<'o>,
    rows: usize,
}

impl Oracle<'_> {
    fn pool(&self, scope: Scope) -> Pool<'_> {
        let main = Pool {
            bytes: self.case.cache,
            stride: self.case.page_stride_bytes,
            geometry: self.spec.pages(),
        };
        match (scope, &self.case.extra, self.spec.extra()) {
            (Scope::Extra, Some(extra), Some(of)) => {
                Pool { bytes: extra.cache, stride: extra.page_stride_bytes, geometry: of.pages }
            }
            _ => main,
        }
    }

    /// The entries of a row, live or not.
    fn entries(&self, scope: Scope, row: usize) -> &[i32] {
        let list = match (scope, self.case.selection) {
            (Scope::Extra, _) => self.case.extra.map_or(&[][..], |extra| extra.slots),
            (Scope::Main, SelectionCase::Positions { positions, .. }) => positions,
            (Scope::Main, SelectionCase::Slots { slots, .. }) => slots,
        };
        let width = list.len() / self.rows;
        &list[row * width..][..width]
    }

    /// The live columns of a row; counts what was clamped, and a request that there is not.
    fn columns(&self, row: usize, faults: &mut [u32; FAULT_NAMES.len()]) -> Columns {
        let counts = match self.case.selection {
            SelectionCase::Positions { counts, .. } | SelectionCase::Slots { counts, .. } => counts,
        };
        let (mut main, fine) =
            Columns::clamp_count(counts[row], self.entries(Scope::Main, row).len());
        faults[Fault::Length as usize] += u32::from(!fine);
        let extra = self.case.extra.map_or(0, |extra| {
            let width = self.entries(Scope::Extra, row).len();
            let (extra, fine) = Columns::clamp_count(extra.slot_counts[row], width);
            faults[Fault::Length as usize] += u32::from(!fine);
            extra
        });
        if let SelectionCase::Positions { request, page_table, table_width, .. } =
            self.case.selection
        {
            let batch = page_table.len() / table_width.max(1);
            let there = usize::try_from(request[row]).is_ok_and(|request| request < batch);
            let bad = !there && request[row] >= 0 && main > 0;
            faults[Fault::Id as usize] += u32::from(bad);
            main = if there { main } else { 0 };
        }
        Columns { main, extra }
    }

    fn entry(&self, scope: Scope, row: usize, entry: i32) -> Entry {
        let pool = self.pool(scope);
        let (page_size, pages) = (pool.geometry.page_size, pool.pages());
        match (scope, self.case.selection) {
            (Scope::Main, SelectionCase::Positions { request, page_table, table_width, .. }) => {
                let request = request[row] as usize;
                let table = &page_table[request * table_width..][..table_width];
                let covered = (table_width * page_size).min(self.spec.max_kv_tokens);
                Entry::of_position(entry, (table, covered), page_size, pages)
            }
            _ => Entry::of_slot(entry, page_size, pages),
        }
    }

    /// The decoded records of some columns, in their order; counts entries that are out of bounds.
    fn records(
        &self,
        row: usize,
        columns: Columns,
        range: Range<usize>,
        faults: &mut [u32; FAULT_NAMES.len()],
    ) -> Vec<Vec<f64>> {
        let mut records = Vec::new();
        let mut column = range.start;
        while column < range.end {
            let (scope, entries) = columns.block(column, range.end);
            for entry in &self.entries(scope, row)[entries] {
                match self.entry(scope, row, *entry) {
                    Entry::Unused => {}
                    Entry::Bad => faults[Fault::Id as usize] += 1,
                    Entry::At(place) => {
                        records.push(self.pool(scope).decode(place, self.case.kv_scale));
                    }
                }
            }
            column = (column / BLOCK + 1) * BLOCK;
        }
        records
    }

    fn query(&self, index: usize, element: usize) -> f64 {
        let (at, scale) = (index * self.spec.qk_width + element, f64::from(self.case.q_scale));
        match self.case.q {
            QueryCase::E4m3(q) => f64::from(E4m3::decode(q[at])) * scale,
            QueryCase::Bf16(q) if self.spec.quantize_query => {
                f64::from(E4m3::decode(E4m3::encode(q[at].to_f32() / self.case.q_scale))) * scale
            }
            QueryCase::Bf16(q) => q[at].to_f64(),
        }
    }

    /// One head of one row: every split by itself, then the merge, which counts the sink.
    fn head(
        &self,
        (row, head): (usize, usize),
        records: &[Vec<Vec<f64>>],
        result: &mut SparseResult,
    ) {
        let spec = self.spec;
        let index = row * spec.heads + head;
        let query: Vec<f64> = (0..spec.qk_width).map(|i| self.query(index, i)).collect();
        let sink = self.case.sink.map_or(f64::NEG_INFINITY, |sink| f64::from(sink[head]));
        let parts: Vec<_> = records
            .iter()
            .filter(|records| !records.is_empty())
            .map(|records| self.part(&query, records))
            .collect();
        let counted = |lse: f64| if spec.sink_in_lse { log_add(lse, sink) } else { lse };
        let top = parts.iter().map(|(_, lse)| *lse).fold(f64::NEG_INFINITY, f64::max);
        if top == f64::NEG_INFINITY && !parts.iter().any(|(_, lse)| lse.is_nan()) {
            result.lse[index] = counted(top) / spec.lse.ln();
            return;
        }
        let sum: f64 = parts.iter().map(|(_, lse)| (lse - top).exp()).sum();
        let denominator = sum + (sink - top).exp();
        let stored = self.division.splits > 1;
        let out = &mut result.out[index * spec.value_width..][..spec.value_width];
        for (part, lse) in parts.iter().filter(|_| denominator < f64::INFINITY) {
            for (total, value) in out.iter_mut().zip(part) {
                let value = match spec.partial {
                    Partial::Bf16 if stored => f64::from(bf16::from_f64(*value)),
                    Partial::F32 if stored => f64::from(*value as f32),
                    _ => *value,
                };
                *total += (lse - top).exp() / denominator * value;
            }
        }
        result.lse[index] = counted(top + sum.ln()) / spec.lse.ln();
    }

    /// The normalised output of some keys, and their natural log-sum-exp.
    fn part(&self, query: &[f64], records: &[Vec<f64>]) -> (Vec<f64>, f64) {
        let spec = self.spec;
        let score = |record: &Vec<f64>| {
            let dot: f64 = query.iter().zip(record).map(|(q, k)| q * k).sum();
            dot * f64::from(spec.softmax_scale.value())
        };
        let scores: Vec<f64> = records.iter().map(score).collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let mut out = vec![0.0; spec.value_width];
        // No score is above -inf: nothing weighs anything.
        if top == f64::NEG_INFINITY && !scores.iter().any(|score| score.is_nan()) {
            return (out, top);
        }
        let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
        let sum: f64 = weights.iter().sum();
        for (record, weight) in records.iter().zip(&weights) {
            for (total, value) in out.iter_mut().zip(record) {
                *total += weight / sum * value;
            }
        }
        (out, top + sum.ln())
    }
}
