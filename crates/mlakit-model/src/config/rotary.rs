//! The rotary keys of `config.json`, in both of their spellings.

use super::MAX_COUNT;
use super::fields::Fields;
use crate::error::ConfigError;
use crate::rope::{RopeParameters, Yarn};

const DEFAULT_THETA: f64 = 10_000.0;
const KINDS: &str = "default, yarn, deepseek_yarn";

/// New spelling: `rope_parameters {rope_type, rope_theta, ...}`. Old spelling: `rope_theta` beside
/// `rope_scaling {type | rope_type, ...}`, which is null where nothing is scaled.
pub(crate) fn rope_parameters(fields: Fields<'_>) -> Result<RopeParameters, ConfigError> {
    let outer_theta = theta(fields)?;
    let key =
        if fields.value("rope_parameters").is_some() { "rope_parameters" } else { "rope_scaling" };
    let Some(object) = fields.object(key)? else {
        return Ok(RopeParameters { theta: outer_theta.unwrap_or(DEFAULT_THETA), yarn: None });
    };
    let path = fields.name(key);
    let inner = Fields::new(object, &path);
    let theta = theta(inner)?.or(outer_theta).unwrap_or(DEFAULT_THETA);
    let kind_key = if inner.value("rope_type").is_some() { "rope_type" } else { "type" };
    let yarn = match inner.text(kind_key)? {
        // The new spelling leaves the type out where nothing is scaled; in the old one the object
        // exists to scale something.
        None if key == "rope_parameters" => None,
        None => return Err(inner.missing("rope_type", format!("one of {KINDS}"))),
        Some("default") => None,
        Some("yarn" | "deepseek_yarn") => Some(yarn(inner, fields)?),
        Some(_) => return Err(inner.unsupported(kind_key, KINDS)),
    };
    Ok(RopeParameters { theta, yarn })
}

fn theta(fields: Fields<'_>) -> Result<Option<f64>, ConfigError> {
    fields.number_or_none("rope_theta", 1.0)
}

fn yarn(inner: Fields<'_>, outer: Fields<'_>) -> Result<Yarn, ConfigError> {
    const LENGTH: &str = "original_max_position_embeddings";
    let original = match inner.size_or_none(LENGTH, 1, MAX_COUNT)? {
        Some(length) => length,
        None => outer
            .size_or_none("max_position_embeddings", 1, MAX_COUNT)?
            .ok_or_else(|| inner.missing(LENGTH, "a positive integer"))?,
    };
    Ok(Yarn {
        factor: inner.number("factor", 0.0)?,
        original_max_position_embeddings: original,
        beta_fast: inner.number_or_none("beta_fast", 0.0)?.unwrap_or(32.0),
        beta_slow: inner.number_or_none("beta_slow", 0.0)?.unwrap_or(1.0),
        mscale: inner.truthy("mscale")?,
        mscale_all_dim: inner.truthy("mscale_all_dim")?,
        attention_factor: inner.number_or_none("attention_factor", 0.0)?,
        truncate: inner.flag("truncate", true)?,
    })
}
