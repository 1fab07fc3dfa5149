//! Whole models in f64: what every device is compared with.
//!
//! Slow on purpose and plain: every stage is computed in f64 from the stored weights, nothing is
//! rounded between stages. Angles are the exception: they are the f32 products of [`crate::rope`].

use crate::checkpoint::Checkpoint;
use crate::config::{LayerIndexer, ModelConfig};
use crate::error::{Error, InputError};

mod attention;
mod indexer;
mod math;
mod mlp;

pub use attention::{
    AttentionOutput, AttentionReference, Form, Keys, LatentCache, Selection, Sequence,
};
pub use indexer::Selected;
use math::{Matrix, add_scaled, rms_norm};
pub use mlp::{MlpReference, route};

/// A whole model, its weights widened to f64: eight bytes a parameter.
#[derive(Clone, Debug)]
pub struct Reference {
    config: ModelConfig,
    embedding: Vec<f64>,
    layers: Vec<LayerReference>,
    final_norm: Vec<f64>,
    head: Matrix,
}

#[derive(Clone, Debug)]
struct LayerReference {
    attention_norm: Vec<f64>,
    attention: AttentionReference,
    mlp_norm: Vec<f64>,
    mlp: MlpReference,
}

/// The caches of one sequence, one a layer.
#[derive(Clone, Debug)]
pub struct SequenceCache {
    /// Rotary position of the sequence's first token.
    pub first_position: usize,
    /// One cache a layer.
    pub layers: Vec<LatentCache>,
}

/// How a forward pass attends.
#[derive(Clone, Copy, Debug, Default)]
pub struct ForwardOptions<'a> {
    /// Sparse layers attend to every visible key, where they are given no selection.
    pub dense: bool,
    /// What each layer is to attend to, instead of what it selects; empty, or one a layer.
    pub selections: &'a [Option<Selection<'a>>],
    /// Which formula.
    pub form: Form,
}

/// What a forward pass computed.
#[derive(Clone, Debug)]
pub struct Forward {
    /// Residual stream after the final norm [rows, hidden].
    pub last_hidden: Vec<f64>,
    /// Input and output of every layer's attention.
    pub layers: Vec<LayerTrace>,
}

/// Input and output of one attention layer.
#[derive(Clone, Debug)]
pub struct LayerTrace {
    /// After the layer's norm [rows, hidden].
    pub attention_input: Vec<f64>,
    /// After the output projection [rows, hidden].
    pub attention_output: Vec<f64>,
    /// What its rows attended to, where they did not attend to every key.
    pub selected: Option<Selected>,
}

impl Reference {
    /// The model that `config` describes and `checkpoint` holds.
    ///
    /// # Errors
    /// [`Error`] for a tensor that is missing or does not fit; for a model of which only layers are
    /// run.
    pub fn new(config: &ModelConfig, checkpoint: &Checkpoint) -> Result<Self, Error> {
        config.check_whole()?;
        let weights = checkpoint.model(config)?;
        let layers = config
            .layers
            .iter()
            .enumerate()
            .map(|(index, layer)| {
                let weights = checkpoint.layer(config, index)?;
                Ok(LayerReference {
                    attention_norm: weights.attention_norm.to_f64(),
                    attention: AttentionReference::new(&layer.attention, &weights.attention),
                    mlp_norm: weights.mlp_norm.to_f64(),
                    mlp: MlpReference::new(&layer.mlp, &weights.mlp),
                })
            })
            .collect::<Result<_, Error>>()?;
        Ok(Self {
            config: config.clone(),
            embedding: weights.embedding.to_f64(),
            layers,
            final_norm: weights.final_norm.to_f64(),
            head: attention::matrix(&weights.head),
        })
    }

    /// An empty cache for a sequence whose first token has rotary position `first_position`.
    pub fn cache(&self, first_position: usize) -> SequenceCache {
        let layers = vec![LatentCache::default(); self.layers.len()];
        SequenceCache { first_position, layers }
    }

    /// The attention of layer `layer`.
    ///
    /// # Errors
    /// [`InputError::Layer`].
    pub fn attention(&self, layer: usize) -> Result<&AttentionReference, InputError> {
        let found = self.layers.get(layer).map(|layer| &layer.attention);
        found.ok_or(InputError::Layer { layer, layers: self.layers.len() })
    }

