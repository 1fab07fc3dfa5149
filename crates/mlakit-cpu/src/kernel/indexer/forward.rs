//! One work item, from page table to candidates.

use std::ops::Range;

use super::call::{IndexCall, IndexFormat, IndexItem, MAX_ITEM_ROWS};
use super::keys::Block;
use super::scratch::{Area, GROUP, Grain, area};
use super::tiles::Tiles;
use crate::kernel::amx::TileUnit;
use crate::kernel::engine::Engine;
use crate::kernel::tiles::{self, ScoreTile};
use crate::kernel::topk::{BLOCK, Candidates};

/// What multiplies keys with lanes.
pub(super) trait Multiply {
    /// The vectors that do the rest.
    type E: Engine;
    /// What queries and key rows are filled up to.
    const GRAIN: Grain;

    /// The vectors.
    fn engine(&self) -> Self::E;

    /// Whether it reads keys where they lie.
    fn in_place(call: &IndexCall) -> bool;

    /// Packs the item's queries.
    ///
    /// # Safety
    /// `area` was laid out for the item; its queries are readable.
    unsafe fn pack(&mut self, call: &IndexCall, item: &IndexItem, area: &Area);

    /// Dot products of the keys `keys` of a block with every lane. Keys that are not there get anything.
    ///
    /// # Safety
    /// The block's rows are readable; `area` holds packed queries.
    unsafe fn multiply(&mut self, call: &IndexCall, area: &Area, keys: Range<usize>, block: &Block);

    /// Ends its use.
    fn release(&mut self) {}
}

