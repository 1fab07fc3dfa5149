//! Memory: what is in flight is kept, what is not goes back to the system, and nothing waits.

use mlakit::op::dense::Dense;
use mlakit::op::merge::{LseInput, LseOutput, Merge, MergeArgs, Partial, PartialInput};
use mlakit::{Buffer, Category, Device, Error, Lane, Pages, Plan, Slots, Splits};
use mlakit_cuda::Cuda;

use super::driver::{Driver, Gate, raw};
use super::large::merge_spec;
use super::suite::dense_inputs::shape;
use super::suite::random::Rng;
use super::suite::replay::{Eager, Given, Replayed, Step, World, fill, same};
use super::{cuda, cuda_alone};

const MIB: usize = 1 << 20;

fn tensor(device: &Cuda, bytes: usize) -> Buffer<u8, Cuda> {
    Buffer::uninit(device, (Category::Tensors, "tensor"), bytes).unwrap()
}

/// Everything of a replay that is behind a gate goes: `release` and each drop return at once,
/// although the gate is opened only afterwards; the bytes are retiring, and then they are gone.
fn retire_behind_a_gate(device: &Cuda) {
    let driver = Driver::new(device);
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let mut world = World::new(device, Splits::Count(2), Partial::Bf16);
    let mut replayed = Replayed::new(&mut stream, &world);
    let step = Step::new(&mut Rng(1));
    replayed.run(&mut stream, &world, (&step, true));
    let needed = replayed.given(&mut stream);
    device.reclaim();
    assert_eq!(device.census().live(Category::Retiring), 0);

    let gate = Gate::new(&driver, raw(&caller));
    fill_behind(&mut world, &mut stream);
    replayed.run(&mut stream, &world, (&step, false));
    let pool = &mut world.pools[step.pool];
    let (pages, bytes) = (pool.pages(), pool.pages() * pool.page_stride_bytes());
    let held = pool.epoch();
    pool.release();
    assert!(device.census().live(Category::Retiring) >= bytes, "a replay reads the pool");
    let stale = replayed.graph.replay(&mut stream).err();
    assert_eq!(stale, Some(Error::StaleEpoch { held, current: held + 1 }));

    // Meanwhile memory comes and goes, other streams work, and hosts copy.
    let (other, mut twice) = (device.own_stream().unwrap(), tensor(device, 4 * MIB));
    let mut other_stream = device.stream(&other).unwrap();
    twice.write_on(&mut other_stream, 0, &[5; 100]).unwrap();
    other_stream.wait().unwrap();
    assert_eq!(twice.read().unwrap()[..100], [5; 100]);
    drop((twice, tensor(device, 64 * MIB)));

    // The replacement is bound behind the gate, and the same graph runs on it.
    pool.refill(pages).unwrap();
    fill(&mut world.pools[step.pool], step.pool as u64);
    replayed.graph.bind(&mut stream, replayed.view, &world.pools[step.pool]).unwrap();
    let _ = replayed.graph.replay(&mut stream).unwrap();
    assert!(device.census().live(Category::Retiring) >= bytes, "the gate is closed");
    gate.open();
    same("on the replacement", &replayed.given(&mut stream), &needed);
    assert_eq!(device.census().live(Category::Retiring), 0);

    // Then the graph with its executable, the lane and the code, behind another gate.
    let gate = Gate::new(&driver, raw(&caller));
    replayed.run(&mut stream, &world, (&step, false));
    drop((replayed, world));
    assert!(device.census().live(Category::Retiring) > 0);
    assert_eq!(device.census().live(Category::Cache), 0);
    gate.open();
    stream.wait().unwrap();
    drop((stream, other_stream));
    assert_eq!(device.census().lines(), [], "the ledger is empty");
}

