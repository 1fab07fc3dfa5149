//! From a checkpoint's attention layer to an [`MlaLayer`].

use std::sync::Arc;

use mlakit::op::rotary::RotaryStyle;
use mlakit::op::sparse::Selection;
use mlakit::{Buffer, Category};
use mlakit_serve::{
    AbsorbedProjection, CacheSpec, Capacity, IndexSpec, IndexWeights, KeyRule, LayerSpec,
    LayerWeights, MlaDevice, MlaLayer, PoolWeights, PooledKeys, Widths,
};

use super::error::DecodeError;
use super::upload::Upload;
use crate::checkpoint::{self, AttentionWeights, IndexerWeights, QueryWeights};
use crate::config::{AttentionConfig, LayerIndexer, Rotary};
use crate::rope::RopeTable;

/// Where keys come from that no indexer of a layer's own selects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lists {
    /// A layer that shares a selection reads that of the last layer with an indexer.
    Shared,
    /// Every layer reads a list of so many keys a row at most, from outside.
    Outside {
        /// Entries of a row.
        width: usize,
    },
}

/// The choices of a deployment, which no checkpoint makes.
#[derive(Clone, Copy, Debug)]
pub struct Deployment {
    /// How the cache stores a token, and how attention over it is divided.
    pub cache: CacheSpec,
    /// How much there may be of what.
    pub capacity: Capacity,
    /// Rows of a decode step; attention has a plan for them beside that for `capacity.rows`.
    pub decode_rows: usize,
    /// Sparse layers can also attend to all keys, for prompts that are no longer than what they select.
    pub dense_prompts: bool,
    /// Which keys the layers attend to that have a list of them.
    pub lists: Lists,
}

/// The layer's shape, under these choices.
///
/// `sharing` is what layers that share a selection attend to: the rule of the last layer with an indexer, made by
/// [`KeyRule::shared`].
///
/// # Errors
/// [`DecodeError::Unsupported`] for a layer that shares a selection where there is none.
pub fn layer_spec(
    config: &AttentionConfig,
    weights: &AttentionWeights<'_>,
    (deployment, sharing): (&Deployment, KeyRule),
) -> Result<LayerSpec, DecodeError> {
    let hidden = weights.kv_down.weight.shape()[1];
    let query_rank = match &weights.query {
        QueryWeights::Direct(_) => None,
        QueryWeights::LowRank { down, .. } => Some(down.weight.shape()[0]),
    };
    let keys = key_rule(config, (deployment, sharing))?;
    let factor = config
        .rope
        .as_ref()
        .map_or(1.0, |rope| RopeTable::new(rope, config.qk_rope_head_dim).attention_factor());
    Ok(LayerSpec {
        hidden,
        heads: config.heads,
        nope: config.qk_nope_head_dim,
        rope: config.qk_rope_head_dim,
        value: config.v_head_dim,
        rank: config.kv_lora_rank,
        query_rank,
        query_eps: config.query_eps as f32,
        kv_eps: config.kv_eps as f32,
        softmax_scale: config.softmax_scale as f32,
        rotary: config.rope.as_ref().map(|_| style(config.rotary)),
        attention_factor: factor as f32,
        window: config.window.filter(|_| keys == KeyRule::All),
        keys,
        dense_rows: deployment.dense_prompts.then_some(deployment.capacity.rows),
        gate_span: weights
            .gate
            .as_ref()
            .map(|gate| config.heads * config.v_head_dim / gate.shape()[0]),
        cache: deployment.cache,
        capacity: deployment.capacity,
    })
}

/// Which keys the layer's rows attend to.
fn key_rule(
    config: &AttentionConfig,
    (deployment, sharing): (&Deployment, KeyRule),
) -> Result<KeyRule, DecodeError> {
    if let Lists::Outside { width } = deployment.lists {
        return Ok(KeyRule::Listed { width, entries: Selection::Positions });
    }
    match config.indexer {
        None => Ok(KeyRule::All),
        Some(LayerIndexer::Shared) if sharing == KeyRule::All => Err(DecodeError::Unsupported {
            what: "a layer that shares the selection of another".to_string(),
            because: "it has no indexer of its own, and no selection is given".to_string(),
            instead: "give the other layer's selection as tensor `topk`".to_string(),
        }),
        Some(LayerIndexer::Shared) => Ok(sharing),
        Some(LayerIndexer::Own(indexer)) => Ok(KeyRule::Indexed(IndexSpec {
            heads: indexer.heads,
            width: indexer.head_dim,
            rope: config.rope.map_or(0, |_| config.qk_rope_head_dim),
            rotary: style(indexer.rotary),
            topk: indexer.topk,
            key_eps: indexer.key_norm_eps as f32,
            pool: indexer.pool.map(|pool| PooledKeys { size: pool.size, tail: pool.always_tail }),
        })),
    }
}

