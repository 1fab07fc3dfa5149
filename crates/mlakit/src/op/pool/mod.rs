//! `pool`: index keys of pools of tokens, as they become complete.
//!
//! Pool `b` of a request holds its tokens `b p .. b p + p`, `p` = `pool_size`. Its key, channel by channel: `sum_s w_s k_s`, `w` =
//! softmax over the pool's tokens of `gate_s + ape[s mod p]`. A row whose token ends a pool gets that pool's key and the slot where it
//! belongs; every other row gets zeros and slot -1. So the shapes depend on the number of rows alone, and the outputs are what a
//! `writer` of the index record takes.
//!
//! What a request keeps between steps is a *ring*: keys and gates of its last tokens, each at its absolute position modulo `ring()` =
//! `pool_size + max_draft_tokens`. Tokens that are rejected later need no undoing: the next step has a smaller length and writes the same
//! places again.
//!
//! Source: the pooled indexer of GLM-5.3 as `transformers` has it (`Glm5NextPoolIndexer`), written from its formula.

mod bind;
mod oracle;
mod plan;
mod spec;

pub use bind::{PoolArgs, PoolRegions};
pub use oracle::{PoolCase, PoolResult, oracle};
pub use plan::Pool;
pub use spec::{PoolFields, PoolSpec};
