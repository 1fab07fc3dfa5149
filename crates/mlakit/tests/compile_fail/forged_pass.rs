//! Nobody outside obtains memory past the ledger.
use mlakit::sim::Late;
use mlakit::*;

fn steal(device: &Late) -> Result<<Late as Device>::Memory, Error> {
    device.obtain(16, Pass(()))
}

fn main() {}
