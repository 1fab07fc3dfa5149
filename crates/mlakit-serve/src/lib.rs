//! mlakit-serve.