    /// Runs `ids` as the continuation of what `cache` holds, and adds them to it.
    ///
    /// # Errors
    /// [`InputError`]: an id outside the vocabulary, a cache or selections that do not fit. The cache
    /// is unchanged then.
    pub fn forward(
        &self,
        ids: &[u32],
        cache: &mut SequenceCache,
        options: ForwardOptions<'_>,
    ) -> Result<Forward, InputError> {
        self.check_forward(ids, cache, &options)?;
        let config = &self.config;
        let mut stream = self.embed(ids)?;
        let mut traces = Vec::with_capacity(self.layers.len());
        for (index, layer) in self.layers.iter().enumerate() {
            let mut x = stream.clone();
            rms_norm(&mut x, &layer.attention_norm, config.rms_norm_eps);
            let mut sequence = Sequence {
                rows: ids.len(),
                first_position: cache.first_position,
                cache: &mut cache.layers[index],
            };
            let keys = keys_of(layer, &traces, options.selections.get(index).copied().flatten());
            let keys = if options.dense && matches!(keys, Keys::Own) { Keys::All } else { keys };
            let sequences = std::slice::from_mut(&mut sequence);
            let out = layer.attention.run(&x, sequences, keys, options.form)?;
            add_scaled(&mut stream, config.residual_scale, &out.hidden);
            let given = match keys {
                Keys::Given(selection) => Some(Selected::from(selection)),
                Keys::Own | Keys::All => None,
            };
            let (attention_output, selected) = (out.hidden, out.selected.or(given));
            traces.push(LayerTrace { attention_input: x, attention_output, selected });

            let mut x = stream.clone();
            rms_norm(&mut x, &layer.mlp_norm, config.rms_norm_eps);
            add_scaled(&mut stream, config.residual_scale, &layer.mlp.run(&x));
        }
        rms_norm(&mut stream, &self.final_norm, config.rms_norm_eps);
        Ok(Forward { last_hidden: stream, layers: traces })
    }

    /// Logits [rows, vocabulary] of `last_hidden` [rows, hidden].
    ///
    /// # Errors
    /// [`InputError::Shape`] where it is not whole rows.
    pub fn logits(&self, last_hidden: &[f64]) -> Result<Vec<f64>, InputError> {
        let width = self.config.hidden_size;
        attention::check(
            "last_hidden",
            last_hidden.len().div_ceil(width) * width,
            last_hidden.len(),
        )?;
        let mut logits = self.head.apply(last_hidden);
        logits.iter_mut().for_each(|logit| *logit *= self.config.logit_scale);
        Ok(logits)
    }

    fn embed(&self, ids: &[u32]) -> Result<Vec<f64>, InputError> {
        let (width, vocabulary) = (self.config.hidden_size, self.config.vocab_size);
        let mut rows = Vec::with_capacity(ids.len() * width);
        for (row, &id) in ids.iter().enumerate() {
            let embedding = self
                .embedding
                .chunks_exact(width)
                .nth(id as usize)
                .ok_or(InputError::TokenId { row, id, vocabulary })?;
            rows.extend(embedding.iter().map(|value| value * self.config.embedding_scale));
        }
        Ok(rows)
    }

    fn check_forward(
        &self,
        ids: &[u32],
        cache: &SequenceCache,
        options: &ForwardOptions<'_>,
    ) -> Result<(), InputError> {
        let vocabulary = self.config.vocab_size;
        if let Some(row) = ids.iter().position(|&id| id as usize >= vocabulary) {
            return Err(InputError::TokenId { row, id: ids[row], vocabulary });
        }
        attention::check("cache layers", self.layers.len(), cache.layers.len())?;
        if !options.selections.is_empty() {
            attention::check("selections", self.layers.len(), options.selections.len())?;
        }
        for (index, layer) in self.layers.iter().enumerate() {
            layer.attention.check_cache(&cache.layers[index])?;
            if let Some(selection) = options.selections.get(index).copied().flatten() {
                layer.attention.check_keys(ids.len(), Keys::Given(selection))?;
            }
        }
        Ok(())
    }
}

/// What a layer attends to: what is given; where it shares a selection, what the last sparse layer
/// attended to.
fn keys_of<'a>(
    layer: &LayerReference,
    before: &'a [LayerTrace],
    given: Option<Selection<'a>>,
) -> Keys<'a> {
    let shares = layer.attention.config().indexer == Some(LayerIndexer::Shared);
    let last = before.iter().rev().find_map(|trace| trace.selected.as_ref());
    match given.or(last.filter(|_| shares).map(Selected::view)) {
        Some(selection) => Keys::Given(selection),
        None => Keys::Own,
    }
}
