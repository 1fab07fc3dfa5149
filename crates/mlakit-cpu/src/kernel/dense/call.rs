//! What a dense attention kernel is given.

use std::ops::Range;
use std::sync::atomic::AtomicU32;

use crate::kernel::attention::{Attention, Lanes};

/// Element format of key records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KeyFormat {
    /// BF16, 2 bytes an element.
    Bf16,
    /// E4M3 codes, 1 byte an element; a key is `kv_scale` times the decoded record.
    E4m3,
}

/// The paged latent cache. The record of position `t` of a request lies at
/// `base + page * page_stride_bytes + (t % page_size) * record_bytes`, `page` being entry
/// `t / page_size` of the request's page table.
#[derive(Clone, Copy, Debug)]
pub struct KeyCache {
    /// The first byte of page 0, 2-byte aligned for BF16.
    pub base: *const u8,
    /// Pages; ids outside `0..pages` are skipped.
    pub pages: usize,
    /// Tokens of a page: 1 or a multiple of 16.
    pub page_size: usize,
    /// Bytes from a page to the next, at least `page_size * record_bytes`.
    pub page_stride_bytes: u64,
    /// Bytes from a record to the next, at least the payload.
    pub record_bytes: u64,
    /// Element format.
    pub format: KeyFormat,
}

/// What all items of one dense attention call share.
#[derive(Clone, Copy, Debug)]
pub struct DenseCall<'a> {
    /// Heads, widths, queries and scales. The value scale is `kv_scale`, or 1 for BF16 records.
    pub attention: Attention,
    /// The cache.
    pub cache: KeyCache,
    /// A key is visible only if it is one of the last `window` visible ones.
    pub window: Option<usize>,
    /// Where out-of-range page ids are counted.
    pub faults: &'a AtomicU32,
}

/// Which keys the rows of an item see, before the window and the item's token range.
#[derive(Clone, Copy, Debug)]
pub enum Visible {
    /// Row `first + i` of the `rows` rows of a request with `kv_len` keys sees the keys below
    /// `kv_len - (rows - 1 - (first + i))`.
    RightAligned {
        /// Keys of the request.
        kv_len: i32,
        /// Query rows of the request.
        rows: usize,
        /// The request's row that is the item's first.
        first: usize,
    },
    /// Row `i` of the item sees the keys below entry `i`, which is readable for every row.
    Lengths {
        /// One a row.
        lengths: *const i32,
        /// Keys of the request: longer lengths are clamped to it.
        kv_len: i32,
    },
}

/// One piece of work: some query rows of a request, some heads, a range of tokens.
#[derive(Clone, Debug)]
pub struct DenseItem {
    /// The request's row of the page table.
    pub page_table: *const i32,
    /// Entries of that row; visible lengths are clamped to what they cover.
    pub table_width: usize,
    /// Query rows and heads.
    pub lanes: Lanes,
    /// What the rows see.
    pub visible: Visible,
    /// Absolute positions of this item. Splits of a row begin at multiples of [`BLOCK`](crate::kernel::BLOCK), or at the
    /// row's first visible key.
    pub tokens: Range<usize>,
    /// Out-of-range page ids that this item counts; see [`Counted`].
    pub counted: Counted,
}

/// Which page ids an item counts, so that each bad id of a request is counted once however rows,
/// heads and splits are divided: give all items of a request the same `first`; of the items of one
/// split give one the part of the split that any row of the request sees, and the others an empty
/// range.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// The first position that the request sees.
    pub first: usize,
    /// A page is counted by the item whose range holds the page's first position at or after
    /// `first`.
    pub tokens: Range<usize>,
}

impl DenseItem {
    /// The half-open range of keys that row `row` of the item (counted from 0) sees within the
    /// item's tokens.
    ///
    /// # Safety
    /// The array of [`Visible::Lengths`] is readable at `row`.
    pub unsafe fn keys_of_row(&self, call: &DenseCall<'_>, row: usize) -> Range<usize> {
        let covered = self.table_width.saturating_mul(call.cache.page_size);
        let clamp = |len: i32| usize::try_from(len).unwrap_or(0).min(covered);
        let end = match self.visible {
            Visible::RightAligned { kv_len, rows, first } => {
                (clamp(kv_len) + first + row + 1).saturating_sub(rows)
            }
            Visible::Lengths { lengths, kv_len } => {
                // SAFETY: readable for every row by contract.
                clamp(unsafe { *lengths.add(row) }.min(kv_len))
            }
        };
        let begin = call.window.map_or(0, |window| end.saturating_sub(window));
        let begin = begin.max(self.tokens.start);
        begin..end.min(self.tokens.end).max(begin)
    }
}
