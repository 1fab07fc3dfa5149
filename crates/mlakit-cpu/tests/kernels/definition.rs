//! The arithmetic of dense attention for one query vector, written plainly. Scalar and AVX-512 BF16
//! kernels must give these bits; the others must too on inputs without denormal numbers.

use std::ops::Range;

use mlakit_cpu::kernel::{BLOCK, LseBase};
use mlakit_cpu::numerics::{dot_pair, exp2, f32_to_bf16, log2};

use crate::common::f64_of;
use crate::dense_inputs::Case;

/// Output (F32) and base-2 log-sum-exp of a row and head over the keys of a request in `keys`.
pub fn by_definition(case: &Case, place: [usize; 3], keys: Range<usize>) -> (Vec<f32>, f32) {
    let [request, row, head] = place;
    let width = case.shape.geometry.value_width;
    let query = case.query(row, head);
    let zeros = vec![0; case.shape.geometry.qk_width];
    let (mut max, mut sum, mut out) = (f32::NEG_INFINITY, 0.0_f32, vec![0.0_f32; width]);
    let mut start = keys.start / BLOCK * BLOCK;
    while start < keys.end {
        // Whole pairs; a key outside the range, or without a page, has a weight of 0.
        let block = keys.start.max(start) / 2 * 2..keys.end.min(start + BLOCK).next_multiple_of(2);
        let record = |key| keys.contains(&key).then(|| case.record(request, key)).flatten();
        let records: Vec<_> = block.clone().map(record).collect();
        let score = |record: &Option<Vec<u16>>| match record {
            None => f32::NEG_INFINITY,
            Some(record) => dot(record, &query) * case.score_scale(),
        };
        let scores: Vec<f32> = records.iter().map(score).collect();
        let old = max;
        for &score in &scores {
            max = if score > max { score } else { max };
        }
        let base = if max == f32::NEG_INFINITY { 0.0 } else { max };
        let factor = exp2(old - base);
        let weights: Vec<f32> = scores.iter().map(|score| exp2(score - base)).collect();
        sum *= factor;
        weights.iter().for_each(|weight| sum += weight);
        for (v, out) in out.iter_mut().enumerate() {
            *out *= factor;
            for pair in 0..weights.len() / 2 {
                let value = |key: usize| records[key].as_ref().unwrap_or(&zeros)[v];
                let [even, odd] = [2 * pair, 2 * pair + 1];
                let weights = join(f32_to_bf16(weights[even]), f32_to_bf16(weights[odd]));
                *out = dot_pair(*out, weights, join(value(even), value(odd)));
            }
        }
        start += BLOCK;
    }
    if sum == 0.0 {
        return (vec![0.0; width], f32::NEG_INFINITY);
    }
    let factor = case.kv_scale / sum;
    let lse = (f64::from(max) + log2(f64::from(sum))) as f32;
    (out.iter().map(|x| x * factor).collect(), if sum.is_nan() { sum } else { lse })
}

fn join(even: u16, odd: u16) -> u32 {
    u32::from(odd) << 16 | u32::from(even)
}

fn dot(a: &[u16], b: &[u16]) -> f32 {
    let pairs = a.chunks_exact(2).zip(b.chunks_exact(2));
    pairs.fold(0.0, |acc, (a, b)| dot_pair(acc, join(a[0], a[1]), join(b[0], b[1])))
}

/// The same in f64, with nothing rounded: outputs, log-sum-exp in `base`, and for each output the
/// weighted mean of magnitudes, to which errors are relative.
pub fn in_f64(
    case: &Case,
    place: [usize; 3],
    keys: Range<usize>,
    base: LseBase,
) -> (Vec<f64>, f64, Vec<f64>) {
    let [request, row, head] = place;
    let width = case.shape.geometry.value_width;
    let query = case.query(row, head);
    let records: Vec<_> = keys.filter_map(|key| case.record(request, key)).collect();
    let scale = f64::from(case.softmax_scale) * f64::from(case.kv_scale) * f64::from(case.q_scale);
    let score = |record: &Vec<u16>| {
        scale * record.iter().zip(&query).map(|(k, q)| f64_of(*k) * f64_of(*q)).sum::<f64>()
    };
    let scores: Vec<f64> = records.iter().map(score).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if scores.is_empty() {
        return (vec![0.0; width], max, vec![0.0; width]);
    }
    let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let mean = |v: usize, f: fn(f64) -> f64| {
        let terms = weights.iter().zip(&records).map(|(weight, r)| weight * f(f64_of(r[v])));
        terms.sum::<f64>() / sum * f64::from(case.kv_scale)
    };
    let lse = max + sum.ln();
    let lse = if base == LseBase::Two { lse * std::f64::consts::LOG2_E } else { lse };
    let outs = (0..width).map(|v| mean(v, |x| x)).collect();
    (outs, lse, (0..width).map(|v| mean(v, f64::abs)).collect())
}
