//! The online softmax of one stretch and lane tile, vertical: a lane is a query vector, keys follow each
//! other.

use std::ops::Range;

use super::keys::Ahead;
use super::scratch::TileArea;
use super::units;
use crate::kernel::amx::{DEPTH, ROW_BYTES, TILE, TileUnit, rows_from};
use crate::kernel::engine::{Engine, exp2};

/// A lane tile: its number among all, and in its panel.
#[derive(Clone, Copy)]
pub(in crate::kernel) struct LaneTile {
    pub(in crate::kernel) index: usize,
    pub(in crate::kernel) of_panel: usize,
}

/// Running maxima that hide the latency of one.
const CHAINS: usize = 4;

/// Turns dot products into A tiles of BF16 weights, and updates each lane's running maximum and sum and the
/// factor by which its accumulated output must shrink (1 where the maximum stays).
///
/// With `MASKED`, keys outside a lane's range weigh nothing; a lane with an empty range keeps its state. The
/// order of a lane is that of `attention::softmax`: the previous sum is rescaled, then the unrounded weights are
/// added key by key. A weight of 0 changes nothing.
///
/// # Safety
/// `area` was laid out for the item and holds scores of the steps.
#[inline(always)]
pub(in crate::kernel) unsafe fn softmax<U: TileUnit, const MASKED: bool>(
    unit: &U,
    area: &TileArea,
    tile: LaneTile,
    (steps, scale): (Range<usize>, f32),
    ahead: &mut Ahead<'_>,
) {
    let e = unit.engine();
    let lane = tile.index * TILE;
    let column = Column { area, scores: area.scores(tile.of_panel), lane, scale: e.splat(scale) };
    let keys = steps.start * DEPTH..steps.end * DEPTH;
    // SAFETY: the area has state for the lanes.
    let (old, old_sum) =
        unsafe { (e.load(area.common.max.add(lane)), e.load(area.common.sum.add(lane))) };
    // SAFETY: the contract of this function.
    let max = unsafe { column.max::<U::E, MASKED>(e, old, keys) };
    // Without any visible key so far, exp2(-inf - 0) is 0 and no NaN arises.
    let base = e.finite_or_zero(max);
    let factor = exp2(e, e.sub(old, base));
    let mut sum = e.mul(old_sum, factor);
    for step in steps {
        for pair in 0..TILE {
            let key = step * DEPTH + 2 * pair;
            // SAFETY: the scores have both keys of the pair.
            let (even, odd) = unsafe {
                let even = column.score::<U::E, MASKED>(e, key);
                let odd = column.score::<U::E, MASKED>(e, key + 1);
                (exp2(e, e.sub(even, base)), exp2(e, e.sub(odd, base)))
            };
            sum = e.add(e.add(sum, even), odd);
            // SAFETY: the area has a tile of packed weights.
            unsafe { unit.store_weights(area.turned.add(pair * TILE), even, odd) };
            ahead.step(e, units::WEIGHT_PAIR);
        }
        let rows = rows_from(area.turned.cast(), ROW_BYTES);
        // SAFETY: 16 rows were just written; the weights have the tile.
        unsafe { unit.transpose(&rows, area.weights(tile.of_panel, step)) };
    }
    // SAFETY: the area has state for the lanes.
    unsafe {
        e.store(area.common.max.add(lane), max);
        e.store(area.common.sum.add(lane), sum);
        e.store(area.common.factor.add(lane), factor);
    }
}

/// The scores of one lane tile.
struct Column<'a, V> {
    area: &'a TileArea,
    scores: *mut f32,
    lane: usize,
    scale: V,
}

impl<V: Copy> Column<'_, V> {
    /// The scaled score of a key, -inf for the lanes that do not see it.
    ///
    /// # Safety
    /// The scores have the key, the bounds the lanes.
    #[inline(always)]
    unsafe fn score<E: Engine<V = V>, const MASKED: bool>(&self, e: E, key: usize) -> V {
        // SAFETY: the contract of this function.
        let score = e.mul(unsafe { e.load(self.scores.add(key * TILE)) }, self.scale);
        if !MASKED {
            return score;
        }
        let common = &self.area.common;
        let bounds = [common.lane_lo, common.lane_hi].map(|at| at.wrapping_add(self.lane));
        // SAFETY: the bounds have an entry for every lane of the stride.
        unsafe { e.mask_outside(score, key as i32, bounds[0], bounds[1]) }
    }

    /// The largest score, `old` included; NaN does not count.
    ///
    /// # Safety
    /// As [`Column::score`], for whole steps.
    #[inline(always)]
    unsafe fn max<E: Engine<V = V>, const MASKED: bool>(
        &self,
        e: E,
        old: V,
        keys: Range<usize>,
    ) -> V {
        let mut max = [old; CHAINS];
        for key in keys.step_by(CHAINS) {
            for (i, max) in max.iter_mut().enumerate() {
                // SAFETY: the contract of this function.
                *max = e.max(unsafe { self.score::<E, MASKED>(e, key + i) }, *max);
            }
        }
        e.max(e.max(max[0], max[1]), e.max(max[2], max[3]))
    }
}
