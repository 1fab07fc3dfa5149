//! The caller's stream, and `submit`: the only way to enqueue.

use std::marker::PhantomData;
use std::sync::atomic::Ordering::Relaxed;

use crate::clock::{Access, Claim, Reporter, STREAMS};
use crate::memory::Use;
use crate::{Device, Error, Lease, Pages, Region, Ticket};

/// A caller's stream while it is lent. `&mut` is the right to enqueue; one thread at a time without
/// a lock.
pub struct Stream<'s, D: Device> {
    device: D,
    /// Only `drop` takes it.
    queue: Option<D::Queue>,
    index: usize,
    key: u64,
    issued: u64,
    /// For each other stream, the number up to which it is ordered before this one (a vector
    /// clock).
    seen: [u64; STREAMS],
    /// The same with the orders that the caller says he made himself.
    assumed: [u64; STREAMS],
    lent: PhantomData<&'s D::CallerStream>,
}

/// A point in a stream: everything that it was given, and made to wait for, so far. Plain data, so
/// it can be sent to the thread that has another stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    device: u64,
    last: Ticket,
    seen: [u64; STREAMS],
    assumed: [u64; STREAMS],
}

impl<'s, D: Device> Stream<'s, D> {
    pub(crate) fn attach(device: &D, caller: &'s D::CallerStream) -> Result<Self, Error> {
        device.poll();
        let (keeper, key) = (device.keeper(), D::key(caller));
        keeper.lend(key)?;
        let (index, issued) = keeper.clocks().attach().inspect_err(|_| keeper.give_back(key))?;
        let reporter = Reporter { device: keeper.id(), stream: index };
        let queue = device.attach(caller, reporter).inspect_err(|_| {
            keeper.clocks().detach(index, issued);
            keeper.give_back(key);
        })?;
        let (seen, assumed) = Default::default();
        let (device, queue, lent) = (device.clone(), Some(queue), PhantomData);
        Ok(Self { device, queue, index, key, issued, seen, assumed, lent })
    }
}

