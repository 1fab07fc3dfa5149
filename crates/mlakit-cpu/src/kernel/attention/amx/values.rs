//! Weights times values of a stretch: `O += P V`. A tiles are weights, B tiles are values, whose pairs of
//! keys must be brought together. Where there are several lane tiles that is done once for all, before they
//! are multiplied; where there is one, 32 keys are laid out while those before them are multiplied, so that
//! values never leave the first-level cache.

use std::ops::Range;

use super::super::call::{Attention, Geometry, Lanes};
use super::KEYS;
use super::keys::{Ahead, Stretch};
use super::scratch::TileArea;
use super::units;
use crate::kernel::amx::{DEPTH, ROW_BYTES, TILE, TILE_WORDS, TileUnit};
use crate::kernel::engine::Engine;

/// Lays the values of the stretch out as B tiles: row = pair of keys, column = value element.
///
/// # Safety
/// `keys` names readable rows; `area` was laid out for the call and has several lane tiles.
#[inline(always)]
pub(in crate::kernel) unsafe fn stage_values<U: TileUnit>(
    unit: &U,
    geometry: Geometry,
    area: &TileArea,
    keys: &Stretch,
    ahead: &mut Ahead<'_>,
) {
    let e = unit.engine();
    for step in keys.steps() {
        for pair in 0..TILE {
            let key = step * DEPTH + 2 * pair;
            let rows = [keys.rows[key], keys.rows[key + 1]];
            for chunk in 0..geometry.value_width.div_ceil(DEPTH) {
                let from = rows.map(|row| row.wrapping_add(chunk * ROW_BYTES).cast());
                let to = area.values(step, 2 * chunk).wrapping_add(pair * TILE);
                // SAFETY: rows are whole chunks long; the values have both tiles.
                unsafe { unit.zip(from, [to, to.wrapping_add(TILE_WORDS)]) };
            }
            ahead.step(e, units::VALUE_PAIR);
        }
    }
}

/// Shrinks the accumulators of the lanes of a tile whose maximum has grown. Denormal results count as zero,
/// as they would in the next product: so a product that adds nothing changes nothing.
///
/// # Safety
/// `area` holds the factors of the lanes.
#[inline(always)]
pub(in crate::kernel) unsafe fn rescale<E: Engine>(e: E, area: &TileArea, lane_tile: usize) {
    for lane in lane_tile * TILE..(lane_tile + 1) * TILE {
        // SAFETY: the area has the lane.
        let factor = unsafe { *area.common.factor.add(lane) };
        if factor == 1.0 {
            continue;
        }
        let factor = e.splat(factor);
        for element in (0..area.tiles.values * TILE).step_by(E::W) {
            let at = area.outs(lane, element);
            // SAFETY: the accumulators have the lane and are whole tiles long.
            unsafe {
                let value = e.mul(e.load(at), factor);
                let size = e.max(value, e.sub(e.splat(0.0), value));
                e.store(at, e.zero_below(value, size, f32::MIN_POSITIVE));
            }
        }
    }
}

/// Adds weights times values to the accumulators of a panel.
///
/// # Safety
/// The unit is configured; `area` holds weights of the steps and, where there are several lane tiles, values.
#[inline(always)]
pub(in crate::kernel) unsafe fn add_values<U: TileUnit>(
    unit: &mut U,
    geometry: Geometry,
    area: &TileArea,
    (panel, keys): (&Range<usize>, &Stretch),
    ahead: &mut Ahead<'_>,
) {
    let lane = panel.start * TILE;
    if panel.len() == 2 {
        for tile in (0..area.tiles.values).step_by(2) {
            // SAFETY: the contract of this function.
            unsafe { two_by_two(unit, area, (lane, tile), keys.steps(), ahead) };
        }
        return;
    }
    for tile in (0..area.tiles.values).step_by(4) {
        let four = OneByFour {
            outs: area.outs(lane, tile * TILE),
            stride: 4 * area.common.size.out_stride,
            of_panel: 0,
            tile,
        };
        // SAFETY: the contract of this function; the accumulators have 16 lanes and four tiles.
        unsafe {
            if area.tiles.lanes == 1 {
                four.add_rows(unit, geometry, area, (&keys.rows, keys.steps()), ahead);
            } else {
                four.add_staged(unit, area, keys.steps(), ahead);
            }
        }
    }
}

/// Products for 16 lanes and 64 value elements.
struct OneByFour {
    /// The accumulators: 16 rows of 64 elements, `stride` bytes apart.
    outs: *mut f32,
    stride: usize,
    /// Whose weights: a tile of the panel.
    of_panel: usize,
    /// The first value tile.
    tile: usize,
}

