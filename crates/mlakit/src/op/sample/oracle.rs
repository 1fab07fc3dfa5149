//! `sample` in f64.

use super::spec::SampleSpec;
use crate::op::layer::descending;

/// The operands on the host.
#[derive(Clone, Copy, Debug)]
pub struct SampleCase<'a> {
    /// `[R, vocab]`.
    pub logits: &'a [f32],
    /// The temperature; not read where the `Spec` has none.
    pub temperature: f32,
    /// `[R]`; not read where the `Spec` has no temperature.
    pub random: &'a [f32],
}

/// What the oracle says.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleResult {
    /// `[R]`.
    pub ids: Vec<i32>,
    /// `[R]`: how far the random number was from another id, as a probability; infinite where the
    /// choice was greedy. Where this is small another device may choose a neighbour and be right.
    pub gaps: Vec<f64>,
}

/// The result.
pub fn oracle(spec: &SampleSpec, case: &SampleCase<'_>) -> SampleResult {
    let mut result = SampleResult { ids: Vec::new(), gaps: Vec::new() };
    for (row, logits) in case.logits.chunks_exact(spec.vocab).enumerate() {
        let greedy = largest(logits);
        let (id, gap) = if spec.temperature && case.temperature > 0.0 {
            let weights = weights(logits, logits[greedy], case.temperature);
            invert(&weights, case.random[row]).unwrap_or((greedy, f64::INFINITY))
        } else {
            (greedy, f64::INFINITY)
        };
        result.ids.push(id as i32);
        result.gaps.push(gap);
    }
    result
}

/// `min_by` keeps the first of equal ones, which is the smaller id.
fn largest(logits: &[f32]) -> usize {
    (0..logits.len()).min_by(|a, b| descending(logits[*a], logits[*b])).unwrap_or(0)
}

fn weights(logits: &[f32], top: f32, temperature: f32) -> Vec<f64> {
    let weight = |logit: &f32| {
        let scaled = (f64::from(*logit) - f64::from(top)) / f64::from(temperature);
        if *logit == top {
            1.0
        } else if scaled.is_nan() {
            0.0
        } else {
            scaled.exp()
        }
    };
    logits.iter().map(weight).collect()
}

/// The id at `random` of the distribution, and the distance to the nearer of its two ends behind
/// which there is another id. `None` if there is no weight at all.
fn invert(weights: &[f64], random: f32) -> Option<(usize, f64)> {
    let sums: Vec<f64> = weights
        .iter()
        .scan(0.0, |sum, weight| {
            *sum += weight;
            Some(*sum)
        })
        .collect();
    let first = weights.iter().position(|w| *w > 0.0)?;
    let last = weights.iter().rposition(|w| *w > 0.0)?;
    let total = sums[last];
    // `max` takes 0 for NaN.
    let bound = f64::from(random).max(0.0) * total;
    let id = sums.iter().position(|sum| *sum > bound).unwrap_or(last);
    let below = if id == first { f64::INFINITY } else { bound - sums[id - 1] };
    let above = if id == last { f64::INFINITY } else { sums[id] - bound };
    Some((id, below.min(above) / total))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::sample::SampleFields;

    const N: f32 = f32::NAN;
    const DOWN: f32 = f32::NEG_INFINITY;
    const UP: f32 = f32::INFINITY;

    fn ids(logits: &[f32], temperature: Option<f32>, random: &[f32]) -> Vec<i32> {
        run(logits, temperature, random).ids
    }

    fn run(logits: &[f32], temperature: Option<f32>, random: &[f32]) -> SampleResult {
        let fields = SampleFields { vocab: 4, max_rows: 99, temperature: temperature.is_some() };
        let spec = SampleSpec::new(fields).unwrap();
        let logits = logits.repeat(random.len() * 4 / logits.len());
        oracle(
            &spec,
            &SampleCase { logits: &logits, temperature: temperature.unwrap_or(N), random },
        )
    }

    #[test]
    fn greedy_takes_the_largest_and_of_equal_ones_the_first() {
        let logits = [1.0, 3.0, 3.0, -1.0, N, DOWN, N, DOWN, N, N, N, N, -0.0, 0.0, N, DOWN];
        assert_eq!(ids(&logits, None, &[0.0; 4]), [1, 1, 0, 0]);
        assert_eq!(ids(&[0.0, 1.0, UP, UP], None, &[0.0]), [2]);
        for temperature in [0.0, -1.0, N, DOWN] {
            assert_eq!(ids(&logits, Some(temperature), &[0.9; 4]), [1, 1, 0, 0]);
        }
    }

    /// Weights 1, 2, 4, 1 of 8 at temperature 1; 1, 4, 16, 1 of 22 at temperature 1/2.
    #[test]
    fn the_running_sum_is_inverted() {
        let logits = [1.0f32, 2.0, 4.0, 1.0].map(f32::ln);
        let random = [0.0, 0.12, 0.13, 0.37, 0.38, 0.87, 0.88, 0.999];
        assert_eq!(ids(&logits, Some(1.0), &random), [0, 0, 1, 1, 2, 2, 3, 3]);
        let random = [0.04, 0.05, 0.22, 0.23, 0.95, 0.96];
        assert_eq!(ids(&logits, Some(0.5), &random), [0, 1, 1, 2, 2, 3]);
        let gaps = run(&logits, Some(1.0), &[0.0, 0.25, 0.75, 0.9]).gaps;
        for (gap, needed) in gaps.iter().zip([0.125, 0.125, 0.125, 0.025]) {
            assert!((gap - needed).abs() < 1e-6, "{gap} {needed}");
        }
    }

    #[test]
    fn strange_numbers_still_give_an_id_with_weight() {
        let logits = [N, 1.0, 1.0, DOWN];
        assert_eq!(
            ids(&logits, Some(1.0), &[0.0, 0.4, 0.6, 1.0, 7.0, N, -3.0]),
            [1, 1, 2, 2, 2, 1, 1]
        );
        assert_eq!(ids(&logits, Some(UP), &[0.4, 0.6]), [1, 2]);
        assert_eq!(ids(&[0.0, UP, 5.0, UP], Some(1.0), &[0.0, 0.4, 0.6]), [1, 1, 3]);
        assert_eq!(ids(&[DOWN; 4], Some(1.0), &[0.0, 0.3, 0.6, 0.9]), [0, 1, 2, 3]);
        assert_eq!(ids(&[N; 4], Some(1.0), &[0.0, 0.9]), [0, 0]);
    }
}
