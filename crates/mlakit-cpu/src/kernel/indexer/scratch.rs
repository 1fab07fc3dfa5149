//! The scratch of one worker of an indexer.

use super::call::IndexCall;
use crate::kernel::amx::DEPTH;
use crate::kernel::engine::Engine;
use crate::kernel::topk::BLOCK;

/// Heads of a row are filled up to a multiple of this.
pub(super) const GROUP: usize = 16;

/// Alignment of regions: a cache line.
const LINE: usize = 64;

/// What a query is filled up to, with zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kernel) enum Grain {
    /// Pairs.
    Vectors,
    /// What a product of tiles covers.
    Tiles,
}

/// Where the regions of a worker's scratch are. Every word that is read was written by the same item.
#[derive(Clone, Copy)]
pub(super) struct Area {
    /// A key row of zeros: what a key that is not there reads as.
    pub(super) zeros: *mut u8,
    /// Packed queries, in the order of what multiplies.
    pub(super) queries: *mut u32,
    /// Weights `[lanes]`, 0 where a head only fills up.
    pub(super) weights: *mut f32,
    /// For the last group of heads 1, or 0 where a head only fills up.
    pub(super) live: *mut f32,
    /// Dot products `[BLOCK, lanes]`.
    pub(super) dots: *mut f32,
    /// Key rows of a block `[BLOCK, row_bytes]`, for keys that are not read in place.
    pub(super) key_rows: *mut u8,
    pub(super) size: Size,
}

/// Sizes that the regions follow from.
#[derive(Clone, Copy)]
pub(super) struct Size {
    /// Lanes of a row: heads rounded up to groups.
    pub(super) row_lanes: usize,
    /// Lanes of all rows.
    pub(super) lanes: usize,
    /// Pairs of a query, those included that fill it up.
    pub(super) pairs: usize,
    /// Bytes from a key row to the next.
    pub(super) row_bytes: usize,
}

impl Size {
    fn new<E: Engine>(call: &IndexCall, grain: Grain, rows: usize) -> Size {
        let row_lanes = call.heads.next_multiple_of(GROUP);
        let width = match grain {
            Grain::Vectors => call.width,
            Grain::Tiles => call.width.next_multiple_of(DEPTH),
        };
        Size {
            row_lanes,
            lanes: rows * row_lanes,
            pairs: width / 2,
            // An odd number of lines: equal columns of the rows lie in different cache sets.
            row_bytes: (width * E::KEY_BYTES).next_multiple_of(2 * LINE) + LINE,
        }
    }
}

/// Scratch bytes of one worker for items of at most `rows` rows.
pub(in crate::kernel) fn bytes<E: Engine>(call: &IndexCall, grain: Grain, rows: usize) -> usize {
    let mut cursor = Cursor { base: std::ptr::null_mut(), used: 0 };
    lay_out(&mut cursor, Size::new::<E>(call, grain, rows), E::HALVES);
    // The base is aligned up to a line.
    cursor.used + LINE
}

/// The regions for an item of `rows` rows in the scratch at `base`.
///
/// # Safety
/// `base` is writable for the [`bytes`] of at least as many rows.
pub(super) unsafe fn area<E: Engine>(
    base: *mut u8,
    call: &IndexCall,
    grain: Grain,
    rows: usize,
) -> Area {
    // SAFETY: `bytes` has a line more than the regions.
    let base = unsafe { base.add(base.align_offset(LINE)) };
    lay_out(&mut Cursor { base, used: 0 }, Size::new::<E>(call, grain, rows), E::HALVES)
}

/// Hands out regions one after another.
struct Cursor {
    base: *mut u8,
    used: usize,
}

impl Cursor {
    fn take<T>(&mut self, count: usize) -> *mut T {
        let region = self.base.wrapping_add(self.used).cast();
        self.used += (count * size_of::<T>()).next_multiple_of(LINE);
        region
    }
}

fn lay_out(cursor: &mut Cursor, size: Size, halves: usize) -> Area {
    Area {
        zeros: cursor.take(size.row_bytes),
        queries: cursor.take(size.lanes * size.pairs * halves),
        weights: cursor.take(size.lanes),
        live: cursor.take(GROUP),
        dots: cursor.take(BLOCK * size.lanes),
        key_rows: cursor.take(BLOCK * size.row_bytes),
        size,
    }
}
