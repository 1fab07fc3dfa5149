//! `route` with sums and functions in f64; logits, scores and what is compared are rounded to F32,
//! since those stages are F32.

use super::spec::{GroupScore, RouteSpec, Scoring};
use crate::op::layer::descending;

/// The operands on the host.
#[derive(Clone, Copy, Debug)]
pub struct RouteCase<'a> {
    /// `[R, hidden]`.
    pub x: &'a [f32],
    /// `[experts, hidden]`.
    pub weight: &'a [f32],
    /// `[experts]`.
    pub bias: Option<&'a [f32]>,
}

/// What the oracle says.
#[derive(Clone, Debug, PartialEq)]
pub struct RouteResult {
    /// `[R, used]`.
    pub ids: Vec<i32>,
    /// `[R, used]`.
    pub gates: Vec<f64>,
    /// `[R]`: the smallest difference that decided something, relative to the numbers that were
    /// compared. Numbers that are equal decide by index and count as infinitely far apart. Where
    /// this is a few F32 units another device may choose otherwise and be right.
    pub gaps: Vec<f64>,
}

/// The result.
pub fn oracle(spec: &RouteSpec, case: &RouteCase<'_>) -> RouteResult {
    let mut result = RouteResult { ids: Vec::new(), gates: Vec::new(), gaps: Vec::new() };
    for x in case.x.chunks_exact(spec.hidden) {
        let scores = scores(spec.scoring, &logits(x, case.weight));
        let bias = |expert: usize| case.bias.map_or(0.0, |bias| bias[expert]);
        let mut compared: Vec<Compared> = scores
            .iter()
            .enumerate()
            .map(|(e, s)| Compared {
                value: s + bias(e),
                terms: s.abs() + bias(e).abs(),
                free: true,
            })
            .collect();
        let mut gap = f64::INFINITY;
        if spec.used_groups() < spec.groups {
            gap = exclude_groups(spec, &mut compared);
        }
        let order = order(&compared);
        let chosen = &order[..spec.used];
        for pair in order.windows(2).take(spec.used) {
            gap = gap.min(compared[pair[0]].apart(compared[pair[1]]));
        }
        let score = |expert: &usize| f64::from(scores[*expert]);
        let sum: f64 = chosen.iter().map(score).sum();
        let divisor = if spec.normalize { sum + 1e-20 } else { 1.0 };
        let gate = |expert| score(expert) / divisor * f64::from(spec.scale.value());
        result.ids.extend(chosen.iter().map(|expert| *expert as i32));
        result.gates.extend(chosen.iter().map(gate));
        result.gaps.push(gap);
    }
    result
}

/// A number that decides, the sum of the magnitudes that made it, to which its error is
/// proportional, and whether it may be chosen.
#[derive(Clone, Copy)]
struct Compared {
    value: f32,
    terms: f32,
    free: bool,
}

impl Compared {
    fn apart(self, other: Self) -> f64 {
        let difference = f64::from(self.value) - f64::from(other.value);
        // NaN and infinities have places of their own in the order: nothing rounds into or out of
        // them.
        if difference == 0.0 || !difference.is_finite() {
            return f64::INFINITY;
        }
        difference.abs() / f64::from(self.terms.max(other.terms))
    }
}

/// Indices of what may be chosen, by falling value, of equal ones the smaller first.
fn order(compared: &[Compared]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..compared.len()).filter(|i| compared[*i].free).collect();
    order.sort_by(|a, b| descending(compared[*a].value, compared[*b].value));
    order
}

/// Excludes the experts of unused groups; how near the choice of groups was.
fn exclude_groups(spec: &RouteSpec, compared: &mut [Compared]) -> f64 {
    let count = match spec.group_score {
        GroupScore::TopTwoSum => 2,
        GroupScore::Max => 1,
    };
    let group = |members: &[Compared]| {
        let best = order(members).into_iter().take(count).map(|i| members[i]);
        best.reduce(|a, b| Compared { value: a.value + b.value, terms: a.terms + b.terms, ..a })
            .expect("a group has an expert")
    };
    let groups: Vec<Compared> = compared.chunks_exact(spec.group_size()).map(group).collect();
    let order = order(&groups);
    for unused in &order[spec.used_groups()..] {
        let first = unused * spec.group_size();
        compared[first..first + spec.group_size()].iter_mut().for_each(|c| c.free = false);
    }
    groups[order[spec.used_groups() - 1]].apart(groups[order[spec.used_groups()]])
}

fn logits(x: &[f32], weight: &[f32]) -> Vec<f32> {
    let dot = |row: &[f32]| -> f64 {
        x.iter().zip(row).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum()
    };
    weight.chunks_exact(x.len()).map(|row| dot(row) as f32).collect()
}

