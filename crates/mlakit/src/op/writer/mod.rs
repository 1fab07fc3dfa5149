//! `writer`: puts the records of new tokens into the pool.
//!
//! Token `i` goes to slot `slots[i]` = page x page_size + offset. A negative slot is skipped; one out of the pool is skipped and
//! counted. Every byte that belongs to no written record stays: other tokens, record padding, page tails. Declared by format alone: it
//! needs no device memory of its own.

mod bind;
mod oracle;
mod plan;
mod spec;

pub use bind::{WriterArgs, WriterRegions};
pub use oracle::{WriterCase, oracle};
pub use plan::Writer;
pub use spec::{WriterFields, WriterSpec};
