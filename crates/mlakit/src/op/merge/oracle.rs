//! `merge` in f64.

use super::spec::MergeSpec;

/// The operands on the host; partial outputs as the values that were stored.
#[derive(Clone, Copy, Debug)]
pub struct MergeCase<'a> {
    /// `[S, R, H, V]`.
    pub outs: &'a [f32],
    /// `[S, R, H]`.
    pub lses: &'a [f32],
    /// `[H]`, natural.
    pub sink: Option<&'a [f32]>,
}

/// Output `[R, H, V]` before its rounding to BF16, and the log-sum-exp `[R, H]` in the base of the `Spec`.
pub fn oracle(spec: &MergeSpec, case: &MergeCase<'_>) -> (Vec<f64>, Vec<f64>) {
    let results = case.lses.len() / spec.splits;
    let ln = spec.lse.ln();
    let (mut out, mut lse) = (Vec::new(), Vec::new());
    for result in 0..results {
        let head = result % spec.heads;
        let log = |s: usize| {
            let value = f64::from(case.lses[s * results + result]);
            if value.is_nan() || value == f64::INFINITY { f64::NEG_INFINITY } else { value * ln }
        };
        let sink = case.sink.map_or(f64::NEG_INFINITY, |sink| f64::from(sink[head]));
        let top = (0..spec.splits).map(log).fold(f64::NEG_INFINITY, f64::max);
        let weight =
            |s: usize| if log(s) == f64::NEG_INFINITY { 0.0 } else { (log(s) - top).exp() };
        let sum: f64 = (0..spec.splits).map(weight).sum();
        let dead = top == f64::NEG_INFINITY || sink == f64::INFINITY;
        let denominator = sum + if sink == f64::NEG_INFINITY { 0.0 } else { (sink - top).exp() };
        for v in 0..spec.value_width {
            let part =
                |s: usize| f64::from(case.outs[(s * results + result) * spec.value_width + v]);
            let live = (0..spec.splits).filter(|s| weight(*s) > 0.0);
            let total: f64 = live.map(|s| weight(s) * part(s)).sum();
            out.push(if dead { 0.0 } else { total / denominator });
        }
        let natural = if top == f64::NEG_INFINITY { top } else { top + sum.ln() };
        let counted = if spec.sink_in_lse { log_add(natural, sink) } else { natural };
        lse.push(counted / ln);
    }
    (out, lse)
}

/// ln(exp(a) + exp(b)).
pub(crate) fn log_add(a: f64, b: f64) -> f64 {
    let top = a.max(b);
    if top.is_infinite() {
        return top;
    }
    top + ((a - top).exp() + (b - top).exp()).ln()
}
