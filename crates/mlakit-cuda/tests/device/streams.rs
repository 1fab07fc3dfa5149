//! Streams of the caller's own, orders between streams, and how signals arrive.

use cudarc::driver::sys;
use mlakit::{Buffer, Category, Device, Error};
use mlakit_cuda::Cuda;

use super::driver::{Driver, Gate, ok, raw};
use super::{cuda, cuda_alone};

fn words(device: &Cuda) -> Buffer<i32, Cuda> {
    Buffer::zeroed(device, (Category::Tensors, "words"), 4).unwrap()
}

/// A stream made by others: lent, used, given back, and still theirs.
#[test]
fn a_borrowed_stream_stays_the_callers() {
    let Some(device) = cuda() else { return };
    let driver = Driver::new(&device);
    let theirs = driver.stream();
    let mut x = words(&device);
    for round in 0..3 {
        // SAFETY: the stream lives until the end of this test, which waits for it.
        let caller = unsafe { device.borrow_stream(theirs.cast()) }.unwrap();
        let mut stream = device.stream(&caller).unwrap();
        assert_eq!(device.stream(&caller).err(), Some(Error::StreamLent));
        // SAFETY: as above.
        let twin = unsafe { device.borrow_stream(theirs.cast()) }.unwrap();
        assert_eq!(device.stream(&twin).err(), Some(Error::StreamLent), "by another handle");
        x.write_on(&mut stream, 0, &[round]).unwrap();
        stream.wait().unwrap();
        assert_eq!(x.read().unwrap()[0], round);
    }
    // SAFETY: the stream is the test's own, and nothing is in flight.
    unsafe { ok(sys::cuStreamSynchronize(theirs)) };
    // SAFETY: as above.
    unsafe { ok(sys::cuStreamDestroy_v2(theirs)) };
}

#[test]
fn streams_that_cannot_be_lent_are_refused() {
    let Some(device) = cuda() else { return };
    let driver = Driver::new(&device);
    // SAFETY: 2 is the default stream of each thread, which always lives.
    let refused = unsafe { device.borrow_stream(std::ptr::without_provenance_mut(2)) }.err();
    assert!(matches!(refused, Some(Error::Contract { what: "stream", .. })), "{refused:?}");
    let theirs = driver.stream();
    // SAFETY: the stream is never destroyed.
    let caller = unsafe { device.borrow_stream(theirs.cast()) }.unwrap();
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the stream is live.
    unsafe { ok(sys::cuStreamBeginCapture_v2(theirs, mode)) };
    let refused = device.stream(&caller).err();
    assert!(matches!(refused, Some(Error::Contract { what: "stream", .. })), "{refused:?}");
    let mut graph = std::ptr::null_mut();
    // SAFETY: the stream is capturing, and the pointer is to a live handle.
    unsafe { ok(sys::cuStreamEndCapture(theirs, &mut graph)) };
    device.stream(&caller).expect("a refusal leaves nothing behind");
    let other = cuda().unwrap();
    assert_eq!(other.stream(&caller).err(), Some(Error::Foreign { what: "stream" }));
}

/// The device itself waits for the other stream, whose queue another thread has, or which is given
/// back.
#[test]
fn an_order_of_streams_is_the_devices() {
    let Some(device) = cuda_alone() else { return };
    let device = &device;
    let driver = Driver::new(device);
    let callers = [device.own_stream().unwrap(), device.own_stream().unwrap()];
    let [mut first, mut second] = callers.each_ref().map(|c| device.stream(c).unwrap());
    for round in 0..4 {
        let mut x = words(device);
        let gate = Gate::new(&driver, raw(&callers[0]));
        x.write_on(&mut first, 0, &[1]).unwrap();
        let busy = x.write_on(&mut second, 0, &[2]).err();
        assert_eq!(busy, Some(Error::Busy { what: "words".into() }));
        let mark = first.mark();
        if round % 2 == 1 {
            drop(first);
            second.wait_for_mark(&mark).unwrap();
            first = device.stream(&callers[0]).unwrap();
        } else {
            std::thread::scope(|scope| {
                scope.spawn(|| second.wait_for_mark(&mark).unwrap());
            });
        }
        let ticket = x.write_on(&mut second, 0, &[2]).unwrap();
        device.poll();
        assert!(!device.keeper().is_done(ticket), "the gate is closed");
        let in_flight = Error::InFlight { what: "words".into() };
        assert_eq!(x.read().err(), Some(in_flight));
        gate.open();
        second.wait().unwrap();
        assert_eq!(x.read().unwrap()[0], 2);
    }
}

/// More in flight than the ring of events has: every number arrives, in order.
#[test]
fn many_submissions_arrive() {
    let Some(device) = cuda_alone() else { return };
    let driver = Driver::new(&device);
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let mut x = words(&device);
    for count in [1, 2, 63, 64, 65, 200] {
        let gate = Gate::new(&driver, raw(&caller));
        let write = |i| x.write_on(&mut stream, 0, &[i]).unwrap();
        let tickets: Vec<_> = (0..count).map(write).collect();
        device.poll();
        assert!(tickets.iter().all(|ticket| !device.keeper().is_done(*ticket)));
        gate.open();
        let mut done = 0;
        while done < tickets.len() {
            device.poll();
            let is_done = |ticket: &&_| device.keeper().is_done(**ticket);
            let now = tickets.iter().filter(is_done).count();
            assert_eq!(now, tickets.iter().take_while(is_done).count(), "in order");
            assert!(now >= done);
            done = now;
        }
        assert_eq!(x.read().unwrap()[0], count - 1);
    }
}
