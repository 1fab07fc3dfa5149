//! Latent attention of one layer in f64, in both of its forms.
//!
//! With x the (normed) input of a row, c the cached latent and kp the cached shared rope key of a
//! token, for head i:
//!
//! ```text
//! [qn | qp] = Wqb norm(Wqa x)  or  Wq x          qp rotated
//! [u | kp]  = Wkva x            c = norm(u)       kp rotated
//! Naive     k = UK c, v = UV c   z = scale (qn . k + qp . kp)          o = sum p v
//! Absorbed  ql = UK^T qn         z = scale (ql . c + qp . kp)          o = UV sum p c
//! out = Wo (gate * o)
//! ```
//!
//! Rows of `kv_b_proj` are, in each head, UK and then UV. The forms are equal in exact arithmetic.

use mlakit::{RecordFormat, RecordLayout};

use super::indexer::{IndexRows, IndexerReference, Selected, rotate, stored};
use super::math::{Matrix, add_scaled, dot, for_blocks, rms_norm, sigmoid, softmax};
use crate::checkpoint::{AttentionWeights, LinearWeights, QueryWeights, Weight};
use crate::config::{AttentionConfig, LayerIndexer};
use crate::error::InputError;
use crate::rope::RopeTable;

/// Which of the two equal formulas is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// Keys and values of every head are expanded from the latents.
    #[default]
    Naive,
    /// Queries are taken to the latent space and results back.
    Absorbed,
}

/// What a layer has cached of one sequence: token by token, row-major.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LatentCache {
    /// Normed latents [tokens, kv_lora_rank].
    pub latent: Vec<f64>,
    /// Rotated shared keys [tokens, qk_rope_head_dim]; pairs stay where they are.
    pub rope_key: Vec<f64>,
    /// Index keys [tokens, index width], rotated, not pooled; none without an indexer.
    pub index_key: Vec<f64>,
    /// Gates of index keys [tokens, index width]; none where keys are not pooled.
    pub index_gate: Vec<f64>,
    /// Cached tokens.
    pub len_tokens: usize,
}

/// Rows of one sequence in a packed input: they continue what `cache` holds and are added to it.
#[derive(Debug)]
pub struct Sequence<'a> {
    /// Rows of the input that belong to it.
    pub rows: usize,
    /// Rotary position of the sequence's first token, the first that was ever cached.
    pub first_position: usize,
    /// Its cache.
    pub cache: &'a mut LatentCache,
}

/// Which keys rows attend to, of those that they see.
#[derive(Clone, Copy, Debug, Default)]
pub enum Keys<'a> {
    /// What the layer's own indexer selects; all where it has none.
    #[default]
    Own,
    /// All.
    All,
    /// These.
    Given(Selection<'a>),
}

/// Keys given from outside, row by row.
#[derive(Clone, Copy, Debug)]
pub struct Selection<'a> {
    /// [rows, width]: indices of keys in their sequence, in any order; negative ones, those that
    /// the row does not see and repetitions are skipped.
    pub keys: &'a [i32],
    /// Entries a row.
    pub width: usize,
}

/// The result of one attention layer.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionOutput {
    /// After the output projection [rows, hidden].
    pub hidden: Vec<f64>,
    /// Before gate and output projection [rows, heads, value width].
    pub heads: Vec<f64>,
    /// Natural logarithm of the sum of exponentials [rows, heads]; -inf where no key is visible.
    pub lse: Vec<f64>,
    /// What the layer's own indexer selected, where it was asked.
    pub selected: Option<Selected>,
}

/// One attention layer, its weights widened to f64.
#[derive(Clone, Debug)]
pub struct AttentionReference {
    config: AttentionConfig,
    rope: Option<RopeTable>,
    query: Query,
    kv_down: Matrix,
    kv_norm: Vec<f64>,
    kv_up: Matrix,
    output: Matrix,
    gate: Option<Matrix>,
    indexer: Option<IndexerReference>,
    record: RecordFormat,
}

#[derive(Clone, Debug)]
enum Query {
    Direct(Matrix),
    LowRank { down: Matrix, norm: Vec<f64>, up: Matrix },
}

/// Queries of the rows of one sequence, and where its rows begin among all.
struct Rows<'a> {
    query: &'a [f64],
    first_row: usize,
    cached: usize,
}

