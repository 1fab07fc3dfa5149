//! mlakit-cuda.
