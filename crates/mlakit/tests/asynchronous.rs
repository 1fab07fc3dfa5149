//! The device works later: borrows, owners, guards and leases end before the work does.

mod common;
use common::*;

const BUSY_VIEW: &str = "view";

fn stale(held: u64, current: u64) -> Option<Error> {
    Some(Error::StaleEpoch { held, current })
}

/// Whose bytes wait for work in flight.
fn retiring(device: &Late) -> Vec<String> {
    let lines = device.census().lines().into_iter();
    let retiring = lines.filter(|line| line.category == Category::Retiring);
    retiring.map(|line| line.owner.to_string()).collect()
}

#[test]
fn borrows_end_at_run_and_operands_may_be_dropped_in_flight() {
    late(|device| {
        let caller = device.own_stream().unwrap();
        let mut stream = device.stream(&caller).unwrap();
        let sum = plans::<Late>(device.facts()).1.prepare(device).unwrap();
        let mut lane = Lane::new(device, "lane", &[sum.plan().scratch_bytes()]).unwrap();
        let mut out = tensor(device, "out", &[0.0; 2]);
        let ticket = {
            let x = tensor(device, "x", &[1.5; ROWS * 16]);
            let args =
                SumArgs { x: (&x).into(), out: (&mut out).into(), scratch: (&mut lane).into() };
            sum.bind(args).unwrap().run(&mut stream).unwrap()
        }; // x is dropped here, with the launch still in the queue
        let bytes = 4 * ROWS * 16 + lane.bytes();
        drop((sum, lane)); // the code and the lane too
        assert_eq!(device.census().live(Category::Scratch), 0);
        assert!(device.census().live(Category::Retiring) >= bytes);
        let owners = retiring(device);
        assert!(owners.iter().any(|owner| owner == "sum"), "code under its kernel: {owners:?}");
        assert!(!device.keeper().is_done(ticket));
        assert_eq!(out.read().err(), Some(Error::InFlight { what: "out".into() }));
        assert_eq!(out.write(&[1.0]).err(), Some(Error::InFlight { what: "out".into() }));
        caller.pump(usize::MAX);
        assert!(device.keeper().is_done(ticket));
        assert_eq!(out.read().unwrap(), [24.0, 24.0]);
        assert_eq!(device.census().live(Category::Retiring), 0);
    });
}

// The lint says it: a submission has no destructor, so leaking it is nothing special. That is the
// point.
#[allow(clippy::forget_non_drop)]
#[test]
fn a_leaked_submission_then_a_slot_write() {
    late(|device| {
        let caller = device.own_stream().unwrap();
        let mut stream = device.stream(&caller).unwrap();
        let mut world = World::new(device, &mut stream);
        stream.wait().unwrap();
        std::mem::forget(world.graph.replay(&mut stream).unwrap());
        let mut slot = world.graph.slot_mut(world.table).unwrap();
        assert_eq!(slot.write(&[1, 1]), Err(Error::InFlight { what: "page_table".into() }));
        // In stream order there is nothing to refuse: the first replay sees the old ids, the second
        // the new ones.
        slot.write_on(&mut stream, &[1, 2]).unwrap();
        assert_eq!(caller.pump(2), 2); // the replay and its signal
        assert_eq!(world.graph.read(world.out).unwrap(), [of_page(1.0); 2]);
        assert_eq!(world.replay(&mut stream), [of_page(2.0), of_page(3.0)]);
        world.graph.slot_mut(world.table).unwrap().write(&[0, 0]).unwrap();
    });
}

