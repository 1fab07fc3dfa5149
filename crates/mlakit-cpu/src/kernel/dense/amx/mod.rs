//! Dense attention on tiles: for each stretch of 256 absolute positions that some row sees, scores of 16
//! keys times 16 lanes a tile, a vertical softmax on vectors, and weights times values of 16 lanes times 16
//! value elements a tile. BF16 records are A tiles as they lie in their page; E4M3 records, pages of one
//! token and widths that are no multiple of 32 are copied to rows of BF16 first, once for all lanes.
//!
//! Lanes of a call share tiles, but not results: an element of a product depends on its own row and column.
//! Rows of an item may see different keys: a key weighs 0 for lanes that do not see it, which adds +0 to
//! them. Where such a key is not finite, values are multiplied row by row instead.

mod keys;
mod scores;
mod scratch;
mod softmax;
mod values;

use std::ops::Range;

use super::call::{BLOCK, DenseCall, DenseItem};
use super::finish::{finish, nothing};
use super::forward::visible_hull;
use super::pages::{count_faults, payload_bytes};
use crate::kernel::amx::{TILE, TileUnit};
use crate::kernel::engine::Engine;

use keys::{Ahead, Stretch, in_place};
use scores::{any_not_finite, hide_absent, pack_queries, score_panel};
use scratch::{PANEL, TileArea, area};
use softmax::{LaneTile, softmax};
use values::{add_values, add_values_by_row, rescale, stage_values};

pub(crate) use scratch::bytes as scratch_bytes;

/// Keys of a stretch, the grid on which a lane's maximum and sum are brought up to date.
const KEYS: usize = 4 * BLOCK;

/// What parts of a stretch cost, in units that only their ratio matters of: prefetches are spread by them.
mod units {
    /// Four products of tiles.
    pub(super) const FOUR_TILES: usize = 3;
    /// Four products of tiles, and laying out their values.
    pub(super) const FOUR_TILES_OF_ROWS: usize = 5;
    /// Weights of two keys for 16 lanes.
    pub(super) const WEIGHT_PAIR: usize = 1;
    /// Values of two keys.
    pub(super) const VALUE_PAIR: usize = 5;
}

/// Computes one item.
///
/// # Safety
/// `base` is writable for the scratch bytes of the item's rows and heads and used by nobody else;
/// the call's and the item's pointers are valid as their fields say.
#[inline(always)]
pub(crate) unsafe fn forward<U: TileUnit>(
    unit: &mut U,
    call: &DenseCall<'_>,
    item: &DenseItem,
    base: *mut u8,
) {
    const { assert!(U::E::W == TILE && U::E::HALVES == 1 && U::E::KEY_BYTES == 2) };
    // SAFETY: the contract of this function.
    unsafe {
        count_faults(call, item);
        let area = area(base, call.geometry, item.rows.len(), item.heads.len());
        let hull = visible_hull(call, item, &area.common);
        if hull.is_empty() {
            nothing(call, item);
            return;
        }
        reset(&area);
        pack_queries(unit, call, item, &area);
        unit.configure();
        let mut next = next_stretch(&hull, hull.start);
        let zeros = area.common.zeros.cast_const();
        let mut two = [Stretch::new(zeros), Stretch::new(zeros)];
        let [keys, ahead] = &mut two;
        let (mut keys, mut ahead) = (keys, ahead);
        keys.locate(call, item, next.clone());
        while !next.is_empty() {
            next = next_stretch(&hull, next.end);
            ahead.locate(call, item, next.clone());
            add_stretch(unit, (call, item), &area, keys, ahead);
            (keys, ahead) = (ahead, keys);
        }
        unit.release();
        end_sums(unit.engine(), &area);
        finish(unit.engine(), call, item, &area.common);
    }
}

/// The keys of `hull` from `position` to the end of its stretch.
fn next_stretch(hull: &Range<usize>, position: usize) -> Range<usize> {
    let end = (position / KEYS * KEYS).saturating_add(KEYS).min(hull.end);
    position.min(end)..end
}

