//! An input cannot go while a call is bound to it.
use mlakit::op::toy::{Sum, SumArgs, SumFields, SumSpec};
use mlakit::sim::AtOnce;
use mlakit::*;

fn main() {
    let device = AtOnce::new(1);
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let spec = SumSpec::new(SumFields { rows: 1, width: 4 }).unwrap();
    let plan = Plan::<Sum>::for_device::<AtOnce>(&spec, device.facts()).unwrap();
    let sum = plan.prepare(&device).unwrap();
    let x = Buffer::<f32, _>::new(&device, (Category::Tensors, "x"), &[1.0; 4]).unwrap();
    let mut out = Buffer::<f32, _>::new(&device, (Category::Tensors, "out"), &[0.0]).unwrap();
    let mut lane = Lane::new(&device, "lane", &[plan.scratch_bytes()]).unwrap();
    let args = SumArgs { x: (&x).into(), out: (&mut out).into(), scratch: (&mut lane).into() };
    let bound = sum.bind(args).unwrap();
    drop(x);
    bound.run(&mut stream).unwrap();
}