impl OneByFour {
    /// Adds values that are staged.
    ///
    /// # Safety
    /// The unit is configured; `area` holds weights and values of the steps.
    #[inline(always)]
    unsafe fn add_staged<U: TileUnit>(
        &self,
        unit: &mut U,
        area: &TileArea,
        steps: Range<usize>,
        ahead: &mut Ahead<'_>,
    ) {
        let e = unit.engine();
        // SAFETY: the contract of this function.
        unsafe {
            self.begin(unit);
            for step in steps {
                self.multiply(
                    unit,
                    area.weights(self.of_panel, step),
                    area.values(step, self.tile),
                );
                ahead.step(e, units::FOUR_TILES);
            }
            self.end(unit);
        }
    }

    /// Adds values of `rows`, laying out those of the next 32 keys beside the products of these.
    ///
    /// # Safety
    /// The unit is configured; `area` holds weights of the steps; the rows are readable.
    #[inline(always)]
    unsafe fn add_rows<U: TileUnit>(
        &self,
        unit: &mut U,
        geometry: Geometry,
        area: &TileArea,
        (rows, steps): (&[*const u8; KEYS], Range<usize>),
        ahead: &mut Ahead<'_>,
    ) {
        let e = unit.engine();
        // Elements beyond the value's chunks stay what the slot held: their sums are not used.
        let chunks = geometry.value_width.div_ceil(DEPTH) - self.tile / 2;
        // SAFETY: the contract of this function.
        unsafe {
            self.begin(unit);
            self.lay_out(unit, rows, (steps.start, chunks), area.slot(steps.start));
            for step in steps.clone() {
                if step + 1 < steps.end {
                    self.lay_out(unit, rows, (step + 1, chunks), area.slot(step + 1));
                }
                self.multiply(unit, area.weights(self.of_panel, step), area.slot(step));
                ahead.step(e, units::FOUR_TILES_OF_ROWS);
            }
            self.end(unit);
        }
    }

    /// Lays out the B tiles of 32 keys: row = pair of keys, column = value element.
    ///
    /// # Safety
    /// The rows are readable; `slot` is writable for four tiles.
    #[inline(always)]
    unsafe fn lay_out<U: TileUnit>(
        &self,
        unit: &U,
        rows: &[*const u8; KEYS],
        (step, chunks): (usize, usize),
        slot: *mut u32,
    ) {
        let rows: &[_; DEPTH] = rows[step * DEPTH..].first_chunk().expect("whole steps");
        for pair in 0..TILE {
            for chunk in 0..chunks.min(2) {
                let offset = (self.tile / 2 + chunk) * ROW_BYTES;
                let from = [rows[2 * pair], rows[2 * pair + 1]];
                let from = from.map(|row| row.wrapping_add(offset).cast());
                let to = slot.wrapping_add(2 * chunk * TILE_WORDS + pair * TILE);
                // SAFETY: rows are whole chunks long; the slot has both tiles.
                unsafe { unit.zip(from, [to, to.wrapping_add(TILE_WORDS)]) };
            }
        }
    }

    /// The accumulators of value tile `i`.
    #[inline(always)]
    fn out(&self, i: usize) -> *mut u8 {
        self.outs.wrapping_add(i * TILE).cast()
    }

    /// # Safety
    /// The unit is configured; the accumulators are readable.
    #[inline(always)]
    unsafe fn begin<U: TileUnit>(&self, unit: &mut U) {
        // SAFETY: the contract of this function.
        unsafe {
            unit.load::<0>(self.out(0), self.stride);
            unit.load::<1>(self.out(1), self.stride);
            unit.load::<2>(self.out(2), self.stride);
            unit.load::<3>(self.out(3), self.stride);
        }
    }

    /// # Safety
    /// The unit is configured; there are weights and four value tiles of 32 keys.
    #[inline(always)]
    unsafe fn multiply<U: TileUnit>(&self, unit: &mut U, weights: *mut u32, values: *mut u32) {
        // SAFETY: the contract of this function.
        unsafe {
            unit.load::<6>(weights.cast(), ROW_BYTES);
            unit.load::<4>(values.cast(), ROW_BYTES);
            unit.dot::<0, 6, 4>();
            unit.load::<5>(values.add(TILE_WORDS).cast(), ROW_BYTES);
            unit.dot::<1, 6, 5>();
            unit.load::<7>(values.add(2 * TILE_WORDS).cast(), ROW_BYTES);
            unit.dot::<2, 6, 7>();
            unit.load::<4>(values.add(3 * TILE_WORDS).cast(), ROW_BYTES);
            unit.dot::<3, 6, 4>();
        }
    }

    /// # Safety
    /// The unit is configured; the accumulators are writable.
    #[inline(always)]
    unsafe fn end<U: TileUnit>(&self, unit: &mut U) {
        // SAFETY: the contract of this function.
        unsafe {
            unit.store::<0>(self.out(0), self.stride);
            unit.store::<1>(self.out(1), self.stride);
            unit.store::<2>(self.out(2), self.stride);
            unit.store::<3>(self.out(3), self.stride);
        }
    }
}

