//! `indexer` in f64. Queries are rounded as the `Spec` says, scores once, to F32.

use half::bf16;

use super::spec::IndexerSpec;
use super::visible::pools_visible;
use crate::RecordFormat;
use crate::op::dense::{Rows, Visible};
use crate::op::layer::descending;
use crate::scratch::{FAULT_NAMES, Fault};

/// The operands on the host.
#[derive(Clone, Copy, Debug)]
pub struct IndexerCase<'a> {
    /// `[R, I, D]`.
    pub q: &'a [bf16],
    /// `[R, I]`.
    pub weights: &'a [f32],
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
    /// `[R]`, pooled only.
    pub last_position: Option<&'a [i64]>,
}

/// What the oracle says.
#[derive(Clone, Debug, PartialEq)]
pub struct IndexerResult {
    /// `[R, T]`.
    pub positions: Vec<i32>,
    /// `[R]`.
    pub counts: Vec<i32>,
    /// `[R, T]`.
    pub scores: Vec<f32>,
    /// Of each row the score of every key that it sees, `None` where the key's page is not there.
    pub visible: Vec<Vec<Option<f64>>>,
    /// By [`Fault`].
    pub faults: [u32; FAULT_NAMES.len()],
}

/// Scores and selects.
pub fn oracle(spec: &IndexerSpec, case: &IndexerCase<'_>) -> IndexerResult {
    Oracle { spec, case }.run()
}

/// The positions of the `topk` best scores, ascending; a position without a score is none.
pub fn top_k(scores: &[Option<f32>], topk: usize) -> Vec<usize> {
    let score = |position: &usize| scores[*position].unwrap_or(f32::NAN);
    let mut found: Vec<usize> = (0..scores.len()).filter(|at| scores[*at].is_some()).collect();
    // Stable: of equal scores the smaller position comes first.
    found.sort_by(|a, b| descending(score(a), score(b)));
    found.truncate(topk);
    found.sort_unstable();
    found
}

struct Oracle<'o> {
    spec: &'o IndexerSpec,
    case: &'o IndexerCase<'o>,
}

