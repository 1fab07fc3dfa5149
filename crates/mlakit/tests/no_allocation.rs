//! `bind`, `run`, `replay`, slot writes and pool binds do not call the allocator, on either device;
//! nor do they obtain device memory.

mod common;
use common::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local!(static CALLS: Cell<usize> = const { Cell::new(0) });

// SAFETY: every call goes unchanged to `System`; the counter is a thread-local without a destructor
// and allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.set(CALLS.get() + 1);
        // SAFETY: the caller's contract is `System`'s.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        CALLS.set(CALLS.get() + 1);
        // SAFETY: `at` came from `System.alloc` with this layout.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn serves_without_allocating<D: Toy>(device: &D) {
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let mut world = World::new(device, &mut stream);
    let second = filled_pool(device, &mut stream, 7.0);
    let ids = table(device, &[0, 1]);
    let mut view = PoolView::new(device, "view", PAGE).unwrap();
    view.bind(&mut stream, &second).unwrap();
    stream.wait().unwrap();
    let (obtained, before) = (device.keeper().counts().obtained, CALLS.get());
    for step in 0..10 {
        let args = ScaleArgs {
            factor: (&world.factor).into(),
            page_table: (&ids).into(),
            cache: (&view).into(),
            out: (&mut world.scaled).into(),
            scratch: (&mut world.lane).into(),
        };
        world.layer.scale.bind(args).unwrap().run(&mut stream).unwrap();
        world.graph.slot_mut(world.table).unwrap().write_on(&mut stream, &[step % 3, 0]).unwrap();
        let pool = if step % 2 == 0 { &second } else { &world.pool };
        world.graph.bind(&mut stream, world.view, pool).unwrap();
        view.bind(&mut stream, pool).unwrap();
        world.factor.write_on(&mut stream, 0, &[FACTOR]).unwrap();
        let _ = world.graph.replay(&mut stream).unwrap();
    }
    assert_eq!(CALLS.get() - before, 0, "calls of the allocator");
    assert_eq!(device.keeper().counts().obtained, obtained);
    stream.wait().unwrap();
    let mut out = [0.0; ROWS];
    let before = CALLS.get();
    world.graph.read_into(world.out, &mut out).unwrap();
    world.graph.slot_mut(world.table).unwrap().write(&[1, 1]).unwrap();
    assert_eq!(CALLS.get() - before, 0, "calls of the allocator by host copies");
    assert_eq!(out, [of_page(1.0); 2]);
}

#[test]
fn on_a_device_that_works_at_once() {
    let device = AtOnce::new(2);
    serves_without_allocating(&device);
    is_clean(&device);
}

#[test]
fn on_a_device_that_works_late() {
    let device = Late::new(2);
    serves_without_allocating(&device);
    is_clean(&device);
}
