//! `norm`: root-mean-square normalisation, `y = x / sqrt(mean(x^2) + eps) * weight`, over the first
//! `width` elements of each row. With `center` it is layer normalisation: the mean of the row is
//! subtracted from `x` first. With `bias` a vector is added at the end.
//!
//! `R` rows. Everything is in F32 up to the one rounding of `y` to BF16; `y_wide` is the F32 result.
//! A `Spec` has either or both, so nothing is written that nobody reads. A row may be part of a
//! wider one on both sides (`in_stride`, `out_stride`): the latent of a joint key-value projection
//! is normalised where it lies, and where attention wants it.
//!
//! Sources: "Root Mean Square Layer Normalization" (arXiv 1910.07467), with the epsilon that all
//! models add under the root; "Layer Normalization" (arXiv 1607.06450), equation 3.

mod bind;
mod oracle;
mod plan;
mod spec;

pub use bind::{NormArgs, NormRegions};
pub use oracle::oracle;
pub use plan::Norm;
pub use spec::{NormFields, NormSpec};
