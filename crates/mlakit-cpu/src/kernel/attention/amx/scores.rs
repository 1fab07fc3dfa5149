//! Scores of a stretch for a panel of lane tiles: `S^T = K Q^T`. A tiles are keys, as they lie; B tiles are
//! the packed queries.

use std::ops::Range;

use super::super::call::{Attention, Lanes, QueryFormat};
use super::super::queries::{query_pair, query_vector};
use super::KEYS;
use super::keys::{Ahead, Stretch};
use super::scratch::TileArea;
use super::units;
use crate::kernel::amx::{DEPTH, ROW_BYTES, TILE, TILE_WORDS, TileUnit};
use crate::kernel::engine::Engine;

/// Chunks of a pass over keys for two lane tiles: 18 KiB of queries stay in the first-level cache while keys
/// pass by.
const PASS_CHUNKS: usize = 9;

/// Packs the item's queries into B tiles: row = pair, column = lane. Lanes that fill up the last tile, and
/// elements that fill up the last chunk, are zero.
///
/// # Safety
/// `area` was laid out for the item and its row of zeros is cleared; the queries are readable.
#[inline(always)]
pub(in crate::kernel) unsafe fn pack_queries<U: TileUnit>(
    unit: &U,
    attention: &Attention,
    item: &Lanes,
    area: &TileArea,
) {
    let width = attention.geometry.qk_width;
    let as_they_lie = attention.queries.format == QueryFormat::Bf16 && width.is_multiple_of(DEPTH);
    let vector = |lane: usize| query_vector(attention, item, lane);
    for lane_tile in 0..area.tiles.lanes {
        let lanes = lane_tile * TILE..area.common.size.lanes.min((lane_tile + 1) * TILE);
        for chunk in 0..area.tiles.chunks {
            let mut copies = [[0_u32; TILE]; TILE];
            let mut rows = [area.common.zeros.cast_const().cast::<u32>(); TILE];
            for (i, lane) in lanes.clone().enumerate() {
                if as_they_lie {
                    let at = vector(lane) * width + chunk * DEPTH;
                    rows[i] = attention.queries.base.wrapping_add(2 * at).cast();
                    continue;
                }
                let pairs = chunk * TILE..(width / 2).min((chunk + 1) * TILE);
                for (word, pair) in copies[i].iter_mut().zip(pairs) {
                    // SAFETY: the vector and the pair exist.
                    *word = unsafe { query_pair(attention, vector(lane), pair) };
                }
                rows[i] = copies[i].as_ptr();
            }
            let to = area.query_tiles(lane_tile).wrapping_add(chunk * TILE_WORDS);
            // SAFETY: each row has 16 words and the packed queries have the tile.
            unsafe { unit.transpose(&rows, to) };
        }
    }
}

/// Dot products of the stretch's keys with the lanes of a panel.
///
/// # Safety
/// The unit is configured; `keys` names readable rows; `area` holds packed queries.
#[inline(always)]
pub(in crate::kernel) unsafe fn score_panel<U: TileUnit>(
    unit: &mut U,
    area: &TileArea,
    panel: &Range<usize>,
    keys: &Stretch,
    ahead: &mut Ahead<'_>,
) {
    let steps = keys.steps();
    if panel.len() == 1 {
        let queries = area.query_tiles(panel.start);
        for quad in steps.start / 2..steps.end.div_ceil(2) {
            let groups: &[_; 4] = keys.groups[4 * quad..].first_chunk().expect("whole quads");
            let scores = area.scores(0).wrapping_add(4 * quad * TILE_WORDS);
            // SAFETY: the contract of this function; a stretch is whole quads.
            unsafe { four_by_one(unit, groups, (queries, area.tiles.chunks), scores, ahead) };
        }
        return;
    }
    let mut chunk = 0;
    while chunk < area.tiles.chunks {
        let pass = chunk..(chunk + PASS_CHUNKS).min(area.tiles.chunks);
        for step in steps.clone() {
            let groups: &[_; 2] = keys.groups[2 * step..].first_chunk().expect("whole steps");
            let tile = TwoByTwo {
                queries: [area.query_tiles(panel.start), area.query_tiles(panel.start + 1)],
                scores: [0, 1].map(|i| area.scores(i).wrapping_add(2 * step * TILE_WORDS)),
                chunks: pass.clone(),
            };
            // SAFETY: the contract of this function.
            unsafe { tile.run(unit, groups, ahead) };
        }
        chunk = pass.end;
    }
}