/// Computes one item on vectors: adds the keys that each row sees to its list.
///
/// # Safety
/// `base` is writable for the scratch bytes of the item's rows and used by nobody else; the pointers of
/// call and item are valid as their fields say.
#[inline(always)]
pub(in crate::kernel) unsafe fn forward<E: Engine>(
    e: E,
    call: &IndexCall,
    item: &IndexItem,
    lists: &mut [Candidates<'_>; MAX_ITEM_ROWS],
    base: *mut u8,
) {
    // SAFETY: the contract of this function.
    unsafe { forward_with(&mut Vectors(e), call, item, lists, base) }
}

/// The same on tiles.
///
/// # Safety
/// As [`forward`].
#[inline(always)]
pub(in crate::kernel) unsafe fn forward_on_tiles<U: TileUnit>(
    unit: &mut U,
    call: &IndexCall,
    item: &IndexItem,
    lists: &mut [Candidates<'_>; MAX_ITEM_ROWS],
    base: *mut u8,
) {
    // SAFETY: the contract of this function.
    unsafe { forward_with(&mut Tiles::new(unit), call, item, lists, base) }
}

/// # Safety
/// As [`forward`].
#[inline(always)]
unsafe fn forward_with<M: Multiply>(
    by: &mut M,
    call: &IndexCall,
    item: &IndexItem,
    lists: &mut [Candidates<'_>; MAX_ITEM_ROWS],
    base: *mut u8,
) {
    let e = by.engine();
    // SAFETY: the contract of this function.
    let area = unsafe { area::<M::E>(base, call, M::GRAIN, item.rows) };
    if item.scored {
        // SAFETY: as above.
        unsafe {
            prepare(call, item, &area);
            by.pack(call, item, &area);
        }
    }
    let mut next = item.keys.start;
    while next < item.keys.end {
        let keys = next..(next / BLOCK * BLOCK + BLOCK).min(item.keys.end);
        next = keys.end;
        // SAFETY: the page table covers the keys.
        let mut block = unsafe { Block::locate(call, item, keys.clone(), area.zeros) };
        if block.present == 0 {
            continue;
        }
        if item.scored {
            let within = keys.start - block.start..keys.end - block.start;
            // SAFETY: the keys that are there lie in pages of the pool.
            unsafe {
                if !M::in_place(call) {
                    block.make_rows(e, call, &area, within.clone());
                }
                by.multiply(call, &area, within, &block);
            }
        }
        for (row, list) in lists.iter_mut().enumerate().take(item.rows) {
            let seen = item.ends[row].saturating_sub(block.start).min(BLOCK);
            let visible = if seen == BLOCK { u64::MAX } else { (1 << seen) - 1 };
            let present = block.present & visible;
            if present == 0 {
                continue;
            }
            let mut scores = [0.0; BLOCK];
            if item.scored {
                // SAFETY: the area holds the dot products of the block's keys.
                unsafe { reduce(e, &area, row, (&block.factors, seen), &mut scores) };
            }
            list.push(e, &scores, present, block.start as i32);
        }
    }
    by.release();
}

/// Clears the row of zeros, and writes weights, 0 where a head only fills up.
///
/// # Safety
/// `area` was laid out for the item; its weights are readable.
unsafe fn prepare(call: &IndexCall, item: &IndexItem, area: &Area) {
    let size = area.size;
    // SAFETY: each count is the length of its region; a live lane has a weight.
    unsafe {
        area.zeros.write_bytes(0, size.row_bytes);
        for i in 0..GROUP {
            let last = vector_of(call, area, size.row_lanes - GROUP + i);
            *area.live.add(i) = f32::from(u8::from(last.is_some()));
        }
        for lane in 0..size.lanes {
            let vector = vector_of(call, area, lane);
            *area.weights.add(lane) = vector.map_or(0.0, |vector| *item.weights.add(vector));
        }
    }
}

/// The query vector of a lane, numbered `row * heads + head`; none for one that fills up.
#[inline(always)]
fn vector_of(call: &IndexCall, area: &Area, lane: usize) -> Option<usize> {
    let (row, head) = (lane / area.size.row_lanes, lane % area.size.row_lanes);
    (head < call.heads).then(|| row * call.heads + head)
}

/// Pair `pair` of the query of a lane; zeros for what fills up.
///
/// # Safety
/// The item's queries are readable.
#[inline(always)]
pub(super) unsafe fn query_word(
    call: &IndexCall,
    item: &IndexItem,
    area: &Area,
    (lane, pair): (usize, usize),
) -> u32 {
    let Some(vector) = vector_of(call, area, lane).filter(|_| 2 * pair < call.width) else {
        return 0;
    };
    let at = item.queries.wrapping_add(vector * call.width + 2 * pair);
    // SAFETY: the vector has the pair.
    let [even, odd] = unsafe { at.cast::<[u16; 2]>().read() };
    u32::from(odd) << 16 | u32::from(even)
}

/// Multiplies on vectors: a pair of a key goes to all lanes.
struct Vectors<E>(E);

impl<E: Engine> Multiply for Vectors<E> {
    type E = E;
    const GRAIN: Grain = Grain::Vectors;

    fn engine(&self) -> E {
        self.0
    }

    fn in_place(call: &IndexCall) -> bool {
        call.cache.format == IndexFormat::Bf16 && E::KEY_BYTES == 2
    }

    #[inline(always)]
    unsafe fn pack(&mut self, call: &IndexCall, item: &IndexItem, area: &Area) {
        let size = area.size;
        let mut lane = 0;
        while lane < size.lanes {
            let lanes = panel_lanes::<E>(size.lanes, lane);
            let panel = area.queries.wrapping_add(lane * size.pairs * E::HALVES);
            for column in 0..lanes {
                for pair in 0..size.pairs {
                    // SAFETY: the contract of this function.
                    let word = unsafe { query_word(call, item, area, (lane + column, pair)) };
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

    #[inline(always)]
    unsafe fn multiply(&mut self, _: &IndexCall, area: &Area, keys: Range<usize>, block: &Block) {
        // SAFETY: the contract of this function.
        unsafe { multiply(self.0, area, keys, &block.rows) }
    }
}

/// Lanes of the panel that begins at lane `lane`: two vectors, or one at the end.
#[inline(always)]
fn panel_lanes<E: Engine>(lanes: usize, lane: usize) -> usize {
    (2 * E::W).min(lanes - lane)
}

/// Bytes of packed queries that stay in the first-level cache while all keys of a block pass by.
const PASS_BYTES: usize = 16384;

/// Dot products of keys with every lane.
///
/// # Safety
/// `rows` names readable rows; `area` holds packed queries.
#[inline(always)]
unsafe fn multiply<E: Engine>(e: E, area: &Area, keys: Range<usize>, rows: &[*const u8; BLOCK]) {
    let size = area.size;
    let mut lane = 0;
    while lane < size.lanes {
        let lanes = panel_lanes::<E>(size.lanes, lane);
        let chunk = PASS_BYTES / (4 * E::HALVES * lanes);
        let mut pair = 0;
        while pair < size.pairs {
            let tile = ScoreTile {
                queries: area.queries.wrapping_add(lane * size.pairs * E::HALVES),
                pairs: pair..(pair + chunk).min(size.pairs),
                scores: area.dots.wrapping_add(lane),
                stride: size.lanes,
                fresh: pair == 0,
            };
            // SAFETY: the contract of this function.
            unsafe {
                if lanes == 2 * E::W {
                    multiply_keys::<E, 2>(e, tile, keys.clone(), rows);
                } else {
                    multiply_keys::<E, 1>(e, tile, keys.clone(), rows);
                }
            }
            pair += chunk;
        }
        lane += lanes;
    }
}

/// One pass over keys for one panel of queries.
///
/// # Safety
/// As [`tiles::scores`] for every key.
#[inline(always)]
unsafe fn multiply_keys<E: Engine, const VECS: usize>(
    e: E,
    mut tile: ScoreTile,
    keys: Range<usize>,
    rows: &[*const u8; BLOCK],
) {
    let (scores, mut key) = (tile.scores, keys.start);
    while key < keys.end {
        let left = keys.end - key;
        tile.scores = scores.wrapping_add(key * tile.stride);
        let at = rows[key..].as_ptr();
        // SAFETY: `left` keys remain.
        key += unsafe {
            if (VECS == 1 || E::REGISTERS >= 32) && left >= 12 && left != 16 {
                tiles::scores::<E, 12, VECS>(e, &tile, at);
                12
            } else if left >= 6 && left != 8 {
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
    }
}

/// The scores of the first `keys` keys of a block for one row: the weighted sum over its heads of dot
/// products that are not negative, times the key's factor.
///
/// # Safety
/// `area` holds the dot products of those keys; others may hold anything.
#[inline(always)]
unsafe fn reduce<E: Engine>(
    e: E,
    area: &Area,
    row: usize,
    (factors, keys): (&[f32; BLOCK], usize),
    scores: &mut [f32; BLOCK],
) {
    let size = area.size;
    let (zero, vectors) = (e.splat(0.0), GROUP / E::W);
    let weights = area.weights.wrapping_add(row * size.row_lanes);
    for key in 0..keys {
        let dots = area.dots.wrapping_add(key * size.lanes + row * size.row_lanes);
        let mut sums = [zero; 2];
        for group in (0..size.row_lanes).step_by(GROUP) {
            let last = group + GROUP == size.row_lanes;
            for (vector, sum) in sums.iter_mut().enumerate().take(vectors) {
                let lane = group + vector * E::W;
                // SAFETY: the row has the lanes.
                let (dot, weight) = unsafe { (e.load(dots.add(lane)), e.load(weights.add(lane))) };
                // NaN stays NaN, because it is the second operand.
                let mut part = e.max(zero, dot);
                if last {
                    // What fills up counts for nothing, whatever the key holds.
                    // SAFETY: the last group has all of it.
                    let live = unsafe { e.load(area.live.add(vector * E::W)) };
                    part = e.zero_below(part, live, 0.5);
                }
                *sum = e.fma(weight, part, *sum);
            }
        }
        let sum = if vectors == 2 { e.add(sums[0], sums[1]) } else { sums[0] };
        scores[key] = e.sum(sum) * factors[key];
    }
}
