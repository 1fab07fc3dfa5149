//! The device runs out of memory, fails a launch, computes wrong numbers, breaks down. Nothing of
//! it leaves memory in doubt.

mod common;
use common::*;

#[test]
fn whichever_allocation_fails_nothing_is_left_behind() {
    let mut failed = 0;
    for nth in 1.. {
        let device = Late::new(2);
        let caller = device.own_stream().unwrap();
        device.inject(Fault::Obtain(nth));
        let built = build(&device, &caller);
        let done = built.is_ok();
        if let Err(error) = built {
            assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
            assert!(!error.to_string().contains("machine"), "the core names the owner: {error}");
            failed += 1;
        }
        while caller.pump(usize::MAX) > 0 {}
        is_clean(&device);
        if done {
            break;
        }
    }
    assert!(failed >= 12, "only {failed} allocations were made to fail");
}

/// Everything that a layer needs, step by step.
fn build(device: &Late, caller: &sim::SimStream) -> Result<Vec<f32>, Error> {
    let mut stream = device.stream(caller)?;
    let (scale, sum) = plans::<Late>(device.facts());
    let (scale, sum) = (scale.prepare(device)?, sum.prepare(device)?);
    let factor = Buffer::<f32, _>::new(device, (Category::Weights, "factor"), &[FACTOR])?;
    let scaled = Buffer::<f32, _>::zeroed(device, (Category::Tensors, "scaled"), 32)?;
    let bytes = [scale.plan().scratch_bytes(), sum.plan().scratch_bytes()];
    let lane = Lane::new(device, "lane", &bytes)?;
    let mut pool = Pages::new(device, "pool", PAGE, 1)?;
    pool.write_on(&mut stream, (0, 0), &page(1.0))?;
    let mut slots = Slots::new(device);
    let (ids, out) = (slots.slot::<i32>("ids", ROWS)?, slots.slot::<f32>("out", ROWS)?);
    let view = slots.view("view", PAGE)?;
    let layer = Layer { scale, sum, factor: factor.lease() };
    let mut graph = slots.capture(&mut stream, |rec| {
        let (inputs, to) = ((rec.input(ids)?, rec.cache(view)?), rec.output(out)?);
        layer.step(rec, &lane, inputs, &scaled.lease(), to)
    })?;
    graph.bind(&mut stream, view, &pool)?;
    graph.replay(&mut stream)?.wait(&mut stream)?;
    graph.read(out)
}

#[test]
fn whichever_call_fails_nothing_is_left_behind() {
    let (mut failed, mut result) = (0, None);
    for nth in 1.. {
        let device = Late::new(2);
        let caller = device.own_stream().unwrap();
        device.inject(Fault::Work(nth));
        match build(&device, &caller) {
            Ok(out) => result = Some(out),
            Err(error) => assert!(matches!(error, Error::Device { .. }), "{error}"),
        }
        while caller.pump(usize::MAX) > 0 {}
        is_clean(&device);
        if result.is_some() {
            break;
        }
        failed += 1;
    }
    assert!(failed >= 9, "only {failed} calls were made to fail");
    assert_eq!(result.unwrap(), [of_page(1.0); 2]);
}

/// A pool that finds no memory when it is filled again stays released; the old pages are gone,
/// because they had to be.
#[test]
fn a_refill_without_memory_leaves_an_empty_pool() {
    late(|device| {
        let caller = device.own_stream().unwrap();
        let mut stream = device.stream(&caller).unwrap();
        let mut world = World::new(device, &mut stream);
        device.inject(Fault::Obtain(1));
        let bytes = 3 * PAGE.payload_bytes();
        let refused = world.pool.refill(3);
        assert_eq!(refused, Err(Error::OutOfMemory { what: "pool".into(), bytes }));
        assert_eq!((world.pool.pages(), world.pool.epoch()), (0, 1));
        let bound = world.graph.bind(&mut stream, world.view, &world.pool);
        assert_eq!(bound.err(), Some(Error::Unbound));
        let stale = Error::StaleEpoch { held: 0, current: 1 };
        assert_eq!(world.graph.replay(&mut stream).err(), Some(stale));
        let enormous = Pages::new(device, "pool", PAGE, usize::MAX);
        assert!(matches!(enormous.err(), Some(Error::OutOfMemory { bytes: usize::MAX, .. })));
        stream.wait().unwrap();
    });
}

/// A write in several pieces whose second piece fails: what was enqueued keeps its memory until it
/// is done.
#[test]
fn a_call_that_fails_half_way_still_counts() {
    late(|device| {
        let caller = device.own_stream().unwrap();
        let mut stream = device.stream(&caller).unwrap();
        let mut wide = tensor(device, "wide", &[0.0; 600]);
        device.inject(Fault::Work(2));
        let sent = wide.write_on(&mut stream, 0, &[1.0; 600]);
        assert!(matches!(sent, Err(Error::Device { call: "write", .. })));
        assert_eq!(wide.read().err(), Some(Error::InFlight { what: "wide".into() }));
        drop(wide);
        assert_eq!(device.census().live(Category::Retiring), 2400);
        caller.pump(usize::MAX);
        assert_eq!(device.census().live(Category::Retiring), 0);
    });
}

/// Nobody knows what a view holds whose rewriting failed; nobody may read through it then.
#[test]
fn a_view_whose_bind_failed_is_unbound() {
    late(|device| {
        let caller = device.own_stream().unwrap();
        let mut stream = device.stream(&caller).unwrap();
        let mut world = World::new(device, &mut stream);
        device.inject(Fault::Work(1));
        let bound = world.graph.bind(&mut stream, world.view, &world.pool);
        assert!(matches!(bound, Err(Error::Device { .. })));
        assert_eq!(world.graph.replay(&mut stream).err(), Some(Error::Unbound));
        world.graph.bind(&mut stream, world.view, &world.pool).unwrap();
        assert_eq!(world.replay(&mut stream), [of_page(1.0); 2]);
    });
}

#[test]
fn a_device_that_computes_wrong_numbers_does_not_prepare() {
    late(|device| {
        device.inject(Fault::Numbers);
        let (scale, sum) = plans::<Late>(device.facts());
        let wrong = scale.prepare(device).err();
        assert!(matches!(wrong, Some(Error::ProbeMismatch { op: "scale", index: 0, .. })));
        let wrong = sum.prepare(device).err();
        assert!(matches!(wrong, Some(Error::ProbeMismatch { op: "sum", index: 0, .. })));
    });
}

/// A device that lost its signals: what may still be in use is never freed, and the ledger shows
/// it.
#[test]
fn unknown_completion_never_frees() {
    let device = Late::new(2);
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let mut world = World::new(&device, &mut stream);
    stream.wait().unwrap();
    let idle = tensor(&device, "idle", &[0.0; 8]);
    let _ = world.graph.replay(&mut stream).unwrap();
    device.inject(Fault::Down);
    let down = |error: Error| assert!(matches!(error, Error::Device { .. }), "{error}");
    down(world.graph.replay(&mut stream).err().unwrap());
    down(stream.wait().err().unwrap());
    down(idle.read().err().unwrap());
    down(Buffer::<f32, _>::zeroed(&device, (Category::Tensors, "more"), 1).err().unwrap());
    let bytes = world.scaled.len() * 4 + world.lane.bytes() + 3 * PAGE.payload_bytes();
    let blocks = device.blocks();
    drop((world, stream, idle));
    assert!(device.census().live(Category::Retiring) >= bytes);
    assert_eq!(device.blocks(), blocks - 1, "what nothing used is freed, the rest is not");
    assert_eq!(device.violations(), 0);
}
