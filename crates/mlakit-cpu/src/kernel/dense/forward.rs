//! One work item, from page table to output.

use std::ops::Range;

use super::call::{BLOCK, DenseCall, DenseItem, KeyFormat, QueryFormat};
use super::finish::{finish, nothing};
use super::pages::{Block, count_faults, payload_bytes};
use super::scratch::{Area, area, in_place};
use super::softmax::softmax;
use super::values::{add_values, add_values_by_row};
use crate::e4m3;
use crate::kernel::engine::Engine;
use crate::kernel::tiles::{self, ScoreTile};
use crate::numerics::bf16_to_f32;

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
        let area = area::<E>(base, call, item.rows.len(), item.heads.len());
        let hull = visible_hull(call, item, &area);
        if hull.is_empty() {
            nothing(call, item);
            return;
        }
        reset(&area);
        pack_queries(e, call, item, &area);
        let mut next = next_block(&hull, hull.start);
        let mut block = Block::locate(&call.cache, item, next.clone(), area.zeros);
        while !next.is_empty() {
            next = next_block(&hull, next.end);
            let ahead = Block::locate(&call.cache, item, next.clone(), area.zeros);
            add_block(e, call, item, &area, [&block, &ahead]);
            block = ahead;
        }
        finish(e, call, item, &area);
    }
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
    for row in 0..item.rows.len() {
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

/// Brings the state of every lane to "no key seen".
///
/// # Safety
/// `area` was laid out for the item.
unsafe fn reset(area: &Area) {
    let size = area.size;
    // SAFETY: each count is the length of its region.
    unsafe {
        area.zeros.write_bytes(0, size.row_bytes);
        area.outs.write_bytes(0, size.lanes * size.out_stride);
        area.sum.write_bytes(0, size.lane_stride);
        area.lane_lo.write_bytes(0, size.lane_stride);
        area.lane_hi.write_bytes(0, size.lane_stride);
        for lane in 0..size.lane_stride {
            *area.max.add(lane) = f32::NEG_INFINITY;
        }
    }
}

/// Lanes of the panel that begins at lane `lane`: two vectors, or one at the end.
#[inline(always)]
fn panel_lanes<E: Engine>(lane_stride: usize, lane: usize) -> usize {
    (2 * E::W).min(lane_stride - lane)
}

/// Packs the item's queries: for each panel of lanes, for each pair and half, one word a lane.
/// Lanes that fill up the last vector get zeros.
///
/// # Safety
/// `area` was laid out for the item; the queries are readable.
#[inline(always)]
unsafe fn pack_queries<E: Engine>(_e: E, call: &DenseCall<'_>, item: &DenseItem, area: &Area) {
    let Area { size, .. } = *area;
    let (heads, pairs) = (call.geometry.heads, size.pairs);
    let mut lane = 0;
    while lane < size.lane_stride {
        let lanes = panel_lanes::<E>(size.lane_stride, lane);
        // SAFETY: the panel lies inside the packed queries.
        let panel = unsafe { area.queries.add(lane * pairs * E::HALVES) };
        for column in 0..lanes {
            let live = lane + column < size.lanes;
            let (row, head) =
                ((lane + column) / item.heads.len(), (lane + column) % item.heads.len());
            let vector = (item.rows.start + row) * heads + item.heads.start + head;
            for pair in 0..pairs {
                // SAFETY: the vector is one of the call's queries.
                let word = if live { unsafe { query_pair(call, vector, pair) } } else { 0 };
                for half in 0..E::HALVES {
                    let at = (pair * E::HALVES + half) * lanes + column;
                    // SAFETY: inside the panel.
                    unsafe { *panel.add(at) = E::pack(word, half) };
                }
            }
        }
        lane += lanes;
    }
}

/// Two neighbouring elements of a query vector as BF16.
///
/// # Safety
/// The vector and the pair exist.
#[inline(always)]
pub(super) unsafe fn query_pair(call: &DenseCall<'_>, vector: usize, pair: usize) -> u32 {
    let index = vector * call.geometry.qk_width + 2 * pair;
    // SAFETY: a BF16 query has two bytes an element.
    let bf16 = || unsafe { call.queries.base.cast::<u16>().add(index).cast::<[u16; 2]>().read() };
    let elements = match call.queries.format {
        QueryFormat::Bf16 => bf16(),
        QueryFormat::E4m3 => {
            // SAFETY: an E4M3 query has a byte an element.
            let codes = unsafe { call.queries.base.add(index).cast::<[u8; 2]>().read() };
            codes.map(e4m3::decode)
        }
        QueryFormat::Bf16AsE4m3 { q_scale } => {
            bf16().map(|x| e4m3::decode(e4m3::encode(bf16_to_f32(x) / q_scale)))
        }
    };
    u32::from(elements[1]) << 16 | u32::from(elements[0])
}

/// Adds one block of keys to every lane that sees some of it. `blocks` are this one and the next,
/// whose records are prefetched.
///
/// # Safety
/// `area` was laid out and reset for the item; the records of both blocks are readable.
#[inline(always)]
unsafe fn add_block<E: Engine>(
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
    // Whole pairs of keys; the key that completes one at an odd end reads as zeros.
    let keys = block.keys.start / 2 * 2..block.keys.end.next_multiple_of(2);
    // SAFETY: the contract of this function; `rows` names key rows once they are made.
    unsafe {
        if !in_place::<E>(call.cache.format) {
            make_rows(e, call, area, block, &mut rows);
        }
        score_block(e, call, area, blocks, &rows);
        hide_absent(area, block, keys.clone());
        if uniform {
            softmax::<E, false>(e, area, keys.clone(), call.score_scale_log2);
            let lanes = 0..area.size.lanes;
            add_values(e, call, area, lanes, keys.start / 2..keys.end / 2, rows.as_ptr());
        } else {
            bound_lanes(item, area, block);
            softmax::<E, true>(e, area, keys, call.score_scale_log2);
            add_values_by_row(e, call, item, area, &mut rows);
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
    for row in 0..item.rows.len() {
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
                KeyFormat::Bf16 => e.row_of_bf16(block.records[key], row, call.geometry.qk_width),
                KeyFormat::E4m3 => e.row_of_e4m3(block.records[key], row, call.geometry.qk_width),
            }
        }
        rows[key] = row;
    }
}

/// Dot products of the block's keys with every lane.
///
/// # Safety
/// `rows` names readable rows; `area` holds packed queries.
#[inline(always)]
unsafe fn score_block<E: Engine>(
    e: E,
    call: &DenseCall<'_>,
    area: &Area,
    blocks: [&Block; 2],
    rows: &[*const u8; BLOCK],
) {
    let Area { size, .. } = *area;
    let mut lane = 0;
    while lane < size.lane_stride {
        let lanes = panel_lanes::<E>(size.lane_stride, lane);
        // A chunk of the panel stays in the first-level cache while all keys pass by.
        let chunk = 16384 / (4 * E::HALVES * lanes);
        let mut pair = 0;
        while pair < size.pairs {
            let tile = ScoreTile {
                // SAFETY: the panel lies inside the packed queries.
                queries: unsafe { area.queries.add(lane * size.pairs * E::HALVES) },
                pairs: pair..(pair + chunk).min(size.pairs),
                // SAFETY: the first row of scores has the lane.
                scores: unsafe { area.scores.add(lane) },
                stride: size.lane_stride,
                fresh: pair == 0,
            };
            let first_pass = lane == 0 && pair == 0;
            let ahead = first_pass.then_some((blocks[1], payload_bytes(call)));
            // SAFETY: the contract of this function.
            unsafe {
                if lanes == 2 * E::W {
                    score_keys::<E, 2>(e, tile, blocks[0].keys.clone(), rows, ahead);
                } else {
                    score_keys::<E, 1>(e, tile, blocks[0].keys.clone(), rows, ahead);
                }
            }
            pair += chunk;
        }
        lane += lanes;
    }
}

/// One pass over the keys of a block for one panel of queries. `ahead` is the block to prefetch and
/// the bytes of its records.
///
/// # Safety
/// As [`tiles::scores`] for every key.
#[inline(always)]
unsafe fn score_keys<E: Engine, const VECS: usize>(
    e: E,
    mut tile: ScoreTile,
    keys: Range<usize>,
    rows: &[*const u8; BLOCK],
    ahead: Option<(&Block, usize)>,
) {
    let scores = tile.scores;
    let mut key = keys.start;
    while key < keys.end {
        let left = keys.end - key;
        tile.scores = scores.wrapping_add(key * tile.stride);
        let at = rows[key..].as_ptr();
        // SAFETY: `left` keys remain.
        let done = unsafe {
            if VECS == 1 && E::REGISTERS >= 32 && left >= 16 {
                tiles::scores::<E, 16, VECS>(e, &tile, at);
                16
            } else if (VECS == 1 && left >= 12 && left != 16) || (E::REGISTERS >= 32 && left >= 12)
            {
                tiles::scores::<E, 12, VECS>(e, &tile, at);
                12
            } else if VECS == 1 && left >= 8 {
                tiles::scores::<E, 8, VECS>(e, &tile, at);
                8
            } else if left >= 6 {
                tiles::scores::<E, 6, VECS>(e, &tile, at);
                6
            } else if left >= 4 {
                tiles::scores::<E, 4, VECS>(e, &tile, at);
                4
            } else {
                tiles::scores::<E, 1, VECS>(e, &tile, at);
                1
            }
        };
        if let Some((block, bytes)) = ahead {
            // A few records a tile: a burst of a whole block would overflow the miss buffers.
            prefetch(e, block, key..key + done, bytes);
        }
        key += done;
    }
}

/// Asks for the records of some keys.
#[inline(always)]
fn prefetch<E: Engine>(e: E, block: &Block, keys: Range<usize>, bytes: usize) {
    for key in keys {
        if block.present >> key & 1 == 1 {
            for line in (0..bytes).step_by(64) {
                e.prefetch(block.records[key].wrapping_add(line));
            }
        }
    }
}

/// Gives keys of `keys` that have no record, or that only complete a pair, a score of -inf.
///
/// # Safety
/// `area` was laid out for the item.
unsafe fn hide_absent(area: &Area, block: &Block, keys: Range<usize>) {
    for key in keys {
        if block.present >> key & 1 == 0 {
            for lane in 0..area.size.lane_stride {
                // SAFETY: the scores have a row for each key of a block.
                unsafe { *area.scores.add(key * area.size.lane_stride + lane) = f32::NEG_INFINITY };
            }
        }
    }
}

/// Writes the keys that each lane sees. Lanes that fill up the last vector see none.
///
/// # Safety
/// `area` is the item's.
unsafe fn bound_lanes(item: &DenseItem, area: &Area, block: &Block) {
    let heads = item.heads.len();
    for row in 0..item.rows.len() {
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