fn scores(scoring: Scoring, logits: &[f32]) -> Vec<f32> {
    let wide = logits.iter().copied().map(f64::from);
    match scoring {
        Scoring::Sigmoid => wide.map(|z| (1.0 / (1.0 + (-z).exp())) as f32).collect(),
        Scoring::Softmax => {
            let top = wide.clone().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = wide.clone().map(|z| (z - top).exp()).sum();
            wide.map(|z| ((z - top).exp() / sum) as f32).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One element a row, so that the weights are the logits of `x` = 1.
    fn spec(more: &str) -> RouteSpec {
        let text = format!(r#"{{"hidden":1,"experts":6,"used":2,"max_rows":9,{more}}}"#);
        serde_json::from_str(&text).unwrap()
    }

    fn logit(probability: f64) -> f32 {
        (probability / (1.0 - probability)).ln() as f32
    }

    fn route(spec: &RouteSpec, weight: &[f32], bias: Option<&[f32]>) -> (Vec<i32>, Vec<f64>, f64) {
        let result = oracle(spec, &RouteCase { x: &[1.0], weight, bias });
        (result.ids, result.gates, result.gaps[0])
    }

    fn same(given: &[f64], needed: &[f64]) {
        assert_eq!(given.len(), needed.len());
        for (given, needed) in given.iter().zip(needed) {
            assert!((given - needed).abs() < 1e-6, "{given} {needed}");
        }
    }

    #[test]
    fn sigmoid_scores_are_normalised_and_scaled() {
        let weight = [0.1, 0.6, 0.2, 0.2, 0.3, 0.15].map(logit);
        let plain = spec(r#""scoring":"sigmoid""#);
        let (ids, gates, gap) = route(&plain, &weight, None);
        assert_eq!(ids, [1, 4]);
        same(&gates, &[0.6, 0.3]);
        // 0.3 against 0.2 is nearer than 0.6 against 0.3.
        assert!((gap - 0.1 / 0.3).abs() < 1e-5, "{gap}");
        let scaled = spec(r#""scoring":"sigmoid","normalize":true,"scale":2.5"#);
        same(&route(&scaled, &weight, None).1, &[2.5 * 2.0 / 3.0, 2.5 / 3.0]);
    }

    #[test]
    fn the_bias_chooses_and_does_not_count() {
        let weight = [0.1, 0.6, 0.2, 0.2, 0.3, 0.15].map(logit);
        let biased = spec(r#""scoring":"sigmoid","bias":true"#);
        let (ids, gates, _) = route(&biased, &weight, Some(&[1.0, -0.5, 0.0, 0.0, 0.0, 0.0]));
        assert_eq!(ids, [0, 4]);
        same(&gates, &[0.1, 0.3]);
    }

    #[test]
    fn groups_are_chosen_by_their_two_best_or_their_best() {
        // Sums of two: 0.75, 1.05, 1.0; the best: 0.7, 0.55, 0.6.
        let weight = [0.7, 0.05, 0.5, 0.55, 0.4, 0.6].map(logit);
        let of = |rule: &str| spec(&format!(r#""scoring":"sigmoid","groups":3,{rule}"#));
        let (ids, gates, gap) = route(&of(r#""used_groups":1"#), &weight, None);
        assert_eq!(ids, [3, 2]);
        same(&gates, &[0.55, 0.5]);
        assert!((gap - 0.05 / 1.05).abs() < 1e-5, "{gap}");
        let best = of(r#""used_groups":1,"group_score":"max""#);
        assert_eq!(route(&best, &weight, None).0, [0, 1]);
        let best = of(r#""used_groups":2,"group_score":"max""#);
        assert_eq!(route(&best, &weight, None).0, [0, 5]);
        assert_eq!(route(&of(r#""used_groups":3"#), &weight, None).0, [0, 5]);
    }

    #[test]
    fn nothing_of_an_unused_group_is_chosen() {
        let weight = [0.5; 6].map(logit);
        let grouped = spec(r#""scoring":"sigmoid","groups":3,"used_groups":1,"bias":true"#);
        // What is compared in the used group: 0.25 and -0.5, which is less than 0.
        let bias = [-1.0, -1.0, -0.25, -1.0, -1.0, -1.0];
        let (ids, gates, _) = route(&grouped, &weight, Some(&bias));
        assert_eq!(ids, [2, 3]);
        same(&gates, &[0.5, 0.5]);
        // All of it below 0, and not even a number.
        let bias = [-9.0, -9.0, -9.0, -9.0, -1.0, f32::NAN];
        let best = spec(
            r#""scoring":"sigmoid","groups":3,"used_groups":1,"bias":true,
            "group_score":"max""#,
        );
        assert_eq!(route(&best, &weight, Some(&bias)).0, [4, 5]);
    }

    #[test]
    fn softmax_is_over_all_experts() {
        let weight = [1.0f32, 2.0, 3.0, 4.0, 5.0, 5.0].map(f32::ln);
        let (ids, gates, gap) = route(&spec(r#""scoring":"softmax""#), &weight, None);
        assert_eq!(ids, [4, 5]);
        same(&gates, &[0.25, 0.25]);
        assert!((gap - 0.2).abs() < 1e-5, "{gap}");
    }

    #[test]
    fn equal_scores_go_to_the_smaller_id_and_nan_comes_last() {
        let sigmoid = spec(r#""scoring":"sigmoid""#);
        let (ids, _, gap) = route(&sigmoid, &[0.5; 6], None);
        assert_eq!((ids, gap), (vec![0, 1], f64::INFINITY));
        let n = f32::NAN;
        let (ids, gates, gap) = route(&sigmoid, &[n, n, n, f32::NEG_INFINITY, n, n], None);
        assert_eq!((ids, gap), (vec![3, 0], f64::INFINITY));
        assert!(gates[0] == 0.0 && gates[1].is_nan());
    }

    #[test]
    fn logits_sum_over_the_row() {
        let text = r#"{"hidden":2,"experts":2,"used":1,"max_rows":9,"scoring":"sigmoid"}"#;
        let spec: RouteSpec = serde_json::from_str(text).unwrap();
        let x = [1.0, 2.0, -1.0, 0.5];
        let result =
            oracle(&spec, &RouteCase { x: &x, weight: &[3.0, -1.0, 0.0, 1.0], bias: None });
        // Logits 1 and 2, then -3.5 and 0.5.
        assert_eq!(result.ids, [1, 1]);
        same(&result.gates, &[1.0 / (1.0 + (-2f64).exp()), 1.0 / (1.0 + (-0.5f64).exp())]);
    }
}
