//! Every kernel, on every instruction set that the machine has, against plain code.
//!
//! The binary can be carried to another machine: it has no data files, and it says which
//! instruction sets it left out.

mod codec;
mod common;
mod definition;
mod dense;
mod dense_inputs;
mod dense_invariance;
mod index;
mod linear;
mod merge;
mod projection;
mod sparse;
mod topk;
