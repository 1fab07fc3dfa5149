//! `dense`: latent attention over every visible token of a paged cache, in the absorbed form.
//!
//! For a query row `q` and the keys `k_s` that it sees: `z_s = softmax_scale (q . k_s)`, `p = softmax(z)`, `out = sum_s p_s v_s` where
//! `v_s` is the first `value_width` elements of `k_s`, `lse = ln sum_s exp(z_s)`. A row without a visible key has output 0 and
//! log-sum-exp -inf.

mod bind;
mod division;
mod oracle;
mod plan;
mod probe;
mod spec;

pub(crate) use bind::present;
pub use bind::{DenseArgs, DenseRegions, QueryInput};
pub use division::{Rows, Visible};
pub use oracle::{DenseCase, DenseResult, QueryCase, oracle};
pub use plan::Dense;
pub use spec::{DenseFields, DenseSpec, QueryDtype};