impl AttentionReference {
    /// The layer that `config` describes and `weights` holds.
    pub fn new(config: &AttentionConfig, weights: &AttentionWeights<'_>) -> Self {
        let qk_rope_head_dim = config.qk_rope_head_dim;
        let query = match &weights.query {
            QueryWeights::Direct(weight) => Query::Direct(matrix(weight)),
            QueryWeights::LowRank { down, norm, up } => {
                Query::LowRank { down: linear(down), norm: norm.to_f64(), up: matrix(up) }
            }
        };
        Self {
            config: config.clone(),
            rope: config.rope.map(|rope| RopeTable::new(&rope, config.qk_rope_head_dim)),
            query,
            kv_down: linear(&weights.kv_down),
            kv_norm: weights.kv_norm.to_f64(),
            kv_up: matrix(&weights.kv_up),
            output: linear(&weights.output),
            gate: weights.gate.as_ref().map(matrix),
            indexer: config
                .own_indexer()
                .zip(weights.indexer.as_ref())
                .map(|(config, weights)| IndexerReference::new(&config, weights, qk_rope_head_dim)),
            record: RecordFormat::Bf16,
        }
    }

    /// The same over what caches of these formats and scale 1 hold of each token: its dequantised
    /// bytes. `bf16` and `index_bf16_256` ones are taken to be exact: they keep f64. Index queries
    /// are rounded as index keys are. A format must be able to store such a token.
    pub fn storing(self, record: RecordFormat, index_record: RecordFormat) -> Self {
        let indexer = self.indexer.map(|indexer| indexer.storing(index_record));
        Self { record, indexer, ..self }
    }

    /// The configuration.
    pub fn config(&self) -> &AttentionConfig {
        &self.config
    }

    /// Width of input and output rows.
    pub fn hidden_size(&self) -> usize {
        self.kv_down.width
    }

    /// Caches the latents and rope keys of `hidden` [rows, hidden] and computes no attention.
    ///
    /// # Errors
    /// [`InputError::Shape`].
    pub fn fill(&self, hidden: &[f64], sequence: &mut Sequence<'_>) -> Result<(), InputError> {
        self.check_rows(hidden, sequence.rows)?;
        self.check_cache(sequence.cache)?;
        self.extend(hidden, sequence);
        Ok(())
    }