// As above: nothing here depends on a destructor of a user.
#[allow(clippy::forget_non_drop)]
#[test]
fn a_leaked_bound_call_pins_nothing_but_its_code() {
    late(|device| {
        let sum = plans::<Late>(device.facts()).1.prepare(device).unwrap();
        let mut lane = Lane::new(device, "lane", &[sum.plan().scratch_bytes()]).unwrap();
        let (x, mut out) = (tensor(device, "x", &[1.0; 32]), tensor(device, "out", &[0.0; 2]));
        let args = SumArgs { x: (&x).into(), out: (&mut out).into(), scratch: (&mut lane).into() };
        let bound = sum.bind(args).unwrap();
        std::mem::forget(tensor(device, "y", &[0.0]).lease());
        drop(bound);
        drop((x, out, lane));
        let live = |category| device.census().live(category);
        assert_eq!([Category::Tensors, Category::Scratch, Category::Retiring].map(live), [0; 3]);
    });
}

#[test]
fn a_pool_is_released_under_work_in_flight_and_replaced_without_a_capture() {
    late(|device| {
        let caller = device.own_stream().unwrap();
        let mut stream = device.stream(&caller).unwrap();
        let mut world = World::new(device, &mut stream);
        stream.wait().unwrap();
        let bytes = device.census().live(Category::Cache);
        let _ = world.graph.replay(&mut stream).unwrap(); // in flight
        world.pool.release(); // returns at once
        let census = device.census();
        assert_eq!((census.live(Category::Cache), census.live(Category::Retiring)), (0, bytes));
        assert_eq!(world.pool.pages(), 0);
        assert_eq!(world.graph.replay(&mut stream).err(), stale(0, 1));
        assert_eq!(world.graph.replay(&mut stream).err(), stale(0, 1), "asking again pins nothing");

        let wide = PageGeometry { page_size: 32, ..PAGE };
        let other = Pages::new(device, "other", wide, 1).unwrap();
        let bound = world.graph.bind(&mut stream, world.view, &other);
        let (needed, given) = (PAGE.to_string(), wide.to_string());
        assert_eq!(bound.err(), Some(Error::PageGeometry { needed, given }));

        // All of this is enqueued behind the replay that still reads the old pool through the same
        // view.
        let pool = filled_pool(device, &mut stream, 5.0);
        world.graph.bind(&mut stream, world.view, &pool).unwrap();
        assert_eq!(caller.pump(2), 2);
        assert_eq!(device.census().live(Category::Retiring), 0, "freed at its last signal");
        assert_eq!(world.graph.read(world.out).unwrap(), [of_page(1.0); 2]);
        assert_eq!(world.replay(&mut stream), [of_page(5.0); 2]);

        // The first owner can fill itself again; the lease of its first epoch is no use then
        // either.
        world.pool.refill(1).unwrap();
        world.pool.refill(1).unwrap();
        assert_eq!(world.pool.epoch(), 2);
    });
}

#[test]
fn an_eager_call_bound_before_a_release_is_stale_when_run() {
    late(|device| {
        let caller = device.own_stream().unwrap();
        let mut stream = device.stream(&caller).unwrap();
        let mut world = World::new(device, &mut stream);
        let ids = table(device, &[0, 0]);
        let mut view = PoolView::new(device, "view", PAGE).unwrap();
        view.bind(&mut stream, &world.pool).unwrap();
        let args = ScaleArgs {
            factor: (&world.factor).into(),
            page_table: (&ids).into(),
            cache: (&view).into(),
            out: (&mut world.scaled).into(),
            scratch: (&mut world.lane).into(),
        };
        let bound = world.layer.scale.bind(args).unwrap();
        world.pool.release();
        world.pool.refill(1).unwrap();
        world.pool.release();
        assert_eq!(bound.run(&mut stream).err(), stale(0, 2));
        stream.wait().unwrap();
    });
}

#[test]
fn leases_of_lanes_weights_and_tensors_go_stale_with_their_owner() {
    for what in 0..3 {
        late(|device| {
            let caller = device.own_stream().unwrap();
            let mut stream = device.stream(&caller).unwrap();
            let World { mut graph, factor, scaled, lane, pool, layer, .. } =
                World::new(device, &mut stream);
            let mut parts = (Some(factor), Some(scaled), Some(lane));
            let _ = graph.replay(&mut stream).unwrap();
            match what {
                0 => drop(parts.0.take()),
                1 => drop(parts.1.take()),
                _ => drop(parts.2.take()),
            }
            assert_eq!(graph.replay(&mut stream).err(), stale(0, 1));
            stream.wait().unwrap();
            drop((layer, pool));
        });
    }
}

