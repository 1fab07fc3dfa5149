//! The scratch of one worker in a dense attention call.

use super::call::{BLOCK, DenseCall, Geometry, KeyFormat};
use crate::kernel::engine::Engine;

/// Where the regions of a worker's scratch are. Contents before an item are arbitrary: every word
/// that is read was written by the same item.
#[derive(Clone, Copy)]
pub(super) struct Area {
    /// A key row of zeros: what a key that nobody may see reads as.
    pub(super) zeros: *mut u8,
    /// Packed queries, panel after panel.
    pub(super) queries: *mut u32,
    /// Scores `[BLOCK, lane_stride]`.
    pub(super) scores: *mut f32,
    /// Packed softmax weights `[BLOCK / 2, HALVES, lane_stride]`.
    pub(super) weights: *mut u32,
    /// Output accumulators `[lanes, out_stride]`.
    pub(super) outs: *mut f32,
    /// Running maximum, sum and the last rescale factor, `lane_stride` each.
    pub(super) max: *mut f32,
    pub(super) sum: *mut f32,
    pub(super) factor: *mut f32,
    /// Keys of the block that each lane sees, `lane_stride` each.
    pub(super) lane_lo: *mut i32,
    pub(super) lane_hi: *mut i32,
    /// Keys that each row sees, `rows` each.
    pub(super) row_lo: *mut u64,
    pub(super) row_hi: *mut u64,
    /// Key rows of a block `[BLOCK, row_bytes]`, where records are not read in place.
    pub(super) key_rows: *mut u8,
    pub(super) size: Size,
}

/// Sizes that the regions follow from.
#[derive(Clone, Copy)]
pub(super) struct Size {
    /// Query vectors: rows times heads.
    pub(super) lanes: usize,
    /// Lanes rounded up to vectors.
    pub(super) lane_stride: usize,
    /// Pairs of a query.
    pub(super) pairs: usize,
    /// f32 from an output accumulator to the next.
    pub(super) out_stride: usize,
    /// Bytes from a key row to the next.
    pub(super) row_bytes: usize,
}

impl Size {
    pub(super) fn new<E: Engine>(geometry: Geometry, rows: usize, heads: usize) -> Size {
        let lanes = rows * heads;
        Size {
            lanes,
            lane_stride: lanes.next_multiple_of(E::W),
            pairs: geometry.qk_width / 2,
            // The extra line keeps accumulators of neighbouring lanes out of one cache set.
            out_stride: geometry.value_width.next_multiple_of(2 * E::W) + 16,
            // An odd number of lines: equal columns of the rows lie in different cache sets.
            row_bytes: (geometry.qk_width * E::KEY_BYTES).next_multiple_of(2 * LINE) + LINE,
        }
    }
}

/// Whether tiles read records of `format` where they lie.
pub(super) const fn in_place<E: Engine>(format: KeyFormat) -> bool {
    matches!(format, KeyFormat::Bf16) && E::KEY_BYTES == 2
}

/// Scratch bytes of one worker.
pub(crate) fn bytes<E: Engine>(
    geometry: Geometry,
    format: KeyFormat,
    max_rows: usize,
    max_heads: usize,
) -> usize {
    let size = Size::new::<E>(geometry, max_rows, max_heads);
    let mut cursor = Cursor { base: std::ptr::null_mut(), used: 0 };
    lay_out::<E>(&mut cursor, size, format, max_rows);
    // The base is aligned up to a line.
    cursor.used + LINE
}

/// The regions for one item in the scratch at `base`.
///
/// # Safety
/// `base` is writable for the [`bytes`] of at least the item's rows and heads.
pub(super) unsafe fn area<E: Engine>(
    base: *mut u8,
    call: &DenseCall<'_>,
    rows: usize,
    heads: usize,
) -> Area {
    let size = Size::new::<E>(call.geometry, rows, heads);
    // SAFETY: `bytes` has a line more than the regions.
    let base = unsafe { base.add(base.align_offset(LINE)) };
    let mut cursor = Cursor { base, used: 0 };
    lay_out::<E>(&mut cursor, size, call.cache.format, rows)
}

/// Alignment of regions: a cache line.
pub(super) const LINE: usize = 64;

/// Hands out regions one after another.
pub(super) struct Cursor {
    pub(super) base: *mut u8,
    pub(super) used: usize,
}

impl Cursor {
    pub(super) fn take<T>(&mut self, count: usize) -> *mut T {
        let region = self.base.wrapping_add(self.used).cast();
        self.used += (count * size_of::<T>()).next_multiple_of(LINE);
        region
    }
}

fn lay_out<E: Engine>(cursor: &mut Cursor, size: Size, format: KeyFormat, rows: usize) -> Area {
    let key_rows = if in_place::<E>(format) { 0 } else { BLOCK * size.row_bytes };
    Area {
        zeros: cursor.take(size.row_bytes),
        queries: cursor.take(size.lane_stride * size.pairs * E::HALVES),
        scores: cursor.take(BLOCK * size.lane_stride),
        weights: cursor.take(BLOCK / 2 * E::HALVES * size.lane_stride),
        outs: cursor.take(size.lanes * size.out_stride),
        max: cursor.take(size.lane_stride),
        sum: cursor.take(size.lane_stride),
        factor: cursor.take(size.lane_stride),
        lane_lo: cursor.take(size.lane_stride),
        lane_hi: cursor.take(size.lane_stride),
        row_lo: cursor.take(rows),
        row_hi: cursor.take(rows),
        key_rows: cursor.take(key_rows),
        size,
    }
}
