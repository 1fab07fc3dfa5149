//! `sample`: the next token of each row, from its logits.
//!
//! `R` rows of `V` logits. Greedy: the id of the largest logit (NaN below -inf, of equal ones the
//! smaller id). With a temperature `t > 0`: the distribution `softmax(logits / t)`, inverted: id
//! `i` is the first whose running sum `w_0 + ... + w_i` exceeds `random[r] * (w_0 + ... +
//! w_(V-1))`, with `w_i = exp((z_i - max z) / t)`; a NaN logit weighs 0, a logit equal to the
//! largest weighs 1 (infinite ones too). Sums run in index order and are exact enough to tell the
//! ids of a whole vocabulary apart (f64, or F32 in parts).
//!
//! Whatever is in the operands, the id is one of the row's: a temperature that is 0, negative or
//! NaN means greedy; a `random` that is NaN or below 0 counts as 0; if it is 1 or more, or rounding
//! leaves no sum above the bound, the last id of weight above 0 is taken; a row of NaN alone gives
//! id 0.
//!
//! Source: inverse transform sampling (Devroye, "Non-Uniform Random Variate Generation", 1986,
//! section III.2).

mod bind;
mod oracle;
mod plan;
mod probe;
mod spec;

pub use bind::{SampleArgs, SampleRegions};
pub use oracle::{SampleCase, SampleResult, oracle};
pub use plan::Sample;
pub use spec::{SampleFields, SampleSpec};