#[test]
fn everything_may_be_dropped_in_any_order_with_launches_in_flight() {
    for order in 0..24 {
        late(|device| {
            let caller = device.own_stream().unwrap();
            let mut stream = device.stream(&caller).unwrap();
            let World { mut graph, pool, factor, scaled, lane, layer, .. } =
                World::new(device, &mut stream);
            let _ = graph.replay(&mut stream).unwrap();
            drop(stream); // the stream goes back to its caller, too
            let (mut left, mut order) = (vec![0, 1, 2, 3], order);
            let mut parts = (Some(pool), Some(layer), Some(graph), Some((factor, scaled, lane)));
            while !left.is_empty() {
                let next = left.remove(order % left.len());
                order /= left.len() + 1;
                match next {
                    0 => drop(parts.0.take()),
                    1 => drop(parts.1.take()),
                    2 => drop(parts.2.take()),
                    _ => drop(parts.3.take()),
                }
            }
            assert_eq!(device.census().live(Category::Slots), 0);
            let owners = retiring(device);
            let all = ["factor", "graph", "lane", "out", "page_table", "pool", "scale", "scaled"];
            let waits = |name: &&str| owners.iter().any(|owner| owner == name);
            assert!(all.iter().all(waits), "retiring: {owners:?}");
            caller.pump(usize::MAX);
        });
    }
}

/// A graph keeps its code alive, so a layer that has captured its step may forget it.
#[test]
fn a_graph_outlives_the_prepared_that_it_was_recorded_from() {
    late(|device| {
        let caller = device.own_stream().unwrap();
        let mut stream = device.stream(&caller).unwrap();
        let World { mut graph, out, layer, pool, factor, scaled, lane, .. } =
            World::new(device, &mut stream);
        drop(layer);
        device.freeze();
        graph.replay(&mut stream).unwrap().wait(&mut stream).unwrap();
        assert_eq!(graph.read(out).unwrap(), [of_page(1.0); 2]);
        plans::<Late>(device.facts()).0.prepare(device).expect("the graph has its code");
        drop((graph, pool, factor, scaled, lane));
        assert_eq!(device.census().live(Category::Code), 0);
    });
}

/// First an input of one call, then the output of another: the graph writes it.
#[test]
fn a_tensor_that_a_graph_reads_and_then_writes_is_written() {
    late(|device| {
        let caller = device.own_stream().unwrap();
        let mut stream = device.stream(&caller).unwrap();
        let sum = plans::<Late>(device.facts()).1.prepare(device).unwrap();
        let lane = Lane::new(device, "lane", &[sum.plan().scratch_bytes()]).unwrap();
        let (x, y) = (tensor(device, "x", &[1.0; 32]), tensor(device, "y", &[2.0; 32]));
        let call = |from: &Lease<f32, Late>, to: &Lease<f32, Late>| {
            let out = (&to.part(0..ROWS).unwrap()).into();
            sum.bind(SumArgs { x: from.into(), out, scratch: lane.lease() })
        };
        let mut graph = Slots::new(device)
            .capture(&mut stream, |rec| {
                call(&x.lease(), &y.lease())?.run(rec)?;
                call(&y.lease(), &x.lease())?.run(rec)
            })
            .unwrap();
        let _ = graph.replay(&mut stream).unwrap();
        assert_eq!(x.read().err(), Some(Error::InFlight { what: "x".into() }));
        stream.wait().unwrap();
        assert_eq!(x.read().unwrap()[..3], [16.0 + 16.0 + 14.0 * 2.0, 32.0, 1.0]);
        assert_eq!(y.read().unwrap()[..3], [16.0, 16.0, 2.0]);
    });
}

