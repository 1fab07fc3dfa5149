//! How the GPU runs each operation: a `Spec` to specialised sources, a launch to parameters.
//!
//! Every `launch` here runs while the core holds its operands: it has numbered each use, so nothing
//! else writes what a kernel reads and nothing else touches what it writes. That is the argument of
//! each `unsafe` block that enqueues a kernel with the address of a [`Region`](mlakit::Region).
//!
//! A parameter struct mirrors the one of its kernel, field by field; both sides assert its size.

mod activation;
mod attention;
mod dense;
mod embed;
mod layer;
mod linear;
mod merge;
mod norm;
mod projection;
mod rotary;
mod route;
mod sample;
mod unbuilt;
mod writer;

use mlakit::{Op, Plan};

use crate::module::Source;

/// What `prepare` compiles for a plan; known without a device.
pub trait Compiles<O: Op> {
    /// The kernels' sources.
    fn sources(plan: &Plan<O>) -> Vec<Source>;
}

/// The representative specialisations of every kernel, which are compiled for all architectures
/// where there is no GPU.
pub(crate) fn manifest() -> Vec<Source> {
    [
        dense::manifest(),
        merge::manifest(),
        writer::manifest(),
        activation::manifest(),
        embed::manifest(),
        linear::manifest(),
        norm::manifest(),
        projection::manifest(),
        rotary::manifest(),
        route::manifest(),
        sample::manifest(),
    ]
    .concat()
}