/// The same bytes as at first, in stream order.
fn fill_behind(world: &mut World<Cuda>, stream: &mut mlakit::Stream<'_, Cuda>) {
    for (seed, pool) in world.pools.iter_mut().enumerate() {
        let bytes = pool.pages() * pool.page_stride_bytes();
        let values = Rng(seed as u64).bf16s(bytes / 2);
        pool.write_on(stream, (0, 0), bytemuck::cast_slice(&values)).unwrap();
    }
}

#[test]
fn what_is_in_flight_behind_a_gate_is_retired() {
    if let Some(device) = cuda_alone() {
        retire_behind_a_gate(&device);
    }
}

/// A device whose last handle goes with work in flight waits for it.
#[test]
fn a_device_waits_for_what_is_in_flight() {
    let Some(device) = cuda_alone() else { return };
    let driver = Driver::new(&device);
    let caller = device.own_stream().unwrap();
    let gate = Gate::new(&driver, raw(&caller));
    let mut stream = device.stream(&caller).unwrap();
    let mut x = tensor(&device, MIB);
    x.write_on(&mut stream, 0, &[1; 10]).unwrap();
    drop((x, stream));
    assert_eq!(device.census().live(Category::Retiring), MIB);
    std::thread::scope(|scope| {
        scope.spawn(|| gate.open());
        drop(device); // waits, then frees: compute-sanitizer would see a write to freed memory
    });
}

/// Freed memory goes back to the system, in the driver's steps; trimming gives back the rest.
#[test]
fn alone_freed_memory_is_given_back() {
    let Some(device) = cuda_alone() else { return };
    drop(tensor(&device, 1)); // the driver's own first allocation
    device.trim().unwrap();
    let (before, _) = device.memory_bytes().unwrap();
    let large = tensor(&device, 1 << 30);
    let (with, _) = device.memory_bytes().unwrap();
    assert!(before - with >= 1 << 30, "{before} {with}");
    drop(large);
    let (after, _) = device.memory_bytes().unwrap();
    assert_eq!(after, before, "without a trim");
    let small: Vec<_> = (0..1000).map(|i| tensor(&device, 1000 + i)).collect();
    drop(small);
    device.trim().unwrap();
    let (after, _) = device.memory_bytes().unwrap();
    assert_eq!(after, before);
}

/// A large free behind a closed gate on another stream: the bytes are given back while it is
/// closed.
#[test]
fn alone_freed_memory_is_given_back_behind_a_gate() {
    let Some(device) = cuda_alone() else { return };
    let driver = Driver::new(&device);
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let mut kept = tensor(&device, MIB);
    let large = tensor(&device, 1 << 30);
    let (with, _) = device.memory_bytes().unwrap();
    let gate = Gate::new(&driver, raw(&caller));
    kept.write_on(&mut stream, 0, &[1]).unwrap();
    drop(large);
    let (after, _) = device.memory_bytes().unwrap();
    assert!(after - with >= 1 << 30, "{with} {after}");
    gate.open();
    stream.wait().unwrap();
}

/// A thousand replays with everything changed, the pool too: not a byte of the GPU more, and the
/// same addresses.
#[test]
fn alone_replays_leave_memory_flat() {
    let Some(device) = cuda_alone() else { return };
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let mut rng = Rng(3);
    let mut world = World::new(&device, Splits::Auto, Partial::Bf16);
    let mut eager = Eager::new(&device, &world);
    let mut replayed = Replayed::new(&mut stream, &world);
    let mut given = Given::nothing();
    let step = Step::new(&mut rng);
    eager.run(&mut stream, &mut world, &step);
    replayed.run(&mut stream, &world, (&step, true));
    replayed.read_into(&mut stream, &mut given);
    device.trim().unwrap();
    let before = (device.memory_bytes().unwrap(), replayed.graph.address(replayed.q).unwrap());
    for index in 0..1000 {
        let step = Step::new(&mut rng);
        replayed.run(&mut stream, &world, (&step, index % 2 == 0));
        replayed.read_into(&mut stream, &mut given);
    }
    device.trim().unwrap();
    let after = (device.memory_bytes().unwrap(), replayed.graph.address(replayed.q).unwrap());
    assert_eq!(after, before);
}

