//! The CPU kernels of mlakit and the thread pool that runs them.
//!
//! Kernels take raw pointers in small structs, allocate nothing and know nothing of who owns the
//! memory. Each is compiled for several instruction sets ([`isa::Isa`]); the scalar one defines the
//! arithmetic, and AVX-512 BF16 gives the same bits.

mod device;
pub mod e4m3;
pub mod isa;
pub mod kernel;
mod memory;
pub mod numerics;
mod ops;
pub mod pool;

pub use device::{CallerStream, Cpu, Facts, Queue, Recorded};
pub use memory::Memory;

/// The example of the README, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
