//! `sparse`: latent attention over the tokens that each row selects, in the absorbed form.
//!
//! A row has a list of selected tokens, its *columns*: logical positions of its request, which a page table turns into places of the
//! pool inside the kernel, or slots, page x page_size + offset. A second scope of the same row, in a cache of its own, may follow.
//! For a query `q` and the keys `k_s` of the columns: `z_s = softmax_scale (q . k_s)`, `out = sum_s exp(z_s) v_s / (sum_s exp(z_s) +
//! exp(sink))`, `lse = ln sum_s exp(z_s)`, where `v_s` is the first `value_width` elements of `k_s`. A token that is selected twice
//! counts twice. A row without a key has output 0 and log-sum-exp -inf (or the sink, where it counts).

mod bind;
mod columns;
mod oracle;
mod plan;
mod probe;
mod spec;

pub use bind::{ExtraInput, SelectionInput, SparseArgs, SparseRegions};
pub use columns::{Columns, Entry, Place, Scope};
pub use oracle::{ExtraCase, SelectionCase, SparseCase, SparseResult, oracle};
pub use plan::Sparse;
pub use spec::{ExtraScope, Selection, SparseFields, SparseSpec};
