//! What a sparse attention kernel is given.

use std::ops::Range;
use std::sync::atomic::AtomicU32;

use mlakit::op::sparse::Columns;
use mlakit::record::Plane;

use super::records::RecordRows;
use crate::kernel::attention::{Attention, Lanes};

/// A paged cache. The data of token `t` of a page lie at `base + page * page_stride_bytes + data.first + t *
/// data.stride`, its scales likewise.
#[derive(Clone, Copy, Debug)]
pub struct RecordCache {
    /// The first byte of page 0, 2-byte aligned.
    pub base: *const u8,
    /// Pages; entries beyond are skipped.
    pub pages: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// Bytes from a page to the next.
    pub page_stride_bytes: u64,
    /// Where the data of tokens are in a page.
    pub data: Plane,
    /// Where their scales are.
    pub scales: Plane,
    /// How records become key rows.
    pub rows: RecordRows,
}

/// What all items of one sparse attention call share.
#[derive(Clone, Copy, Debug)]
pub struct SparseCall<'a> {
    /// Heads, widths, queries and scales; the value scale is what a key is times its row.
    pub attention: Attention,
    /// The cache of each scope; the second is that of the first where there is none.
    pub caches: [RecordCache; 2],
    /// Where entries that are out of bounds are counted.
    pub faults: &'a AtomicU32,
}

/// The list of a row in one scope.
#[derive(Clone, Copy, Debug)]
pub enum List {
    /// Slots.
    Slots {
        /// The row's entries, readable for its live ones.
        entries: *const i32,
    },
    /// Logical positions.
    Positions {
        /// As above.
        entries: *const i32,
        /// The request's row of the page table, readable for the pages of all positions below `covered`.
        table: *const i32,
        /// Positions from there on are out of bounds.
        covered: usize,
    },
}

/// One piece of work: a query row, some heads, a range of its columns.
#[derive(Clone, Debug)]
pub struct SparseItem {
    /// One row and its heads.
    pub lanes: Lanes,
    /// The row's list in each scope.
    pub lists: [List; 2],
    /// The row's live columns.
    pub columns: Columns,
    /// The columns of this item; begins at a multiple of 64.
    pub range: Range<usize>,
    /// Whether it counts the entries that are out of bounds: of the items of the same columns, one does.
    pub counts_faults: bool,
}

impl SparseItem {
    /// What follows the block that holds `column`.
    #[inline(always)]
    pub(super) fn next_block(&self, column: usize) -> usize {
        (column / super::BLOCK + 1) * super::BLOCK
    }
}
