//! `linear`: one matrix for all rows, `y[r, o] = sum_k x[r, k] w[o, k] (+ bias[o])`, or one of
//! several, chosen row by row.
//!
//! `R` rows, `in` and `out` widths. Weights are `[out, in]`, as checkpoints hold them. With
//! `accumulate` the result is added to what `y` holds (a residual stream). With experts (the routed
//! half of a mixture of experts) row `r` has `used` ids:
//! - expand: `y[r, j] = W[ids[r, j]] x[r]`, `y` is `[R, used, out]`;
//! - combine: `y[r] = sum_j gates[r, j] W[ids[r, j]] x[r, j]`, `x` is `[R, used, in]`; `j` in
//!   order, in F32.
//!
//! `x` is BF16 or F32, weights are BF16; sums are F32, and one rounding to BF16 follows where `y`
//! is BF16. Products of BF16 are exact; those of an F32 `x` keep at least 16 bits of it. An id that
//! is no expert contributes nothing, whatever its gate and its `x` (expand: zeros, or with
//! `accumulate` what was there), and counts once a launch as
//! [`Fault::Id`](crate::scratch::Fault::Id).
//!
//! Source of the expert formulas: "DeepSeekMoE" (arXiv 2401.06066), section 3, with the gates that
//! [`route`](super::route) writes.

mod bind;
mod oracle;
mod plan;
mod probe;
mod spec;

pub use bind::{LinearArgs, LinearRegions};
pub use oracle::{LinearCase, LinearResult, oracle};
pub use plan::Linear;
pub use spec::{Experts, LinearFields, LinearSpec};
