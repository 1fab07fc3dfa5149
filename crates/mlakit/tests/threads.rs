//! Real threads against each other. (`clock/model.rs` tries the interleavings of the protocol one
//! by one.)

mod common;
use common::*;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::{scope, yield_now};

/// Lets the device work while `body` runs.
fn pumped<R>(callers: &[&sim::SimStream], body: impl FnOnce() -> R) -> R {
    let stop = AtomicBool::new(false);
    scope(|scope| {
        for caller in callers {
            scope.spawn(|| {
                while !stop.load(SeqCst) {
                    if caller.pump(3) == 0 {
                        yield_now();
                    }
                }
            });
        }
        let result = body();
        stop.store(true, SeqCst);
        result
    })
}

/// A pool is released on one thread while another replays and a third lets the device work.
#[test]
fn release_against_replay() {
    let device = Late::new(2);
    let (caller, filler) = (device.own_stream().unwrap(), device.own_stream().unwrap());
    let mut stream = device.stream(&caller).unwrap();
    let World { mut graph, view, mut pool, factor, scaled, lane, layer, .. } =
        World::new(&device, &mut stream);
    stream.wait().unwrap();
    let (mut replayed, mut stale) = (0, 0);
    pumped(&[&caller], || {
        let mut fill = device.stream(&filler).unwrap();
        for round in 0..300 {
            let held = &mut pool;
            held.refill(3).unwrap();
            held.write_on(&mut fill, (0, 0), &page(1.0)).unwrap();
            fill.wait().unwrap();
            graph.bind(&mut stream, view, held).unwrap();
            let _ = graph.replay(&mut stream).unwrap();
            scope(|inner| {
                let owner = inner.spawn(move || {
                    (0..round % 7).for_each(|_| yield_now());
                    held.release();
                });
                for attempt in 0.. {
                    let last = owner.is_finished();
                    if attempt >= 20 && !last {
                        yield_now();
                        continue;
                    }
                    match graph.replay(&mut stream) {
                        Ok(_) if last => panic!("replayed without its pool"),
                        Ok(_) => replayed += 1,
                        Err(Error::StaleEpoch { .. }) => stale += 1,
                        Err(other) => panic!("{other}"),
                    }
                    if last {
                        break;
                    }
                }
            });
        }
    });
    stream.wait().unwrap();
    assert!(replayed > 0, "{replayed} replayed, {stale} stale: no race was tried");
    drop((graph, pool, factor, scaled, lane, layer, stream));
    is_clean(&device);
}

/// Streams are attached and dropped by several threads, with work left behind: an index is never
/// two queues.
#[test]
fn streams_come_and_go() {
    let device = Late::new(2);
    let callers: [_; 4] = std::array::from_fn(|_| device.own_stream().unwrap());
    pumped(&callers.each_ref(), || {
        scope(|scope| {
            for (i, caller) in callers.iter().enumerate() {
                let device = &device;
                scope.spawn(move || {
                    let mut left = 500;
                    while left > 0 {
                        let mut x = tensor(device, "x", &[0.0]);
                        match device.stream(caller) {
                            Ok(mut stream) => {
                                x.write_on(&mut stream, 0, &[i as f32]).unwrap();
                                left -= 1;
                            }
                            Err(error) => {
                                assert_eq!(error, Error::TooManyStreams);
                                yield_now(); // every index has work of its last stream in flight
                            }
                        }
                    } // x goes with its write in flight
                });
            }
        });
    });
    while callers.iter().map(|caller| caller.pump(usize::MAX)).sum::<usize>() > 0 {}
    is_clean(&device);
}

/// A view is pointed from one pool to another and back on one thread, and its leases are used on
/// another.
#[test]
fn rebind_against_a_leased_view() {
    let device = Late::new(2);
    let (left, right) = (device.own_stream().unwrap(), device.own_stream().unwrap());
    let mut one = device.stream(&left).unwrap();
    let World { pool, factor, scaled, lane, layer, graph, .. } = World::new(&device, &mut one);
    let mut view = PoolView::new(&device, "view", PAGE).unwrap();
    view.bind(&mut one, &pool).unwrap();
    one.wait().unwrap();
    let (ids, out) = (table(&device, &[0, 0]), tensor(&device, "out", &[0.0; ROWS]));
    let step = |stream: &mut Stream<'_, Late>, cache: &Cache<'static, Late>| {
        let inputs = ((&ids.lease()).into(), cache.clone());
        let (scaled, out) = (scaled.lease(), (&out.lease()).into());
        layer.step(stream, &lane, inputs, &scaled, out)
    };
    pumped(&[&left, &right], || {
        let mut two = device.stream(&right).unwrap();
        for round in 0..300 {
            let cache = view.lease();
            step(&mut two, &cache).unwrap();
            scope(|scope| {
                let (view, pool, one, device) = (&mut view, &pool, &mut one, &device);
                let owner = scope.spawn(move || {
                    (0..round % 7).for_each(|_| yield_now());
                    let other = filled_pool(device, one, 5.0);
                    let _ = view.bind(one, &other);
                    drop(other); // with whatever reads it in flight
                    while view.bind(one, pool).is_err() {
                        yield_now();
                    }
                });
                for attempt in 0.. {
                    let last = owner.is_finished();
                    if attempt >= 8 && !last {
                        yield_now();
                        continue;
                    }
                    match step(&mut two, &cache) {
                        Ok(()) if last => panic!("the view was bound again and its lease stands"),
                        Ok(()) | Err(Error::Busy { .. } | Error::StaleEpoch { .. }) => {}
                        Err(other) => panic!("{other}"),
                    }
                    if last {
                        break;
                    }
                }
            });
            one.wait().unwrap();
            two.wait().unwrap();
        }
    });
    drop((pool, factor, scaled, lane, layer, graph, view, ids, out, one));
    is_clean(&device);
}
