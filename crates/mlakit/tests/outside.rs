//! What the core cannot see: memory, orders and uses of the caller's own; and streams that are lent
//! twice.

mod common;
use common::*;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// Says that it is gone.
struct Owner(Arc<AtomicBool>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

#[test]
fn a_stream_is_lent_once() {
    late(|device| {
        let (caller, other) = (device.own_stream().unwrap(), device.own_stream().unwrap());
        let first = device.stream(&caller).unwrap();
        assert_eq!(device.stream(&caller).err(), Some(Error::StreamLent));
        device.stream(&other).unwrap();
        drop(first);
        let second = device.stream(&caller).unwrap();
        std::mem::forget(second);
        assert_eq!(device.stream(&caller).err(), Some(Error::StreamLent), "leaked, so still lent");
        let taken: Vec<_> = (0..7).map(|_| device.own_stream().unwrap()).collect();
        let streams: Vec<_> = taken.iter().map(|caller| device.stream(caller).unwrap()).collect();
        assert_eq!(device.stream(&other).err(), Some(Error::TooManyStreams));
        drop(streams);
        device.stream(&other).expect("a refused stream is not lent");
    });
}

#[test]
fn a_stream_of_another_device_is_foreign() {
    let (device, other) = (Late::new(1), Late::new(1));
    let caller = other.own_stream().unwrap();
    assert_eq!(device.stream(&caller).err(), Some(Error::Foreign { what: "stream" }));
    let (mine, theirs) = (device.own_stream().unwrap(), other.own_stream().unwrap());
    let (mut mine, theirs) = (device.stream(&mine).unwrap(), other.stream(&theirs).unwrap());
    let foreign = Err(Error::Foreign { what: "stream" });
    assert_eq!(mine.wait_for_mark(&theirs.mark()), foreign);
    assert_eq!(mine.assume_after(&theirs.mark()), foreign);
}

/// Two streams that share a tensor; the first has written it and is not done.
struct Two<'s> {
    device: Late,
    first: Stream<'s, Late>,
    second: Stream<'s, Late>,
    x: Buffer<f32, Late>,
}

impl<'s> Two<'s> {
    fn new(device: &Late, callers: &'s [sim::SimStream; 2]) -> Self {
        let [first, second] = callers.each_ref().map(|caller| device.stream(caller).unwrap());
        let x = tensor(device, "x", &[0.0; 4]);
        let mut two = Self { device: device.clone(), first, second, x };
        two.x.write_on(&mut two.first, 0, &[1.0]).unwrap();
        two
    }

    fn busy(&self) -> Error {
        Error::Busy { what: "x".into() }
    }
}

/// A mark goes to the thread of the other stream; its stream may go on, or be given back.
#[test]
fn a_mark_orders_streams_of_two_threads() {
    late(|device| {
        let callers = [device.own_stream().unwrap(), device.own_stream().unwrap()];
        let mut two = Two::new(device, &callers);
        let busy = two.busy();
        assert_eq!(two.x.write_on(&mut two.second, 0, &[2.0]).err(), Some(busy));
        let mark = two.first.mark();
        drop(two.first);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                two.second.wait_for_mark(&mark).unwrap();
                two.x.write_on(&mut two.second, 0, &[2.0]).unwrap();
            });
        });
        assert_eq!(callers[1].pump(usize::MAX), 0, "the device waits");
        callers[0].pump(usize::MAX);
        callers[1].pump(usize::MAX);
        assert_eq!(two.x.read().unwrap()[0], 2.0);
        drop((two.second, two.x));
    });
}

/// An order that the caller made with an event of his own.
#[test]
fn an_order_made_outside_is_believed() {
    late(|device| {
        let callers = [device.own_stream().unwrap(), device.own_stream().unwrap()];
        let mut two = Two::new(device, &callers);
        device.outside_order(&callers[1], two.first.last());
        two.second.assume_after(&two.first.mark()).unwrap();
        two.x.write_on(&mut two.second, 0, &[2.0]).unwrap();
        // What comes later on the first stream is not meant.
        two.x.write_on(&mut two.first, 0, &[3.0]).expect_err("the second stream is not done");
        callers[0].pump(usize::MAX);
        callers[1].pump(usize::MAX);
        assert_eq!(two.x.read().unwrap()[0], 2.0);
        drop((two.first, two.second, two.x));
    });
}

