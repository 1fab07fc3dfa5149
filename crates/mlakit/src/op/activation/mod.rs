//! `activation`: a gate. In a gated MLP `y[r, i] = f(x[r, i]) * x[r, width + i]`, with `f = silu`,
//! `silu(v) = v / (1 + exp(-v))`: a row of `x` is the result of one `linear` whose matrix stacks the
//! gate projection on the up projection. Of attention `y[r, i] = f(gate[r, i / gate_span]) * x[r, i]`,
//! with `f = sigmoid`, `sigmoid(v) = 1 / (1 + exp(-v))`: the gate is a tensor of its own, with one
//! element for each of `y`, or one for each head.
//!
//! F32 up to the one rounding where `y` is BF16.
//!
//! Source: "GLU Variants Improve Transformer" (arXiv 2002.05202), SwiGLU with beta 1.

mod bind;
mod oracle;
mod plan;
mod spec;

pub use bind::{ActivationArgs, ActivationRegions};
pub use oracle::oracle;
pub use plan::Activation;
pub use spec::{ActivationFields, ActivationKind, ActivationSpec};
