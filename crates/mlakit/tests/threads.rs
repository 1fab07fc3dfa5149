//! Real threads against each other. (`clock/model.rs` tries the interleavings of the protocol one by one.)

mod common;
use common::*;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
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
            let gate = AtomicBool::new(false);
            scope(|inner| {
                inner.spawn(|| {
                    while !gate.load(SeqCst) {
                        std::hint::spin_loop();
                    }
                    (0..round % 7).for_each(|_| yield_now());
                    held.release();
                });
                gate.store(true, SeqCst);
                for _ in 0..20 {
                    match graph.replay(&mut stream) {
                        Ok(_) => replayed += 1,
                        Err(Error::StaleEpoch { .. }) => stale += 1,
                        Err(other) => panic!("{other}"),
                    }
                }
            });
        }
    });
    stream.wait().unwrap();
    assert!(replayed > 0 && stale > 0, "{replayed} replayed, {stale} stale: no race was tried");
    drop((graph, pool, factor, scaled, lane, layer, stream));
    is_clean(&device);
}

/// Streams are attached and dropped by several threads, with work left behind: an index is never two queues.
#[test]
fn streams_come_and_go() {
    let device = Late::new(2);
    let callers: [_; 4] = std::array::from_fn(|_| device.own_stream().unwrap());
    let (attached, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
    pumped(&callers.each_ref(), || {
        scope(|scope| {
            for (i, caller) in callers.iter().enumerate() {
                let (device, attached, refused) = (&device, &attached, &refused);
                scope.spawn(move || {
                    for round in 0..2000 {
                        let mut x = tensor(device, "x", &[0.0]);
                        match device.stream(caller) {
                            Ok(mut stream) => {
                                let _ = x.write_on(&mut stream, 0, &[i as f32]).unwrap();
                                attached.fetch_add(1, SeqCst);
                            }
                            Err(error) => {
                                assert_eq!(error, Error::TooManyStreams);
                                refused.fetch_add(1, SeqCst);
                            }
                        }
                        if round % 3 == 0 {
                            yield_now();
                        }
                    } // x goes with its write in flight
                });
            }
        });
    });
    while callers.iter().map(|caller| caller.pump(usize::MAX)).sum::<usize>() > 0 {}
    assert!(attached.load(SeqCst) > 1000, "{attached:?} attached, {refused:?} refused");
    is_clean(&device);
}

/// A view is pointed from one pool to another and back on one thread, and its leases are used on another.
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
    let (mut done, mut stale, mut busy) = (0, 0, 0);
    pumped(&[&left, &right], || {
        let mut two = device.stream(&right).unwrap();
        for _ in 0..300 {
            let cache = view.lease();
            scope(|scope| {
                let (view, pool, one, device) = (&mut view, &pool, &mut one, &device);
                scope.spawn(move || {
                    let other = filled_pool(device, one, 5.0);
                    let _ = view.bind(one, &other);
                    drop(other); // with whatever reads it in flight
                    while view.bind(one, pool).is_err() {
                        yield_now();
                    }
                });
                for _ in 0..8 {
                    let inputs = ((&ids.lease()).into(), cache.clone());
                    let (scaled, out) = (scaled.lease(), (&out.lease()).into());
                    match layer.step(&mut two, &lane, inputs, &scaled, out) {
                        Ok(()) => done += 1,
                        Err(Error::StaleEpoch { .. }) => stale += 1,
                        Err(Error::Busy { .. }) => busy += 1,
                        Err(other) => panic!("{other}"),
                    }
                }
            });
            one.wait().unwrap();
            two.wait().unwrap();
        }
    });
    assert!(done > 0 && stale > 0, "{done} done, {stale} stale, {busy} busy: no race was tried");
    drop((pool, factor, scaled, lane, layer, graph, view, ids, out, one));
    is_clean(&device);
}
