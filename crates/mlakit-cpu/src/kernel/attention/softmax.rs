//! The online softmax of one block, vertical: a lane is a query vector, keys follow each other.

use std::ops::Range;

use super::scratch::Area;
use crate::kernel::engine::{Engine, exp2};

/// Turns the block's dot products into packed BF16 weights, and updates each lane's running maximum
/// and sum and the factor by which its accumulated output must shrink (1 where the maximum stays).
///
/// `keys` begins and ends at even numbers. With `MASKED`, keys outside a lane's range weigh
/// nothing; a lane with an empty range keeps its state.
///
/// Order of a lane: scores are scaled; the maximum is taken with the previous one; the previous sum
/// is rescaled, then the unrounded weights are added key by key.
///
/// # Safety
/// `area` was laid out for the item and its scores are written for `keys` and every lane.
#[inline(always)]
pub(in crate::kernel) unsafe fn softmax<E: Engine, const MASKED: bool>(
    e: E,
    area: &Area,
    keys: Range<usize>,
    scale: f32,
) {
    let scale = e.splat(scale);
    let stride = area.size.lane_stride;
    for lane in (0..stride).step_by(E::W) {
        // SAFETY: `lane` begins a vector of lanes below the stride.
        let old = unsafe { e.load(area.max.add(lane)) };
        let mut max = old;
        for key in keys.clone() {
            // SAFETY: the scores have a row for the key.
            let at = unsafe { area.scores.add(key * stride + lane) };
            // SAFETY: as above.
            let mut score = e.mul(unsafe { e.load(at) }, scale);
            if MASKED {
                let (lo, hi) = (area.lane_lo.wrapping_add(lane), area.lane_hi.wrapping_add(lane));
                // SAFETY: the bounds have an entry for every lane of the stride.
                score = unsafe { e.mask_outside(score, key as i32, lo, hi) };
            }
            // SAFETY: the scores have a row for the key.
            unsafe { e.store(at, score) };
            max = e.max(score, max);
        }
        // Without any visible key so far, exp2(-inf - 0) is 0 and no NaN arises.
        let base = e.finite_or_zero(max);
        let factor = exp2(e, e.sub(old, base));
        // SAFETY: `lane` begins a vector of lanes below the stride.
        let mut sum = e.mul(unsafe { e.load(area.sum.add(lane)) }, factor);
        for pair in keys.start / 2..keys.end / 2 {
            // SAFETY: the scores have rows for both keys of the pair.
            let (even, odd) = unsafe {
                let even = e.load(area.scores.add(2 * pair * stride + lane));
                let odd = e.load(area.scores.add((2 * pair + 1) * stride + lane));
                (exp2(e, e.sub(even, base)), exp2(e, e.sub(odd, base)))
            };
            sum = e.add(e.add(sum, even), odd);
            // SAFETY: the weights have `HALVES` rows for the pair.
            unsafe {
                let to = area.weights.add(pair * E::HALVES * stride + lane);
                e.store_weights(to, stride, even, odd);
            }
        }
        // SAFETY: `lane` begins a vector of lanes below the stride.
        unsafe {
            e.store(area.max.add(lane), max);
            e.store(area.sum.add(lane), sum);
            e.store(area.factor.add(lane), factor);
        }
    }
}
