//! The rotary keys of `config.json`, in both of their spellings.

use super::MAX_COUNT;
use super::fields::Fields;
use crate::error::ConfigError;
use crate::rope::{RopeParameters, Yarn};

const THETA: &str = "rope_theta";
const DEFAULT_THETA: f64 = 10_000.0;
const KINDS: &str = "default, yarn, deepseek_yarn";

/// New spelling: `rope_parameters {rope_type, rope_theta, ...}`. Old spelling: `rope_theta` beside
/// `rope_scaling {type | rope_type, ...}`, which is null or empty where nothing is scaled. A file
/// that has both must mean the same by them: readers disagree about which one counts.
pub(crate) fn rope_parameters(fields: Fields<'_>) -> Result<RopeParameters, ConfigError> {
    const NEW: &str = "rope_parameters";
    let new = spelled(fields, NEW)?;
    let old = spelled(fields, "rope_scaling")?;
    match (new, old) {
        (Some(new), Some(old)) if new != old => Err(fields.invalid(NEW, "what rope_scaling says")),
        (Some(rope), _) | (None, Some(rope)) => Ok(rope),
        (None, None) => Ok(RopeParameters { theta: theta_or_default(fields)?, yarn: None }),
    }
}

/// What the object `key` says, where there is one.
fn spelled(fields: Fields<'_>, key: &str) -> Result<Option<RopeParameters>, ConfigError> {
    let object = fields.object(key)?.filter(|object| !object.is_empty());
    let Some(object) = object else { return Ok(None) };
    let path = fields.name(key);
    let inner = fields.inner(object, &path);
    let base = match theta(inner)? {
        Some(base) => base,
        None => theta_or_default(fields)?,
    };
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
    Ok(Some(RopeParameters { theta: base, yarn }))
}

fn theta(fields: Fields<'_>) -> Result<Option<f64>, ConfigError> {
    fields.number_or_none(THETA, 1.0)
}

fn theta_or_default(fields: Fields<'_>) -> Result<f64, ConfigError> {
    let theta = theta(fields)?;
    if theta.is_none() {
        fields.assume(THETA, DEFAULT_THETA);
    }
    Ok(theta.unwrap_or(DEFAULT_THETA))
}

fn yarn(inner: Fields<'_>, outer: Fields<'_>) -> Result<Yarn, ConfigError> {
    const LENGTH: &str = "original_max_position_embeddings";
    let original = match inner.size_or_none(LENGTH, 1, MAX_COUNT)? {
        Some(length) => length,
        None => {
            let length = outer
                .size_or_none("max_position_embeddings", 1, MAX_COUNT)?
                .ok_or_else(|| inner.missing(LENGTH, "a positive integer"))?;
            inner.assume(LENGTH, length);
            length
        }
    };
    // A null stands for an absent key here.
    let ramp = |key: &str, default: f64| -> Result<f64, ConfigError> {
        let number = inner.number_or_none(key, 0.0)?;
        if number.is_none() {
            inner.assume(key, default);
        }
        Ok(number.unwrap_or(default))
    };
    Ok(Yarn {
        factor: inner.number("factor", 0.0)?,
        original_max_position_embeddings: original,
        beta_fast: ramp("beta_fast", 32.0)?,
        beta_slow: ramp("beta_slow", 1.0)?,
        mscale: inner.truthy("mscale")?,
        mscale_all_dim: inner.truthy("mscale_all_dim")?,
        attention_factor: inner.number_or_none("attention_factor", 0.0)?,
        truncate: inner.flag("truncate", true)?,
    })
}
