//! Sparse multi-head latent attention: the tokens that each row selects, by blocks of 64 columns.
//!
//! A work item is one query row, some heads and a range of the row's columns. Of each block the entries that
//! refer to a token are looked up and closed up, so that what is unused costs nothing; their records become
//! key rows once for all heads, while those of the next block are fetched. From there on all is that of
//! dense attention where every row sees the same keys.

pub(super) mod amx;
mod call;
mod forward;
mod gather;
mod records;

use super::attention::BLOCK;

pub use call::{List, RecordCache, SparseCall, SparseItem};
pub(super) use forward::{forward, scratch_bytes};
pub use records::RecordRows;