/// Adds to 32 lanes and 32 value elements.
///
/// # Safety
/// As [`add_values`]; the accumulators have the lanes and both value tiles.
#[inline(always)]
unsafe fn two_by_two<U: TileUnit>(
    unit: &mut U,
    area: &TileArea,
    (lane, tile): (usize, usize),
    steps: Range<usize>,
    ahead: &mut Ahead<'_>,
) {
    let e = unit.engine();
    let stride = 4 * area.common.size.out_stride;
    let out = |i: usize, j: usize| area.outs(lane + i * TILE, (tile + j) * TILE).cast::<u8>();
    // SAFETY: configured; accumulators, weights and values are as long as the contract says.
    unsafe {
        unit.load::<0>(out(0, 0), stride);
        unit.load::<1>(out(0, 1), stride);
        unit.load::<2>(out(1, 0), stride);
        unit.load::<3>(out(1, 1), stride);
        for step in steps {
            unit.load::<4>(area.weights(0, step).cast(), ROW_BYTES);
            unit.load::<6>(area.values(step, tile).cast(), ROW_BYTES);
            unit.dot::<0, 4, 6>();
            unit.load::<7>(area.values(step, tile + 1).cast(), ROW_BYTES);
            unit.dot::<1, 4, 7>();
            unit.load::<5>(area.weights(1, step).cast(), ROW_BYTES);
            unit.dot::<2, 5, 6>();
            unit.dot::<3, 5, 7>();
            ahead.step(e, units::FOUR_TILES);
        }
        unit.store::<0>(out(0, 0), stride);
        unit.store::<1>(out(0, 1), stride);
        unit.store::<2>(out(1, 0), stride);
        unit.store::<3>(out(1, 1), stride);
    }
}

/// Adds values row by row, with zeros in place of the keys that a row does not see: a NaN or an infinity of
/// such a key times a weight of 0 would be NaN. It is slow, and only needed where there is one.
///
/// # Safety
/// As [`add_values`]; the bounds of lanes are written.
#[inline(always)]
pub(in crate::kernel) unsafe fn add_values_by_row<U: TileUnit>(
    unit: &mut U,
    (attention, item): (&Attention, &Lanes),
    area: &TileArea,
    (panel, keys): (&Range<usize>, &Stretch),
    ahead: &mut Ahead<'_>,
) {
    let heads = item.heads.len();
    let lanes = panel.start * TILE..(panel.end * TILE).min(area.common.size.lanes);
    for row in lanes.start / heads..lanes.end.div_ceil(heads) {
        let first = row * heads;
        // SAFETY: the bounds have an entry for each lane.
        let seen = unsafe {
            *area.common.lane_lo.add(first) as usize..*area.common.lane_hi.add(first) as usize
        };
        if seen.is_empty() {
            continue;
        }
        let mut rows = [area.common.zeros.cast_const(); KEYS];
        rows[seen.clone()].copy_from_slice(&keys.rows[seen]);
        let own = first.max(lanes.start)..(first + heads).min(lanes.end);
        for lane_tile in own.start / TILE..own.end.div_ceil(TILE) {
            let begin = lane_tile * TILE;
            let kept = own.start.max(begin)..own.end.min(begin + TILE);
            let place = (begin, lane_tile - panel.start, kept);
            let work = (&rows, keys.steps());
            // SAFETY: the contract of this function.
            unsafe { add_some_lanes(unit, attention.geometry, area, place, (work, &mut *ahead)) };
        }
    }
}

/// Adds values to the lanes `kept` of the tile of lanes that begins at `first`.
///
/// # Safety
/// As [`add_values`].
#[inline(always)]
unsafe fn add_some_lanes<U: TileUnit>(
    unit: &mut U,
    geometry: Geometry,
    area: &TileArea,
    (first, of_panel, kept): (usize, usize, Range<usize>),
    (work, ahead): ((&[*const u8; KEYS], Range<usize>), &mut Ahead<'_>),
) {
    for tile in (0..area.tiles.values).step_by(4) {
        let mut copy = [[0.0_f32; 4 * TILE]; TILE];
        for lane in kept.clone() {
            let from = area.outs(lane, tile * TILE).cast::<[f32; 4 * TILE]>();
            // SAFETY: the accumulators have the lane and whole groups of tiles.
            copy[lane - first] = unsafe { from.read() };
        }
        let stride = size_of_val(&copy[0]);
        let four = OneByFour { outs: copy.as_mut_ptr().cast(), stride, of_panel, tile };
        // SAFETY: the copy is 16 lanes of 64 elements.
        unsafe { four.add_rows(unit, geometry, area, work.clone(), &mut *ahead) };
        for lane in kept.clone() {
            let to = area.outs(lane, tile * TILE).cast::<[f32; 4 * TILE]>();
            // SAFETY: as above.
            unsafe { to.write(copy[lane - first]) };
        }
    }
}
