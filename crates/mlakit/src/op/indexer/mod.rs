//! `indexer`: scores the cached index keys of each row and selects the best.
//!
//! For a row with queries `q_h` and weights `w_h` and a key `k` that it sees: `score = sum_h w_h relu(q_h . k)`, in F32. The caller
//! has multiplied every other factor into the weights (`D^-0.5`, `I^-0.5`). Queries are rounded as the record rounds keys: to E4M3 with
//! a power of two for each row and head (`index_fp8_132`), to E2M1 with a power of two for each 32 elements (`index_mxfp4_68`), not at
//! all (`index_bf16_256`).
//!
//! Of the keys that a row sees, the `topk` best: the larger score first, -0 equal to 0, NaN below -inf, of equal ones the smaller
//! position. A visible key is a key even if its score is NaN; a key on an unused or bad page is none. Positions are written in
//! ascending order, -1 after the last.
//!
//! A key is a token, or, where `pool_size` is above 1, a *pool*: that many tokens in a row whose keys were merged into one. A row sees
//! the pools whose last token is at its own position or before it.
//!
//! No device may hold the scores of all keys: its scratch keeps within `budget_bytes`, whatever the lengths.
//!
//! Source: "DeepSeek-V3.2" (arXiv 2512.02556), section 2.1, for the score.

mod bind;
mod oracle;
mod plan;
mod probe;
mod spec;
mod visible;

pub(crate) use bind::width_of_table;
pub use bind::{IndexerArgs, IndexerRegions};
pub use oracle::{IndexerCase, IndexerResult, oracle, top_k};
pub use plan::Indexer;
pub use spec::{IndexerFields, IndexerSpec, MAX_POOL, MAX_SELECTED};
pub use visible::pools_visible;
