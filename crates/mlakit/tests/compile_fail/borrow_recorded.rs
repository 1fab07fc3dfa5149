//! A graph cannot record something that is only borrowed.
use mlakit::op::toy::{Sum, SumArgs};
use mlakit::sim::Late;
use mlakit::*;

fn record(
    sum: &Prepared<Sum, Late>,
    slots: Slots<Late>,
    stream: &mut Stream<'_, Late>,
    x: &Buffer<f32, Late>,
    (out, lane): (Key<f32>, &Lane<Late>),
) -> Result<Graph<Late>, Error> {
    slots.capture(stream, |rec| {
        let args = SumArgs { x: x.into(), out: rec.output(out)?, scratch: lane.lease() };
        sum.bind(args)?.run(rec)
    })
}

fn main() {}
