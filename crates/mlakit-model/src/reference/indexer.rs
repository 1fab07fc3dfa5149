//! The selection of a sparse layer in f64.
//!
//! With x the input of a row, qr its query latent, I heads of D elements:
//!
//! ```text
//! q_h = rope(Wqb qr)_h      w = I^-0.5 Www x       k = rope(LayerNorm(Wk x))
//! score[t, s] = sum_h w[t, h] relu(D^-0.5 q[t, h] . k[s])
//! ```
//!
//! The rope part is the first elements of a head. Where keys are pooled, pool `b` of `p` tokens has
//! the key `sum_s softmax_s(Wgate x[s] + ape[s mod p]) k[s]`, channel by channel, and a row sees the
//! pools whose last token it sees.

use half::bf16;
use mlakit::{RecordFormat, RecordLayout};

use super::math::{Matrix, dot, for_blocks, layer_norm, softmax};
use super::{LatentCache, Selection};
use crate::checkpoint::IndexerWeights;
use crate::config::{IndexPool, IndexerConfig, Rotary};
use crate::rope::RopeTable;

use super::attention::matrix;

/// The keys that rows select.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selected {
    /// [rows, width]: indices of keys in their sequence, ascending, -1 after the last.
    pub keys: Vec<i32>,
    /// Entries a row.
    pub width: usize,
}

impl Selected {
    /// The same, borrowed.
    pub fn view(&self) -> Selection<'_> {
        Selection { keys: &self.keys, width: self.width }
    }
}

impl From<Selection<'_>> for Selected {
    fn from(selection: Selection<'_>) -> Self {
        Self { keys: selection.keys.to_vec(), width: selection.width }
    }
}

/// The weights of an indexer, widened to f64.
#[derive(Clone, Debug)]
pub(super) struct IndexerReference {
    config: IndexerConfig,
    rope_width: usize,
    query: Matrix,
    key: Matrix,
    key_norm: [Vec<f64>; 2],
    head_weights: Matrix,
    pool: Option<PoolReference>,
    record: RecordFormat,
}

#[derive(Clone, Debug)]
struct PoolReference {
    config: IndexPool,
    gate: Matrix,
    ape: Vec<f64>,
}

/// What the rows of one sequence are selected by.
pub(super) struct IndexRows<'a> {
    /// [rows, hidden].
    pub hidden: &'a [f64],
    /// What index queries are projected from [rows, query rank].
    pub query_latent: &'a [f64],
    /// Tokens that were cached before the first row.
    pub cached: usize,
    /// Rotary position of the first row.
    pub first_position: usize,
}

impl IndexerReference {
    /// `rope_width`: elements of a query and key that rotate.
    pub(super) fn new(
        config: &IndexerConfig,
        weights: &IndexerWeights<'_>,
        rope_width: usize,
    ) -> Self {
        let pool = weights.pool.as_ref().zip(config.pool);
        Self {
            config: *config,
            rope_width,
            query: matrix(&weights.query_up),
            key: matrix(&weights.key),
            key_norm: [weights.key_norm.to_f64(), weights.key_norm_bias.to_f64()],
            head_weights: matrix(&weights.head_weights),
            pool: pool.map(|(weights, config)| PoolReference {
                config,
                gate: matrix(&weights.gate),
                ape: weights.ape.to_f64(),
            }),
            record: RecordFormat::IndexBf16_256,
        }
    }

    pub(super) fn storing(self, record: RecordFormat) -> Self {
        Self { record, ..self }
    }

    /// Elements of a token's key.
    pub(super) fn width(&self) -> usize {
        self.config.head_dim
    }

    /// Elements of a token's gate: as many where keys are pooled.
    pub(super) fn gate_width(&self) -> usize {
        if self.pool.is_some() { self.width() } else { 0 }
    }

    /// Appends the keys of the rows `x`, and their gates where keys are pooled.
    pub(super) fn extend(
        &self,
        x: &[f64],
        first_position: usize,
        (rope, cache): (Option<&RopeTable>, &mut LatentCache),
    ) {
        let mut keys = self.key.apply(x);
        let [gain, bias] = &self.key_norm;
        layer_norm(&mut keys, (gain, bias), self.config.key_norm_eps);
        for (row, key) in keys.chunks_exact_mut(self.width()).enumerate() {
            self.rotate(key, first_position + row, rope);
            if self.pool.is_none() {
                self.round(key);
            }
        }
        cache.index_key.extend(keys);
        if let Some(pool) = &self.pool {
            cache.index_gate.extend(pool.gate.apply(x));
        }
    }

    /// The selection of each row.
    pub(super) fn select(
        &self,
        rows: &IndexRows<'_>,
        (rope, cache): (Option<&RopeTable>, &LatentCache),
    ) -> Selected {
        let (heads, width) = (self.config.heads, self.width());
        let mut queries = self.query.apply(rows.query_latent);
        for (index, query) in queries.chunks_exact_mut(width).enumerate() {
            self.rotate(query, rows.first_position + index / heads, rope);
            self.round(query);
        }
        let weights = self.head_weights.apply(rows.hidden);
        let pooled = self.pool.as_ref().map(|pool| self.pooled_keys(pool, cache));
        let keys = pooled.as_ref().unwrap_or(&cache.index_key);
        let selected = self.config.selected_width();
        let count = weights.len() / heads;
        let mut entries = vec![-1.0; count * selected];
        let work = queries.len() * (keys.len() / width);
        for_blocks(&mut entries, selected, work, |row, entries| {
            let query = &queries[row * heads * width..(row + 1) * heads * width];
            let weights = &weights[row * heads..(row + 1) * heads];
            let seen = rows.cached + row + 1;
            let visible = seen / self.config.pool_size();
            let scores: Vec<f64> = keys
                .chunks_exact(width)
                .take(visible)
                .map(|key| self.score(query, weights, key))
                .collect();
            let best = best(&scores, self.config.topk / self.config.pool_size());
            let tokens = self.tokens(&best, seen);
            entries.iter_mut().zip(tokens).for_each(|(entry, token)| *entry = token as f64);
        });
        Selected { keys: entries.into_iter().map(|entry| entry as i32).collect(), width: selected }
    }

