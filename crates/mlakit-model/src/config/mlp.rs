//! Which layers have experts, and how they are routed.

use super::family::RouterRule;
use super::fields::Fields;
use super::{
    ExpertsConfig, Family, GroupScore, MAX_COUNT, MAX_HEAD_WIDTH, MAX_LAYERS, MAX_WIDTH, MlpConfig,
    RouterConfig,
};
use crate::error::ConfigError;

/// The MLP of each of `count` layers.
pub(super) fn layers(
    fields: Fields<'_>,
    family: &Family,
    count: usize,
) -> Result<Vec<MlpConfig>, ConfigError> {
    let sparse = match family.router {
        Some(rule) => sparse_layers(fields, &rule, count)?,
        None => vec![false; count],
    };
    let dense = if sparse.iter().all(|&sparse| sparse) {
        None
    } else {
        Some(MlpConfig::Dense { width: fields.size("intermediate_size", 1, MAX_WIDTH)? })
    };
    let experts = match family.router {
        Some(rule) if sparse.contains(&true) => Some(MlpConfig::Experts(experts(fields, &rule)?)),
        _ => None,
    };
    Ok(sparse
        .into_iter()
        .filter_map(|sparse| if sparse { experts.clone() } else { dense.clone() })
        .collect())
}

/// True for each layer with experts: `mlp_layer_types` where there is one, else every
/// `moe_layer_freq`-th layer from `first_k_dense_replace` on. A null for `n_routed_experts`: none.
fn sparse_layers(
    fields: Fields<'_>,
    rule: &RouterRule,
    count: usize,
) -> Result<Vec<bool>, ConfigError> {
    if let Some(types) = fields.array("mlp_layer_types")? {
        let needed = || format!("an array of {count} strings `dense` or `sparse`");
        if types.len() != count {
            return Err(fields.invalid("mlp_layer_types", needed()));
        }
        return types
            .iter()
            .map(|kind| match kind.as_str() {
                Some("dense") => Ok(false),
                Some("sparse") => Ok(true),
                _ => Err(fields.invalid("mlp_layer_types", needed())),
            })
            .collect();
    }
    let key = experts_key(fields, rule);
    if fields.has(key) && fields.value(key).is_none() {
        return Ok(vec![false; count]);
    }
    const FIRST: &str = "first_k_dense_replace";
    let default = Some(rule.defaults.first_k_dense_replace);
    let first = fields.size_or(FIRST, default, (0, MAX_COUNT))?;
    let first = first.ok_or_else(|| fields.missing(FIRST, "the number of dense layers"))?;
    let frequency = fields.size_or_none("moe_layer_freq", 1, MAX_LAYERS)?.unwrap_or(1);
    Ok((0..count).map(|layer| layer >= first && layer % frequency == 0).collect())
}

/// The name that the number of experts has in this file.
fn experts_key(fields: Fields<'_>, rule: &RouterRule) -> &'static str {
    const KEY: &str = "n_routed_experts";
    if !fields.has(KEY) && fields.has(rule.experts_alias) { rule.experts_alias } else { KEY }
}

fn experts(fields: Fields<'_>, rule: &RouterRule) -> Result<ExpertsConfig, ConfigError> {
    let expert_width = fields.size("moe_intermediate_size", 1, MAX_WIDTH)?;
    let default = Some(rule.defaults.n_shared_experts);
    let shared = fields.size_or("n_shared_experts", default, (0, MAX_WIDTH / expert_width))?;
    Ok(ExpertsConfig {
        router: router(fields, rule)?,
        expert_width,
        shared_width: shared.unwrap_or(0) * expert_width,
    })
}

fn router(fields: Fields<'_>, rule: &RouterRule) -> Result<RouterConfig, ConfigError> {
    if let Some(scoring) = fields.text("scoring_func")?
        && scoring != rule.scoring_func
    {
        return Err(fields.unsupported("scoring_func", rule.scoring_func));
    }
    let normalize = fields.flag_or("norm_topk_prob", rule.defaults.norm_topk_prob)?;
    if normalize && !rule.normalizes {
        return Err(fields.unsupported("norm_topk_prob", "false for this architecture"));
    }
    let experts = fields
        .size_or_none(experts_key(fields, rule), 1, MAX_HEAD_WIDTH)?
        .ok_or_else(|| fields.missing("n_routed_experts", "an integer, or null for no experts"))?;
    let (groups, groups_kept) = groups(fields, rule, experts)?;
    let candidates = experts / groups * groups_kept;
    let factor = "routed_scaling_factor";
    let default = rule.defaults.routed_scaling_factor;
    Ok(RouterConfig {
        experts,
        experts_per_token: count(
            fields,
            ("num_experts_per_tok", rule.defaults.num_experts_per_tok),
            candidates,
        )?,
        groups,
        groups_kept,
        scoring: rule.scoring,
        group_score: rule.group_score,
        correction_bias: rule.correction_bias,
        normalize,
        scaling_factor: fields
            .number_or(factor, default, 0.0)?
            .ok_or_else(|| fields.missing(factor, "a finite number above 0"))?,
    })
}

/// Number of groups, and of groups that a row may choose from.
fn groups(
    fields: Fields<'_>,
    rule: &RouterRule,
    experts: usize,
) -> Result<(usize, usize), ConfigError> {
    const METHOD: &str = "topk_method";
    let method = fields.text(METHOD)?.unwrap_or(rule.default_method);
    // Of one method alone there is nothing to assume.
    if !fields.has(METHOD) && rule.plain_methods.len() + rule.grouped_methods.len() > 1 {
        fields.assume(METHOD, method);
    }
    if rule.plain_methods.contains(&method) {
        return Ok((1, 1));
    }
    if !rule.grouped_methods.contains(&method) {
        let known = [rule.plain_methods, rule.grouped_methods].concat().join(", ");
        return Err(fields.unsupported(METHOD, known));
    }
    let groups = count(fields, ("n_group", rule.defaults.n_group), experts)?;
    if !experts.is_multiple_of(groups) {
        return Err(fields.invalid("n_group", format!("a divisor of {experts} experts")));
    }
    if groups > 1 && rule.group_score == GroupScore::TopTwoSum && experts / groups < 2 {
        return Err(fields.invalid("n_group", "groups of at least two experts"));
    }
    Ok((groups, count(fields, ("topk_group", rule.defaults.topk_group), groups)?))
}

/// An integer from 1 to `most` that there must be, if only by default.
fn count(
    fields: Fields<'_>,
    (key, default): (&str, Option<usize>),
    most: usize,
) -> Result<usize, ConfigError> {
    let size = fields.size_or(key, default, (1, most))?;
    size.ok_or_else(|| fields.missing(key, format!("an integer from 1 to {most}")))
}
