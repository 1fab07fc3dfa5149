//! Scores of an indexer over a paged cache of keys, and the best of them.
//!
//! A work item is some query rows of one request and a range of keys. Every (row, head) is a *lane*;
//! heads of a row are filled up to whole groups of 16. For each block of 64 positions: keys become rows
//! as the engine multiplies them (a BF16 key where it lies, if it can; others are decoded once for all
//! lanes), dot products of all keys with all lanes (on vectors, or on tiles where there are some), the
//! weighted sum over the heads of each row, and its scores go into the row's candidates (`topk`). No
//! score outlives its block.
//!
//! What a key is multiplied by as a whole (the scale of `index_fp8_132`) multiplies the sum; a negative
//! scale turns the key's sign, since the sum is not linear.
//!
//! A score is a chain of its own: over the elements of the key for each lane, then over the groups of
//! heads for each of 16 sums, then those sums in a fixed tree. Its bits depend on the row's queries and
//! weights and on the key, not on other rows, on where a range begins or on the block it falls in.

mod call;
mod forward;
mod keys;
mod scratch;
mod tiles;

pub use call::{IndexCache, IndexCall, IndexFormat, IndexItem, MAX_ITEM_ROWS};
pub(super) use forward::{forward, forward_on_tiles};
pub(super) use scratch::{Grain, bytes as scratch_bytes};
