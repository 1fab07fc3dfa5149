//! The program `mlakit`, run as a user runs it.

mod common;
mod cuda;
mod fuzz;
mod indexing;
mod malformed_cases;
mod malformed_flags;
mod model;
mod ops;
mod plan;
mod sparse;
mod tools;
