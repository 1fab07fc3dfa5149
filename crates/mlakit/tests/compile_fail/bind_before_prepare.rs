//! A plan has no `bind`.
use mlakit::Plan;
use mlakit::op::toy::{Sum, SumArgs};
use mlakit::sim::AtOnce;

fn bind(plan: &Plan<Sum>, args: SumArgs<'_, AtOnce>) {
    let _ = plan.bind(args);
}

fn main() {}
