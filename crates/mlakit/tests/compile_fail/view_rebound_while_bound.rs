//! A view cannot be pointed elsewhere while a call is bound to it.
use mlakit::op::toy::{Scale, ScaleArgs};
use mlakit::sim::Late;
use mlakit::*;

fn rebind<'a>(
    scale: &Prepared<Scale, Late>,
    stream: &mut Stream<'_, Late>,
    (view, pool): (&'a mut PoolView<Late>, &Pages<Late>),
    rest: impl FnOnce(Cache<'a, Late>) -> ScaleArgs<'a, Late>,
) -> Result<Ticket, Error> {
    let bound = scale.bind(rest((&*view).into()))?;
    view.bind(stream, pool)?;
    bound.run(stream)
}

fn main() {}
