//! Case files: one operation, from a safetensors file.
//!
//! Everything about a file that is wrong is found here, before anything is allocated for it on a
//! device: what kind of file it is, which tensors it has, their dtypes, their shapes against each
//! other and against the spec.

pub mod read;
pub mod shape;
pub mod tensor;
pub mod write;

pub use read::{Case, read_file};
pub use shape::{Axis, Dims, Table, TensorRule};
pub use tensor::{Tensor, Tensors};
pub use write::write_file;
