//! `linear` in f64.

use half::bf16;

use super::spec::LinearSpec;

/// The operands on the host; what the `Spec` does not have is empty.
#[derive(Clone, Copy, Debug)]
pub struct LinearCase<'a> {
    /// `[R, in_width]`; for `combine` `[R, used, in_width]`.
    pub x: &'a [f32],
    /// `[out_width, in_width]`; with experts `[count, out_width, in_width]`.
    pub weight: &'a [bf16],
    /// `[out_width]`.
    pub bias: &'a [f32],
    /// `[R, used]`.
    pub ids: &'a [i32],
    /// `[R, used]`.
    pub gates: &'a [f32],
    /// What `y` holds before, where the `Spec` accumulates.
    pub before: &'a [f32],
}

/// What the oracle says.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearResult {
    /// `[R, out_width]`, for `expand` `[R, used, out_width]`; before its rounding to the output
    /// dtype.
    pub y: Vec<f64>,
    /// Ids that are no expert.
    pub faults: u32,
}

/// The result.
pub fn oracle(spec: &LinearSpec, case: &LinearCase<'_>) -> LinearResult {
    let rows = case.x.len() / spec.x_row();
    let mut y = match spec.accumulate {
        true => case.before.iter().copied().map(f64::from).collect(),
        false => vec![0.0; rows * spec.y_row()],
    };
    let mut faults = 0;
    for index in 0..rows * spec.used() {
        let row = index / spec.used();
        let Some(matrix) = expert(spec, case, index) else {
            faults += 1;
            continue;
        };
        let (x, y_at) = if spec.combines() { (index, row) } else { (row, index) };
        let gate = if spec.combines() { f64::from(case.gates[index]) } else { 1.0 };
        let x = &case.x[x * spec.in_width..][..spec.in_width];
        let y = &mut y[y_at * spec.out_width..][..spec.out_width];
        for (o, (y, weight)) in y.iter_mut().zip(matrix.chunks_exact(spec.in_width)).enumerate() {
            let dot: f64 = x.iter().zip(weight).map(|(x, w)| f64::from(*x) * w.to_f64()).sum();
            *y += gate * dot + case.bias.get(o).copied().map_or(0.0, f64::from);
        }
    }
    LinearResult { y, faults }
}

/// The matrix of a use, by its index in `[R, used]`; `None` where its id is no expert.
fn expert<'a>(spec: &LinearSpec, case: &LinearCase<'a>, index: usize) -> Option<&'a [bf16]> {
    let Some(experts) = spec.experts else { return Some(case.weight) };
    let count = experts.count.unwrap_or(case.weight.len() / spec.matrix());
    let id = usize::try_from(case.ids[index]).ok().filter(|id| *id < count)?;
    Some(&case.weight[id * spec.matrix()..][..spec.matrix()])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::layer::Float;
    use crate::op::linear::{Experts, LinearFields};

    fn spec(experts: Option<Experts>, accumulate: bool) -> LinearSpec {
        let bias = experts.is_none();
        let output = Float::F32;
        let fields = LinearFields {
            in_width: 2,
            out_width: 2,
            max_rows: 8,
            input: Float::F32,
            output,
            accumulate,
            bias,
            experts,
        };
        LinearSpec::new(fields).unwrap()
    }

    fn narrow(values: &[f32]) -> Vec<bf16> {
        values.iter().copied().map(bf16::from_f32).collect()
    }

    const EMPTY: LinearCase<'static> =
        LinearCase { x: &[], weight: &[], bias: &[], ids: &[], gates: &[], before: &[] };

    #[test]
    fn one_matrix_with_bias() {
        let (x, weight) = ([1.0, 2.0, -1.0, 0.5], narrow(&[3.0, 4.0, 5.0, 6.0]));
        let case = LinearCase { x: &x, weight: &weight, bias: &[10.0, 20.0], ..EMPTY };
        let result = oracle(&spec(None, false), &case);
        assert_eq!(result, LinearResult { y: vec![21.0, 37.0, 9.0, 18.0], faults: 0 });
        let case = LinearCase { before: &[1.0, 2.0, 3.0, 4.0], ..case };
        assert_eq!(oracle(&spec(None, true), &case).y, [22.0, 39.0, 12.0, 22.0]);
    }

    #[test]
    fn expand_applies_each_expert_to_the_row() {
        // W[0] is the identity, W[1] swaps and doubles.
        let weight = narrow(&[1.0, 0.0, 0.0, 1.0, 0.0, 2.0, 2.0, 0.0]);
        let x = [3.0, 4.0, 5.0, 6.0];
        let case = LinearCase { x: &x, weight: &weight, ids: &[1, 0, 2, -1], ..EMPTY };
        for count in [None, Some(2)] {
            let experts = Experts { count, used: 2, combine: false };
            let result = oracle(&spec(Some(experts), false), &case);
            assert_eq!(result.y, [8.0, 6.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0]);
            assert_eq!(result.faults, 2);
        }
    }

    #[test]
    fn combine_sums_gated_results_and_ignores_what_has_no_expert() {
        let weight = narrow(&[1.0, 0.0, 0.0, 1.0, 0.0, 2.0, 2.0, 0.0]);
        let x = [3.0, 4.0, 5.0, 6.0, 1.0, 1.0, f32::NAN, 0.0];
        let gates = [0.5, 2.0, -1.0, f32::NAN];
        let ids = [1, 0, 0, i32::MIN];
        let experts = Experts { count: Some(2), used: 2, combine: true };
        let before = [100.0, 200.0, 300.0, 400.0];
        let case = LinearCase {
            x: &x,
            weight: &weight,
            ids: &ids,
            gates: &gates,
            before: &before,
            ..EMPTY
        };
        let result = oracle(&spec(Some(experts), false), &case);
        assert_eq!(result, LinearResult { y: vec![14.0, 15.0, -1.0, -1.0], faults: 1 });
        let result = oracle(&spec(Some(experts), true), &case);
        assert_eq!(result.y, [114.0, 215.0, 299.0, 399.0]);
    }
}
