//! A cache that was lent for reading is no operand of a writer.
use mlakit::sim::Late;
use mlakit::{Cache, CacheMut};

fn write<'a>(cache: Cache<'a, Late>) -> CacheMut<'a, Late> {
    cache
}

fn main() {}
