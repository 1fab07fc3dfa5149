//! `embed`: gathers rows of a table, `y[r] = table[ids[r]] * scale`.
//!
//! The product is in F32 and is rounded once more where `y` is BF16. Id -1 is padding and gives
//! zeros; any other id that is no row of the table gives zeros and counts once a launch as
//! [`Fault::Id`](crate::scratch::Fault::Id). Beside token embeddings it picks rows of a batch: with
//! hidden states as the table, the last rows of all requests go to the vocabulary layer.
//!
//! Source: the lookup of "Attention Is All You Need" (arXiv 1706.03762), section 3.4, whose factor
//! is `scale`; most models use 1.

mod bind;
mod oracle;
mod plan;
mod spec;

pub use bind::{EmbedArgs, EmbedRegions};
pub use oracle::{EmbedResult, oracle};
pub use plan::Embed;
pub use spec::{EmbedFields, EmbedSpec};
