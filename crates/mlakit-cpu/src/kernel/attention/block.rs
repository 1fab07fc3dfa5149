//! A block of keys: where its records lie, and its scores with every lane.

use std::ops::Range;

use super::call::BLOCK;
use super::queries::panel_lanes;
use super::scratch::Area;
use crate::kernel::engine::Engine;
use crate::kernel::tiles::{self, ScoreTile};

/// The records of one block of keys.
pub(in crate::kernel) struct Block {
    /// The position of key 0 on the grid of blocks.
    pub(in crate::kernel) start: usize,
    /// Keys that some row of the item sees, counted from `start`; others are not looked up.
    pub(in crate::kernel) keys: Range<usize>,
    /// Addresses of records; `nowhere` where a key was not looked up or has none.
    pub(in crate::kernel) records: [*const u8; BLOCK],
    /// Bit `j` is set where key `j` has a record.
    pub(in crate::kernel) present: u64,
    /// Bytes of a record that are read.
    pub(in crate::kernel) record_bytes: usize,
}

impl Block {
    /// No keys.
    #[inline(always)]
    pub(in crate::kernel) fn new(nowhere: *const u8, record_bytes: usize) -> Block {
        Block { start: 0, keys: 0..0, records: [nowhere; BLOCK], present: 0, record_bytes }
    }

    /// The keys in whole pairs; the key that completes one at an odd end reads as zeros.
    #[inline(always)]
    pub(in crate::kernel) fn whole_pairs(&self) -> Range<usize> {
        self.keys.start / 2 * 2..self.keys.end.next_multiple_of(2)
    }
}

/// Dot products of the block's keys with every lane.
///
/// # Safety
/// `rows` names readable rows; `area` holds packed queries.
#[inline(always)]
pub(in crate::kernel) unsafe fn score_block<E: Engine>(
    e: E,
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
            let ahead = first_pass.then_some(blocks[1]);
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

/// One pass over the keys of a block for one panel of queries. `ahead` is the block to prefetch.
///
/// # Safety
/// As [`tiles::scores`] for every key.
#[inline(always)]
unsafe fn score_keys<E: Engine, const VECS: usize>(
    e: E,
    mut tile: ScoreTile,
    keys: Range<usize>,
    rows: &[*const u8; BLOCK],
    ahead: Option<&Block>,
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
        if let Some(block) = ahead {
            // A few records a tile: a burst of a whole block would overflow the miss buffers.
            prefetch(e, block, key..key + done);
        }
        key += done;
    }
    if let Some(block) = ahead {
        prefetch(e, block, keys.end..BLOCK);
    }
}

/// Asks for the records of some keys.
#[inline(always)]
fn prefetch<E: Engine>(e: E, block: &Block, keys: Range<usize>) {
    for key in keys {
        if block.present >> key & 1 == 1 {
            for line in (0..block.record_bytes).step_by(64) {
                e.prefetch(block.records[key].wrapping_add(line));
            }
        }
    }
}

/// Gives keys of `keys` that have no record, or that only complete a pair, a score of -inf.
///
/// # Safety
/// `area` was laid out for the item.
pub(in crate::kernel) unsafe fn hide_absent(area: &Area, block: &Block, keys: Range<usize>) {
    for key in keys {
        if block.present >> key & 1 == 0 {
            for lane in 0..area.size.lane_stride {
                // SAFETY: the scores have a row for each key of a block.
                unsafe { *area.scores.add(key * area.size.lane_stride + lane) = f32::NEG_INFINITY };
            }
        }
    }
}
