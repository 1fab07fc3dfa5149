//! The program `mlakit`.

fn main() {}
