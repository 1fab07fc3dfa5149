//! mlakit-model.
