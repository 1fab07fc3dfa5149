//! Merging the partial results of splits.

use std::ops::Range;

use super::attention::{LseBase, OutFormat};
use super::engine::Engine;
use super::store::store_chunk;
use crate::numerics::{exp2, log2};

/// Partial results `[splits, rows, heads, width]` with log-sum-exps `[splits, rows, heads]`, merged
/// into BF16 `[rows, heads, width]` and F32 `[rows, heads]`.
///
/// A partial weighs `exp(lse)`. NaN and +inf count as -inf, unless `nan_spreads`; a partial of
/// weight 0 is not read. The
/// order of sums is that of split numbers. Where every partial is empty the output is 0 and the
/// log-sum-exp -inf, or the sink where it counts.
#[derive(Clone, Copy, Debug)]
pub struct MergeCall {
    /// Partials a row has, at most.
    pub splits: usize,
    /// Heads.
    pub heads: usize,
    /// Elements of an output.
    pub width: usize,
    /// Partial outputs.
    pub outs: *const u8,
    /// Their format.
    pub format: OutFormat,
    /// Their log-sum-exps.
    pub lses: *const f32,
    /// Base of those.
    pub lse_base: LseBase,
    /// (row, head) pairs from one split to the next: at least rows times heads.
    pub split_stride: usize,
    /// Natural-log logits `[heads]` that enter each denominator once, or null.
    pub sink: *const f32,
    /// Whether a partial whose log-sum-exp is NaN makes the result NaN: where the partials are those
    /// of one row's splits, a NaN says that a visible key is one.
    pub nan_spreads: bool,
    /// Whether the merged log-sum-exp counts the sink.
    pub sink_in_lse: bool,
    /// BF16 results.
    pub out: *mut u16,
    /// Merged log-sum-exps.
    pub lse: *mut f32,
    /// Base of those.
    pub out_lse_base: LseBase,
}

/// Merges the (row, head) pairs `lanes`, numbered `row * heads + head`.
///
/// # Safety
/// The call's pointers are valid as its fields say, for the given pairs.
#[inline(always)]
pub(super) unsafe fn merge<E: Engine>(e: E, call: &MergeCall, lanes: Range<usize>) {
    for lane in lanes {
        // SAFETY: the contract of this function.
        unsafe {
            let weights = weigh(call, lane);
            *call.lse.add(lane) = weights.lse;
            let to = call.out.add(lane * call.width);
            if weights.factor.is_nan() {
                for i in 0..call.width {
                    *to.add(i) = BF16_NAN;
                }
                continue;
            }
            if weights.factor == 0.0 {
                to.write_bytes(0, call.width);
                continue;
            }
            let mut offset = 0;
            while offset < call.width {
                // A weight is computed once a strip.
                offset += if call.width - offset >= 8 * E::W {
                    merge_strip::<E, 4>(e, call, lane, offset, &weights)
                } else {
                    merge_strip::<E, 1>(e, call, lane, offset, &weights)
                };
            }
        }
    }
}

/// NaN in BF16.
pub(super) const BF16_NAN: u16 = 0x7fc0;

/// What the partials of one (row, head) amount to.
struct Weights {
    /// The largest log-sum-exp, in the base of the partials.
    max: f32,
    /// Factor of the weighted sum: one over the denominator, 0 where the output is 0.
    factor: f32,
    /// The merged log-sum-exp.
    lse: f32,
}

/// A partial's log-sum-exp, -inf where it counts as empty.
///
/// # Safety
/// The partial exists.
#[inline(always)]
unsafe fn partial_lse(call: &MergeCall, split: usize, lane: usize) -> f32 {
    // SAFETY: the partial exists.
    let lse = unsafe { *call.lses.add(split * call.split_stride + lane) };
    if lse < f32::INFINITY { lse } else { f32::NEG_INFINITY }
}

/// The weight of a partial relative to the largest.
#[inline(always)]
fn weight(call: &MergeCall, lse: f32, max: f32) -> f32 {
    if lse == f32::NEG_INFINITY { 0.0 } else { exp2((lse - max) * log2_of(call.lse_base)) }
}

/// The base-2 logarithm of a base.
#[inline(always)]
fn log2_of(base: LseBase) -> f32 {
    match base {
        LseBase::Natural => std::f32::consts::LOG2_E,
        LseBase::Two => 1.0,
    }
}

