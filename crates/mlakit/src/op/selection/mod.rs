//! `selection`: logical positions of a request, as an indexer gives them, to slots of the pool.
//!
//! Slot = page x page_size + offset, with the page of the row's request. Order and places stay: a negative entry gives -1 where it
//! stands, and so does one whose position or page is out of bounds, which is counted.
//!
//! Where `pool_size` is above 1 an entry is a pool of that many tokens: its slots stand side by side, and behind the last live entry
//! follow those of the tokens behind the last complete pool, up to the row's own (`tail`). So `T` pools of `p` tokens become
//! `T p + p - 1` slots: 512 pools of 4 become 2,051.

mod bind;
mod oracle;
mod plan;
mod spec;

pub use bind::{SelectionArgs, SelectionRegions};
pub use oracle::{SelectionCase, SelectionResult, oracle};
pub use plan::Selection;
pub use spec::{SelectionFields, SelectionSpec, Slot};
