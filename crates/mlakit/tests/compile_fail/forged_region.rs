//! Nobody outside makes a region.
use mlakit::*;

fn main() {
    let _ = Region { address: 0, bytes: 1 };
}
