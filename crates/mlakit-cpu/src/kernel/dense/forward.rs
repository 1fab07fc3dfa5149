//! One work item, from page table to output.

use std::ops::Range;

use super::call::{DenseCall, DenseItem, KeyFormat};
use super::pages::{count_faults, locate};
use crate::kernel::attention::block::{Block, hide_absent, score_block};
use crate::kernel::attention::finish::{finish, nothing};
use crate::kernel::attention::queries::pack_queries;
use crate::kernel::attention::scratch::{self, Area, area, reset};
use crate::kernel::attention::softmax::softmax;
use crate::kernel::attention::values::{add_values, add_values_by_row};
use crate::kernel::attention::{BLOCK, Geometry, Lanes};
use crate::kernel::engine::Engine;

/// Computes one item.
///
/// # Safety
/// `base` is writable for the scratch bytes of the item's rows and heads and used by nobody else;
/// the call's and the item's pointers are valid as their fields say.
#[inline(always)]
pub(crate) unsafe fn forward<E: Engine>(
    e: E,
    call: &DenseCall<'_>,
    item: &DenseItem,
    base: *mut u8,
) {
    // SAFETY: the contract of this function.
    unsafe {
        count_faults(call, item);
        let (attention, lanes) = (&call.attention, &item.lanes);
        let made = !in_place::<E>(call.cache.format);
        let area = area::<E>(base, (attention.geometry, made), lanes);
        let hull = visible_hull(call, item, &area);
        if hull.is_empty() {
            nothing(attention, lanes);
            return;
        }
        reset(&area);
        pack_queries(e, attention, lanes, &area);
        let mut next = next_block(&hull, hull.start);
        let mut block = locate(call, item, next.clone(), area.zeros);
        while !next.is_empty() {
            next = next_block(&hull, next.end);
            let ahead = locate(call, item, next.clone(), area.zeros);
            add_visible(e, call, item, &area, [&block, &ahead]);
            block = ahead;
        }
        finish(e, attention, lanes, &area);
    }
}

/// Scratch bytes of one worker.
pub(crate) fn scratch_bytes<E: Engine>(
    geometry: Geometry,
    format: KeyFormat,
    max_rows: usize,
    max_heads: usize,
) -> usize {
    scratch::bytes::<E>((geometry, !in_place::<E>(format)), max_rows, max_heads)
}

/// Whether tiles read records of `format` where they lie.
const fn in_place<E: Engine>(format: KeyFormat) -> bool {
    matches!(format, KeyFormat::Bf16) && E::KEY_BYTES == 2
}

/// The keys of `hull` from `position` to the end of its block.
fn next_block(hull: &Range<usize>, position: usize) -> Range<usize> {
    let end = (position / BLOCK * BLOCK).saturating_add(BLOCK).min(hull.end);
    position.min(end)..end
}

/// Writes the keys that each row sees and returns the smallest range that holds them all.
///
/// # Safety
/// `area` was laid out for the item; the item's lengths are readable.
pub(super) unsafe fn visible_hull(
    call: &DenseCall<'_>,
    item: &DenseItem,
    area: &Area,
) -> Range<usize> {
    let (mut start, mut end) = (usize::MAX, 0);
    for row in 0..item.lanes.rows.len() {
        // SAFETY: the row is one of the item's.
        let keys = unsafe { item.keys_of_row(call, row) };
        if !keys.is_empty() {
            (start, end) = (start.min(keys.start), end.max(keys.end));
        }
        // SAFETY: the area has an entry for each row.
        unsafe {
            *area.row_lo.add(row) = keys.start as u64;
            *area.row_hi.add(row) = keys.end as u64;
        }
    }
    start.min(end)..end
}

