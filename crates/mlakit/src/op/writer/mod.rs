//! `writer`: puts the records of new tokens into the pool.
//!
//! Token `i` goes to slot `slots[i]` = page x page_size + offset. A negative slot is skipped; one out of the pool is skipped and
//! counted. Of two tokens for one slot the later stays. Every byte that belongs to no written record stays: other tokens, the padding of
//! `bf16` and `e4m3`, page tails. Declared by format alone: it needs no device memory of its own.

mod bind;
mod oracle;
mod plan;
mod spec;

pub use bind::{WriterArgs, WriterInput, WriterRegions};
pub use oracle::{WriterCase, oracle};
pub use plan::Writer;
pub use spec::{WriterFields, WriterSpec};
