//! Memory, orders and uses of the caller's own.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use mlakit::op::merge::Partial;
use mlakit::{Access, Buffer, Category, Device, Error, Pages, Splits};
use mlakit_cuda::Cuda;

use super::cuda_alone;
use super::driver::{Driver, Gate, Owned, raw};
use super::suite::random::Rng;
use super::suite::replay::{Replayed, Step, World, bytes_of, same};

/// A kernel of the caller's own on a tensor of ours keeps it, once it is noted.
#[test]
fn a_noted_use_keeps_memory() {
    let Some(device) = cuda_alone() else { return };
    let driver = Driver::new(&device);
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let x = Buffer::<i32, Cuda>::new(&device, (Category::Tensors, "x"), &[41, 1]).unwrap();
    let gate = Gate::new(&driver, raw(&caller));
    driver.launch("mlakit_add", raw(&caller), 2, Some(x.address()));
    stream.note_use(&x.lease(), Access::Write).unwrap();
    assert_eq!(x.read().err(), Some(Error::InFlight { what: "x".into() }));
    let lease = x.lease();
    gate.open();
    stream.wait().unwrap();
    assert_eq!(x.read().unwrap(), [42, 2]);

    let gate = Gate::new(&driver, raw(&caller));
    driver.launch("mlakit_add", raw(&caller), 2, Some(x.address()));
    stream.note_use(&x.lease(), Access::Write).unwrap();
    drop(x);
    assert_eq!(device.census().live(Category::Retiring), 8);
    let stale = stream.note_use(&lease, Access::Read).err();
    assert!(matches!(stale, Some(Error::StaleEpoch { .. })), "{stale:?}");
    gate.open();
    stream.wait().unwrap();
    assert_eq!(device.census().live(Category::Retiring), 0);
}

/// An order by an event of the caller's own.
#[test]
fn an_order_made_outside_is_believed() {
    let Some(device) = cuda_alone() else { return };
    let driver = Driver::new(&device);
    let callers = [device.own_stream().unwrap(), device.own_stream().unwrap()];
    let [mut first, mut second] = callers.each_ref().map(|c| device.stream(c).unwrap());
    let mut x = Buffer::<i32, Cuda>::zeroed(&device, (Category::Tensors, "x"), 2).unwrap();
    let gate = Gate::new(&driver, raw(&callers[0]));
    x.write_on(&mut first, 0, &[1, 1]).unwrap();
    assert!(matches!(x.write_on(&mut second, 0, &[2]), Err(Error::Busy { .. })));
    driver.order(raw(&callers[0]), raw(&callers[1]));
    second.assume_after(&first.mark()).unwrap();
    x.write_on(&mut second, 0, &[2]).unwrap();
    gate.open();
    second.wait().unwrap();
    assert_eq!(x.read().unwrap(), [2, 1]);
}

/// Foreign memory as a tensor: used by ours and by the caller's kernels; its owner goes when
/// nothing uses it.
#[test]
fn foreign_memory_keeps_its_owner() {
    let Some(device) = cuda_alone() else { return };
    let driver = Driver::new(&device);
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let (address, freed) = (driver.memory(64), Arc::new(AtomicU32::new(0)));
    let owner = Owned { address, freed: freed.clone() };
    // SAFETY: the memory is the owner's, has these bytes, and is used by this test alone, in stream
    // order.
    let foreign = unsafe { device.foreign((address, 64), owner) }.unwrap();
    let mut x = Buffer::<i32, Cuda>::foreign("theirs", foreign);
    assert_eq!((x.len(), x.address()), (16, address));
    assert_eq!(device.census().live(Category::Foreign), 64);
    x.write_on(&mut stream, 3, &[7]).unwrap();
    driver.launch("mlakit_add", raw(&caller), 16, Some(address));
    stream.note_use(&x.lease(), Access::Write).unwrap();
    stream.wait().unwrap();
    let mut needed = vec![1; 16];
    needed[3] = 8;
    assert_eq!(x.read().unwrap(), needed.iter().map(|w| *w as i32).collect::<Vec<_>>());
    assert_eq!(driver.read(address, 16), needed);
    let gate = Gate::new(&driver, raw(&caller));
    x.write_on(&mut stream, 0, &[0]).unwrap();
    drop(x);
    device.reclaim();
    assert_eq!(freed.load(SeqCst), 0, "a write is in flight");
    gate.open();
    stream.wait().unwrap();
    assert_eq!((freed.load(SeqCst), device.census().lines()), (1, vec![]));
    // SAFETY: refused, so never used.
    let odd = unsafe { device.foreign((address + 4, 8), ()) }.err();
    assert!(matches!(odd, Some(Error::Contract { what: "foreign memory", .. })), "{odd:?}");
}

/// A pool in foreign memory, bound to a graph instead of ours: the same bits, in the results and in
/// the pool.
#[test]
fn a_foreign_pool_replays_the_same_bits() {
    let Some(device) = cuda_alone() else { return };
    let driver = Driver::new(&device);
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let mut world = World::new(&device, Splits::Auto, Partial::Bf16);
    let mut replayed = Replayed::new(&mut stream, &world);
    let step = Step::new(&mut Rng(6));
    let before = bytes_of(&world.pools[0]);
    let own = Step::clone(&step);
    replayed.run(&mut stream, &world, (&own, true));
    let bound = replayed.graph.bind(&mut stream, replayed.view, &world.pools[0]);
    bound.unwrap();
    stream.wait().unwrap();
    world.pools[0].write((0, 0), &before).unwrap();
    let _ = replayed.graph.replay(&mut stream).unwrap();
    let needed = replayed.given(&mut stream);
    let written = bytes_of(&world.pools[0]);

    let (geometry, bytes) = (world.pools[0].geometry(), before.len());
    let (address, freed) = (driver.memory(bytes), Arc::new(AtomicU32::new(0)));
    let owner = Owned { address, freed: freed.clone() };
    // SAFETY: the memory is the owner's, has these bytes, and is used here alone.
    let foreign = unsafe { device.foreign((address, bytes), owner) }.unwrap();
    let mut pool = Pages::foreign("theirs", geometry, geometry.payload_bytes(), foreign).unwrap();
    pool.write((0, 0), &before).unwrap();
    replayed.graph.bind(&mut stream, replayed.view, &pool).unwrap();
    let _ = replayed.graph.replay(&mut stream).unwrap();
    same("in foreign memory", &replayed.given(&mut stream), &needed);
    assert!(bytes_of(&pool) == written, "the writer's bytes");
    let gate = Gate::new(&driver, raw(&caller));
    let _ = replayed.graph.replay(&mut stream).unwrap();
    pool.release();
    assert_eq!(freed.load(SeqCst), 0);
    gate.open();
    stream.wait().unwrap();
    assert_eq!(freed.load(SeqCst), 1);
}
