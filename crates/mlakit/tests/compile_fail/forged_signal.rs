//! Nobody outside reports that work is done.
use mlakit::sim::Late;
use mlakit::*;

fn lie(device: &Late, stream: &Stream<'_, Late>) {
    device.keeper().complete(Signal(stream.last()));
}

fn main() {}