impl Oracle<'_> {
    fn run(&self) -> IndexerResult {
        let (spec, case) = (self.spec, self.case);
        let rows = case.weights.len() / spec.heads;
        let mut result = IndexerResult {
            positions: vec![-1; rows * spec.topk],
            counts: vec![0; rows],
            scores: vec![f32::NEG_INFINITY; rows * spec.topk],
            visible: vec![Vec::new(); rows],
            faults: [0; FAULT_NAMES.len()],
        };
        let mut count = |fault: Fault, bad: usize| result.faults[fault as usize] += bad as u32;
        let width = case.page_table.len() / case.kv_lens.len().max(1);
        let covered = (width * spec.page_size).min(spec.max_kv_tokens);
        let (mut offsets, fine) = Rows::begin(case.q_offsets[0], rows);
        count(Fault::Offset, usize::from(!fine));
        for (index, length) in case.kv_lens.iter().enumerate() {
            let (range, fine) = offsets.until(case.q_offsets[index + 1]);
            count(Fault::Offset, usize::from(!fine));
            let (kv_len_tokens, fine) = Visible::clamp_length(*length, covered);
            count(Fault::Length, usize::from(!fine));
            let visible = Visible { rows: range.len(), kv_len_tokens, window: None };
            let table = &case.page_table[index * width..(index + 1) * width];
            let mut longest = 0;
            for row in range.clone() {
                let (keys, fine) = self.keys(visible, (row - range.start, row));
                count(Fault::Length, usize::from(!fine));
                longest = longest.max(keys);
                let query = self.query(row);
                let scores = (0..keys).map(|key| self.score(&query, row, self.key(table, key)?));
                result.visible[row] = scores.collect();
            }
            let needed = &table[..longest.div_ceil(spec.page_size)];
            count(Fault::Id, needed.iter().filter(|id| self.is_bad(**id)).count());
        }
        for row in 0..rows {
            self.select(row, &mut result);
        }
        result
    }

    /// The keys that a row sees, given as row of its request and row of the call.
    fn keys(&self, visible: Visible, (local, row): (usize, usize)) -> (usize, bool) {
        match self.case.last_position {
            Some(last) if self.spec.is_pooled() => {
                pools_visible(last[row], self.spec.pool_size, visible.kv_len_tokens)
            }
            _ => (visible.causal(local).end, true),
        }
    }

    fn page(&self, id: i32) -> Option<usize> {
        let pages = self.case.cache.len() / self.case.page_stride_bytes;
        usize::try_from(id).ok().filter(|page| *page < pages)
    }

    fn is_bad(&self, id: i32) -> bool {
        id != -1 && self.page(id).is_none()
    }

    /// A key, if its page is there.
    fn key(&self, table: &[i32], position: usize) -> Option<Vec<f32>> {
        let (size, stride) = (self.spec.page_size, self.case.page_stride_bytes);
        let page = &self.case.cache[self.page(table[position / size])? * stride..][..stride];
        let planes = self.spec.layout().planes(size);
        let [data, scales] =
            [planes.data, planes.scales].map(|plane| &page[plane.token(position % size)]);
        let mut key = vec![0.0; self.spec.width];
        self.spec.layout().decode(data, scales, 1.0, &mut key);
        Some(key)
    }

    /// The queries of a row, rounded as the record rounds.
    fn query(&self, row: usize) -> Vec<f32> {
        let (spec, layout) = (self.spec, self.spec.layout());
        let all = &self.case.q[row * spec.heads * spec.width..][..spec.heads * spec.width];
        if spec.record == RecordFormat::IndexBf16_256 {
            return all.iter().map(|element| element.to_f32()).collect();
        }
        let planes = layout.planes(1);
        let (mut data, mut scales) = (vec![0; planes.data.bytes], vec![0; planes.scales.bytes]);
        let mut rounded = vec![0.0; all.len()];
        for (head, to) in all.chunks_exact(spec.width).zip(rounded.chunks_exact_mut(spec.width)) {
            layout.encode(&mut data, &mut scales, head, 1.0);
            layout.decode(&data, &scales, 1.0, to);
        }
        rounded
    }

    fn score(&self, query: &[f32], row: usize, key: Vec<f32>) -> Option<f64> {
        let weights = &self.case.weights[row * self.spec.heads..][..self.spec.heads];
        let heads = query.chunks_exact(self.spec.width).zip(weights);
        let part = |(head, weight): (&[f32], &f32)| {
            let dot: f64 = head.iter().zip(&key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
            // NaN stays NaN.
            f64::from(*weight) * if dot < 0.0 { 0.0 } else { dot }
        };
        Some(heads.map(part).sum())
    }

    fn select(&self, row: usize, result: &mut IndexerResult) {
        let scores: Vec<Option<f32>> =
            result.visible[row].iter().map(|score| score.map(|score| score as f32)).collect();
        let found = top_k(&scores, self.spec.topk);
        result.counts[row] = found.len() as i32;
        for (column, position) in found.into_iter().enumerate() {
            let at = row * self.spec.topk + column;
            result.positions[at] = position as i32;
            result.scores[at] = scores[position].unwrap_or(f32::NEG_INFINITY);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_selection() {
        let nan = f32::NAN;
        let low = f32::NEG_INFINITY;
        let scores = [Some(nan), Some(low), Some(-0.0), None, Some(0.0), Some(2.0), Some(nan)];
        let picks: Vec<_> = (1..=7).map(|k| top_k(&scores, k)).collect();
        assert_eq!(picks[0], [5]);
        assert_eq!(picks[1], [2, 5]);
        assert_eq!(picks[2], [2, 4, 5]);
        assert_eq!(picks[3], [1, 2, 4, 5]);
        assert_eq!(picks[4], [0, 1, 2, 4, 5]);
        assert_eq!(picks[6], [0, 1, 2, 4, 5, 6]);
    }

    fn spec(more: &str) -> IndexerSpec {
        let text = format!(
            r#"{{"heads":2,"width":2,"record":"index_bf16_256","page_size":1,"topk":2,
            "max_rows":4,"max_batch":2,"max_kv_tokens":9,"max_table_width":9{more}}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    fn bf16s(values: &[f32]) -> Vec<bf16> {
        values.iter().copied().map(bf16::from_f32).collect()
    }

    /// By hand: keys (1, 0), (0, 1), (2, 2), (-1, 3); the third page is bad.
    #[test]
    fn scores_by_hand() {
        let keys = bf16s(&[1.0, 0.0, 0.0, 1.0, 2.0, 2.0, -1.0, 3.0]);
        let cache: Vec<u8> = keys.iter().flat_map(|value| value.to_le_bytes()).collect();
        let q = bf16s(&[1.0, -1.0, 0.5, 1.0, 1.0, -1.0, 0.5, 1.0]);
        let case = IndexerCase {
            q: &q,
            weights: &[2.0, -1.0, -1.0, 1.0],
            cache: &cache,
            page_stride_bytes: 4,
            page_table: &[0, 1, 77, 3],
            kv_lens: &[4],
            q_offsets: &[0, 2],
            last_position: None,
        };
        let result = oracle(&spec(""), &case);
        assert_eq!(result.visible[0], [Some(1.5), Some(-1.0), None]);
        assert_eq!(result.visible[1], [Some(-0.5), Some(1.0), None, Some(2.5)]);
        assert_eq!(result.positions, [0, 1, 1, 3]);
        assert_eq!(result.scores, [1.5, -1.0, 1.0, 2.5]);
        assert_eq!((result.counts, result.faults), (vec![2, 2], [1, 0, 0]));
    }

    /// Pools of 4 seen from positions 2, 7 and a padding row.
    #[test]
    fn pools_are_seen_when_they_are_complete() {
        let cache: Vec<u8> =
            bf16s(&[1.0; 6]).iter().flat_map(|value| value.to_le_bytes()).collect();
        let case = IndexerCase {
            q: &bf16s(&[1.0; 12]),
            weights: &[1.0; 6],
            cache: &cache,
            page_stride_bytes: 4,
            page_table: &[0, 1, 2],
            kv_lens: &[3],
            q_offsets: &[0, 3],
            last_position: Some(&[2, 7, -1]),
        };
        let result = oracle(&spec(r#","pool_size":4"#), &case);
        assert_eq!(result.counts, [0, 2, 0]);
        assert_eq!(result.positions, [-1, -1, 0, 1, -1, -1]);
        assert_eq!(result.faults, [0; 3]);
    }
}