    /// The tokens of keys, and the tail of a row that sees `seen` tokens.
    fn tokens(&self, keys: &[usize], seen: usize) -> Vec<usize> {
        let Some(pool) = &self.pool else { return keys.to_vec() };
        let size = pool.config.size;
        let tail = if pool.config.always_tail { seen - seen % size..seen } else { 0..0 };
        keys.iter().flat_map(|key| key * size..(key + 1) * size).chain(tail).collect()
    }

    fn score(&self, query: &[f64], weights: &[f64], key: &[f64]) -> f64 {
        let scale = 1.0 / (self.width() as f64 * self.config.heads as f64).sqrt();
        let heads = query.chunks_exact(self.width()).zip(weights);
        heads.map(|(query, weight)| weight * dot(query, key).max(0.0)).sum::<f64>() * scale
    }

    /// The keys of all complete pools.
    fn pooled_keys(&self, pool: &PoolReference, cache: &LatentCache) -> Vec<f64> {
        let (width, elements) = (self.width(), pool.config.size * self.width());
        let pools = cache.index_key.chunks_exact(elements);
        let mut pooled = Vec::with_capacity(cache.index_key.len() / pool.config.size);
        for (keys, gates) in pools.zip(cache.index_gate.chunks_exact(elements)) {
            let mut key: Vec<f64> = (0..width)
                .map(|channel| {
                    let at = (channel..elements).step_by(width);
                    let mut shares: Vec<f64> = at.clone().map(|i| gates[i] + pool.ape[i]).collect();
                    softmax(&mut shares);
                    at.zip(shares).map(|(i, share)| keys[i] * share).sum()
                })
                .collect();
            self.round(&mut key);
            pooled.extend(key);
        }
        pooled
    }

    fn rotate(&self, head: &mut [f64], position: usize, rope: Option<&RopeTable>) {
        if let Some(table) = rope {
            rotate(&mut head[..self.rope_width], (position, table), self.config.rotary);
        }
    }

    /// What the record keeps of a query or a key; a `index_bf16_256` one is taken to be exact.
    fn round(&self, values: &mut [f64]) {
        if self.record != RecordFormat::IndexBf16_256 {
            stored(RecordLayout::of(self.record, values.len(), 0), values);
        }
    }
}

/// Replaces values, rounded to BF16 first, by what a record of them with a cache scale of 1 holds.
pub(super) fn stored(layout: RecordLayout, values: &mut [f64]) {
    let narrow: Vec<bf16> = values.iter().copied().map(bf16::from_f64).collect();
    let planes = layout.planes(1);
    let (mut data, mut scales) = (vec![0; planes.data.bytes], vec![0; planes.scales.bytes]);
    layout.encode(&mut data, &mut scales, &narrow, 1.0);
    let mut decoded = vec![0.0; values.len()];
    layout.decode(&data, &scales, 1.0, &mut decoded);
    values.iter_mut().zip(decoded).for_each(|(value, held)| *value = f64::from(held));
}

/// Rotates the pairs of a part in place.
pub(super) fn rotate(part: &mut [f64], (position, table): (usize, &RopeTable), style: Rotary) {
    let pairs = part.len() / 2;
    for pair in 0..pairs {
        let (a, b) = match style {
            Rotary::Pair => (2 * pair, 2 * pair + 1),
            Rotary::Half => (pair, pair + pairs),
        };
        let (cos, sin) = table.cos_sin(position, pair);
        let (x, y) = (part[a], part[b]);
        part[a] = x * cos - y * sin;
        part[b] = x * sin + y * cos;
    }
}

/// The indices of the `count` best scores, ascending: the larger first, -0 equal to 0, NaN below
/// -inf, of equal ones the smaller index.
fn best(scores: &[f64], count: usize) -> Vec<usize> {
    let rank = |index: usize| {
        let score = scores[index];
        (!score.is_nan(), if score.is_nan() { 0.0 } else { score + 0.0 })
    };
    let mut order: Vec<usize> = (0..scores.len()).collect();
    if scores.len() > count {
        order.sort_by(|&a, &b| {
            let ((a_number, a_score), (b_number, b_score)) = (rank(a), rank(b));
            b_number.cmp(&a_number).then(b_score.total_cmp(&a_score)).then(a.cmp(&b))
        });
        order.truncate(count);
        order.sort_unstable();
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_scores() {
        let scores = [0.0, f64::NEG_INFINITY, f64::NAN, -0.0, 2.0, 0.0, -1.0];
        assert_eq!(best(&scores, 3), [0, 3, 4]);
        assert_eq!(best(&scores, 5), [0, 3, 4, 5, 6]);
        assert_eq!(best(&scores, 6), [0, 1, 3, 4, 5, 6]);
        assert_eq!(best(&scores, 7), [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(best(&[], 3), [0; 0]);
    }

    #[test]
    fn a_record_holds_rounded_values() {
        let mut values: Vec<f64> = (0..128).map(|i| f64::from(i) / 61.0 - 1.0).collect();
        let exact = values.clone();
        stored(RecordLayout::of(RecordFormat::IndexFp8_132, 128, 0), &mut values);
        let worst = values.iter().zip(&exact).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(worst > 1e-3 && worst < 0.07, "{worst}");
    }
}
