//! `projection`: one matrix a head, `y[r, h] = x[r, h] W[h]`.
//!
//! Absorption is two of them: the query's no-position part times W_UK^T gives its latent part, the latent result times W_UV gives values.

mod bind;
mod oracle;
mod plan;
mod spec;

pub(crate) use bind::strided_rows;
pub use bind::{ProjectionArgs, ProjectionRegions};
pub use oracle::{absorb, oracle};
pub use plan::Projection;
pub use spec::{ProjectionFields, ProjectionSpec};
