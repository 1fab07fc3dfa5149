//! `hadamard`: the normalised Walsh-Hadamard transform of each row, `y_i = n^-0.5 sum_j (-1)^(i . j) x_j`, where `i . j` counts the bits
//! that both have.
//!
//! It is orthogonal and its own inverse: queries and keys that both went through it have the dot products that they had, and outliers
//! are spread over all elements before they are rounded to 8 or 4 bits. Everything is in F32 up to the one rounding to BF16.
//!
//! Source: the matrix of Sylvester's construction, `H_2n = [[H_n, H_n], [H_n, -H_n]]`; "QuIP#" (arXiv 2402.04396), section 3, for its
//! use.

mod bind;
mod oracle;
mod plan;
mod spec;

pub use bind::{HadamardArgs, HadamardRegions};
pub use oracle::oracle;
pub use plan::Hadamard;
pub use spec::{HadamardFields, HadamardSpec, MAX_HADAMARD};