/// Brings the state of every lane to "no key seen".
///
/// # Safety
/// `area` was laid out for the item.
unsafe fn reset(area: &TileArea) {
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

/// Adds one stretch of keys to every lane that sees some of it, while the records of the next are fetched.
///
/// # Safety
/// `area` was laid out and reset for the item, the unit is configured; the records of both are readable.
#[inline(always)]
unsafe fn add_stretch<U: TileUnit>(
    unit: &mut U,
    (call, item): (&DenseCall<'_>, &DenseItem),
    area: &TileArea,
    keys: &mut Stretch,
    next: &Stretch,
) {
    // SAFETY: the area is the item's.
    let Some(uniform) = (unsafe { bound_lanes(item, area, keys) }) else {
        return;
    };
    let ahead = &mut Ahead::new(next, payload_bytes(call), units_of(area, keys));
    // SAFETY: the contract of this function; `keys` names rows once they are made.
    unsafe {
        if !in_place(call) {
            keys.make_rows(unit.engine(), call, area);
        }
        let keys = &*keys;
        if area.tiles.lanes > 1 {
            stage_values(unit, call, area, keys, ahead);
        }
        for first in (0..area.tiles.lanes).step_by(PANEL) {
            let panel = first..(first + PANEL).min(area.tiles.lanes);
            score_panel(unit, area, &panel, keys, ahead);
            let e = unit.engine();
            let by_row = !uniform && any_not_finite(e, area, panel.len(), keys);
            hide_absent(e, area, panel.len(), keys);
            for (of_panel, index) in panel.clone().enumerate() {
                let tile = LaneTile { index, of_panel };
                let work = (keys.steps(), call.score_scale_log2);
                if uniform {
                    softmax::<U, false>(unit, area, tile, work, ahead);
                } else {
                    softmax::<U, true>(unit, area, tile, work, ahead);
                }
                rescale(e, area, index);
            }
            if by_row {
                add_values_by_row(unit, (call, item), area, (&panel, keys), ahead);
            } else {
                add_values(unit, call, area, (&panel, keys), ahead);
            }
        }
    }
}

/// The work of a stretch in [`units`].
fn units_of(area: &TileArea, keys: &Stretch) -> usize {
    let (steps, tiles) = (keys.steps().len(), area.tiles);
    let pairs = units::WEIGHT_PAIR * TILE * tiles.lanes;
    let scores = tiles.chunks * 2 * tiles.lanes * units::FOUR_TILES / 4;
    let values = match tiles.lanes {
        1 => tiles.values * units::FOUR_TILES_OF_ROWS / 4,
        lanes => tiles.values * lanes * units::FOUR_TILES / 4 + units::VALUE_PAIR * TILE,
    };
    steps * (pairs + scores + values)
}

/// Writes the keys of the stretch that each lane sees and tells whether all see the same; nothing where no
/// lane sees any. Lanes that fill up the last tile see none.
///
/// # Safety
/// `area` is the item's.
unsafe fn bound_lanes(item: &DenseItem, area: &TileArea, keys: &Stretch) -> Option<bool> {
    let (mut all, mut any) = (true, false);
    let heads = item.heads.len();
    let inside = |at: u64| (at as usize).saturating_sub(keys.start).min(KEYS);
    for row in 0..item.rows.len() {
        // SAFETY: the area has an entry for each row.
        let seen =
            unsafe { inside(*area.common.row_lo.add(row))..inside(*area.common.row_hi.add(row)) };
        any |= !seen.is_empty();
        all &= seen == keys.keys;
        for lane in row * heads..(row + 1) * heads {
            // SAFETY: the bounds have an entry for each lane.
            unsafe {
                *area.common.lane_lo.add(lane) = seen.start as i32;
                *area.common.lane_hi.add(lane) = seen.end as i32;
            }
        }
    }
    any.then_some(all)
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