#[test]
fn two_streams_need_an_order() {
    late(|device| {
        let (left, right) = (device.own_stream().unwrap(), device.own_stream().unwrap());
        let mut one = device.stream(&left).unwrap();
        let mut two = device.stream(&right).unwrap();
        let mut world = World::new(device, &mut one);
        let busy = world.graph.replay(&mut two).err();
        assert_eq!(busy, Some(Error::Busy { what: BUSY_VIEW.into() }), "written on stream one");
        two.wait_for(&one).unwrap();
        let _ = world.graph.replay(&mut two).unwrap();
        assert_eq!(right.pump(usize::MAX), 0, "held back by stream one");
        left.pump(usize::MAX);
        right.pump(usize::MAX);
        assert_eq!(world.graph.read(world.out).unwrap(), [of_page(1.0); 2]);
        // Reading the same weights and pages from two streams at a time needs no order; the graph's
        // slots do.
        let mut again = filled_pool(device, &mut one, 1.0);
        let _ = world.graph.replay(&mut two).unwrap();
        let busy = world.factor.write_on(&mut one, 0, &[1.0]).err();
        assert_eq!(busy, Some(Error::Busy { what: "factor".into() }));
        let busy = world.graph.replay(&mut one).err();
        assert!(matches!(busy, Some(Error::Busy { .. })), "one executable on two streams");
        again.release();
        one.wait().unwrap();
        two.wait().unwrap();
    });
}

#[test]
fn an_order_reaches_through_a_third_stream() {
    late(|device| {
        let callers: [_; 3] = std::array::from_fn(|_| device.own_stream().unwrap());
        let [mut a, mut b, mut c] = callers.each_ref().map(|at| device.stream(at).unwrap());
        let mut x = tensor(device, "x", &[0.0]);
        x.write_on(&mut a, 0, &[1.0]).unwrap();
        b.wait_for(&a).unwrap();
        let busy = x.write_on(&mut c, 0, &[3.0]).err();
        assert_eq!(busy, Some(Error::Busy { what: "x".into() }));
        c.wait_for(&b).unwrap(); // and so for a, though b was given nothing since it waits
        x.write_on(&mut c, 0, &[3.0]).unwrap();
        assert_eq!(callers[2].pump(usize::MAX), 0, "held back by a, through b");
        c.wait().unwrap();
        assert_eq!(x.read().unwrap(), [3.0]);
        // What a was given after b looked is not ordered before c.
        x.write_on(&mut a, 0, &[4.0]).unwrap();
        assert!(matches!(x.write_on(&mut c, 0, &[5.0]), Err(Error::Busy { .. })));
        [a, b, c].iter_mut().for_each(|stream| stream.wait().unwrap());
        assert_eq!(x.read().unwrap(), [4.0]);
    });
}

/// A driver need not say at once that an event has come; who has waited knows it all the same, of
/// his stream and of those that it was made to wait for.
#[test]
fn a_wait_needs_no_report() {
    late(|device| {
        let callers: [_; 3] = std::array::from_fn(|_| device.own_stream().unwrap());
        let [mut a, mut b, mut c] = callers.each_ref().map(|at| device.stream(at).unwrap());
        let (mut x, mut y) = (tensor(device, "x", &[0.0]), tensor(device, "y", &[0.0]));
        device.inject(Fault::Silent);
        x.write_on(&mut a, 0, &[1.0]).unwrap();
        y.write_on(&mut c, 0, &[2.0]).unwrap();
        b.wait_for(&a).unwrap();
        for caller in &callers {
            caller.pump(usize::MAX);
        }
        assert_eq!(x.read().err(), Some(Error::InFlight { what: "x".into() }), "no report");
        b.wait().unwrap();
        assert_eq!(x.read().unwrap(), [1.0]);
        assert_eq!(y.read().err(), Some(Error::InFlight { what: "y".into() }), "of c, not of b");
        c.wait().unwrap();
        assert_eq!(y.read().unwrap(), [2.0]);
        a.wait().unwrap();
    });
}

