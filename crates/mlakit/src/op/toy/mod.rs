//! Two toy operations for tests of ownership, with all that a real one has: a cache behind a view,
//! scratch in splits, probes.
//!
//! `scale` reads pages: `out[r] = factor * cache[page_table[r]]`. `sum` divides: `out[r] = sum
//! x[r]`.

mod scale;
mod sum;

pub use scale::{Scale, ScaleArgs, ScaleFields, ScaleRegions, ScaleSpec};
pub use sum::{Sum, SumArgs, SumFields, SumRegions, SumSpec};
