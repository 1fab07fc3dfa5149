//! Which layers have latent attention, and where each one's selection of keys comes from.

use serde_json::Value;

use super::family::{IndexerRule, LinearLayers};
use super::fields::Fields;
use super::{
    AttentionKind, Family, IndexPool, IndexerConfig, LayerIndexer, MAX_COUNT, MAX_HEAD_WIDTH,
    MAX_LAYERS,
};
use crate::error::ConfigError;

const TYPES: &str = "layer_types";
const LINEAR: &str = "linear_attention";

/// The kind of attention of each of `count` layers: what `layer_types` says, else the family's.
pub(super) fn kinds(
    fields: Fields<'_>,
    family: &Family,
    count: usize,
) -> Result<Vec<AttentionKind>, ConfigError> {
    const LATENT: [&str; 3] = ["full_attention", "indexed_attention", "deepseek_sparse_attention"];
    let Some(types) = fields.array(TYPES)? else { return unlisted_kinds(fields, family, count) };
    if types.len() != count {
        return Err(fields.invalid(TYPES, format!("an array of {count} strings")));
    }
    let latent = if family.indexer.is_some() { &LATENT[..] } else { &LATENT[..1] };
    let hybrid = family.linear_layers != LinearLayers::None;
    let kind = |name: &str| match name {
        LINEAR if hybrid => Some(AttentionKind::Linear),
        name if latent.contains(&name) => Some(AttentionKind::Latent),
        _ => None,
    };
    let known = || [latent, if hybrid { &[LINEAR] } else { &[] }].concat().join(", ");
    let kinds: Option<Vec<_>> = types.iter().map(|name| name.as_str().and_then(kind)).collect();
    kinds.ok_or_else(|| fields.unsupported(TYPES, known()))
}

fn unlisted_kinds(
    fields: Fields<'_>,
    family: &Family,
    count: usize,
) -> Result<Vec<AttentionKind>, ConfigError> {
    let latent: Vec<bool> = match family.linear_layers {
        LinearLayers::None => vec![true; count],
        LinearLayers::ThreeOfFour => (0..count).map(|layer| layer % 4 == 3).collect(),
        LinearLayers::Listed => match fields.object("linear_attn_config")? {
            Some(inner) if inner.contains_key("full_attn_layers") => {
                listed(Fields::new(inner, &fields.name("linear_attn_config")), count)?
            }
            _ => (0..count).map(|layer| layer > 0 && layer % 4 == 0).collect(),
        },
    };
    let kind = |latent| if latent { AttentionKind::Latent } else { AttentionKind::Linear };
    Ok(latent.into_iter().map(kind).collect())
}

/// `full_attn_layers`, which counts from 1.
fn listed(inner: Fields<'_>, count: usize) -> Result<Vec<bool>, ConfigError> {
    const KEY: &str = "full_attn_layers";
    let mut latent = vec![false; count];
    for layer in inner.array(KEY)?.unwrap_or_default() {
        let at = layer.as_u64().and_then(|layer| usize::try_from(layer).ok());
        match at.filter(|at| (1..=count).contains(at)) {
            Some(at) => latent[at - 1] = true,
            None => return Err(inner.invalid(KEY, format!("layers from 1 to {count}"))),
        }
    }
    Ok(latent)
}

/// The indexer of each layer of latent attention.
pub(super) fn indexers(
    fields: Fields<'_>,
    family: &Family,
    (kinds, rope_width): (&[AttentionKind], usize),
) -> Result<Vec<Option<LayerIndexer>>, ConfigError> {
    let Some(rule) = family.indexer else { return Ok(vec![None; kinds.len()]) };
    let own = LayerIndexer::Own(indexer(fields, &rule, rope_width)?);
    let full = full_layers(fields, kinds.len())?;
    let latent = |layer: usize| kinds[layer] == AttentionKind::Latent;
    match (0..kinds.len()).find(|layer| latent(*layer)) {
        Some(first) if !full[first] => {
            let needed = format!("an indexer of its own for layer {first}, which has none before");
            return Err(fields.invalid("indexer_types", needed));
        }
        _ => {}
    }
    let of = |full| if full { own } else { LayerIndexer::Shared };
    Ok((0..kinds.len()).map(|layer| latent(layer).then(|| of(full[layer]))).collect())
}