/// Adds one block of keys to every lane that sees some of it. `blocks` are this one and the next,
/// whose records are prefetched.
///
/// # Safety
/// `area` was laid out and reset for the item; the records of both blocks are readable.
#[inline(always)]
unsafe fn add_visible<E: Engine>(
    e: E,
    call: &DenseCall<'_>,
    item: &DenseItem,
    area: &Area,
    blocks: [&Block; 2],
) {
    let block = blocks[0];
    // SAFETY: the area is the item's.
    let Some(uniform) = (unsafe { same_for_all_rows(item, area, block) }) else {
        return;
    };
    let mut rows = block.records;
    // SAFETY: the contract of this function; `rows` names key rows once they are made.
    unsafe {
        if !in_place::<E>(call.cache.format) {
            make_rows(e, call, area, block, &mut rows);
        }
        let keys = block.whole_pairs();
        let scale = call.attention.score_scale_log2;
        score_block(e, area, blocks, &rows);
        hide_absent(area, block, keys.clone());
        if uniform {
            softmax::<E, false>(e, area, keys.clone(), scale);
            let all = (0..area.size.lanes, keys.start / 2..keys.end / 2);
            add_values(e, &call.attention, area, all, rows.as_ptr());
        } else {
            bound_lanes(&item.lanes, area, block);
            softmax::<E, true>(e, area, keys, scale);
            add_values_by_row(e, (&call.attention, &item.lanes), area, &mut rows);
        }
    }
}

/// The keys of `block` that row `row` sees, counted from the block's start.
///
/// # Safety
/// `area` is the item's and has the row.
#[inline(always)]
unsafe fn keys_in_block(area: &Area, row: usize, block: &Block) -> Range<usize> {
    // SAFETY: the area has an entry for each row.
    let (lo, hi) = unsafe { (*area.row_lo.add(row), *area.row_hi.add(row)) };
    let inside = |position: u64| (position as usize).saturating_sub(block.start).min(BLOCK);
    inside(lo)..inside(hi)
}

/// Whether every row sees exactly the keys of the block; nothing where no row sees any.
///
/// # Safety
/// `area` is the item's.
unsafe fn same_for_all_rows(item: &DenseItem, area: &Area, block: &Block) -> Option<bool> {
    let (mut all, mut any) = (true, false);
    for row in 0..item.lanes.rows.len() {
        // SAFETY: the row is one of the item's.
        let keys = unsafe { keys_in_block(area, row, block) };
        any |= !keys.is_empty();
        all &= keys == block.keys;
    }
    any.then_some(all)
}

/// Makes key rows of the block's records and lets `rows` name them.
///
/// # Safety
/// The block's records are readable; `area` was laid out for their format.
#[inline(always)]
unsafe fn make_rows<E: Engine>(
    e: E,
    call: &DenseCall<'_>,
    area: &Area,
    block: &Block,
    rows: &mut [*const u8; BLOCK],
) {
    for key in block.keys.clone() {
        if block.present >> key & 1 == 0 {
            continue;
        }
        // SAFETY: the area has a key row for each key of a block.
        let row = unsafe { area.key_rows.add(key * area.size.row_bytes) };
        // SAFETY: the record is present and the key row as wide as a query.
        unsafe {
            match call.cache.format {
                KeyFormat::Bf16 => {
                    e.row_of_bf16(block.records[key], row, call.attention.geometry.qk_width)
                }
                KeyFormat::E4m3 => {
                    e.row_of_e4m3(block.records[key], row, call.attention.geometry.qk_width)
                }
            }
        }
        rows[key] = row;
    }
}

/// Writes the keys that each lane sees. Lanes that fill up the last vector see none.
///
/// # Safety
/// `area` is the item's.
unsafe fn bound_lanes(lanes: &Lanes, area: &Area, block: &Block) {
    let heads = lanes.heads.len();
    for row in 0..lanes.rows.len() {
        // SAFETY: the row is one of the item's.
        let keys = unsafe { keys_in_block(area, row, block) };
        for lane in row * heads..(row + 1) * heads {
            // SAFETY: the bounds have an entry for each lane.
            unsafe {
                *area.lane_lo.add(lane) = keys.start as i32;
                *area.lane_hi.add(lane) = keys.end as i32;
            }
        }
    }
}