fn style(rotary: Rotary) -> RotaryStyle {
    match rotary {
        Rotary::Pair => RotaryStyle::Pair,
        Rotary::Half => RotaryStyle::Half,
    }
}

/// Uploads a layer's weights and prepares it. `sharing` as for [`layer_spec`].
///
/// # Errors
/// As [`layer_spec`] and [`MlaLayer::new`].
pub fn attention_layer<D: MlaDevice>(
    device: &D,
    owner: &str,
    (config, weights): (&AttentionConfig, &AttentionWeights<'_>),
    (deployment, sharing): (&Deployment, KeyRule),
) -> Result<MlaLayer<D>, DecodeError> {
    let up = Upload { device, owner: owner.to_string() };
    let (down, query_norm, query) = match &weights.query {
        QueryWeights::Direct(query) => (vec![weights.kv_down], None, query),
        QueryWeights::LowRank { down, norm, up: query } => {
            let norm = up.vector("q_a_norm", norm)?;
            (vec![*down, weights.kv_down], Some(norm), query)
        }
    };
    let spec = layer_spec(config, weights, (deployment, sharing))?;
    let widths = Widths { heads: spec.heads, nope: spec.nope, value: spec.value, rank: spec.rank };
    let kv_up = match weights.kv_up.as_bf16() {
        Some(values) => values.into(),
        None => std::borrow::Cow::Owned(weights.kv_up.to_bf16()),
    };
    let matrices: Vec<_> = down.iter().map(|linear| linear.weight).collect();
    let uploaded = LayerWeights {
        down: up.matrices("q_a and kv_a", &matrices)?,
        down_bias: up.biases("q_a and kv_a bias", &down)?,
        query_norm,
        query: up.matrices("q", &[*query])?,
        kv_norm: up.vector("kv_a_norm", &weights.kv_norm)?,
        absorbed: AbsorbedProjection::new(device, owner, widths, &kv_up)?,
        output: up.matrices("o", &[weights.output.weight])?,
        output_bias: up.biases("o bias", &[weights.output])?,
        inv_freq: inverse_frequencies(device, config)?.map(Arc::new),
        gate: weights.gate.as_ref().map(|gate| up.matrices("gate", &[*gate])).transpose()?,
        indexer: match (spec.keys.indexer(), &weights.indexer) {
            (Some(_), Some(weights)) => Some(index_weights(&up, weights)?),
            _ => None,
        },
    };
    Ok(MlaLayer::new(device, spec, uploaded, &[deployment.decode_rows])?)
}

fn index_weights<D: MlaDevice>(
    up: &Upload<'_, D>,
    weights: &IndexerWeights<'_>,
) -> Result<IndexWeights<D>, DecodeError> {
    let pool = |pool: &checkpoint::PoolWeights<'_>| -> Result<_, DecodeError> {
        Ok(PoolWeights {
            gate: up.matrices("index pool gate", &[pool.gate])?,
            ape: up.vector("index pool ape", &pool.ape)?,
        })
    };
    Ok(IndexWeights {
        query: up.matrices("index q", &[weights.query_up])?,
        key: up.matrices("index k", &[weights.key])?,
        key_norm: up.vector("index k_norm", &weights.key_norm)?,
        key_norm_bias: up.vector("index k_norm bias", &weights.key_norm_bias)?,
        head_weights: up.matrices("index weights", &[weights.head_weights])?,
        pool: weights.pool.as_ref().map(pool).transpose()?,
    })
}

/// The rotary frequencies; zeros, which rotate by nothing, where the rope part carries no position.
fn inverse_frequencies<D: MlaDevice>(
    device: &D,
    config: &AttentionConfig,
) -> Result<Option<Buffer<f32, D>>, DecodeError> {
    let width = config.qk_rope_head_dim;
    if width == 0 {
        return Ok(None);
    }
    let frequencies = match &config.rope {
        Some(rope) => RopeTable::new(rope, width).inverse_frequencies().to_vec(),
        None => vec![0.0; width / 2],
    };
    Ok(Some(Buffer::new(device, (Category::Weights, "inv_freq"), &frequencies)?))
}