/// True for each layer with an indexer of its own: `indexer_types`, else `index_topk_pattern`, else
/// every `index_topk_freq`-th layer from `index_skip_topk_offset - 1` on, and those before it.
fn full_layers(fields: Fields<'_>, count: usize) -> Result<Vec<bool>, ConfigError> {
    const TYPES: &str = "indexer_types";
    const PATTERN: &str = "index_topk_pattern";
    if let Some(types) = fields.array(TYPES)? {
        return modes(types.iter().map(Value::as_str), count)
            .ok_or_else(|| fields.invalid(TYPES, format!("{count} strings `full` or `shared`")));
    }
    let needed = || format!("{count} letters `F` or `S`, or strings `full` or `shared`");
    match fields.value(PATTERN) {
        Some(Value::String(text)) => {
            let letters = text.char_indices().map(|(at, c)| text.get(at..at + c.len_utf8()));
            modes(letters, count).ok_or_else(|| fields.invalid(PATTERN, needed()))
        }
        Some(Value::Array(names)) => modes(names.iter().map(Value::as_str), count)
            .ok_or_else(|| fields.invalid(PATTERN, needed())),
        Some(_) => Err(fields.invalid(PATTERN, needed())),
        None => {
            let frequency = fields.size_or_none("index_topk_freq", 0, MAX_LAYERS)?;
            let offset = fields.size_or_none("index_skip_topk_offset", 0, MAX_LAYERS)?;
            let (frequency, offset) = (frequency.unwrap_or(1).max(1), offset.unwrap_or(2));
            let full = |layer: usize| (layer + 1).saturating_sub(offset).is_multiple_of(frequency);
            Ok((0..count).map(full).collect())
        }
    }
}

fn modes<'a>(names: impl Iterator<Item = Option<&'a str>>, count: usize) -> Option<Vec<bool>> {
    let mode = |name: Option<&str>| match name? {
        "full" | "F" => Some(true),
        "shared" | "S" => Some(false),
        _ => None,
    };
    let modes: Vec<bool> = names.map(mode).collect::<Option<_>>()?;
    (modes.len() == count).then_some(modes)
}

fn indexer(
    fields: Fields<'_>,
    rule: &IndexerRule,
    rope_width: usize,
) -> Result<IndexerConfig, ConfigError> {
    const TOPK: &str = "index_topk";
    let size = |key: &str, default: usize, most: usize| {
        let size = fields.size_or(key, Some(default), (1, most))?;
        size.ok_or_else(|| fields.missing(key, format!("an integer from 1 to {most}")))
    };
    let head_dim = size("index_head_dim", 128, MAX_HEAD_WIDTH)?;
    if head_dim < rope_width {
        return Err(fields.invalid("index_head_dim", format!("at least {rope_width} (rope part)")));
    }
    let topk = size(TOPK, 2048, MAX_COUNT)?;
    let pool_size = match rule.pool {
        Some(default) => size("index_kpool", default, MAX_HEAD_WIDTH)?,
        None => 1,
    };
    if !topk.is_multiple_of(pool_size) {
        return Err(fields.invalid(TOPK, format!("a multiple of index_kpool, {pool_size}")));
    }
    let tail = || fields.flag_or("index_kpool_always_select_tail", true);
    Ok(IndexerConfig {
        heads: size("index_n_heads", rule.heads, MAX_HEAD_WIDTH)?,
        head_dim,
        topk,
        rotary: rotary(fields, rule)?,
        key_norm_eps: rule.key_norm_eps,
        pool: match pool_size {
            1 => None,
            size => Some(IndexPool { size, always_tail: tail()? }),
        },
    })
}

fn rotary(fields: Fields<'_>, rule: &IndexerRule) -> Result<super::Rotary, ConfigError> {
    const KEY: &str = "indexer_rope_interleave";
    Ok(match fields.has(KEY).then(|| fields.flag(KEY, false)).transpose()? {
        None => rule.rotary,
        Some(true) => super::Rotary::Pair,
        Some(false) => super::Rotary::Half,
    })
}
