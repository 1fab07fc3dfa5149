//! While a capture goes on, the stream is the recorder's.
use mlakit::sim::Late;
use mlakit::*;

fn record(slots: Slots<Late>, stream: &mut Stream<'_, Late>) -> Result<Graph<Late>, Error> {
    slots.capture(stream, |_| stream.wait())
}

fn main() {}
