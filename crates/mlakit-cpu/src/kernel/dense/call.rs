//! What a dense attention kernel is given.

use std::ops::Range;
use std::sync::atomic::AtomicU32;

/// Keys in a block. Blocks begin at multiples of this many absolute positions.
pub const BLOCK: usize = 64;

/// Heads and widths. The value is the first `value_width` elements of the key record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// Query heads, at least 1.
    pub heads: usize,
    /// Elements of a query and of a key record that enter the score: even, >= `value_width`.
    pub qk_width: usize,
    /// Elements of the output, at least 1.
    pub value_width: usize,
}

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

/// Element format of queries. Whatever it is, the kernel multiplies exact BF16.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum QueryFormat {
    /// BF16.
    Bf16,
    /// E4M3 codes; the scale is part of the score scale.
    E4m3,
    /// BF16 that is first rounded to E4M3 of `q / q_scale`; the scale is part of the score scale.
    Bf16AsE4m3 {
        /// The divisor.
        q_scale: f32,
    },
}

/// Query rows `[R, heads, qk_width]`.
#[derive(Clone, Copy, Debug)]
pub struct Queries {
    /// The first element, aligned to its size.
    pub base: *const u8,
    /// Element format.
    pub format: QueryFormat,
}

/// Element format of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OutFormat {
    /// BF16, rounded to nearest even.
    Bf16,
    /// F32.
    F32,
}

/// Base of a log-sum-exp.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LseBase {
    /// Natural logarithm.
    Natural,
    /// Logarithm to base 2.
    Two,
}

/// What all items of one dense attention call share.
#[derive(Clone, Copy, Debug)]
pub struct DenseCall<'a> {
    /// Heads and widths.
    pub geometry: Geometry,
    /// The cache.
    pub cache: KeyCache,
    /// The queries.
    pub queries: Queries,
    /// Factor of a dot product of BF16 operands that gives the score times log2(e):
    /// [`DenseCall::score_scale`].
    pub score_scale_log2: f32,
    /// Factor of the output: `kv_scale`, or 1 for BF16 records.
    pub value_scale: f32,
    /// A key is visible only if it is one of the last `window` visible ones.
    pub window: Option<usize>,
    /// Where out-of-range page ids are counted.
    pub faults: &'a AtomicU32,
}

impl DenseCall<'_> {
    /// `softmax_scale * kv_scale * q_scale * log2(e)`, rounded once. Scales that do not apply are
    /// 1.
    pub fn score_scale(softmax_scale: f32, kv_scale: f32, q_scale: f32) -> f32 {
        let product = f64::from(softmax_scale) * f64::from(kv_scale) * f64::from(q_scale);
        (product * std::f64::consts::LOG2_E) as f32
    }
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
    /// Query rows, numbered through the whole call.
    pub rows: Range<usize>,
    /// Heads.
    pub heads: Range<usize>,
    /// What the rows see.
    pub visible: Visible,
    /// Absolute positions of this item. Splits of a row begin at multiples of [`BLOCK`], or at the
    /// row's first visible key.
    pub tokens: Range<usize>,
    /// Out-of-range page ids that this item counts; see [`Counted`].
    pub counted: Counted,
    /// Where the result goes.
    pub out: Output,
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

/// Where an item's result goes: `[rows, heads of the geometry, value_width]` and `[rows, heads of
/// the geometry]`, both beginning at the item's first row and **head 0**. Rows and heads outside
/// the item are not touched.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    /// The outputs: softmax-weighted mean of values over the item's visible keys, 0 without any.
    pub values: *mut u8,
    /// Their format.
    pub format: OutFormat,
    /// Log-sum-exp of the scores of the item's visible keys, -inf without any.
    pub lse: *mut f32,
    /// Its base.
    pub lse_base: LseBase,
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

impl OutFormat {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            OutFormat::Bf16 => 2,
            OutFormat::F32 => 4,
        }
    }
}
