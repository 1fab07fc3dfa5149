//! Dense attention on tiles, in stretches of 256 absolute positions that some row sees. BF16 records are read
//! as they lie in their page; E4M3 records, pages of one token and widths that are no multiple of 32 are
//! copied to rows of BF16 first, once for all lanes.
//!
//! Rows of an item may see different keys: a key weighs 0 for lanes that do not see it, which adds +0 to
//! them. Where such a key is not finite, values are multiplied row by row instead.

use std::ops::Range;

use super::call::{DenseCall, DenseItem, KeyFormat};
use super::forward::visible_hull;
use super::pages::{count_faults, page_base, payload_bytes};
use crate::kernel::amx::{DEPTH, TILE, TileUnit};
use crate::kernel::attention::amx::keys::{Ahead, Stretch};
use crate::kernel::attention::amx::scores::{
    any_not_finite, hide_absent, pack_queries, score_panel,
};
use crate::kernel::attention::amx::scratch::{PANEL, TileArea, area};
use crate::kernel::attention::amx::softmax::{LaneTile, softmax};
use crate::kernel::attention::amx::values::{add_values, add_values_by_row, rescale, stage_values};
use crate::kernel::attention::amx::{KEYS, finish_tiles, reset, units_of};
use crate::kernel::attention::finish::nothing;
use crate::kernel::engine::Engine;

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
        let (attention, lanes) = (&call.attention, &item.lanes);
        let area = area(base, attention.geometry, lanes);
        let hull = visible_hull(call, item, &area.common);
        if hull.is_empty() {
            nothing(attention, lanes);
            return;
        }
        reset(&area);
        pack_queries(unit, attention, lanes, &area);
        unit.configure();
        let mut next = next_stretch(&hull, hull.start);
        let zeros = area.common.zeros.cast_const();
        let mut two = [Stretch::new(zeros), Stretch::new(zeros)];
        let [keys, ahead] = &mut two;
        let (mut keys, mut ahead) = (keys, ahead);
        locate(call, item, next.clone(), keys);
        while !next.is_empty() {
            next = next_stretch(&hull, next.end);
            locate(call, item, next.clone(), ahead);
            add_stretch(unit, (call, item), &area, keys, ahead);
            (keys, ahead) = (ahead, keys);
        }
        unit.release();
        finish_tiles(unit, attention, lanes, &area);
    }
}

/// The keys of `hull` from `position` to the end of its stretch.
fn next_stretch(hull: &Range<usize>, position: usize) -> Range<usize> {
    let end = (position / KEYS * KEYS).saturating_add(KEYS).min(hull.end);
    position.min(end)..end
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
    let attention = &call.attention;
    let ahead = &mut Ahead::new(next, payload_bytes(call), units_of(area, keys));
    // SAFETY: the contract of this function; `keys` names rows once they are made.
    unsafe {
        if !in_place(call) {
            make_rows(unit.engine(), call, area, keys);
        }
        let keys = &*keys;
        if area.tiles.lanes > 1 {
            stage_values(unit, attention.geometry, area, keys, ahead);
        }
        for first in (0..area.tiles.lanes).step_by(PANEL) {
            let panel = first..(first + PANEL).min(area.tiles.lanes);
            score_panel(unit, area, &panel, keys, ahead);
            let e = unit.engine();
            let by_row = !uniform && any_not_finite(e, area, panel.len(), keys);
            hide_absent(e, area, panel.len(), keys);
            for (of_panel, index) in panel.clone().enumerate() {
                let tile = LaneTile { index, of_panel };
                let work = (keys.steps(), attention.score_scale_log2);
                if uniform {
                    softmax::<U, false>(unit, area, tile, work, ahead);
                } else {
                    softmax::<U, true>(unit, area, tile, work, ahead);
                }
                rescale(e, area, index);
            }
            if by_row {
                add_values_by_row(unit, (attention, &item.lanes), area, (&panel, keys), ahead);
            } else {
                add_values(unit, attention.geometry, area, (&panel, keys), ahead);
            }
        }
    }
}

/// Writes the keys of the stretch that each lane sees and tells whether all see the same; nothing where no
/// lane sees any. Lanes that fill up the last tile see none.
///
/// # Safety
/// `area` is the item's.
unsafe fn bound_lanes(item: &DenseItem, area: &TileArea, keys: &Stretch) -> Option<bool> {
    let (mut all, mut any) = (true, false);
    let heads = item.lanes.heads.len();
    let inside = |at: u64| (at as usize).saturating_sub(keys.start).min(KEYS);
    for row in 0..item.lanes.rows.len() {
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

/// Looks up the keys of `keys` (absolute positions within one stretch).
///
/// # Safety
/// The item's page table is readable for its width, which covers `keys`.
#[inline(always)]
unsafe fn locate(
    call: &DenseCall<'_>,
    item: &DenseItem,
    keys: Range<usize>,
    stretch: &mut Stretch,
) {
    let cache = &call.cache;
    stretch.begin(keys.clone());
    let mut position = keys.start;
    while position < keys.end {
        let (page, token) = (position / cache.page_size, position % cache.page_size);
        let run = (cache.page_size - token).min(keys.end - position);
        // SAFETY: the table covers the position.
        let id = unsafe { *item.page_table.add(page) };
        if let Some(base) = page_base(cache, id) {
            let first = position - stretch.start;
            stretch.name_rows(first..first + run, (base, token), cache.record_bytes as usize);
        }
        position += run;
    }
}

/// Makes BF16 rows where tiles cannot read records in place.
///
/// # Safety
/// The records are readable; `area` was laid out for the call.
#[inline(always)]
unsafe fn make_rows<E: Engine>(e: E, call: &DenseCall<'_>, area: &TileArea, stretch: &mut Stretch) {
    let rows = (area.common.key_rows, area.common.size.row_bytes);
    for key in stretch.keys.clone() {
        if stretch.has(key) {
            let record = stretch.rows[key];
            stretch.name_row(key, rows);
            // SAFETY: the record is present and the area has a row for each key of a stretch.
            unsafe { make_row(e, call, record, stretch.rows[key].cast_mut()) };
        }
    }
}

/// Whether tiles read records where they lie: 16 neighbours lie in one page, and chunks of 32 elements end
/// where records do.
fn in_place(call: &DenseCall<'_>) -> bool {
    call.cache.format == KeyFormat::Bf16
        && call.cache.page_size.is_multiple_of(TILE)
        && call.attention.geometry.qk_width.is_multiple_of(DEPTH)
}

/// Makes the BF16 row of a record, filled up with zeros to whole chunks.
///
/// # Safety
/// `record` is readable for its payload, `row` writable for whole chunks.
#[inline(always)]
unsafe fn make_row<E: Engine>(e: E, call: &DenseCall<'_>, record: *const u8, row: *mut u8) {
    let width = call.attention.geometry.qk_width;
    let missing = width.next_multiple_of(DEPTH) - width;
    // SAFETY: the contract of this function.
    unsafe {
        match call.cache.format {
            KeyFormat::Bf16 => e.row_of_bf16(record, row, width),
            KeyFormat::E4m3 => e.row_of_e4m3(record, row, width),
        }
    }
    // SAFETY: the row is whole chunks long.
    unsafe { row.add(2 * width).write_bytes(0, 2 * missing) };
}
