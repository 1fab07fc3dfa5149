//! Where the signals of one lent stream arrive, and how other streams wait for it.
//!
//! Each submission records the next event of a ring. A write of the stream to pinned host memory
//! would be read without asking the driver, but costs a submission half as much again
//! (docs/benchmarks/cuda-signals.md).

use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mlakit::{Error, Keeper, Reporter, Ticket};

use super::OwnStream;
use crate::driver::{Code, Context, RawEvent, RawStream};

/// Events of a ring. When more submissions are in flight, an event is recorded again and stands for
/// the later number: what waits for the earlier one then waits longer, and never too short.
const RING: u64 = 64;

/// An event without timing.
const DISABLE_TIMING: u32 = 2;

/// An event, destroyed when it is dropped.
struct Event {
    context: Arc<Context>,
    raw: RawEvent,
}

// SAFETY: an event may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    fn new(context: &Arc<Context>) -> Result<Self, Error> {
        let _current = context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the context is current, and the pointer is to a live handle.
        let code = unsafe { (context.api.event_create)(&mut raw, DISABLE_TIMING) };
        context.check("cuEventCreate", code)?;
        Ok(Self { context: context.clone(), raw })
    }

    fn record(&self, stream: RawStream) -> Result<(), Error> {
        // SAFETY: event and stream are live handles of one context.
        let code = unsafe { (self.context.api.event_record)(self.raw, stream) };
        self.context.check("cuEventRecord", code)
    }

    fn is_done(&self) -> bool {
        // SAFETY: the event is a live handle.
        let code = unsafe { (self.context.api.event_query)(self.raw) };
        if Code(code) != Code::NOT_READY {
            let _ = self.context.check("cuEventQuery", code); // remembers a sticky error
        }
        code == 0
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter_lost() {
            // SAFETY: `new` created it, and it is destroyed once; the driver keeps what is still to
            // happen.
            unsafe { (self.context.api.event_destroy)(self.raw) };
        }
    }
}

/// One event of the ring with the number that it stands for.
struct Recorded {
    event: Event,
    number: AtomicU64,
}

/// What others may do to a stream now.
enum Door {
    /// Record an event on it.
    Open,
    /// Use the event that was recorded last: the stream is capturing, or given back.
    Sealed,
}

/// One lent stream as the device sees it from other threads, and after it was given back.
pub(super) struct Line {
    context: Arc<Context>,
    reporter: Reporter,
    pub(super) raw: RawStream,
    /// Keeps a stream of the device's own alive while something may wait for it.
    _own: Option<Arc<OwnStream>>,
    ring: Vec<Recorded>,
    /// The last number that was signalled.
    signalled: AtomicU64,
    /// Its queue is dropped.
    closed: AtomicBool,
    door: Mutex<Door>,
    /// Recorded under the lock of `door` alone.
    order: Event,
}

// SAFETY: the only field that is neither is the raw stream, which may be used from any thread.
unsafe impl Send for Line {}
// SAFETY: as above.
unsafe impl Sync for Line {}

impl Line {
    pub(super) fn new(
        context: &Arc<Context>,
        reporter: Reporter,
        (raw, own): (RawStream, Option<Arc<OwnStream>>),
    ) -> Result<Self, Error> {
        let recorded = || {
            let event = Event::new(context)?;
            Ok::<_, Error>(Recorded { event, number: AtomicU64::new(0) })
        };
        Ok(Self {
            order: Event::new(context)?,
            context: context.clone(),
            reporter,
            raw,
            _own: own,
            ring: (0..RING).map(|_| recorded()).collect::<Result<_, _>>()?,
            signalled: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            door: Mutex::new(Door::Open),
        })
    }

    /// Enqueues the signal of a submission. A failure leaves the number to the next signal that
    /// arrives; if the context is lost there is none, and `report` says that all is over.
    pub(super) fn signal(&self, ticket: Ticket) {
        let number = ticket.number();
        let next = self.of(number);
        if next.event.record(self.raw).is_ok() {
            // Behind the recording: whoever reads the old number asks an event that is later.
            next.number.store(number, Release);
        }
        self.signalled.store(number, Release);
    }

    /// A submission to a lost context.
    pub(super) fn gave_up(&self, ticket: Ticket) {
        self.signalled.store(ticket.number(), Release);
    }

    /// Tells the core what has arrived.
    pub(super) fn report(&self, keeper: &Keeper) {
        if self.context.is_lost() {
            // Nothing of a lost context runs, and its memory is gone with it.
            keeper.complete(&self.reporter, self.signalled.load(Acquire));
            return;
        }
        let known = keeper.done(&self.reporter);
        keeper.complete(&self.reporter, self.last_arrived(known));
    }

    /// Whether everything that was signalled has arrived.
    pub(super) fn is_idle(&self, keeper: &Keeper) -> bool {
        let last = self.signalled.load(Acquire);
        keeper.done(&self.reporter) >= last
    }

    /// Makes `waiting` wait for everything that this line was given so far.
    pub(super) fn hold(&self, waiting: RawStream) -> Result<(), Error> {
        let _current = self.context.enter()?;
        let door = self.door();
        if let Door::Open = *door {
            self.order.record(self.raw)?;
        }
        // SAFETY: both handles are live, and of this context.
        let code = unsafe { (self.context.api.stream_wait)(waiting, self.order.raw, 0) };
        self.context.check("cuStreamWaitEvent", code)
    }

    /// From here on nobody else touches the stream.
    pub(super) fn seal(&self) -> Result<(), Error> {
        let mut door = self.door();
        self.order.record(self.raw)?;
        *door = Door::Sealed;
        Ok(())
    }

    pub(super) fn open(&self) {
        *self.door() = Door::Open;
    }

    pub(super) fn close(&self) {
        if let Ok(_current) = self.context.enter() {
            let _ = self.seal(); // without it, waiting for this line is an error of the driver's
        }
        *self.door() = Door::Sealed;
        self.closed.store(true, Release);
    }

    /// Nothing can come from it any more.
    pub(super) fn is_over(&self, keeper: &Keeper) -> bool {
        self.closed.load(Acquire) && self.is_idle(keeper)
    }

    /// The largest number from `known` on whose event is done. Work of a stream ends in order, so
    /// it is found by halving. A number is read before its event is asked: if the event is recorded
    /// again in between, it answers for later work, which is done no earlier.
    fn last_arrived(&self, known: u64) -> u64 {
        let last = self.signalled.load(Acquire);
        let is_done = |number: u64| {
            let recorded = self.of(number);
            recorded.number.load(Acquire) == number && recorded.event.is_done()
        };
        // Everything up to `done` is done; nothing from `not` on is known to be.
        let (mut done, mut not) = (known.max(last.saturating_sub(RING)), last + 1);
        let before = done;
        while done + 1 < not {
            // First the newest: mostly all is done, or little is in flight.
            let number = if not == last + 1 { last } else { done.midpoint(not) };
            match is_done(number) {
                true => done = number,
                false => not = number,
            }
        }
        if done == before { known } else { done }
    }

    fn of(&self, number: u64) -> &Recorded {
        &self.ring[(number % RING) as usize]
    }

    fn door(&self) -> MutexGuard<'_, Door> {
        self.door.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
