//! `rotary` in f64, but for the angle, which is a product in F32.

use super::spec::RotarySpec;

/// The operands on the host.
#[derive(Clone, Copy, Debug)]
pub struct RotaryCase<'a> {
    /// `[R, heads, head_width()]` without gaps.
    pub x: &'a [f32],
    /// `[R]`.
    pub positions: &'a [i32],
    /// `[width / 2]`.
    pub inv_freq: &'a [f32],
}

/// `[R, heads, head_width()]` without gaps, before the rounding to BF16.
pub fn oracle(spec: &RotarySpec, case: &RotaryCase<'_>) -> Vec<f64> {
    let factor = f64::from(spec.attention_factor.value());
    let mut y: Vec<f64> = case.x.iter().copied().map(f64::from).collect();
    let rows = y.chunks_exact_mut(spec.heads * spec.head_width()).zip(case.positions);
    for (row, position) in rows {
        for head in row.chunks_exact_mut(spec.head_width()) {
            for (j, inv_freq) in case.inv_freq.iter().enumerate() {
                let angle = f64::from(*position as f32 * inv_freq);
                let (c, s) = (angle.cos() * factor, angle.sin() * factor);
                let (a, b) = spec.pair(j);
                (head[a], head[b]) = (head[a] * c - head[b] * s, head[b] * c + head[a] * s);
            }
        }
    }
    y
}

#[cfg(test)]
mod tests {
    use super::*;

    const FACTOR: &str = r#""attention_factor":2.0"#;

    fn turn(style: &str, x: &[f32], positions: &[i32], inv_freq: &[f32]) -> Vec<f64> {
        let text = format!(
            r#"{{"heads":1,"width":4,"style":"{style}","input":"f32","max_rows":9,{FACTOR}}}"#
        );
        let spec: RotarySpec = serde_json::from_str(&text).unwrap();
        oracle(&spec, &RotaryCase { x, positions, inv_freq })
    }

    fn same(given: &[f64], needed: &[f64]) {
        assert_eq!(given.len(), needed.len());
        for (given, needed) in given.iter().zip(needed) {
            assert!((given - needed).abs() < 1e-6, "{given} {needed}");
        }
    }

    /// Quarter and half turns, so that cosines and sines are whole; the factor doubles.
    #[test]
    fn pairs_turn_by_position_times_frequency() {
        use std::f32::consts::{FRAC_PI_2, PI};
        let (x, frequencies) = ([1.0, 2.0, 3.0, 4.0], [FRAC_PI_2, PI]);
        same(&turn("pair", &x, &[1], &frequencies), &[-4.0, 2.0, -6.0, -8.0]);
        same(&turn("half", &x, &[1], &frequencies), &[-6.0, -4.0, 2.0, -8.0]);
        same(&turn("pair", &x, &[-1], &frequencies), &[4.0, -2.0, -6.0, -8.0]);
        same(&turn("pair", &x, &[0], &frequencies), &[2.0, 4.0, 6.0, 8.0]);
    }

    #[test]
    fn what_lies_around_the_rotated_part_stays() {
        use std::f32::consts::FRAC_PI_2;
        for (before, after) in [(1, 0), (0, 3), (2, 1)] {
            let text = format!(
                r#"{{"heads":2,"width":2,"style":"pair","input":"f32","max_rows":1,
                "before":{before},"after":{after}}}"#
            );
            let spec: RotarySpec = serde_json::from_str(&text).unwrap();
            let width = before + 2 + after;
            let x: Vec<f32> = (0..2 * width).map(|i| i as f32).collect();
            let case = RotaryCase { x: &x, positions: &[1], inv_freq: &[FRAC_PI_2] };
            let mut needed: Vec<f64> = x.iter().copied().map(f64::from).collect();
            for head in [0, width] {
                let at = head + before;
                (needed[at], needed[at + 1]) = (-needed[at + 1], needed[at]);
            }
            same(&oracle(&spec, &case), &needed);
        }
    }

    /// Position 16777217 is no F32 number and becomes 16777216; the product is rounded once more.
    #[test]
    fn huge_angles_are_those_of_f32() {
        let (x, frequencies) = ([1.0, 0.0, 1.0, 0.0], [1.0, 0.3]);
        let y = turn("pair", &x, &[16_777_217], &frequencies);
        let angle = f64::from(16_777_216f32 * 0.3f32);
        let needed = [
            2.0 * 16_777_216f64.cos(),
            2.0 * 16_777_216f64.sin(),
            2.0 * angle.cos(),
            2.0 * angle.sin(),
        ];
        same(&y, &needed);
        let y = turn("pair", &x, &[i32::MIN], &frequencies);
        same(&y[..2], &[2.0 * 2f64.powi(31).cos(), -2.0 * 2f64.powi(31).sin()]);
    }
}