/// A third stream that waits for the second is behind the first as well.
#[test]
fn an_assumed_order_is_transitive() {
    late(|device| {
        let callers = [device.own_stream().unwrap(), device.own_stream().unwrap()];
        let third = device.own_stream().unwrap();
        let mut two = Two::new(device, &callers);
        let mut third_stream = device.stream(&third).unwrap();
        device.outside_order(&callers[1], two.first.last());
        two.second.assume_after(&two.first.mark()).unwrap();
        third_stream.wait_for(&two.second).unwrap();
        two.x.write_on(&mut third_stream, 0, &[2.0]).unwrap();
        [&callers[0], &callers[1], &third].iter().for_each(|caller| _ = caller.pump(usize::MAX));
        assert_eq!(two.x.read().unwrap()[0], 2.0);
        drop((two.first, two.second, two.x));
    });
}

/// What kernels rely on needs an order that the core made: a false statement must not lead to a
/// wild address.
#[test]
fn an_assumed_order_is_not_believed_of_views_lanes_and_graphs() {
    late(|device| {
        let callers = [device.own_stream().unwrap(), device.own_stream().unwrap()];
        let [mut first, mut second] = callers.each_ref().map(|c| device.stream(c).unwrap());
        let mut world = World::new(device, &mut first);
        first.wait().unwrap();
        let _ = world.graph.replay(&mut first).unwrap();
        second.assume_after(&first.mark()).unwrap();
        let bound = world.graph.bind(&mut second, world.view, &world.pool);
        assert_eq!(bound.err(), Some(Error::Busy { what: "view".into() }));
        let replayed = world.graph.replay(&mut second).err();
        assert!(matches!(replayed, Some(Error::Busy { .. })), "{replayed:?}");
        let mut other = tensor(device, "other", &[0.0; 2]);
        let sum = world.layer.sum.bind(SumArgs {
            x: (&world.scaled).into(),
            out: (&mut other).into(),
            scratch: (&mut world.lane).into(),
        });
        let busy = Some(Error::Busy { what: "scratch".into() });
        assert_eq!(sum.unwrap().run(&mut second).err(), busy);
        second.wait_for(&first).unwrap();
        let _ = world.graph.replay(&mut second).unwrap();
        callers.iter().for_each(|caller| _ = caller.pump(usize::MAX));
        drop((first, second, world));
    });
}

/// Work of the caller's own keeps what it uses, once it is noted.
#[test]
fn a_noted_use_keeps_memory() {
    let device = Late::new(1);
    for (noted, violations) in [(true, 0), (false, 1)] {
        let caller = device.own_stream().unwrap();
        let mut stream = device.stream(&caller).unwrap();
        let x = tensor(&device, "x", &[0.0; 4]);
        device.outside(&caller, &x.lease(), Access::Read);
        if noted {
            stream.note_use(&x.lease(), Access::Read).unwrap();
            assert_eq!(x.read().unwrap(), [0.0; 4], "both only read");
        }
        let lease = x.lease();
        drop(x);
        let retiring = device.census().live(Category::Retiring);
        assert_eq!(retiring, if noted { 16 } else { 0 });
        let stale = stream.note_use(&lease, Access::Read).err();
        assert!(matches!(stale, Some(Error::StaleEpoch { .. })));
        caller.pump(usize::MAX);
        assert_eq!(device.census().live(Category::Retiring), 0);
        assert_eq!(device.violations() > 0, violations > 0, "noted: {noted}");
    }
}

