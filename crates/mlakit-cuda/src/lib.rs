//! The CUDA device.
//!
//! The driver is never linked: it is loaded when it is asked for, so one program runs with and
//! without it. [`probe()`] says what is there, or why nothing is; [`Cuda`] is the device.
//!
//! ```no_run
//! use mlakit::{Buffer, Category};
//! use mlakit_cuda::{Cuda, Options};
//!
//! let device = Cuda::with(Options::from_environment())?;
//! let ones = Buffer::<f32, Cuda>::new(&device, (Category::Tensors, "ones"), &[1.0; 4])?;
//! assert_eq!(ones.read()?, [1.0; 4]);
//! # Ok::<(), mlakit::Error>(())
//! ```

mod device;
mod driver;
pub mod facts;
mod graph;
mod memory;
mod module;
mod ops;
pub mod options;
pub mod probe;
pub mod recorded;
mod stream;
mod view;

pub use device::Cuda;
pub use facts::Facts;
pub use graph::Executable;
pub use memory::Memory;
pub use module::compiler::{Compiled, Compiler};
pub use module::log::Assembled;
pub use module::{LoadedKernel, Resources, Source};
pub use ops::Compiles;
pub use options::{DenseFamily, Options};
pub use probe::{CudaDevice, CudaFound, DriverVersion, Unavailable, probe};
pub use recorded::{PlannedKernel, planned_kernels, recorded_kernels};
pub use stream::{CallerStream, Queue};

/// The representative specialisations of every kernel, which CI compiles for all architectures.
pub fn manifest() -> Vec<Source> {
    ops::manifest()
}
