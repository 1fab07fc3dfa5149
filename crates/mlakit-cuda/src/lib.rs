//! The CUDA device.
//!
//! The driver is never linked: it is loaded when it is asked for, so one program runs with and
//! without it. [`probe()`] says what is there, or why nothing is.

pub mod probe;

pub use probe::{CudaDevice, CudaFound, DriverVersion, Unavailable, probe};
