//! Dense multi-head latent attention over a paged cache.
//!
//! A work item is some query rows of one request, some heads and a range of tokens. Every (row,
//! head) is a *lane*. For each block of 64 positions that some row sees: dot products of keys with
//! all lanes (`tiles::scores`; the key is broadcast, lanes are query vectors), a vertical softmax
//! (`softmax`), and weights times values (`tiles::products`; the weight is broadcast, lanes are
//! value elements, accumulators are loaded and stored once a block). Where the machine multiplies
//! BF16 pairs, BF16 records are read where they lie; otherwise a block's records are widened to f32
//! once for all lanes. E4M3 records are decoded once a block for all lanes.
//!
//! A lane's bits depend on its keys, the block grid and the item's token range, not on the other
//! lanes: every lane has its own accumulation chain. Where the rows of an item see different keys
//! of a block, values are multiplied row by row over the pairs of keys that the row sees, with
//! zeros in place of the key at an odd end, so a key that a row may not see cannot reach it, NaN or
//! not.

pub(super) mod amx;
mod call;
mod finish;
mod forward;
mod pages;
mod scratch;
mod softmax;
mod values;

pub use call::{
    BLOCK, Counted, DenseCall, DenseItem, Geometry, KeyCache, KeyFormat, LseBase, OutFormat,
    Output, Queries, QueryFormat, Visible,
};
pub(super) use forward::forward;
pub(super) use scratch::bytes as scratch_bytes;
