//! Nobody outside reports that work is done.
use mlakit::sim::Late;
use mlakit::*;

fn lie(device: &Late, stream: &Stream<'_, Late>) {
    let reporter = Reporter { device: 1, stream: stream.last().stream() };
    device.keeper().complete(&reporter, stream.last().number());
}

fn main() {}
