//! `norm` in f64.

use super::spec::NormSpec;

/// `[R, width]` without gaps, before the rounding to BF16 (`y`) or F32 (`y_wide`); `x` is `[R,
/// width]` without gaps, `weight` `[width]`, `bias` `[width]` or, where there is none, empty.
pub fn oracle(spec: &NormSpec, x: &[f32], weight: &[f32], bias: &[f32]) -> Vec<f64> {
    let (mut y, width) = (Vec::with_capacity(x.len()), spec.width as f64);
    for row in x.chunks_exact(spec.width) {
        let sum: f64 = row.iter().copied().map(f64::from).sum();
        let mean = if spec.center { sum / width } else { 0.0 };
        let squares: f64 = row.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum();
        let root = (squares / width + f64::from(spec.eps.value())).sqrt();
        let bias = bias.iter().copied().chain(std::iter::repeat(0.0)).map(f64::from);
        let scaled =
            row.iter().zip(weight).map(|(v, w)| (f64::from(*v) - mean) / root * f64::from(*w));
        y.extend(scaled.zip(bias).map(|(scaled, bias)| scaled + bias));
    }
    y
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_is_divided_by_its_own_root_mean_square() {
        let text = r#"{"width":2,"eps":0.5,"max_rows":4,"input":"f32"}"#;
        let spec: NormSpec = serde_json::from_str(text).unwrap();
        // Mean squares 3.5, 0 and 24.5; with the epsilon their roots are 2, sqrt(0.5) and 5.
        let (a, b) = (7f32.sqrt(), 49f32.sqrt());
        let y = oracle(&spec, &[a, 0.0, 0.0, 0.0, 0.0, b], &[4.0, -10.0], &[]);
        let needed = [2.0 * 7f64.sqrt(), 0.0, 0.0, 0.0, 0.0, -14.0];
        for (given, needed) in y.iter().zip(needed) {
            assert!((given - needed).abs() < 1e-6, "{given} {needed}");
        }
    }

    #[test]
    fn layer_normalisation_subtracts_the_mean_and_adds_a_bias() {
        let text = r#"{"width":2,"eps":0.75,"max_rows":4,"input":"f32","center":true,"bias":true}"#;
        let spec: NormSpec = serde_json::from_str(text).unwrap();
        // Mean 3, deviations -0.5 and 0.5, variance 0.25, root of it and the epsilon 1.
        let y = oracle(&spec, &[2.5, 3.5], &[4.0, -10.0], &[1.0, 100.0]);
        assert_eq!(y, [-1.0, 95.0]);
        let y = oracle(&spec, &[7.0, 7.0], &[4.0, -10.0], &[1.0, 100.0]);
        assert_eq!(y, [1.0, 100.0]);
    }
}
