//! From a checkpoint's attention layer to an [`MlaLayer`].

use std::sync::Arc;

use mlakit::op::rotary::RotaryStyle;
use mlakit::{Buffer, Category};
use mlakit_serve::{
    AbsorbedProjection, CacheSpec, Capacity, LayerSpec, LayerWeights, MlaDevice, MlaLayer, Widths,
};

use super::error::DecodeError;
use super::upload::Upload;
use crate::checkpoint::{AttentionWeights, QueryWeights};
use crate::config::{AttentionConfig, Rotary};
use crate::rope::RopeTable;

/// The choices of a deployment, which no checkpoint makes.
#[derive(Clone, Copy, Debug)]
pub struct Deployment {
    /// How the cache stores a token, and how attention over it is divided.
    pub cache: CacheSpec,
    /// How much there may be of what.
    pub capacity: Capacity,
    /// Rows of a decode step; attention has a plan for them beside that for `capacity.rows`.
    pub decode_rows: usize,
}

/// The layer's shape, under these choices.
///
/// # Errors
/// [`DecodeError::Unsupported`] for gates.
pub fn layer_spec(
    config: &AttentionConfig,
    (hidden, query_rank): (usize, Option<usize>),
    deployment: &Deployment,
) -> Result<LayerSpec, DecodeError> {
    if config.gate.is_some() {
        return Err(DecodeError::Unsupported {
            what: "an output gate".to_string(),
            because: "the device path has no gated layers".to_string(),
            instead: "use --precision f64 with the layer command".to_string(),
        });
    }
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
        rotary: config.rope.as_ref().map(|_| match config.rotary {
            Rotary::Pair => RotaryStyle::Pair,
            Rotary::Half => RotaryStyle::Half,
        }),
        attention_factor: factor as f32,
        window: config.window,
        cache: deployment.cache,
        capacity: deployment.capacity,
    })
}

/// Uploads a layer's weights and prepares it.
///
/// # Errors
/// As [`layer_spec`] and [`MlaLayer::new`].
pub fn attention_layer<D: MlaDevice>(
    device: &D,
    owner: &str,
    (config, weights): (&AttentionConfig, &AttentionWeights<'_>),
    deployment: &Deployment,
) -> Result<MlaLayer<D>, DecodeError> {
    let hidden = weights.kv_down.weight.shape()[1];
    let up = Upload { device, owner: owner.to_string() };
    let (rank, down, query_norm, query) = match &weights.query {
        QueryWeights::Direct(query) => (None, vec![weights.kv_down], None, query),
        QueryWeights::LowRank { down, norm, up: query } => {
            let norm = up.vector("q_a_norm", norm)?;
            (Some(down.weight.shape()[0]), vec![*down, weights.kv_down], Some(norm), query)
        }
    };
    let spec = layer_spec(config, (hidden, rank), deployment)?;
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
    };
    Ok(MlaLayer::new(device, spec, uploaded, &[deployment.decode_rows])?)
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
