//! `dense` in f64. The only roundings are those that the `Spec` names: the query to E4M3 on request, and partial outputs to their dtype.

use std::ops::Range;

use half::bf16;

use super::division::{Rows, Visible};
use super::spec::DenseSpec;
use crate::E4m3;
use crate::op::merge::Partial;
use crate::scratch::{FAULT_NAMES, Fault};
use crate::splits::Division;

/// Queries on the host.
#[derive(Clone, Copy, Debug)]
pub enum QueryCase<'a> {
    /// `[R, H, K]`.
    Bf16(&'a [bf16]),
    /// `[R, H, K]`, bytes.
    E4m3(&'a [u8]),
}

/// The operands on the host.
#[derive(Clone, Copy, Debug)]
pub struct DenseCase<'a> {
    /// `[R, H, K]`.
    pub q: QueryCase<'a>,
    /// All pages, raw.
    pub cache: &'a [u8],
    /// From one page to the next.
    pub page_stride_bytes: usize,
    /// `[B, W]`.
    pub page_table: &'a [i32],
    /// `[B]`.
    pub kv_lens: &'a [i32],
    /// `[B + 1]`.
    pub q_offsets: &'a [i32],
    /// `[R]`.
    pub row_kv_lens: Option<&'a [i32]>,
    /// The scale of the cache; 1 where the record has none.
    pub kv_scale: f32,
    /// The scale of the query; 1 where it has none.
    pub q_scale: f32,
}

/// What the oracle says.
#[derive(Clone, Debug, PartialEq)]
pub struct DenseResult {
    /// `[R, H, V]`, before its rounding to BF16.
    pub out: Vec<f64>,
    /// `[R, H]`, in the base of the `Spec`.
    pub lse: Vec<f64>,
    /// By [`Fault`].
    pub faults: [u32; FAULT_NAMES.len()],
}

/// The result with the keys divided as a plan divides them.
pub fn oracle(spec: &DenseSpec, division: Division, case: &DenseCase<'_>) -> DenseResult {
    Oracle { spec, division, case }.run()
}

/// From the first to the last position that some row sees; empty where none sees any.
pub fn span(keys: &[Range<usize>]) -> Range<usize> {
    let live = || keys.iter().filter(|keys| !keys.is_empty());
    let first = live().map(|keys| keys.start).min().unwrap_or(0);
    let end = live().map(|keys| keys.end).max().unwrap_or(0);
    first..end
}

struct Oracle<'o> {
    spec: &'o DenseSpec,
    division: Division,
    case: &'o DenseCase<'o>,
}

