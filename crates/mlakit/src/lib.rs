//! mlakit.
