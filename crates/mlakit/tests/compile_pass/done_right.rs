//! The twin that compiles: what the failing programs do, done right.
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
    bound.run(&mut stream).unwrap();
    drop(x);
    let mut slots = Slots::new(&device);
    let (x, y) = (slots.slot::<f32>("x", 4).unwrap(), slots.slot::<f32>("y", 1).unwrap());
    let record = |rec: &mut Recorder<'_, AtOnce>| {
        let args = SumArgs { x: rec.input(x)?, out: rec.output(y)?, scratch: lane.lease() };
        sum.bind(args)?.run(rec)
    };
    let mut graph = slots.capture(&mut stream, record).unwrap();
    graph.slot_mut(x).unwrap().write(&[1.0; 4]).unwrap();
    graph.replay(&mut stream).unwrap().wait(&mut stream).unwrap();
    assert_eq!(graph.read(y).unwrap(), [4.0]);
}
