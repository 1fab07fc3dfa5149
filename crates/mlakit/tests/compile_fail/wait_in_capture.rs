//! A recorder cannot wait, allocate or read.
use mlakit::sim::Late;
use mlakit::*;

fn record(slots: Slots<Late>, stream: &mut Stream<'_, Late>) -> Result<Graph<Late>, Error> {
    slots.capture(stream, |rec| rec.wait())
}

fn main() {}
