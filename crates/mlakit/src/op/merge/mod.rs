//! `merge`: partial results of splits or shards become one result.
//!
//! With natural-log sums `l_s` of each part and its normalised output `o_s`:
//! `out = sum_s exp(l_s - m) o_s / (sum_s exp(l_s - m) + exp(sink - m))`, `lse = m + ln(sum_s exp(l_s - m))`, `m` the maximum.

mod bind;
mod oracle;
mod plan;
mod spec;

pub use bind::{LseInput, LseOutput, MergeArgs, MergeRegions, PartialInput};
pub(crate) use oracle::log_add;
pub use oracle::{MergeCase, oracle};
pub use plan::Merge;
pub use spec::{MergeFields, MergeSpec, Partial};