impl Oracle<'_> {
    fn run(&self) -> DenseResult {
        let (spec, case) = (self.spec, self.case);
        let queries = match case.q {
            QueryCase::Bf16(q) => q.len(),
            QueryCase::E4m3(q) => q.len(),
        };
        let rows = queries / (spec.heads * spec.qk_width);
        let mut result = DenseResult {
            out: vec![0.0; rows * spec.heads * spec.value_width],
            lse: vec![f64::NEG_INFINITY; rows * spec.heads],
            faults: [0; FAULT_NAMES.len()],
        };
        let mut count =
            |fault: Fault, fine: bool| result.faults[fault as usize] += u32::from(!fine);
        let width = case.page_table.len() / case.kv_lens.len().max(1);
        let covered = (width * spec.page_size).min(spec.max_kv_tokens);
        let (mut offsets, fine) = Rows::begin(case.q_offsets[0], rows);
        count(Fault::Offset, fine);
        let mut requests = Vec::new();
        for (request, length) in case.kv_lens.iter().enumerate() {
            let (range, fine) = offsets.until(case.q_offsets[request + 1]);
            count(Fault::Offset, fine);
            let (kv_len_tokens, fine) = Visible::clamp_length(*length, covered);
            count(Fault::Length, fine);
            let visible = Visible { rows: range.len(), kv_len_tokens, window: spec.window };
            let mut keys = Vec::new();
            for row in range.clone() {
                keys.push(match case.row_kv_lens {
                    None => visible.causal(row - range.start),
                    Some(lengths) => {
                        let (end, fine) = Visible::clamp_length(lengths[row], kv_len_tokens);
                        count(Fault::Length, fine);
                        visible.until(end)
                    }
                });
            }
            let table = &case.page_table[request * width..(request + 1) * width];
            for page in self.pages(&keys) {
                count(Fault::Id, table[page] == -1 || self.page(table, page).is_some());
            }
            requests.push((range, keys, table));
        }
        for (range, keys, table) in requests {
            let span = span(&keys);
            for (row, keys) in range.zip(keys) {
                for head in 0..spec.heads {
                    let index = row * spec.heads + head;
                    self.row(index, (&span, &keys), table, &mut result);
                }
            }
        }
        result
    }

    /// The entries of a page table that some row of a request needs.
    fn pages(&self, keys: &[Range<usize>]) -> Range<usize> {
        let span = span(keys);
        span.start / self.spec.page_size..span.end.div_ceil(self.spec.page_size)
    }

    fn page(&self, table: &[i32], index: usize) -> Option<usize> {
        let pages = self.case.cache.len() / self.case.page_stride_bytes;
        usize::try_from(table[index]).ok().filter(|page| *page < pages)
    }

    /// The bytes of a token: data, then scales.
    fn record(&self, table: &[i32], position: usize) -> Option<[&[u8]; 2]> {
        let size = self.spec.page_size;
        let page = self.page(table, position / size)?;
        let page = &self.case.cache[page * self.case.page_stride_bytes..];
        Some(self.spec.pages().planes().token(page, position % size))
    }

    /// A key, the scale of the cache not multiplied: its product is exact only in f64.
    fn decode<'k>(&self, [data, scales]: [&[u8]; 2], key: &'k mut [f32]) -> &'k [f32] {
        self.spec.pages().record.decode(data, scales, 1.0, key);
        key
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

    /// One head of one row: every split by itself, then the merge.
    fn row(
        &self,
        index: usize,
        (span, keys): (&Range<usize>, &Range<usize>),
        table: &[i32],
        result: &mut DenseResult,
    ) {
        let spec = self.spec;
        let query: Vec<f64> = (0..spec.qk_width).map(|i| self.query(index, i)).collect();
        let parts: Vec<_> = (0..self.division.splits)
            .map(|split| self.part(&query, self.division.range(span, keys, split), table))
            .filter(|(_, lse)| *lse > f64::NEG_INFINITY || lse.is_nan())
            .collect();
        let top = parts.iter().map(|(_, lse)| *lse).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = parts.iter().map(|(_, lse)| (lse - top).exp()).sum();
        if parts.is_empty() {
            return;
        }
        let stored = self.division.splits > 1;
        let out = &mut result.out[index * spec.value_width..][..spec.value_width];
        for (part, lse) in &parts {
            for (total, value) in out.iter_mut().zip(part) {
                let value = match spec.partial {
                    Partial::Bf16 if stored => f64::from(bf16::from_f64(*value)),
                    Partial::F32 if stored => f64::from(*value as f32),
                    _ => *value,
                };
                *total += (lse - top).exp() / sum * value;
            }
        }
        result.lse[index] = (top + sum.ln()) / spec.lse.ln();
    }

    fn part(&self, query: &[f64], keys: Range<usize>, table: &[i32]) -> (Vec<f64>, f64) {
        let spec = self.spec;
        let kv_scale = f64::from(self.case.kv_scale);
        let mut key = vec![0.0; spec.qk_width];
        let records: Vec<_> = keys.filter_map(|key| self.record(table, key)).collect();
        let mut score = |record: &[&[u8]; 2]| {
            let pairs = query.iter().zip(self.decode(*record, &mut key));
            let dot: f64 = pairs.map(|(q, k)| q * (f64::from(*k) * kv_scale)).sum();
            dot * f64::from(spec.softmax_scale.value())
        };
        let scores: Vec<f64> = records.iter().map(&mut score).collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let mut out = vec![0.0; spec.value_width];
        // No key, or none whose score is above -inf: nothing weighs anything.
        if top == f64::NEG_INFINITY && !scores.iter().any(|score| score.is_nan()) {
            return (out, top);
        }
        let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
        let sum: f64 = weights.iter().sum();
        for (record, weight) in records.iter().zip(&weights) {
            for (total, value) in out.iter_mut().zip(self.decode(*record, &mut key)) {
                *total += weight / sum * (f64::from(*value) * kv_scale);
            }
        }
        (out, top + sum.ln())
    }
}