/// # Safety
/// The partials of `lane` exist.
#[inline(always)]
unsafe fn weigh(call: &MergeCall, lane: usize) -> Weights {
    let mut max = f32::NEG_INFINITY;
    for split in 0..call.splits {
        // SAFETY: the partial exists.
        if call.nan_spreads && unsafe { *call.lses.add(split * call.split_stride + lane) }.is_nan()
        {
            return Weights { max: f32::NAN, factor: f32::NAN, lse: f32::NAN };
        }
        // SAFETY: the partial exists.
        max = max.max(unsafe { partial_lse(call, split, lane) });
    }
    if max == f32::NEG_INFINITY {
        let alone = call.sink_in_lse && !call.sink.is_null();
        // SAFETY: the sink has an entry for each head.
        let sink = || sink_alone(unsafe { *call.sink.add(lane % call.heads) }, call.out_lse_base);
        return Weights { max, factor: 0.0, lse: if alone { sink() } else { max } };
    }
    let mut sum = 0.0;
    for split in 0..call.splits {
        // SAFETY: the partial exists.
        sum += weight(call, unsafe { partial_lse(call, split, lane) }, max);
    }
    let max_log2 = match call.lse_base {
        LseBase::Natural => f64::from(max) * std::f64::consts::LOG2_E,
        LseBase::Two => f64::from(max),
    };
    let mut lse_log2 = max_log2 + log2(f64::from(sum));
    let mut denominator = sum;
    if !call.sink.is_null() {
        // SAFETY: the sink has an entry for each head.
        let sink = unsafe { *call.sink.add(lane % call.heads) };
        let (counted, lse_counted) = with_sink(max_log2, sum, sink);
        denominator = counted;
        if call.sink_in_lse {
            lse_log2 = lse_counted;
        }
    }
    let lse = match call.out_lse_base {
        LseBase::Natural => (lse_log2 * std::f64::consts::LN_2) as f32,
        LseBase::Two => lse_log2 as f32,
    };
    Weights { max, factor: 1.0 / denominator, lse }
}

/// A denominator relative to `2^max_log2` that counts a sink, and its base-2 logarithm.
#[inline(always)]
pub(super) fn with_sink(max_log2: f64, sum: f32, sink: f32) -> (f32, f64) {
    let sink_log2 = f64::from(sink) * std::f64::consts::LOG2_E;
    let denominator = sum + exp2_saturating((sink_log2 - max_log2) as f32);
    let all = max_log2 + log2(f64::from(denominator));
    (denominator, if denominator < f32::INFINITY { all } else { sink_log2 })
}

/// The log-sum-exp of a sink and nothing else.
pub(super) fn sink_alone(sink: f32, base: LseBase) -> f32 {
    match base {
        LseBase::Natural => sink,
        LseBase::Two => (f64::from(sink) * std::f64::consts::LOG2_E) as f32,
    }
}

/// `2^x`, infinite from 127 on: a sink that large leaves nothing of the rest.
#[inline(always)]
fn exp2_saturating(x: f32) -> f32 {
    if x >= 127.0 { f32::INFINITY } else { exp2(x) }
}

/// Merges `CHUNKS` chunks of `2 W` elements from `offset` on and returns the elements they hold;
/// the last chunk may reach beyond the width.
///
/// # Safety
/// The partials of `lane` exist, those with a weight hold values, and the output is writable.
#[inline(always)]
unsafe fn merge_strip<E: Engine, const CHUNKS: usize>(
    e: E,
    call: &MergeCall,
    lane: usize,
    offset: usize,
    weights: &Weights,
) -> usize {
    // Several chunks are all whole: a constant spares their loops the test.
    let left = |at: usize| if CHUNKS > 1 { usize::MAX } else { call.width - at };
    let mut acc = [[e.splat(0.0); 2]; CHUNKS];
    for split in 0..call.splits {
        // SAFETY: the partial exists.
        let weight = weight(call, unsafe { partial_lse(call, split, lane) }, weights.max);
        if weight == 0.0 {
            continue;
        }
        let weight = e.splat(weight);
        for (i, sums) in acc.iter_mut().enumerate() {
            let at = offset + i * 2 * E::W;
            let index = (split * call.split_stride + lane) * call.width + at;
            // SAFETY: the partial has the elements from `at` to the width.
            let chunk = unsafe { load_chunk(e, call, index, left(at)) };
            *sums = [e.fma(weight, chunk[0], sums[0]), e.fma(weight, chunk[1], sums[1])];
        }
    }
    let factor = e.splat(weights.factor);
    for (i, sums) in acc.into_iter().enumerate() {
        let at = offset + i * 2 * E::W;
        let chunk = [e.mul(sums[0], factor), e.mul(sums[1], factor)];
        // SAFETY: the output has the elements from `at` to the width.
        unsafe {
            let to = call.out.add(lane * call.width + at).cast();
            store_chunk(e, chunk, to, false, left(at));
        }
    }
    CHUNKS * 2 * E::W
}

/// Loads the partial output elements from `index` on, at most `width`, zeros beyond.
///
/// # Safety
/// The partial outputs have the elements.
#[inline(always)]
unsafe fn load_chunk<E: Engine>(e: E, call: &MergeCall, index: usize, width: usize) -> [E::V; 2] {
    // SAFETY: whole chunks are read in place, a part through a buffer of a whole one.
    unsafe {
        match call.format {
            OutFormat::F32 => {
                let from = call.outs.cast::<f32>().add(index);
                if width < 2 * E::W {
                    let mut whole = [0_f32; 32];
                    std::ptr::copy_nonoverlapping(from, whole.as_mut_ptr(), width);
                    let from = whole.as_ptr();
                    return [e.load(from), e.load(from.add(E::W))];
                }
                [e.load(from), e.load(from.add(E::W))]
            }
            OutFormat::Bf16 => {
                let from = call.outs.cast::<u16>().add(index);
                if width < 2 * E::W {
                    let mut whole = [0_u16; 32];
                    std::ptr::copy_nonoverlapping(from, whole.as_mut_ptr(), width);
                    let from = whole.as_ptr();
                    return [e.load_bf16(from), e.load_bf16(from.add(E::W))];
                }
                [e.load_bf16(from), e.load_bf16(from.add(E::W))]
            }
        }
    }
}
