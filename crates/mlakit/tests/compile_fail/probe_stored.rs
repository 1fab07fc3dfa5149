//! A probe cannot be kept in something that outlives `prepare`.
use mlakit::op::toy::Sum;
use mlakit::sim::AtOnce;
use mlakit::*;

fn prepare(plan: &Plan<Sum>, device: &AtOnce) {
    let mut kept = None;
    let _ = plan.prepare_with(device, |warm| {
        kept = Some(warm.probe::<f32>(&[1.0; 4])?);
        Ok(())
    });
}

fn main() {}
