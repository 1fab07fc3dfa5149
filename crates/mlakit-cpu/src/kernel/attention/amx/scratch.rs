//! The scratch of one worker in an attention call on tiles.

use super::super::call::{Geometry, Lanes};
use super::super::scratch::{Area, Cursor, LINE, Size};
use super::KEYS;
use crate::kernel::amx::{DEPTH, TILE, TILE_WORDS};
use crate::kernel::engine::Engine;
use crate::kernel::scalar::Scalar;

/// Lane tiles that are scored, weighed and multiplied together.
pub(in crate::kernel) const PANEL: usize = 2;

/// Where the regions of a worker's scratch are. Of the common [`Area`]
///
/// - `queries` holds B tiles `[lane tile, chunk of 32 elements]`,
/// - `scores` those of one panel, `[tile of the panel, KEYS, 16 lanes]`,
/// - `weights` A tiles of one panel, `[tile of the panel, KEYS / 32]`: row = lane, element = key,
/// - `outs` a row for each lane, those that fill up the last tile included,
/// - `key_rows` BF16 rows of a stretch of keys, where records are not read in place.
#[derive(Clone, Copy)]
pub(in crate::kernel) struct TileArea {
    pub(in crate::kernel) common: Area,
    /// B tiles `[KEYS / 32, value tile]` of the values of a stretch, where there are several lane tiles.
    values: *mut u32,
    /// Two slots of four B tiles.
    slots: *mut u32,
    /// Packed weights of 32 keys before they are transposed `[16 pairs, 16 lanes]`.
    pub(in crate::kernel) turned: *mut u32,
    pub(in crate::kernel) tiles: TileSize,
}

/// Sizes in tiles.
#[derive(Clone, Copy)]
pub(in crate::kernel) struct TileSize {
    /// Tiles of 16 lanes.
    pub(in crate::kernel) lanes: usize,
    /// Chunks of 32 elements of a query.
    pub(in crate::kernel) chunks: usize,
    /// Tiles of 16 value elements: a multiple of 4, of which the last may be unused.
    pub(in crate::kernel) values: usize,
}

impl TileArea {
    /// The query tile of a lane tile and chunk 0.
    #[inline(always)]
    pub(in crate::kernel) fn query_tiles(&self, lane_tile: usize) -> *mut u32 {
        self.common.queries.wrapping_add(lane_tile * self.tiles.chunks * TILE_WORDS)
    }

    /// The scores of key 0 for a tile of the panel.
    #[inline(always)]
    pub(in crate::kernel) fn scores(&self, of_panel: usize) -> *mut f32 {
        self.common.scores.wrapping_add(of_panel * KEYS * TILE)
    }

    /// The weights of a tile of the panel for 32 keys.
    #[inline(always)]
    pub(in crate::kernel) fn weights(&self, of_panel: usize, step: usize) -> *mut u32 {
        self.common.weights.wrapping_add((of_panel * (KEYS / DEPTH) + step) * TILE_WORDS)
    }

    /// The value tile of 32 keys.
    #[inline(always)]
    pub(in crate::kernel) fn values(&self, step: usize, tile: usize) -> *mut u32 {
        self.values.wrapping_add((step * self.tiles.values + tile) * TILE_WORDS)
    }

    /// Four value tiles of 32 keys, until those of the next but one are laid out.
    #[inline(always)]
    pub(in crate::kernel) fn slot(&self, step: usize) -> *mut u32 {
        self.slots.wrapping_add(step % 2 * 4 * TILE_WORDS)
    }

    /// The accumulators of a lane from a value element on.
    #[inline(always)]
    pub(in crate::kernel) fn outs(&self, lane: usize, element: usize) -> *mut f32 {
        self.common.outs.wrapping_add(lane * self.common.size.out_stride + element)
    }
}

/// Scratch bytes of one worker.
pub(in crate::kernel) fn bytes(geometry: Geometry, max_rows: usize, max_heads: usize) -> usize {
    let mut cursor = Cursor { base: std::ptr::null_mut(), used: 0 };
    lay_out(&mut cursor, geometry, max_rows, max_heads);
    // The base is aligned up to a line.
    cursor.used + LINE
}

/// The regions for one item in the scratch at `base`.
///
/// # Safety
/// `base` is writable for the [`bytes`] of at least the item's rows and heads.
pub(in crate::kernel) unsafe fn area(base: *mut u8, geometry: Geometry, lanes: &Lanes) -> TileArea {
    // SAFETY: `bytes` has a line more than the regions.
    let base = unsafe { base.add(base.align_offset(LINE)) };
    lay_out(&mut Cursor { base, used: 0 }, geometry, lanes.rows.len(), lanes.heads.len())
}

fn lay_out(cursor: &mut Cursor, geometry: Geometry, rows: usize, heads: usize) -> TileArea {
    const { assert!(Scalar::W == TILE) };
    let mut size = Size::new::<Scalar>(geometry, rows, heads);
    let tiles = TileSize {
        lanes: size.lane_stride / TILE,
        chunks: geometry.qk_width.div_ceil(DEPTH),
        values: geometry.value_width.div_ceil(4 * TILE) * 4,
    };
    // As in `Size::new`, an odd number of lines.
    size.out_stride = tiles.values * TILE + 16;
    let panel = PANEL.min(tiles.lanes);
    let common = Area {
        zeros: cursor.take(size.row_bytes),
        queries: cursor.take(tiles.lanes * tiles.chunks * TILE_WORDS),
        scores: cursor.take(panel * KEYS * TILE),
        weights: cursor.take(panel * KEYS / DEPTH * TILE_WORDS),
        outs: cursor.take(size.lane_stride * size.out_stride),
        max: cursor.take(size.lane_stride),
        sum: cursor.take(size.lane_stride),
        factor: cursor.take(size.lane_stride),
        lane_lo: cursor.take(size.lane_stride),
        lane_hi: cursor.take(size.lane_stride),
        row_lo: cursor.take(rows),
        row_hi: cursor.take(rows),
        key_rows: cursor.take(KEYS * size.row_bytes),
        size,
    };
    let staged = if tiles.lanes > 1 { KEYS / DEPTH * tiles.values } else { 0 };
    TileArea {
        common,
        values: cursor.take(staged * TILE_WORDS),
        slots: cursor.take(2 * 4 * TILE_WORDS),
        turned: cursor.take(TILE_WORDS),
        tiles,
    }
}
