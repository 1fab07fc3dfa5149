//! mlakit-cpu.
