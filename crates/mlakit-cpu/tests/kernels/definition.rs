//! The arithmetic of dense attention for one query vector, written plainly, in the order of pairs and in
//! that of tiles. Scalar and AVX-512 BF16 kernels must give the bits of pairs; AVX2 and AVX-512 must too on
//! inputs without denormal numbers. AMX kernels must give the bits of tiles.

use std::ops::Range;

use mlakit_cpu::isa::Isa;
use mlakit_cpu::kernel::{BLOCK, LseBase};
use mlakit_cpu::numerics::{dot_pair, exp2, f32_to_bf16, log2};

use crate::common::f64_of;
use crate::dense_inputs::Case;

/// Output (F32) and base-2 log-sum-exp of a row and head over the keys of a request in `keys`.
pub fn by_definition(
    arithmetic: Arithmetic,
    case: &Case,
    place: [usize; 3],
    keys: Range<usize>,
) -> (Vec<f32>, f32) {
    let [request, row, head] = place;
    let width = case.shape.geometry.value_width;
    let query = case.query(row, head);
    let zeros = vec![0; case.shape.geometry.qk_width];
    let (mut max, mut sum, mut out) = (f32::NEG_INFINITY, 0.0_f32, vec![0.0_f32; width]);
    let (span, group) = (arithmetic.span(), arithmetic.group());
    let mut start = keys.start / span * span;
    while start < keys.end {
        // Whole groups; a key outside the range, or without a page, has a weight of 0.
        let begin = keys.start.max(start) / group * group;
        let block = begin..keys.end.min(start + span).next_multiple_of(group);
        let record = |key| keys.contains(&key).then(|| case.record(request, key)).flatten();
        let records: Vec<_> = block.clone().map(record).collect();
        let score = |record: &Option<Vec<u16>>| match record {
            None => f32::NEG_INFINITY,
            Some(record) => arithmetic.add(0.0, record, &query) * case.score_scale(),
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
        let weights: Vec<u16> = weights.into_iter().map(f32_to_bf16).collect();
        for (v, out) in out.iter_mut().enumerate() {
            let value = |record: &Option<Vec<u16>>| record.as_ref().unwrap_or(&zeros)[v];
            let values: Vec<u16> = records.iter().map(value).collect();
            *out = arithmetic.add(arithmetic.rescaled(*out, factor), &weights, &values);
        }
        start += span;
    }
    if sum == 0.0 {
        return (vec![0.0; width], f32::NEG_INFINITY);
    }
    let factor = case.kv_scale / sum;
    let lse = (f64::from(max) + log2(f64::from(sum))) as f32;
    let out = out.iter().map(|x| arithmetic.ended(*x) * factor).collect();
    (out, if sum.is_nan() { sum } else { lse })
}

/// The order of sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// One chain over pairs of neighbours.
    Pairs,
    /// Chunks of 32 products: the even ones, the odd ones, then their sum to the accumulator.
    Tiles,
}

impl Arithmetic {
    pub fn of(isa: Isa) -> Arithmetic {
        if isa == Isa::Amx { Arithmetic::Tiles } else { Arithmetic::Pairs }
    }

    /// Keys of which the maximum is taken at once, at multiples of as many positions.
    fn span(self) -> usize {
        match self {
            Arithmetic::Pairs => BLOCK,
            Arithmetic::Tiles => 4 * BLOCK,
        }
    }

    /// Keys that are multiplied together.
    fn group(self) -> usize {
        match self {
            Arithmetic::Pairs => 2,
            Arithmetic::Tiles => 32,
        }
    }

    /// `acc + sum a_i b_i`.
    fn add(self, acc: f32, a: &[u16], b: &[u16]) -> f32 {
        let chunks = a.chunks(self.group()).zip(b.chunks(self.group()));
        chunks.fold(acc, |acc, (a, b)| match self {
            Arithmetic::Pairs => dot_pair(acc, join(a[0], a[1]), join(b[0], b[1])),
            Arithmetic::Tiles => {
                let chain = |parity: usize| {
                    let products = (parity..a.len()).step_by(2).map(|i| (a[i], b[i]));
                    products.fold(0.0, |acc, (a, b)| dot_pair(acc, join(0, a), join(0, b)))
                };
                flush(flush(acc) + flush(chain(0) + chain(1)))
            }
        })
    }

    /// An accumulator after the maximum has grown.
    fn rescaled(self, out: f32, factor: f32) -> f32 {
        match self {
            Arithmetic::Pairs => out * factor,
            Arithmetic::Tiles if factor == 1.0 => out,
            Arithmetic::Tiles if (out * factor).abs() < f32::MIN_POSITIVE => 0.0,
            Arithmetic::Tiles => out * factor,
        }
    }

    /// An accumulator after the last key.
    fn ended(self, out: f32) -> f32 {
        match self {
            Arithmetic::Pairs => out,
            Arithmetic::Tiles => out + 0.0,
        }
    }
}

/// `x`, or the zero of its sign for a denormal one.
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0.0_f32.copysign(x) } else { x }
}

fn join(even: u16, odd: u16) -> u32 {
    u32::from(odd) << 16 | u32::from(even)
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
