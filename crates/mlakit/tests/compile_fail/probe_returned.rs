//! A probe cannot be the result of `prepare`.
use mlakit::op::toy::Sum;
use mlakit::sim::AtOnce;
use mlakit::*;

fn prepare(plan: &Plan<Sum>, device: &AtOnce) {
    let _ = plan.prepare_with(device, |warm| warm.probe::<f32>(&[1.0; 4]));
}

fn main() {}
