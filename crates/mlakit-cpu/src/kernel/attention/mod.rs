//! What attention kernels share, whatever keys their rows see.
//!
//! A work item is some query rows, some heads and a range of keys. Every (row, head) is a *lane*. For each
//! block of keys: dot products of keys with all lanes (`tiles::scores`; the key is broadcast, lanes are
//! query vectors), a vertical softmax (`softmax`), and weights times values (`tiles::products`; the weight
//! is broadcast, lanes are value elements, accumulators are loaded and stored once a block).
//!
//! A lane's bits depend on its keys, the grid of blocks and the item's range, not on the other lanes: every
//! lane has its own accumulation chain. Where the rows of an item see different keys of a block, values are
//! multiplied row by row over the pairs of keys that the row sees, with zeros in place of the key at an odd
//! end, so a key that a row may not see cannot reach it, NaN or not.

pub(super) mod amx;
pub(super) mod block;
mod call;
pub(super) mod finish;
pub(super) mod queries;
pub(super) mod scratch;
pub(super) mod softmax;
pub(super) mod values;

pub use call::{
    Attention, BLOCK, Geometry, Lanes, LseBase, OutFormat, Output, Queries, QueryFormat, Sink,
};