#[test]
fn a_stream_that_left_work_behind_keeps_its_number() {
    late(|device| {
        let callers: Vec<_> = (0..9).map(|_| device.own_stream().unwrap()).collect();
        let mut pool = Pages::new(device, "pool", PAGE, 1).unwrap();
        let mut stream = device.stream(&callers[0]).unwrap();
        pool.write_on(&mut stream, (0, 0), &page(0.0)).unwrap();
        drop(stream);
        let streams: Vec<_> = callers[1..].iter().map(|caller| device.stream(caller)).collect();
        assert_eq!(streams.iter().filter(|stream| stream.is_ok()).count(), 7);
        assert_eq!(streams[7].as_ref().err(), Some(&Error::TooManyStreams));
        callers[0].pump(usize::MAX);
        assert!(device.stream(&callers[8]).is_ok());
    });
}

#[test]
fn a_view_of_one_graph_is_no_operand_of_another() {
    late(|device| {
        let caller = device.own_stream().unwrap();
        let mut stream = device.stream(&caller).unwrap();
        let mut world = World::new(device, &mut stream);
        let mut stolen = None;
        let mut slots = Slots::new(device);
        let view = slots.view("mine", PAGE).unwrap();
        let first = slots.capture(&mut stream, |rec| {
            stolen = Some(rec.cache(view)?);
            Ok(())
        });
        let ids = table(device, &[0, 0]);
        let args = |cache| ScaleArgs {
            factor: (&world.factor.lease()).into(),
            page_table: (&ids.lease()).into(),
            cache,
            out: (&world.scaled.lease()).into(),
            scratch: world.lane.lease(),
        };
        let eager = world.layer.scale.bind(args(stolen.clone().unwrap())).unwrap();
        assert_eq!(eager.run(&mut stream).err(), Some(Error::Foreign { what: "view of a graph" }));
        let other = world.layer.scale.bind(args(stolen.unwrap())).unwrap();
        let captured = Slots::new(device).capture(&mut stream, |rec| other.run(rec));
        assert_eq!(captured.err(), Some(Error::Foreign { what: "view of another graph" }));
        drop(first);
        world.graph.replay(&mut stream).unwrap().wait(&mut stream).unwrap();
    });
}

/// The eager view of a stream, used by a call on another one while it is pointed elsewhere.
#[test]
fn a_view_in_use_on_another_stream_is_not_rewritten() {
    late(|device| {
        let (left, right) = (device.own_stream().unwrap(), device.own_stream().unwrap());
        let mut one = device.stream(&left).unwrap();
        let mut two = device.stream(&right).unwrap();
        let world = World::new(device, &mut one);
        let other = filled_pool(device, &mut one, 5.0);
        let mut view = PoolView::new(device, "view", PAGE).unwrap();
        view.bind(&mut one, &world.pool).unwrap();
        one.wait().unwrap();
        let (ids, out) = (table(device, &[2, 1]), tensor(device, "out", &[0.0; ROWS]));
        let inputs = ((&ids.lease()).into(), view.lease());
        let (scaled, to) = (world.scaled.lease(), (&out.lease()).into());
        world.layer.step(&mut two, &world.lane, inputs, &scaled, to).unwrap();
        let busy = view.bind(&mut one, &other).err();
        assert_eq!(busy, Some(Error::Busy { what: BUSY_VIEW.into() }));
        let _still_good = view.lease();
        one.wait_for(&two).unwrap();
        view.bind(&mut one, &other).unwrap();
        drop((world, other));
        one.wait().unwrap();
        assert_eq!(out.read().unwrap(), [of_page(3.0), of_page(2.0)]);
    });
}
