//! Nobody outside attaches a second handle to a stream, or obtains memory past the ledger.
use mlakit::sim::Late;
use mlakit::*;

fn steal(device: &Late, caller: &<Late as Device>::CallerStream) -> Result<(), Error> {
    let mut queue = device.attach(caller, Pass(()))?;
    device.begin_capture(&mut queue)
}

fn main() {}
