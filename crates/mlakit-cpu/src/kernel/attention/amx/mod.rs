//! Attention on tiles: for each stretch of keys, scores of 16 keys times 16 lanes a tile, a vertical softmax
//! on vectors, and weights times values of 16 lanes times 16 value elements a tile. BF16 rows of keys are A
//! tiles, as they lie in their page or made of records.
//!
//! Lanes of a call share tiles, but not results: an element of a product depends on its own row and column.

pub(in crate::kernel) mod keys;
pub(in crate::kernel) mod scores;
pub(in crate::kernel) mod scratch;
pub(in crate::kernel) mod softmax;
pub(in crate::kernel) mod values;

use super::call::{Attention, BLOCK, Lanes};
use super::finish::finish;
use crate::kernel::amx::{TILE, TileUnit};
use crate::kernel::engine::Engine;

use keys::Stretch;
use scratch::TileArea;

/// Keys of a stretch, the grid on which a lane's maximum and sum are brought up to date.
pub(in crate::kernel) const KEYS: usize = 4 * BLOCK;

/// What parts of a stretch cost, in units that only their ratio matters of: prefetches are spread by them.
pub(in crate::kernel) mod units {
    /// Four products of tiles.
    pub(in crate::kernel) const FOUR_TILES: usize = 3;
    /// Four products of tiles, and laying out their values.
    pub(in crate::kernel) const FOUR_TILES_OF_ROWS: usize = 5;
    /// Weights of two keys for 16 lanes.
    pub(in crate::kernel) const WEIGHT_PAIR: usize = 1;
    /// Values of two keys.
    pub(in crate::kernel) const VALUE_PAIR: usize = 5;
}

/// Brings the state of every lane to "no key seen".
///
/// # Safety
/// `area` was laid out for the item.
pub(in crate::kernel) unsafe fn reset(area: &TileArea) {
    let (common, size) = (&area.common, area.common.size);
    // SAFETY: each count is the length of its region.
    unsafe {
        common.zeros.write_bytes(0, size.row_bytes);
        common.outs.write_bytes(0, size.lane_stride * size.out_stride);
        common.sum.write_bytes(0, size.lane_stride);
        common.lane_lo.write_bytes(0, size.lane_stride);
        common.lane_hi.write_bytes(0, size.lane_stride);
        for lane in 0..size.lane_stride {
            *common.max.add(lane) = f32::NEG_INFINITY;
        }
    }
}

/// The work of a stretch in [`units`].
pub(in crate::kernel) fn units_of(area: &TileArea, keys: &Stretch) -> usize {
    let (steps, tiles) = (keys.steps().len(), area.tiles);
    let pairs = units::WEIGHT_PAIR * TILE * tiles.lanes;
    let scores = tiles.chunks * 2 * tiles.lanes * units::FOUR_TILES / 4;
    let values = match tiles.lanes {
        1 => tiles.values * units::FOUR_TILES_OF_ROWS / 4,
        lanes => tiles.values * lanes * units::FOUR_TILES / 4 + units::VALUE_PAIR * TILE,
    };
    steps * (pairs + scores + values)
}

/// Writes the results of an item.
///
/// # Safety
/// `area` holds the item's finished state, and tiles are released; the item's output is writable.
#[inline(always)]
pub(in crate::kernel) unsafe fn finish_tiles<U: TileUnit>(
    unit: &U,
    attention: &Attention,
    lanes: &Lanes,
    area: &TileArea,
) {
    let e = unit.engine();
    // SAFETY: the contract of this function.
    unsafe {
        end_sums(e, area);
        finish(e, attention, lanes, &area.common);
    }
}

/// Turns a -0 that underflow left into +0: whether one stays depends on how many products added nothing.
///
/// # Safety
/// `area` holds the item's finished state.
#[inline(always)]
unsafe fn end_sums<E: Engine>(e: E, area: &TileArea) {
    let size = area.common.size;
    for lane in 0..size.lanes {
        for element in (0..area.tiles.values * TILE).step_by(E::W) {
            let at = area.outs(lane, element);
            // SAFETY: the accumulators have the lane and are whole tiles long.
            unsafe { e.store(at, e.add(e.load(at), e.splat(0.0))) };
        }
    }
}
