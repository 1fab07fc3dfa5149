//! The scratch of one worker in an attention call.

use super::call::{BLOCK, Geometry, Lanes};
use crate::kernel::engine::Engine;

/// Where the regions of a worker's scratch are. Contents before an item are arbitrary: every word
/// that is read was written by the same item.
#[derive(Clone, Copy)]
pub(in crate::kernel) struct Area {
    /// A key row of zeros: what a key that nobody may see reads as.
    pub(in crate::kernel) zeros: *mut u8,
    /// Packed queries, panel after panel.
    pub(in crate::kernel) queries: *mut u32,
    /// Scores `[BLOCK, lane_stride]`.
    pub(in crate::kernel) scores: *mut f32,
    /// Packed softmax weights `[BLOCK / 2, HALVES, lane_stride]`.
    pub(in crate::kernel) weights: *mut u32,
    /// Output accumulators `[lanes, out_stride]`.
    pub(in crate::kernel) outs: *mut f32,
    /// Running maximum, sum and the last rescale factor, `lane_stride` each.
    pub(in crate::kernel) max: *mut f32,
    pub(in crate::kernel) sum: *mut f32,
    pub(in crate::kernel) factor: *mut f32,
    /// Keys of the block that each lane sees, `lane_stride` each.
    pub(in crate::kernel) lane_lo: *mut i32,
    pub(in crate::kernel) lane_hi: *mut i32,
    /// Keys that each row sees, `rows` each.
    pub(in crate::kernel) row_lo: *mut u64,
    pub(in crate::kernel) row_hi: *mut u64,
    /// Key rows of a block `[BLOCK, row_bytes]`, where records are not read in place.
    pub(in crate::kernel) key_rows: *mut u8,
    pub(in crate::kernel) size: Size,
}

/// Sizes that the regions follow from.
#[derive(Clone, Copy)]
pub(in crate::kernel) struct Size {
    /// Query vectors: rows times heads.
    pub(in crate::kernel) lanes: usize,
    /// Lanes rounded up to vectors.
    pub(in crate::kernel) lane_stride: usize,
    /// Pairs of a query.
    pub(in crate::kernel) pairs: usize,
    /// f32 from an output accumulator to the next.
    pub(in crate::kernel) out_stride: usize,
    /// Bytes from a key row to the next.
    pub(in crate::kernel) row_bytes: usize,
}

impl Size {
    pub(in crate::kernel) fn new<E: Engine>(geometry: Geometry, rows: usize, heads: usize) -> Size {
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

/// Scratch bytes of one worker; `made` says whether key rows are made of records.
pub(in crate::kernel) fn bytes<E: Engine>(
    (geometry, made): (Geometry, bool),
    max_rows: usize,
    max_heads: usize,
) -> usize {
    let size = Size::new::<E>(geometry, max_rows, max_heads);
    let mut cursor = Cursor { base: std::ptr::null_mut(), used: 0 };
    lay_out::<E>(&mut cursor, size, made, max_rows);
    // The base is aligned up to a line.
    cursor.used + LINE
}

/// The regions for one item in the scratch at `base`.
///
/// # Safety
/// `base` is writable for the [`bytes`] of at least the item's rows and heads.
pub(in crate::kernel) unsafe fn area<E: Engine>(
    base: *mut u8,
    (geometry, made): (Geometry, bool),
    lanes: &Lanes,
) -> Area {
    let size = Size::new::<E>(geometry, lanes.rows.len(), lanes.heads.len());
    // SAFETY: `bytes` has a line more than the regions.
    let base = unsafe { base.add(base.align_offset(LINE)) };
    let mut cursor = Cursor { base, used: 0 };
    lay_out::<E>(&mut cursor, size, made, lanes.rows.len())
}

/// Brings the state of every lane to "no key seen".
///
/// # Safety
/// `area` was laid out for the item.
pub(in crate::kernel) unsafe fn reset(area: &Area) {
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

/// Alignment of regions: a cache line.
pub(in crate::kernel) const LINE: usize = 64;

/// Hands out regions one after another.
pub(in crate::kernel) struct Cursor {
    pub(in crate::kernel) base: *mut u8,
    pub(in crate::kernel) used: usize,
}

impl Cursor {
    pub(in crate::kernel) fn take<T>(&mut self, count: usize) -> *mut T {
        let region = self.base.wrapping_add(self.used).cast();
        self.used += (count * size_of::<T>()).next_multiple_of(LINE);
        region
    }
}

fn lay_out<E: Engine>(cursor: &mut Cursor, size: Size, made: bool, rows: usize) -> Area {
    let key_rows = if made { BLOCK * size.row_bytes } else { 0 };
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
