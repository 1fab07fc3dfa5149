//! `hadamard` in f64, by its definition.

use super::spec::HadamardSpec;

/// `[R, width]`, before the rounding to BF16.
pub fn oracle(spec: &HadamardSpec, x: &[f32]) -> Vec<f64> {
    let mut y = Vec::with_capacity(x.len());
    for row in x.chunks_exact(spec.width) {
        y.extend((0..spec.width).map(|i| {
            let sign = |j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
            let sum: f64 = row.iter().enumerate().map(|(j, x)| sign(j) * f64::from(*x)).sum();
            sum * spec.scale()
        }));
    }
    y
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_orthogonal_and_its_own_inverse() {
        let spec: HadamardSpec =
            serde_json::from_str(r#"{"width":4,"input":"f32","max_rows":2}"#).unwrap();
        let y = oracle(&spec, &[1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 8.0]);
        assert_eq!(y, [5.0, -1.0, -2.0, 0.0, 4.0, -4.0, -4.0, 4.0]);
        let narrow: Vec<f32> = y.iter().map(|v| *v as f32).collect();
        assert_eq!(oracle(&spec, &narrow), [1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 8.0]);
    }
}
