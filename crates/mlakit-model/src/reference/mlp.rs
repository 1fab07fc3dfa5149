//! Gated MLPs and routed experts in f64.

use super::attention::{linear, matrix};
use super::math::{Matrix, add_scaled, sigmoid, softmax};
use crate::checkpoint::{GatedMlpWeights, MlpWeights};
use crate::config::{GroupScore, MlpConfig, RouterConfig, Scoring};

/// The MLP of one layer, its weights widened to f64.
#[derive(Clone, Debug)]
pub struct MlpReference(Inner);

#[derive(Clone, Debug)]
enum Inner {
    Dense(Gated),
    Experts {
        config: RouterConfig,
        router: Matrix,
        bias: Option<Vec<f64>>,
        experts: Vec<Gated>,
        shared: Option<Gated>,
    },
}

/// `down(silu(gate x) * up x)`.
#[derive(Clone, Debug)]
struct Gated {
    gate: Matrix,
    up: Matrix,
    down: Matrix,
}

impl MlpReference {
    /// The MLP that `config` describes and `weights` holds; both come from one
    /// [`crate::Checkpoint::layer`].
    pub(crate) fn new(config: &MlpConfig, weights: &MlpWeights<'_>) -> Self {
        Self(match (config, weights) {
            (MlpConfig::Experts(config), MlpWeights::Experts(weights)) => Inner::Experts {
                config: config.router.clone(),
                router: matrix(&weights.router),
                bias: weights.correction_bias.map(|bias| bias.to_f64()),
                experts: weights.experts.iter().map(gated).collect(),
                shared: weights.shared.as_ref().map(gated),
            },
            (_, MlpWeights::Dense(weights)) => Inner::Dense(gated(weights)),
            (MlpConfig::Dense { .. }, MlpWeights::Experts(_)) => {
                unreachable!("Checkpoint::layer reads the weights of the kind that config names")
            }
        })
    }

    /// The MLP of every row of `x` [rows, hidden].
    pub fn run(&self, x: &[f64]) -> Vec<f64> {
        match &self.0 {
            Inner::Dense(mlp) => mlp.run(x),
            Inner::Experts { config, router, bias, experts, shared } => {
                let width = router.width;
                let logits = router.apply(x);
                let mut y = match shared {
                    Some(shared) => shared.run(x),
                    None => vec![0.0; x.len()],
                };
                let rows = x.chunks_exact(width).zip(y.chunks_exact_mut(width));
                for ((x, y), logits) in rows.zip(logits.chunks_exact(config.experts)) {
                    for (expert, weight) in route(config, logits, bias.as_deref()) {
                        add_scaled(y, weight, &experts[expert].run(x));
                    }
                }
                y
            }
        }
    }
}

/// The experts of a row and their weights, from the router's `logits` `[experts]` and, where the
/// router has one, its correction `bias` `[experts]`. Best first; of equal scores the lower expert.
///
/// Experts of groups that are not kept cannot be chosen: the rule of the operation
/// [`route`](mlakit::op::route), whose documentation has the sources.
pub fn route(config: &RouterConfig, logits: &[f64], bias: Option<&[f64]>) -> Vec<(usize, f64)> {
    let mut scores = logits.to_vec();
    match config.scoring {
        Scoring::Softmax => {
            softmax(&mut scores);
        }
        Scoring::Sigmoid => scores.iter_mut().for_each(|score| *score = sigmoid(*score)),
    }
    let mut choice = scores.clone();
    if let Some(bias) = bias {
        add_scaled(&mut choice, 1.0, bias);
    }
    keep_groups(config, &mut choice);
    let chosen = best(&choice, config.experts_per_token);
    let sum: f64 = chosen.iter().map(|&expert| scores[expert]).sum();
    let divisor = if config.normalize { sum + 1e-20 } else { 1.0 };
    chosen
        .into_iter()
        .map(|expert| (expert, scores[expert] / divisor * config.scaling_factor))
        .collect()
}

