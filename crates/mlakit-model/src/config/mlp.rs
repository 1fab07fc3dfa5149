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
        Some(_) => sparse_layers(fields, count)?,
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
/// `moe_layer_freq`-th layer from `first_k_dense_replace` on. No `n_routed_experts`: none.
fn sparse_layers(fields: Fields<'_>, count: usize) -> Result<Vec<bool>, ConfigError> {
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
    if fields.value("n_routed_experts").is_none() {
        return Ok(vec![false; count]);
    }
    let first = fields.size("first_k_dense_replace", 0, MAX_COUNT)?;
    let frequency = fields.size_or_none("moe_layer_freq", 1, MAX_LAYERS)?.unwrap_or(1);
    Ok((0..count).map(|layer| layer >= first && layer % frequency == 0).collect())
}

fn experts(fields: Fields<'_>, rule: &RouterRule) -> Result<ExpertsConfig, ConfigError> {
    let expert_width = fields.size("moe_intermediate_size", 1, MAX_WIDTH)?;
    let shared = fields.size_or_none("n_shared_experts", 0, MAX_WIDTH / expert_width)?.unwrap_or(0);
    Ok(ExpertsConfig {
        router: router(fields, rule)?,
        expert_width,
        shared_width: shared * expert_width,
    })
}

fn router(fields: Fields<'_>, rule: &RouterRule) -> Result<RouterConfig, ConfigError> {
    if let Some(scoring) = fields.text("scoring_func")?
        && scoring != rule.scoring_func
    {
        return Err(fields.unsupported("scoring_func", rule.scoring_func));
    }
    let normalize = fields.flag("norm_topk_prob", false)?;
    if normalize && !rule.normalizes {
        return Err(fields.unsupported("norm_topk_prob", "false for this architecture"));
    }
    let experts = fields.size("n_routed_experts", 1, MAX_HEAD_WIDTH)?;
    let (groups, groups_kept) = groups(fields, rule, experts)?;
    let candidates = experts / groups * groups_kept;
    Ok(RouterConfig {
        experts,
        experts_per_token: fields.size("num_experts_per_tok", 1, candidates)?,
        groups,
        groups_kept,
        scoring: rule.scoring,
        group_score: rule.group_score,
        correction_bias: rule.correction_bias,
        normalize,
        scaling_factor: fields.number_or_none("routed_scaling_factor", 0.0)?.unwrap_or(1.0),
    })
}

/// Number of groups, and of groups that a row may choose from.
fn groups(
    fields: Fields<'_>,
    rule: &RouterRule,
    experts: usize,
) -> Result<(usize, usize), ConfigError> {
    let method = fields.text("topk_method")?.unwrap_or(rule.default_method);
    if rule.plain_methods.contains(&method) {
        return Ok((1, 1));
    }
    if !rule.grouped_methods.contains(&method) {
        let known = [rule.plain_methods, rule.grouped_methods].concat().join(", ");
        return Err(fields.unsupported("topk_method", known));
    }
    let groups = fields.size("n_group", 1, experts)?;
    if !experts.is_multiple_of(groups) {
        return Err(fields.invalid("n_group", format!("a divisor of {experts} experts")));
    }
    if groups > 1 && rule.group_score == GroupScore::TopTwoSum && experts / groups < 2 {
        return Err(fields.invalid("n_group", "groups of at least two experts"));
    }
    Ok((groups, fields.size("topk_group", 1, groups)?))
}