    /// Attention of the packed rows `hidden` [rows, hidden] of `sequences`, each row over `keys` of
    /// its own sequence up to itself.
    ///
    /// # Errors
    /// [`InputError::Shape`] for an input, cache or selection of another length;
    /// [`InputError::SharedSelection`] for a layer that shares a selection and is given none. The
    /// caches are unchanged then.
    pub fn run(
        &self,
        hidden: &[f64],
        sequences: &mut [Sequence<'_>],
        keys: Keys<'_>,
        form: Form,
    ) -> Result<AttentionOutput, InputError> {
        let rows: usize = sequences.iter().map(|sequence| sequence.rows).sum();
        self.check_rows(hidden, rows)?;
        self.check_keys(rows, keys)?;
        for sequence in sequences.iter() {
            self.check_cache(sequence.cache)?;
        }
        let width = self.config.v_head_dim + 1;
        let mut results = Vec::with_capacity(rows * self.config.heads * width);
        let mut own: Option<Selected> = None;
        let mut first_row = 0;
        for sequence in sequences {
            let end = first_row + sequence.rows;
            let x = &hidden[first_row * self.hidden_size()..end * self.hidden_size()];
            let cached = sequence.cache.len_tokens;
            self.extend(x, sequence);
            let first_position = sequence.first_position + cached;
            let latent = self.query_latent(x);
            let query = self.queries(&latent, first_position);
            let index = IndexRows { hidden: x, query_latent: &latent, cached, first_position };
            let selected = self.select(&index, sequence.cache, keys);
            let (selection, first) = match (&selected, keys) {
                (Some(selected), _) => (Some(selected.view()), 0),
                (None, Keys::Given(selection)) => (Some(selection), first_row),
                (None, _) => (None, 0),
            };
            let rows = Rows { query: &query, first_row: first, cached };
            results.extend(self.attend(&rows, sequence.cache, selection, form));
            own = append(own, selected);
            first_row = end;
        }
        Ok(self.finish(hidden, &results, own))
    }

    /// What the layer's own indexer selects, where it is asked.
    fn select(
        &self,
        rows: &IndexRows<'_>,
        cache: &LatentCache,
        keys: Keys<'_>,
    ) -> Option<Selected> {
        let indexer = self.indexer.as_ref().filter(|_| matches!(keys, Keys::Own))?;
        Some(indexer.select(rows, (self.rope.as_ref(), cache)))
    }

    /// Splits the results of heads into values and LSE, gates and projects them.
    fn finish(
        &self,
        hidden: &[f64],
        results: &[f64],
        selected: Option<Selected>,
    ) -> AttentionOutput {
        let v = self.config.v_head_dim;
        let heads: Vec<f64> = results.chunks_exact(v + 1).flat_map(|r| &r[..v]).copied().collect();
        let lse = results.chunks_exact(v + 1).map(|result| result[v]).collect();
        let gated = match &self.gate {
            Some(gate) => {
                // One factor an element, or one a head.
                let span = self.config.heads * v / gate.rows();
                let gates = gate.apply(hidden);
                heads.iter().enumerate().map(|(i, o)| o * sigmoid(gates[i / span])).collect()
            }
            None => heads.clone(),
        };
        AttentionOutput { hidden: self.output.apply(&gated), heads, lse, selected }
    }

    /// Appends the rows' latents and rotated rope keys to the cache.
    fn extend(&self, x: &[f64], sequence: &mut Sequence<'_>) {
        let (latent, rope) = (self.config.kv_lora_rank, self.config.qk_rope_head_dim);
        let first = sequence.first_position + sequence.cache.len_tokens;
        for (row, token) in self.kv_down.apply(x).chunks_exact_mut(latent + rope).enumerate() {
            let (token_latent, token_key) = token.split_at_mut(latent);
            rms_norm(token_latent, &self.kv_norm, self.config.kv_eps);
            self.rotate(token_key, first + row);
            if self.record != RecordFormat::Bf16 {
                let layout = RecordLayout::of(self.record, latent, rope);
                stored(layout, token);
            }
            let (token_latent, token_key) = token.split_at(latent);
            sequence.cache.latent.extend_from_slice(token_latent);
            sequence.cache.rope_key.extend_from_slice(token_key);
        }
        if let Some(indexer) = &self.indexer {
            indexer.extend(x, first, (self.rope.as_ref(), sequence.cache));
        }
        sequence.cache.len_tokens += sequence.rows;
    }

    /// What queries are projected from: the normed query latent, or the input itself.
    fn query_latent(&self, x: &[f64]) -> Vec<f64> {
        let Query::LowRank { down, norm, .. } = &self.query else { return x.to_vec() };
        let mut latent = down.apply(x);
        rms_norm(&mut latent, norm, self.config.query_eps);
        latent
    }

    /// Queries [rows, heads, qk width], their rope parts rotated.
    fn queries(&self, latent: &[f64], first_position: usize) -> Vec<f64> {
        let (Query::Direct(up) | Query::LowRank { up, .. }) = &self.query;
        let mut query = up.apply(latent);
        let width = self.config.qk_head_dim();
        for (index, head) in query.chunks_exact_mut(width).enumerate() {
            let position = first_position + index / self.config.heads;
            self.rotate(&mut head[self.config.qk_nope_head_dim..], position);
        }
        query
    }

    /// Rotates the pairs of a rope part in place.
    fn rotate(&self, part: &mut [f64], position: usize) {
        if let Some(table) = &self.rope {
            rotate(part, (position, table), self.config.rotary);
        }
    }

    /// Results [rows, heads, value width + 1] of one sequence: the values of a head, then its LSE.
    fn attend(
        &self,
        rows: &Rows<'_>,
        cache: &LatentCache,
        selection: Option<Selection<'_>>,
        form: Form,
    ) -> Vec<f64> {
        let config = &self.config;
        let result_width = config.heads * (config.v_head_dim + 1);
        let count = rows.query.len() / (config.heads * config.qk_head_dim());
        let expanded = (form == Form::Naive).then(|| self.kv_up.apply(&cache.latent));
        let mut results = vec![0.0; count * result_width];
        let work = count * cache.len_tokens * config.heads * config.qk_head_dim();
        for_blocks(&mut results, result_width, work, |row, results| {
            let keys = self.visible(rows, row, selection);
            let width = config.qk_head_dim();
            let query = &rows.query[row * config.heads * width..];
            let heads = results.chunks_exact_mut(config.v_head_dim + 1).enumerate();
            for ((head, result), query) in heads.zip(query.chunks_exact(width)) {
                match &expanded {
                    Some(expanded) => self.naive(head, query, &keys, (cache, expanded), result),
                    None => self.absorbed(head, query, &keys, cache, result),
                }
            }
        });
        results
    }

    /// Indices of the keys that row `row` of the sequence sees, ascending.
    fn visible(&self, rows: &Rows<'_>, row: usize, selection: Option<Selection<'_>>) -> Vec<usize> {
        let end = rows.cached + row + 1;
        let begin = self.config.window.map_or(0, |window| end.saturating_sub(window));
        let Some(selection) = selection else { return (begin..end).collect() };
        let first = (rows.first_row + row) * selection.width;
        let mut keys: Vec<usize> = selection.keys[first..first + selection.width]
            .iter()
            .filter_map(|&key| usize::try_from(key).ok())
            .filter(|key| (begin..end).contains(key))
            .collect();
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    /// One head of one row over expanded keys and values.
    fn naive(
        &self,
        head: usize,
        query: &[f64],
        keys: &[usize],
        (cache, expanded): (&LatentCache, &[f64]),
        result: &mut [f64],
    ) {
        let config = &self.config;
        let (nope, rope, v) = (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim);
        let (query_nope, query_rope) = query.split_at(nope);
        let token = |key: usize| &expanded[(key * config.heads + head) * (nope + v)..][..nope + v];
        let mut scores: Vec<f64> = keys
            .iter()
            .map(|&key| {
                let score = dot(query_nope, &token(key)[..nope])
                    + dot(query_rope, &cache.rope_key[key * rope..(key + 1) * rope]);
                score * config.softmax_scale
            })
            .collect();
        result[v] = softmax(&mut scores);
        for (&key, &p) in keys.iter().zip(&scores) {
            add_scaled(&mut result[..v], p, &token(key)[nope..]);
        }
    }

    /// One head of one row over latents.
    fn absorbed(
        &self,
        head: usize,
        query: &[f64],
        keys: &[usize],
        cache: &LatentCache,
        result: &mut [f64],
    ) {
        let config = &self.config;
        let (nope, rope, v) = (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim);
        let rank = config.kv_lora_rank;
        let (query_nope, query_rope) = query.split_at(nope);
        let up = &self.kv_up.values[head * (nope + v) * rank..][..(nope + v) * rank];
        let (key_up, value_up) = up.split_at(nope * rank);
        let mut latent_query = vec![0.0; rank];
        for (&q, row) in query_nope.iter().zip(key_up.chunks_exact(rank)) {
            add_scaled(&mut latent_query, q, row);
        }
        let latent = |key: usize| &cache.latent[key * rank..(key + 1) * rank];
        let mut scores: Vec<f64> = keys
            .iter()
            .map(|&key| {
                let score = dot(&latent_query, latent(key))
                    + dot(query_rope, &cache.rope_key[key * rope..(key + 1) * rope]);
                score * config.softmax_scale
            })
            .collect();
        result[v] = softmax(&mut scores);
        let mut latent_result = vec![0.0; rank];
        for (&key, &p) in keys.iter().zip(&scores) {
            add_scaled(&mut latent_result, p, latent(key));
        }
        for (value, row) in result[..v].iter_mut().zip(value_up.chunks_exact(rank)) {
            *value = dot(row, &latent_result);
        }
    }

    fn check_rows(&self, hidden: &[f64], rows: usize) -> Result<(), InputError> {
        check("hidden", rows.saturating_mul(self.hidden_size()), hidden.len())
    }

    /// A given selection must have all rows, and one that is shared must be given.
    pub(super) fn check_keys(&self, rows: usize, keys: Keys<'_>) -> Result<(), InputError> {
        match (keys, self.config.indexer) {
            (Keys::Given(selection), _) => {
                check("selection", rows.saturating_mul(selection.width), selection.keys.len())
            }
            (Keys::Own, Some(LayerIndexer::Shared)) => Err(InputError::SharedSelection),
            (Keys::Own | Keys::All, _) => Ok(()),
        }
    }

    pub(super) fn check_cache(&self, cache: &LatentCache) -> Result<(), InputError> {
        let tokens = cache.len_tokens;
        let elements = |width: usize| tokens.saturating_mul(width);
        let (key, gate) = match &self.indexer {
            Some(indexer) => (indexer.width(), indexer.gate_width()),
            None => (0, 0),
        };
        check("cache index_key", elements(key), cache.index_key.len())?;
        check("cache index_gate", elements(gate), cache.index_gate.len())?;
        check("cache latent", elements(self.config.kv_lora_rank), cache.latent.len())?;
        check("cache rope_key", elements(self.config.qk_rope_head_dim), cache.rope_key.len())
    }
}

/// Rows behind rows.
fn append(first: Option<Selected>, more: Option<Selected>) -> Option<Selected> {
    let Some(mut first) = first else { return more };
    first.keys.extend(more.into_iter().flat_map(|more| more.keys));
    Some(first)
}

/// A matrix without bias, in f64.
pub(super) fn matrix(weight: &Weight<'_>) -> Matrix {
    Matrix { values: weight.to_f64(), bias: None, width: weight.shape()[1] }
}

/// A linear layer in f64.
pub(super) fn linear(weights: &LinearWeights<'_>) -> Matrix {
    Matrix { bias: weights.bias.map(|bias| bias.to_f64()), ..matrix(&weights.weight) }
}

/// An argument must have `needed` elements.
pub(super) fn check(what: &'static str, needed: usize, given: usize) -> Result<(), InputError> {
    if needed == given {
        return Ok(());
    }
    let elements = |count: usize| format!("{count} elements");
    Err(InputError::Shape { what, needed: elements(needed), given: elements(given) })
}
