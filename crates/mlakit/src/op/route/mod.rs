//! `route`: which experts of a mixture a row uses, and how much each counts.
//!
//! `R` rows, `E` experts in `G` groups of neighbours. With `z = x W^T`:
//! 1. scores `s = sigmoid(z)`, or `softmax(z)` over all experts;
//! 2. what is compared: `c = s + bias`, or `s` where there is no bias;
//! 3. where not all groups are used: a group's score is the sum of its two best `c` (`top2_sum`) or
//!    its best (`max`); in all but the `used_groups` best groups `c` becomes 0;
//! 4. `ids` are the `used` largest `c`, largest first;
//! 5. `gates` are the scores of those, `s` and not `c`; with `normalize` divided by (their sum +
//!    1e-20); times `scale`.
//!
//! Every stage is F32. The order is that of all selections
//! ([`descending`](super::layer::descending), then the smaller index), for groups too. Note step 3:
//! 0 is a number like others, so where biases make every `c` of the used groups negative an expert
//! of another group wins, as in the source.
//!
//! Sources: "DeepSeek-V3 Technical Report" (arXiv 2412.19437), equations 12 to 16, with the group
//! rule and the fill of 0 as Hugging Face transformers 5 runs them (`deepseek_v3`: sigmoid, bias,
//! `top2_sum`; `deepseek_v2`, `group_limited_greedy`: softmax, no bias, `max`, not normalised;
//! `greedy`: one group). In `deepseek_v2` no softmax score is negative, so the fill selects
//! nothing.

mod bind;
mod oracle;
mod plan;
mod probe;
mod spec;

pub use bind::{RouteArgs, RouteRegions};
pub use oracle::{RouteCase, RouteResult, oracle};
pub use plan::Route;
pub use spec::{GroupScore, RouteFields, RouteSpec, Scoring};
