//! `route`: which experts of a mixture a row uses, and how much each counts.
//!
//! `R` rows, `E` experts in `G` groups of neighbours. With `z = x W^T`:
//! 1. scores `s = sigmoid(z)`, or `softmax(z)` over all experts;
//! 2. what is compared: `c = s + bias`, or `s` where there is no bias;
//! 3. where not all groups are used: a group's score is the sum of its two best `c` (`top2_sum`) or
//!    its best (`max`); experts of all but the `used_groups` best groups cannot be chosen;
//! 4. `ids` are the `used` largest `c` of those that can, largest first;
//! 5. `gates` are the scores of those, `s` and not `c`; with `normalize` divided by (their sum +
//!    1e-20); times `scale`.
//!
//! Every stage is F32. The order is that of all selections
//! ([`descending`](super::layer::descending), then the smaller index), for groups too.
//!
//! Sources: "DeepSeek-V3 Technical Report" (arXiv 2412.19437), equations 12 to 16, with the group
//! rule of the authors' code: `deepseek_v3`, `deepseek_v32`, `glm4_moe_lite`: sigmoid, bias,
//! `top2_sum`; `deepseek_v2`, `group_limited_greedy`: softmax, no bias, `max`, not normalised;
//! `greedy`: one group. Step 3 excludes: the authors fill with -inf (DeepSeek-V3-0324 and later),
//! and so does transformers since its pull request 45441 (issue 45440). Earlier versions of both
//! filled with 0, so that an unused group won where biases made every `c` of the used ones
//! negative. `deepseek_v2` fills with 0 to this day; there the results are the same, because no
//! softmax score is negative and one of 0 adds nothing, whoever has it.

mod bind;
mod oracle;
mod plan;
mod probe;
mod spec;

pub use bind::{RouteArgs, RouteRegions};
pub use oracle::{RouteCase, RouteResult, oracle};
pub use plan::Route;
pub use spec::{GroupScore, RouteFields, RouteSpec, Scoring};
