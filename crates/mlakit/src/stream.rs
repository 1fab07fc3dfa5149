//! The caller's stream, and `submit`: the only way to enqueue.

use std::marker::PhantomData;
use std::sync::atomic::Ordering::Relaxed;

use crate::clock::{Claim, STREAMS, Signal};
use crate::device::Pass;
use crate::memory::Use;
use crate::{Device, Error, Ticket};

/// A caller's stream while it is lent. `&mut` is the right to enqueue; one thread at a time without
/// a lock.
pub struct Stream<'s, D: Device> {
    device: D,
    queue: D::Queue,
    index: usize,
    issued: u64,
    /// For each other stream, the number up to which it is ordered before this one (a vector
    /// clock).
    seen: [u64; STREAMS],
    lent: PhantomData<&'s D::CallerStream>,
}

impl<'s, D: Device> Stream<'s, D> {
    pub(crate) fn attach(device: &D, caller: &'s D::CallerStream) -> Result<Self, Error> {
        device.poll();
        let (index, issued) = device.keeper().clocks().attach()?;
        let queue = match device.attach(caller, Pass(())) {
            Ok(queue) => queue,
            Err(error) => {
                device.keeper().clocks().detach(index, issued);
                return Err(error);
            }
        };
        let seen = [0; STREAMS];
        Ok(Self { device: device.clone(), queue, index, issued, seen, lent: PhantomData })
    }
}

impl<D: Device> Stream<'_, D> {
    /// Work enqueued from now on comes after all that `other` has been given, and made to wait for,
    /// so far.
    ///
    /// The wait is a submission of its own, so that a third stream which waits for this one waits
    /// for `other` too, even if this one was given nothing in between.
    pub fn wait_for(&mut self, other: &Stream<'_, D>) -> Result<(), Error> {
        if other.device.keeper().id() != self.device.keeper().id() {
            return Err(Error::Foreign { what: "stream" });
        }
        self.submit(std::iter::empty(), |device, queue| device.after(queue, other.last()))?;
        for (mine, theirs) in self.seen.iter_mut().zip(other.seen) {
            *mine = theirs.max(*mine);
        }
        self.seen[other.index] = other.issued;
        Ok(())
    }

    /// The host waits for everything enqueued.
    pub fn wait(&mut self) -> Result<(), Error> {
        self.device.wait(&mut self.queue)?;
        self.device.reclaim();
        Ok(())
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
        &mut self.queue
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
        let keeper = self.device.keeper();
        let place = (keeper.id(), self.index);
        let check = |u: &'u Use| {
            u.claim.check(u.what, u.access, place, |t| self.seen[t].max(keeper.clocks().done(t)))
        };
        uses.clone().try_for_each(check)?;
        let ticket = Ticket { stream: self.index, number: self.issued + 1 };
        Claim::stamp(ticket, uses.clone().map(|u| (&u.claim, u.access)));
        let sent = uses.clone().try_for_each(check);
        keeper.counters().submitted.fetch_add(1, Relaxed);
        self.issued = ticket.number;
        let sent = sent.and_then(|()| enqueue(&self.device, &mut self.queue));
        self.device.signal(&mut self.queue, Signal(ticket));
        sent.map(|()| ticket)
    }
}

/// Gives the stream back. Its number stays reserved until its work is done; if this destructor is
/// leaked it stays reserved for good, which costs a place in the table and nothing else.
impl<D: Device> Drop for Stream<'_, D> {
    fn drop(&mut self) {
        self.device.keeper().clocks().detach(self.index, self.issued);
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