/// The work is there already, so it is numbered even if it should not have been enqueued.
#[test]
fn a_noted_use_in_conflict_is_busy_and_numbered() {
    late(|device| {
        let callers = [device.own_stream().unwrap(), device.own_stream().unwrap()];
        let mut two = Two::new(device, &callers);
        let noted = two.second.note_use(&two.x.lease(), Access::Read).err();
        assert_eq!(noted, Some(Error::Busy { what: "noted use".into() }));
        callers[0].pump(usize::MAX);
        assert!(matches!(two.x.write(&[0.0]), Err(Error::InFlight { .. })), "it is numbered");
        callers[1].pump(usize::MAX);
        two.x.write(&[0.0]).unwrap();
        drop((two.first, two.second, two.x));
        assert_eq!(two.device.violations(), 0);
    });
}

/// Pages that the caller's own work writes are kept until it is done.
#[test]
fn noted_pages_are_retired() {
    late(|device| {
        let caller = device.own_stream().unwrap();
        let mut stream = device.stream(&caller).unwrap();
        let mut pool = Pages::new(device, "pool", PAGE, 3).unwrap();
        stream.note_pages(&pool, Access::Write).unwrap();
        pool.release();
        assert_eq!(device.census().live(Category::Retiring), 96);
        assert_eq!(stream.note_pages(&pool, Access::Write).err(), Some(Error::Unbound));
        caller.pump(usize::MAX);
        assert_eq!(device.census().live(Category::Retiring), 0);
    });
}

/// Memory whose owner is outside as a tensor and as pages: in the ledger, and its owner goes when
/// nothing in flight uses it.
#[test]
fn foreign_memory_keeps_its_owner() {
    late(|device| {
        let caller = device.own_stream().unwrap();
        let mut stream = device.stream(&caller).unwrap();
        let gone = Arc::new(AtomicBool::new(false));
        let foreign = device.foreign(18, Owner(gone.clone())).unwrap();
        assert_eq!(foreign.bytes(), 18);
        let mut x = Buffer::<f32, Late>::foreign("torch", foreign);
        assert_eq!((x.len(), device.census().live(Category::Foreign)), (4, 18));
        x.write_on(&mut stream, 0, &[5.0]).unwrap();
        drop(x);
        assert!(!gone.load(SeqCst), "a write is in flight");
        assert_eq!(device.census().live(Category::Retiring), 18);
        caller.pump(usize::MAX);
        device.reclaim();
        assert!(gone.load(SeqCst));
    });
}

#[test]
fn a_foreign_pool_is_bound_released_and_refilled() {
    late(|device| {
        let caller = device.own_stream().unwrap();
        let mut stream = device.stream(&caller).unwrap();
        let mut world = World::new(device, &mut stream);
        let gone = Arc::new(AtomicBool::new(false));
        let foreign = device.foreign(3 * 48 + 7, Owner(gone.clone())).unwrap();
        let mut pool = Pages::foreign("torch pool", PAGE, 48, foreign).unwrap();
        assert_eq!((pool.pages(), pool.page_stride_bytes()), (3, 48));
        for index in 0..3 {
            pool.write((index, 0), &page(7.0)).unwrap();
        }
        world.graph.bind(&mut stream, world.view, &pool).unwrap();
        assert_eq!(world.replay(&mut stream), [of_page(7.0); 2]);
        let _ = world.graph.replay(&mut stream).unwrap();
        pool.release();
        assert!(!gone.load(SeqCst), "a replay reads it");
        caller.pump(usize::MAX);
        device.reclaim();
        assert!(gone.load(SeqCst));
        let stale = world.graph.replay(&mut stream).err();
        assert_eq!(stale, Some(Error::StaleEpoch { held: 0, current: 1 }));
        pool.refill(3).unwrap();
        assert_eq!(device.census().live(Category::Foreign), 0, "the new pages are the device's");
        drop((world, stream, pool));
        let small = device.foreign(64, ()).unwrap();
        let refused = Pages::foreign("pool", PAGE, 31, small).err();
        assert!(matches!(refused, Some(Error::Size { .. })), "{refused:?}");
    });
}
