//! Dense multi-head latent attention over a paged cache: every position that a row sees, by blocks of 64
//! absolute positions.
//!
//! Where the machine multiplies BF16 pairs, BF16 records are read where they lie; otherwise a block's
//! records are widened to f32 once for all query vectors. E4M3 records are decoded once a block.

pub(super) mod amx;
mod call;
mod forward;
mod pages;

pub use call::{Counted, DenseCall, DenseItem, KeyCache, KeyFormat, Visible};
pub(super) use forward::{forward, scratch_bytes};