impl<D: Device> Stream<'_, D> {
    /// Work enqueued from now on comes after all that `other` has been given, and made to wait for,
    /// so far.
    ///
    /// The wait is a submission of its own, so that a third stream which waits for this one waits
    /// for `other` too, even if this one was given nothing in between.
    pub fn wait_for(&mut self, other: &Stream<'_, D>) -> Result<(), Error> {
        self.wait_for_mark(&other.mark())
    }

    /// The same for a point of a stream that another thread has, or that is given back already.
    pub fn wait_for_mark(&mut self, mark: &Mark) -> Result<(), Error> {
        self.own(mark)?;
        self.submit(std::iter::empty(), |device, queue| device.after(queue, mark.last))?;
        self.seen = latest(self.seen, mark.seen, mark.last);
        self.assumed = latest(self.assumed, mark.assumed, mark.last);
        Ok(())
    }

    /// The caller has made an order himself (with events of his own, say): work enqueued on this
    /// stream from now on comes after `mark`. The device is not made to wait; as with `wait_for`, a
    /// number is given, so that a third stream that waits for this one waits for both.
    ///
    /// It is believed for tensors, slots and pages: a wrong statement gives wrong numbers there, and
    /// frees nothing early, because that is decided by what is done. For lanes, views and graphs,
    /// on whose contents kernels rely, `Busy` stays until [`wait_for`](Self::wait_for) makes an order.
    pub fn assume_after(&mut self, mark: &Mark) -> Result<(), Error> {
        self.own(mark)?;
        self.submit(std::iter::empty(), |_, _| Ok(()))?;
        self.assumed = latest(self.assumed, mark.seen, mark.last);
        self.assumed = latest(self.assumed, mark.assumed, mark.last);
        Ok(())
    }

    /// The caller has enqueued work of his own on this stream that uses what is leased: from now on
    /// it is in flight like any other use. Call it behind the work.
    ///
    /// # Errors
    /// `Busy` if another stream uses it without a known order, `StaleEpoch` if it is gone: the work
    /// is in conflict already. In the first case it is numbered all the same.
    pub fn note_use<T>(&mut self, lease: &Lease<T, D>, access: Access) -> Result<Ticket, Error> {
        self.note(Use::new("noted use", lease.region, access, lease.claim.clone()))
    }

    /// The same for the pages of a pool. `Unbound` after a release.
    pub fn note_pages(&mut self, pages: &Pages<D>, access: Access) -> Result<Ticket, Error> {
        let claim = pages.claim().ok_or(Error::Unbound)?.clone();
        self.note(Use::new("noted pages", Region::EMPTY, access, claim))
    }

    /// The host waits for everything enqueued, and so for all that it was made to wait for on other
    /// streams.
    ///
    /// Then it is done, whether or not a signal has been seen: a driver may say that an event is
    /// still to come while another thread keeps it busy.
    pub fn wait(&mut self) -> Result<(), Error> {
        let queue = self.queue.as_mut().expect(TAKEN);
        self.device.wait(queue)?;
        let clocks = self.device.keeper().clocks();
        clocks.complete(self.last());
        for (stream, number) in self.seen.into_iter().enumerate() {
            clocks.complete(Ticket { stream, number });
        }
        self.device.reclaim();
        Ok(())
    }

    /// What it was given so far, to be waited for by another stream.
    pub fn mark(&self) -> Mark {
        let (device, last) = (self.device.keeper().id(), self.last());
        Mark { device, last, seen: self.seen, assumed: self.assumed }
    }

    /// The last submission.
    pub fn last(&self) -> Ticket {
        Ticket { stream: self.index, number: self.issued }
    }

    /// The device behind it.
    pub fn device(&self) -> &D {
        &self.device
    }

    pub(crate) fn queue(&mut self) -> &mut D::Queue {
        self.queue.as_mut().expect(TAKEN)
    }

    /// The only way to enqueue. Check, number, check again, enqueue, signal: no allocation, no
    /// lock, no wait.
    ///
    /// Sound because (1) every number is written before the second check, and `Standing::close` is
    /// called before the owner reads the numbers, so a release on another thread is seen here or
    /// sees this number; (2) the number counts as unfinished until the signal behind the work has
    /// passed, also when the device failed half way; (3) work of one stream runs in order, and a
    /// conflict with another stream or the host is refused unless an order is known. The first
    /// check is there so that a refused use leaves no number behind in the ordinary case.
    pub(crate) fn submit<'u>(
        &mut self,
        uses: impl Iterator<Item = &'u Use> + Clone,
        enqueue: impl FnOnce(&D, &mut D::Queue) -> Result<(), Error>,
    ) -> Result<Ticket, Error> {
        let first = uses.clone().try_for_each(|u| self.check(u));
        if let Err(Error::Busy { .. }) = first {
            // Perhaps it is done and nobody has looked.
            self.device.poll();
            uses.clone().try_for_each(|u| self.check(u))?;
        } else {
            first?;
        }
        let ticket = self.stamp(uses.clone());
        let sent = uses.clone().try_for_each(|u| self.check(u));
        let queue = self.queue.as_mut().expect(TAKEN);
        let sent = sent.and_then(|()| enqueue(&self.device, queue));
        self.device.signal(queue, ticket);
        sent.map(|()| ticket)
    }

    /// Numbers what was enqueued by others. It is there already, so it is numbered whatever the
    /// check says.
    fn note(&mut self, used: Use) -> Result<Ticket, Error> {
        if used.claim.is_of_other(self.device.keeper().id()) {
            return Err(Error::Foreign { what: used.what });
        }
        self.device.poll();
        let ticket = self.stamp(std::iter::once(&used));
        self.device.signal(self.queue.as_mut().expect(TAKEN), ticket);
        self.check(&used).map(|()| ticket)
    }

    /// Gives the next number and writes it beside everything that is used.
    fn stamp<'u>(&mut self, uses: impl Iterator<Item = &'u Use>) -> Ticket {
        let ticket = Ticket { stream: self.index, number: self.issued + 1 };
        Claim::stamp(ticket, uses.map(|u| (&u.claim, u.access)));
        self.device.keeper().counters().submitted.fetch_add(1, Relaxed);
        self.issued = ticket.number;
        ticket
    }

    /// Whether this stream may use it now.
    fn check(&self, used: &Use) -> Result<(), Error> {
        let keeper = self.device.keeper();
        let ordered = |t: usize| match used.relied {
            true => self.seen[t],
            false => self.seen[t].max(self.assumed[t]),
        };
        let known = |t: usize| ordered(t).max(keeper.clocks().done(t));
        used.claim.check(used.what, used.access, (keeper.id(), self.index), known)
    }

    fn own(&self, mark: &Mark) -> Result<(), Error> {
        let own = mark.device == self.device.keeper().id();
        own.then_some(()).ok_or(Error::Foreign { what: "stream" })
    }
}

const TAKEN: &str = "only `drop` takes the queue";

/// What is known to come before: by either clock, and the ticket.
fn latest(mine: [u64; STREAMS], theirs: [u64; STREAMS], last: Ticket) -> [u64; STREAMS] {
    let mut both = std::array::from_fn(|stream| mine[stream].max(theirs[stream]));
    both[last.stream] = last.number.max(both[last.stream]);
    both
}