/// Scores of 64 keys for one lane tile.
///
/// # Safety
/// As [`score_panel`]; `scores` is writable for 64 keys.
#[inline(always)]
unsafe fn four_by_one<U: TileUnit>(
    unit: &mut U,
    groups: &[(*const u8, usize); 4],
    (queries, chunks): (*mut u32, usize),
    scores: *mut f32,
    ahead: &mut Ahead<'_>,
) {
    let e = unit.engine();
    // SAFETY: configured; rows, queries and scores are as long as the contract says.
    unsafe {
        unit.zero::<0>();
        unit.zero::<1>();
        unit.zero::<2>();
        unit.zero::<3>();
        for chunk in 0..chunks {
            let key = |group: usize| groups[group].0.wrapping_add(chunk * ROW_BYTES);
            unit.load::<6>(queries.add(chunk * TILE_WORDS).cast(), ROW_BYTES);
            unit.load::<4>(key(0), groups[0].1);
            unit.dot::<0, 4, 6>();
            unit.load::<5>(key(1), groups[1].1);
            unit.dot::<1, 5, 6>();
            unit.load::<7>(key(2), groups[2].1);
            unit.dot::<2, 7, 6>();
            unit.load::<4>(key(3), groups[3].1);
            unit.dot::<3, 4, 6>();
            ahead.step(e, units::FOUR_TILES);
        }
        unit.store::<0>(scores.cast(), ROW_BYTES);
        unit.store::<1>(scores.add(TILE_WORDS).cast(), ROW_BYTES);
        unit.store::<2>(scores.add(2 * TILE_WORDS).cast(), ROW_BYTES);
        unit.store::<3>(scores.add(3 * TILE_WORDS).cast(), ROW_BYTES);
    }
}

/// Scores of 32 keys for two lane tiles over some chunks.
struct TwoByTwo {
    queries: [*mut u32; 2],
    /// Of the first of the keys, a lane tile each.
    scores: [*mut f32; 2],
    /// After chunk 0 scores begin at what is stored.
    chunks: Range<usize>,
}

impl TwoByTwo {
    /// # Safety
    /// As [`score_panel`]; the scores are writable for 32 keys each.
    #[inline(always)]
    unsafe fn run<U: TileUnit>(
        &self,
        unit: &mut U,
        groups: &[(*const u8, usize); 2],
        ahead: &mut Ahead<'_>,
    ) {
        let e = unit.engine();
        let [[s00, s01], [s10, s11]] =
            self.scores.map(|s| [s.cast::<u8>(), s.wrapping_add(TILE_WORDS).cast::<u8>()]);
        // SAFETY: configured; rows, queries and scores are as long as the contract says.
        unsafe {
            if self.chunks.start == 0 {
                unit.zero::<0>();
                unit.zero::<1>();
                unit.zero::<2>();
                unit.zero::<3>();
            } else {
                unit.load::<0>(s00, ROW_BYTES);
                unit.load::<1>(s01, ROW_BYTES);
                unit.load::<2>(s10, ROW_BYTES);
                unit.load::<3>(s11, ROW_BYTES);
            }
            for chunk in self.chunks.clone() {
                let key = |group: usize| groups[group].0.wrapping_add(chunk * ROW_BYTES);
                let query = |i: usize| self.queries[i].wrapping_add(chunk * TILE_WORDS).cast();
                unit.load::<4>(key(0), groups[0].1);
                unit.load::<6>(query(0), ROW_BYTES);
                unit.dot::<0, 4, 6>();
                unit.load::<5>(key(1), groups[1].1);
                unit.dot::<1, 5, 6>();
                unit.load::<7>(query(1), ROW_BYTES);
                unit.dot::<2, 4, 7>();
                unit.dot::<3, 5, 7>();
                ahead.step(e, units::FOUR_TILES);
            }
            unit.store::<0>(s00, ROW_BYTES);
            unit.store::<1>(s01, ROW_BYTES);
            unit.store::<2>(s10, ROW_BYTES);
            unit.store::<3>(s11, ROW_BYTES);
        }
    }
}

/// Whether the score of some key with a record is not finite. An infinite or NaN element of a record makes
/// its scores so, whatever the query.
///
/// # Safety
/// `area` holds scores of the panel.
#[inline(always)]
pub(in crate::kernel) unsafe fn any_not_finite<E: Engine>(
    e: E,
    area: &TileArea,
    tiles: usize,
    keys: &Stretch,
) -> bool {
    let zero = e.splat(0.0);
    let mut trace = zero;
    for tile in 0..tiles {
        for key in keys.keys.clone().filter(|key| keys.has(*key)) {
            // SAFETY: the scores have the key.
            let score = unsafe { e.load(area.scores(tile).add(key * TILE)) };
            // 0 times anything finite is 0.
            trace = e.fma(score, zero, trace);
        }
    }
    e.sum(trace).is_nan()
}

/// Gives the keys of the stretch's steps that have no record, or that no row sees, a score of -inf.
///
/// # Safety
/// `area` is the item's.
#[inline(always)]
pub(in crate::kernel) unsafe fn hide_absent<E: Engine>(
    e: E,
    area: &TileArea,
    tiles: usize,
    keys: &Stretch,
) {
    let steps = keys.steps();
    let hidden = e.splat(f32::NEG_INFINITY);
    for key in steps.start * DEPTH..steps.end * DEPTH {
        debug_assert!(key < KEYS);
        if !keys.has(key) {
            for tile in 0..tiles {
                // SAFETY: the scores have a row for each key of a stretch.
                unsafe { e.store(area.scores(tile).add(key * TILE), hidden) };
            }
        }
    }
}