/// Excludes the experts of all but the best groups.
fn keep_groups(config: &RouterConfig, choice: &mut [f64]) {
    if config.groups == 1 {
        return;
    }
    let size = config.experts / config.groups;
    let group_scores: Vec<f64> = choice
        .chunks_exact(size)
        .map(|group| {
            let count = if config.group_score == GroupScore::Max { 1 } else { 2 };
            best(group, count).into_iter().map(|expert| group[expert]).sum()
        })
        .collect();
    let kept = best(&group_scores, config.groups_kept);
    for (group, members) in choice.chunks_exact_mut(size).enumerate() {
        if !kept.contains(&group) {
            members.fill(f64::NEG_INFINITY);
        }
    }
}

/// Indices of the `count` largest values, largest first, of equal ones the lower index.
fn best(values: &[f64], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
    order.truncate(count);
    order
}

impl Gated {
    fn run(&self, x: &[f64]) -> Vec<f64> {
        let mut hidden = self.gate.apply(x);
        for (gate, up) in hidden.iter_mut().zip(self.up.apply(x)) {
            *gate *= sigmoid(*gate) * up;
        }
        self.down.apply(&hidden)
    }
}

fn gated(weights: &GatedMlpWeights<'_>) -> Gated {
    Gated { gate: linear(&weights.gate), up: linear(&weights.up), down: linear(&weights.down) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> RouterConfig {
        RouterConfig {
            experts: 6,
            experts_per_token: 2,
            groups: 3,
            groups_kept: 1,
            scoring: Scoring::Sigmoid,
            group_score: GroupScore::TopTwoSum,
            correction_bias: true,
            normalize: true,
            scaling_factor: 2.5,
        }
    }

    /// Group 0 has the best expert, group 2 the best two together.
    const LOGITS: [f64; 6] = [3.0, -4.0, 0.0, 0.1, 1.5, 2.0];

    #[test]
    fn groups_are_chosen_by_their_two_best() {
        let chosen = route(&config(), &LOGITS, None);
        let (a, b) = (sigmoid(2.0), sigmoid(1.5));
        assert_eq!(chosen[0].0, 5);
        assert!((chosen[0].1 - 2.5 * a / (a + b)).abs() < 1e-12);
        assert!((chosen[1].1 - 2.5 * b / (a + b)).abs() < 1e-12);
    }

    #[test]
    fn the_bias_moves_the_choice_and_not_the_weight() {
        let mut config = config();
        (config.groups, config.normalize) = (1, false);
        let bias = [-1.0, 0.0, 0.0, 5.0, 0.0, 0.0];
        let chosen = route(&config, &LOGITS, Some(&bias));
        assert_eq!(chosen.iter().map(|c| c.0).collect::<Vec<_>>(), [3, 5]);
        assert!((chosen[0].1 - 2.5 * sigmoid(0.1)).abs() < 1e-12);
    }

    #[test]
    fn negative_biased_scores_never_leave_the_kept_group() {
        let bias = [-9.0, -9.0, -9.0, -9.0, -2.0, -2.0];
        let chosen = route(&config(), &LOGITS, Some(&bias));
        assert_eq!(chosen.iter().map(|c| c.0).collect::<Vec<_>>(), [5, 4]);
    }

    #[test]
    fn softmax_groups_are_chosen_by_their_best() {
        let config = RouterConfig {
            scoring: Scoring::Softmax,
            group_score: GroupScore::Max,
            correction_bias: false,
            normalize: false,
            ..config()
        };
        let chosen = route(&config, &LOGITS, None);
        let sum: f64 = LOGITS.iter().map(|logit| logit.exp()).sum();
        assert_eq!(chosen.iter().map(|c| c.0).collect::<Vec<_>>(), [0, 1]);
        assert!((chosen[0].1 - 2.5 * 3.0_f64.exp() / sum).abs() < 1e-12);
    }

    #[test]
    fn ties_go_to_the_lower_expert() {
        let chosen = route(&RouterConfig { groups: 1, ..config() }, &[0.5; 6], None);
        assert_eq!(chosen.iter().map(|c| c.0).collect::<Vec<_>>(), [0, 1]);
    }
}
