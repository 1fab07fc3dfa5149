//! `activation` in f64.

use super::spec::{ActivationKind, ActivationSpec};

/// `[R, width]` before the rounding to its dtype, from `x` `[R, 2, width]`, or `[R, width]` and a gate
/// `[R, width / gate_span]`, which is empty where it is in `x`.
pub fn oracle(spec: &ActivationSpec, x: &[f32], gate: &[f32]) -> Vec<f64> {
    let (width, in_width) = (spec.width, spec.in_width());
    let mut y = Vec::with_capacity(x.len() / in_width * width);
    for (row, x) in x.chunks_exact(in_width).enumerate() {
        for i in 0..width {
            let (gate, up) = match spec.gate_span {
                Some(span) => (gate[(row * width + i) / span], x[i]),
                None => (x[i], x[width + i]),
            };
            let (gate, up) = (f64::from(gate), f64::from(up));
            y.push(match spec.kind {
                ActivationKind::Silu => gate / (1.0 + (-gate).exp()) * up,
                ActivationKind::Sigmoid => up / (1.0 + (-gate).exp()),
            });
        }
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
        let y = oracle(&spec, &[ln3, 0.0, 4.0, 5.0, -ln3, 1000.0, 4.0, -2.0], &[]);
        let ln3 = 3f64.ln();
        for (given, needed) in y.iter().zip([3.0 * ln3, 0.0, -ln3, -2000.0]) {
            assert!((given - needed).abs() < 1e-6, "{given} {needed}");
        }
        assert_eq!(y.len(), 4);
        assert_eq!(oracle(&spec, &[-1000.0, 0.0, 3.0, 3.0], &[]), [0.0, 0.0]);
    }

    #[test]
    fn a_gate_apart_counts_for_its_span() {
        let spec = |span: usize| -> ActivationSpec {
            let text = format!(
                r#"{{"width":2,"max_rows":9,"input":"f32","kind":"sigmoid","gate_span":{span}}}"#
            );
            serde_json::from_str(&text).unwrap()
        };
        assert_eq!(oracle(&spec(2), &[4.0, 6.0, 8.0, 2.0], &[0.0, -1000.0]), [2.0, 3.0, 0.0, 0.0]);
        assert_eq!(oracle(&spec(1), &[4.0, 6.0], &[1000.0, 0.0]), [4.0, 3.0]);
    }
}
