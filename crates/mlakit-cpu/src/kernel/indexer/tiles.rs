//! Dot products of keys and lanes on tiles: keys are A tiles, 16 of them 32 elements wide, queries are B
//! tiles of 16 lanes. A step is 32 keys times 32 lanes: four products for four loads.

use std::ops::Range;

use super::call::{IndexCall, IndexFormat, IndexItem};
use super::forward::{Multiply, query_word};
use super::keys::Block;
use super::scratch::{Area, Grain};
use crate::kernel::amx::{DEPTH, ROW_BYTES, TILE, TILE_WORDS, TileUnit};
use crate::kernel::topk::BLOCK;

/// Multiplies on the tiles of a unit.
pub(super) struct Tiles<'u, U>(&'u mut U);

impl<'u, U: TileUnit> Tiles<'u, U> {
    /// Takes the unit's registers into use.
    pub(super) fn new(unit: &'u mut U) -> Self {
        unit.configure();
        Self(unit)
    }
}

/// Keys of 16 rows: the first, and the bytes from one to the next.
type Group = (*const u8, usize);

impl<U: TileUnit> Multiply for Tiles<'_, U> {
    type E = U::E;
    const GRAIN: Grain = Grain::Tiles;

    fn engine(&self) -> U::E {
        self.0.engine()
    }

    /// Whether 16 neighbours lie in one page, and chunks end where keys do.
    fn in_place(call: &IndexCall) -> bool {
        call.cache.format == IndexFormat::Bf16
            && call.width.is_multiple_of(DEPTH)
            && call.cache.page_size.is_multiple_of(TILE)
    }

    /// B tiles, chunk after chunk for each 16 lanes: row = pair, column = lane.
    #[inline(always)]
    unsafe fn pack(&mut self, call: &IndexCall, item: &IndexItem, area: &Area) {
        let size = area.size;
        for lane in 0..size.lanes {
            let tiles = area.queries.wrapping_add(lane / TILE * TILE * size.pairs);
            for pair in 0..size.pairs {
                let at = pair / TILE * TILE_WORDS + pair % TILE * TILE + lane % TILE;
                // SAFETY: the item's queries are readable, and the tile is one of the packed queries'.
                unsafe { *tiles.add(at) = query_word(call, item, area, (lane, pair)) };
            }
        }
    }

    #[inline(always)]
    unsafe fn multiply(
        &mut self,
        call: &IndexCall,
        area: &Area,
        keys: Range<usize>,
        block: &Block,
    ) {
        let groups = self.groups(call, area, &keys, block);
        let lane_tiles = area.size.lanes / TILE;
        for step in 0..keys.end.div_ceil(2 * TILE) {
            let groups = [groups[2 * step], groups[2 * step + 1]];
            let mut tile = 0;
            while tile < lane_tiles {
                let step = Step { area, groups, key: step * 2 * TILE, tile };
                // SAFETY: the unit is configured; rows, queries and results are as long as tiles are.
                unsafe {
                    if tile + 1 < lane_tiles {
                        step.two_by_two(self.0);
                    } else {
                        step.two_by_one(self.0);
                    }
                }
                tile += 2;
            }
        }
    }

    fn release(&mut self) {
        self.0.release();
    }
}

impl<U: TileUnit> Tiles<'_, U> {
    /// The keys of a block in groups. Keys that are not there read as anything, or as zeros.
    #[inline(always)]
    fn groups(
        &self,
        call: &IndexCall,
        area: &Area,
        keys: &Range<usize>,
        block: &Block,
    ) -> [Group; BLOCK / TILE] {
        let mut groups = [(area.zeros.cast_const(), 0); BLOCK / TILE];
        for (i, group) in groups.iter_mut().enumerate().take(keys.end.div_ceil(TILE)) {
            let first = i * TILE;
            if !Self::in_place(call) {
                let row = area.key_rows.wrapping_add(first * area.size.row_bytes);
                *group = (row.cast_const(), area.size.row_bytes);
            } else if block.present >> first & 1 == 1 {
                // All 16 are in the page, those behind the last key too.
                *group = (block.rows[first], call.cache.data_stride);
            }
        }
        groups
    }
}

/// 32 keys and up to 32 lanes.
struct Step<'s> {
    area: &'s Area,
    groups: [Group; 2],
    /// The first key, counted from the block's start.
    key: usize,
    /// The first 16 lanes.
    tile: usize,
}

impl Step<'_> {
    fn chunks(&self) -> usize {
        self.area.size.pairs / TILE
    }

    /// The B tile of a chunk for one of the step's groups of lanes.
    fn queries(&self, lanes: usize, chunk: usize) -> *const u8 {
        let first = (self.tile + lanes) * TILE * self.area.size.pairs;
        self.area.queries.wrapping_add(first + chunk * TILE_WORDS).cast_const().cast()
    }

    /// Where the products of a group of keys and one of lanes go.
    fn dots(&self, keys: usize, lanes: usize) -> *mut u8 {
        let first = (self.key + keys * TILE) * self.area.size.lanes;
        self.area.dots.wrapping_add(first + (self.tile + lanes) * TILE).cast()
    }

    /// # Safety
    /// The unit is configured; the groups are readable for 16 rows of all chunks, the area holds packed
    /// queries.
    #[inline(always)]
    unsafe fn two_by_two<U: TileUnit>(&self, unit: &mut U) {
        let stride = self.area.size.lanes * 4;
        // SAFETY: the contract of this function; the dot products have a row for each key of a block.
        unsafe {
            unit.zero::<0>();
            unit.zero::<1>();
            unit.zero::<2>();
            unit.zero::<3>();
            for chunk in 0..self.chunks() {
                let keys = |i: usize| self.groups[i].0.wrapping_add(chunk * ROW_BYTES);
                unit.load::<4>(keys(0), self.groups[0].1);
                unit.load::<6>(self.queries(0, chunk), ROW_BYTES);
                unit.dot::<0, 4, 6>();
                unit.load::<5>(keys(1), self.groups[1].1);
                unit.dot::<1, 5, 6>();
                unit.load::<7>(self.queries(1, chunk), ROW_BYTES);
                unit.dot::<2, 4, 7>();
                unit.dot::<3, 5, 7>();
            }
            unit.store::<0>(self.dots(0, 0), stride);
            unit.store::<1>(self.dots(1, 0), stride);
            unit.store::<2>(self.dots(0, 1), stride);
            unit.store::<3>(self.dots(1, 1), stride);
        }
    }

    /// # Safety
    /// As [`Step::two_by_two`].
    #[inline(always)]
    unsafe fn two_by_one<U: TileUnit>(&self, unit: &mut U) {
        let stride = self.area.size.lanes * 4;
        // SAFETY: the contract of this function; the dot products have a row for each key of a block.
        unsafe {
            unit.zero::<0>();
            unit.zero::<1>();
            for chunk in 0..self.chunks() {
                let keys = |i: usize| self.groups[i].0.wrapping_add(chunk * ROW_BYTES);
                unit.load::<6>(self.queries(0, chunk), ROW_BYTES);
                unit.load::<4>(keys(0), self.groups[0].1);
                unit.dot::<0, 4, 6>();
                unit.load::<5>(keys(1), self.groups[1].1);
                unit.dot::<1, 5, 6>();
            }
            unit.store::<0>(self.dots(0, 0), stride);
            unit.store::<1>(self.dots(1, 0), stride);
        }
    }
}
