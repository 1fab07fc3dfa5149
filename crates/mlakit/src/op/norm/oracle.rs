//! `norm` in f64.

use super::spec::NormSpec;

/// `[R, width]` without gaps, before the rounding to BF16 (`y`) or F32 (`y_wide`); `x` is `[R,
/// width]` without gaps, `weight` `[width]`.
pub fn oracle(spec: &NormSpec, x: &[f32], weight: &[f32]) -> Vec<f64> {
    let mut y = Vec::with_capacity(x.len());
    for row in x.chunks_exact(spec.width) {
        let squares: f64 = row.iter().map(|v| f64::from(*v).powi(2)).sum();
        let root = (squares / spec.width as f64 + f64::from(spec.eps.value())).sqrt();
        y.extend(row.iter().zip(weight).map(|(v, w)| f64::from(*v) / root * f64::from(*w)));
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
        let y = oracle(&spec, &[a, 0.0, 0.0, 0.0, 0.0, b], &[4.0, -10.0]);
        let needed = [2.0 * 7f64.sqrt(), 0.0, 0.0, 0.0, 0.0, -14.0];
        for (given, needed) in y.iter().zip(needed) {
            assert!((given - needed).abs() < 1e-6, "{given} {needed}");
        }
    }
}
