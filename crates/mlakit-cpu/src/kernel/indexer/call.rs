//! What the kernel of an indexer is given.

use std::ops::Range;

/// Query rows of an item at most.
pub const MAX_ITEM_ROWS: usize = 8;

/// Format of the keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IndexFormat {
    /// BF16, 2 bytes an element.
    Bf16,
    /// E4M3 codes and an F32 scale a key.
    E4m3,
    /// E2M1 codes, two a byte, the even element low, and a UE8M0 scale for each 32 elements.
    E2m1,
}

/// The paged cache of index keys. Key `t` of a request lies in page `table[t / page_size]`, its codes at
/// `(t % page_size) * data_stride` of the page, its scales at `scales_first + (t % page_size) *
/// scales_stride`.
#[derive(Clone, Copy, Debug)]
pub struct IndexCache {
    /// The first byte of page 0.
    pub base: *const u8,
    /// Pages; ids outside `0..pages` are skipped.
    pub pages: usize,
    /// Keys of a page: 1 or a multiple of 16.
    pub page_size: usize,
    /// Bytes from a page to the next.
    pub page_stride_bytes: u64,
    /// Bytes from a key's codes to the next.
    pub data_stride: usize,
    /// Where the scales of a page begin.
    pub scales_first: usize,
    /// Bytes from a key's scales to the next.
    pub scales_stride: usize,
    /// What they are.
    pub format: IndexFormat,
}

/// What all items of one call share.
#[derive(Clone, Copy, Debug)]
pub struct IndexCall {
    /// Index heads, at least 1.
    pub heads: usize,
    /// Elements of a query and a key; even, a multiple of 32 for [`IndexFormat::E2m1`].
    pub width: usize,
    /// The cache.
    pub cache: IndexCache,
}

/// One piece of work: some query rows of a request and a range of its keys.
#[derive(Clone, Debug)]
pub struct IndexItem {
    /// The request's row of the page table, which covers `keys`.
    pub page_table: *const i32,
    /// Positions; the first is a multiple of 64.
    pub keys: Range<usize>,
    /// Query rows: at least 1, at most [`MAX_ITEM_ROWS`].
    pub rows: usize,
    /// For each row the position behind the last that it sees.
    pub ends: [usize; MAX_ITEM_ROWS],
    /// BF16 `[rows, heads, width]`, as they are multiplied; where nothing is scored, anything.
    pub queries: *const u16,
    /// F32 `[rows, heads]`, likewise.
    pub weights: *const f32,
    /// Whether scores count at all; where every key is selected whatever its score, they are taken as 0.
    pub scored: bool,
}
