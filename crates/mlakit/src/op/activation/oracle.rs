//! `activation` in f64.

use super::spec::{ActivationKind, ActivationSpec};

/// `[R, width]` before the rounding to its dtype, from `x` `[R, 2, width]`.
pub fn oracle(spec: &ActivationSpec, x: &[f32]) -> Vec<f64> {
    let mut y = Vec::with_capacity(x.len() / 2);
    for row in x.chunks_exact(2 * spec.width) {
        let (gate, up) = row.split_at(spec.width);
        let pairs = gate.iter().zip(up).map(|(g, u)| (f64::from(*g), f64::from(*u)));
        y.extend(pairs.map(|(gate, up)| match spec.kind {
            ActivationKind::Silu => gate / (1.0 + (-gate).exp()) * up,
        }));
    }
    y
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_half_of_a_row_gates_the_second() {
        let text = r#"{"width":2,"max_rows":9,"input":"f32","kind":"silu"}"#;
        let spec: ActivationSpec = serde_json::from_str(text).unwrap();
        let ln3 = 3f32.ln();
        // sigmoid(ln 3) = 3/4, sigmoid(-ln 3) = 1/4, sigmoid(0) = 1/2, sigmoid(large) = 1.
        let y = oracle(&spec, &[ln3, 0.0, 4.0, 5.0, -ln3, 1000.0, 4.0, -2.0]);
        let ln3 = 3f64.ln();
        for (given, needed) in y.iter().zip([3.0 * ln3, 0.0, -ln3, -2000.0]) {
            assert!((given - needed).abs() < 1e-6, "{given} {needed}");
        }
        assert_eq!(y.len(), 4);
        assert_eq!(oracle(&spec, &[-1000.0, 0.0, 3.0, 3.0]), [0.0, 0.0]);
    }
}