/// Whichever allocation finds no memory, the error is typed and names the owner, and nothing is
/// left behind.
#[test]
fn alone_whichever_allocation_fails_nothing_is_left() {
    let Some(device) = cuda_alone() else { return };
    build(&device).unwrap();
    device.trim().unwrap();
    let before = device.memory_bytes().unwrap();
    let mut failed = 0;
    for nth in 1.. {
        device.fail_allocation(nth);
        match build(&device) {
            Ok(()) => break,
            Err(Error::OutOfMemory { what, .. }) => assert_ne!(what.as_str(), "device"),
            Err(other) => panic!("allocation {nth}: {other}"),
        }
        failed += 1;
        assert_eq!(device.census().lines(), [], "allocation {nth}");
    }
    device.fail_allocation(0);
    assert!(failed >= 20, "only {failed} allocations were made to fail");
    device.trim().unwrap();
    assert_eq!(device.memory_bytes().unwrap(), before);
}

/// What a layer needs: code that is checked on probes, a lane, a pool, a view, a graph that is
/// replayed.
fn build(device: &Cuda) -> Result<(), Error> {
    let caller = device.own_stream()?;
    let mut stream = device.stream(&caller)?;
    let plan = Plan::<Merge>::for_device::<Cuda>(&merge_spec(), device.facts())?;
    let merge = plan.prepare(device)?;
    let dense = shape(3, (66, 34), &[(70, 1)]).spec();
    let dense = Plan::<Dense>::for_device::<Cuda>(&dense, device.facts())?.prepare(device)?;
    let bytes = [merge.plan().scratch_bytes(), dense.plan().scratch_bytes()];
    let lane = Lane::new(device, "lane", &bytes)?;
    let pool = Pages::new(device, "pool", dense.plan().spec().pages(), 4)?;
    let mut slots = Slots::new(device);
    let (outs, lses) = (slots.slot("outs", 2 * 8)?, slots.slot("lses", 2)?);
    let (out, lse) = (slots.slot("out", 8)?, slots.slot("lse", 1)?);
    let view = slots.view("view", pool.geometry())?;
    let mut graph = slots.capture(&mut stream, |rec| {
        let args = MergeArgs {
            outs: PartialInput::F32(rec.input(outs)?),
            lses: LseInput::Natural(rec.input(lses)?),
            sink: None,
            out: rec.output(out)?,
            lse: LseOutput::Natural(rec.output(lse)?),
            scratch: lane.lease(),
        };
        merge.bind(args)?.run(rec)
    })?;
    graph.slot_mut(outs)?.write(&[[1.0; 8], [3.0; 8]].concat())?;
    graph.slot_mut(lses)?.write(&[0.5; 2])?;
    graph.bind(&mut stream, view, &pool)?;
    graph.replay(&mut stream)?.wait(&mut stream)?;
    assert_eq!(graph.read(out)?, [half::bf16::from_f32(2.0); 8]);
    Ok(())
}

/// More than there is: typed, with the owner's name, and the device goes on.
#[test]
fn too_much_memory_is_refused() {
    let Some(device) = cuda() else { return };
    let bytes = 1 << 45;
    let refused = Buffer::<u8, Cuda>::uninit(&device, (Category::Weights, "weights"), bytes).err();
    assert_eq!(refused, Some(Error::OutOfMemory { what: "weights".into(), bytes }));
    assert_eq!(device.census().lines(), []);
    let ones = Buffer::<u8, Cuda>::new(&device, (Category::Tensors, "x"), &[1; 9]).unwrap();
    assert_eq!(ones.read().unwrap(), [1; 9]);
    let none = tensor(&device, 0);
    assert_eq!((none.len(), none.read().unwrap()), (0, vec![]));
}