/// Gives the stream back. Its number stays reserved until its work is done; if this destructor is
/// leaked it stays reserved for good, which costs a place in the table and nothing else.
impl<D: Device> Drop for Stream<'_, D> {
    fn drop(&mut self) {
        self.queue = None; // before its place in the table is free
        let keeper = self.device.keeper();
        keeper.clocks().detach(self.index, self.issued);
        keeper.give_back(self.key);
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;
    use crate::clock::{Access, Epoch};
    use crate::memory::Block;
    use crate::sim::{Fault, Late};
    use crate::{Category, Name};

    fn pool(device: &Late) -> Block<Late> {
        Block::new(device, (Category::Cache, Name::from("pool")), 16, Epoch::default()).unwrap()
    }

    fn written(block: &Block<Late>) -> Use {
        Use::new("pool", block.region, Access::Write, block.claim.clone())
    }

    /// A release that falls between the passes of `submit`, as another thread's would: before the
    /// numbers are written (then the memory is gone at once and the submission must notice), and
    /// after (then the memory must wait).
    #[test]
    fn a_release_between_the_passes_is_seen_by_one_side() {
        for pass in [2, 3] {
            let device = Late::new(1);
            let caller = device.own_stream().unwrap();
            let mut stream = device.stream(&caller).unwrap();
            let block = pool(&device);
            let (region, use_) = (block.region, written(&block));
            let (owner, passes) = (RefCell::new(Some(block)), Cell::new(0));
            let uses = std::iter::once(&use_).inspect(|_| {
                passes.set(passes.get() + 1);
                if passes.get() == pass {
                    owner.take();
                }
            });
            let sent = stream.submit(uses, |device, queue| device.write(queue, region, &[7]));
            assert_eq!(sent, Err(Error::StaleEpoch { held: 0, current: 1 }));
            let waits = if pass == 2 { 0 } else { 16 };
            assert_eq!(device.census().live(Category::Retiring), waits, "pass {pass}");
            caller.pump(usize::MAX);
            assert_eq!(device.census().lines(), []);
            assert_eq!((device.violations(), device.blocks()), (0, 0));
        }
    }

    /// A device that fails half way: what it may have enqueued keeps its memory.
    #[test]
    fn a_failed_launch_still_counts() {
        let device = Late::new(1);
        let caller = device.own_stream().unwrap();
        let mut stream = device.stream(&caller).unwrap();
        let block = pool(&device);
        let (region, use_) = (block.region, written(&block));
        device.inject(Fault::Work(2));
        let sent = stream.submit(std::iter::once(&use_), |device, queue| {
            device.write(queue, region, &[7])?;
            device.write(queue, region, &[8])
        });
        assert!(matches!(sent, Err(Error::Device { .. })));
        drop(block);
        assert_eq!(device.census().live(Category::Retiring), 16);
        caller.pump(usize::MAX);
        assert_eq!((device.census().live(Category::Retiring), device.violations()), (0, 0));
    }

    /// A refused use leaves no number behind, so a loop of stale calls does not keep what is gone
    /// alive.
    #[test]
    fn a_refused_submission_numbers_nothing() {
        let device = Late::new(1);
        let caller = device.own_stream().unwrap();
        let mut stream = device.stream(&caller).unwrap();
        let (old, live) = (pool(&device), pool(&device));
        let uses = [written(&live), written(&old)];
        drop(old);
        let sent = stream.submit(uses.iter(), |_, _| panic!("enqueued"));
        assert_eq!(sent, Err(Error::StaleEpoch { held: 0, current: 1 }));
        assert_eq!(stream.last().number(), 0);
        drop((live, uses));
        assert_eq!(device.census().lines(), [], "and nothing is retiring");
    }

    /// A lease runs on one thread while the owner copies on another: refused, unless both only
    /// read.
    #[test]
    fn a_submission_during_a_host_copy_is_busy() {
        use Access::{Read, Write};
        for (copies, uses, fine) in [(Read, Read, true), (Read, Write, false), (Write, Read, false)]
        {
            let device = Late::new(1);
            let caller = device.own_stream().unwrap();
            let mut stream = device.stream(&caller).unwrap();
            let block = pool(&device);
            let use_ = Use { access: uses, ..written(&block) };
            let clocks = device.keeper().clocks();
            let copy = || stream.submit(std::iter::once(&use_), |_, _| Ok(())).map(drop);
            let sent = block.claim.standing.host(block.name(), copies, clocks, copy).unwrap();
            let busy = Err(Error::Busy { what: "pool".into() });
            assert_eq!(sent, if fine { Ok(()) } else { busy }, "{copies:?} {uses:?}");
            stream.submit(std::iter::once(&use_), |_, _| Ok(())).expect("the copy is over");
            let copied = block.claim.standing.host(block.name(), copies, clocks, || ());
            let in_flight = Err(Error::InFlight { what: "pool".into() });
            assert_eq!(copied, if fine { Ok(()) } else { in_flight });
        }
    }
}
