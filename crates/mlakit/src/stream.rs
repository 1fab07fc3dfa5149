//! The caller's stream, and `submit`: the only way to enqueue.

use std::marker::PhantomData;
use std::sync::atomic::Ordering::Relaxed;

use crate::clock::{STREAMS, Signal};
use crate::device::Pass;
use crate::memory::Use;
use crate::{Device, Error, Ticket};

/// A caller's stream while it is lent. `&mut` is the right to enqueue; one thread at a time without a lock.
pub struct Stream<'s, D: Device> {
    device: D,
    queue: D::Queue,
    index: usize,
    issued: u64,
    /// For each other stream, the number up to which it is ordered before this one (a vector clock).
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
    /// Work enqueued from now on comes after all that `other` has been given so far.
    pub fn wait_for(&mut self, other: &Stream<'_, D>) -> Result<(), Error> {
        if other.device.keeper().id() != self.device.keeper().id() {
            return Err(Error::Foreign { what: "stream" });
        }
        self.device.after(&mut self.queue, other.last())?;
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

    /// The only way to enqueue. Check, number, check again, enqueue, signal: no allocation, no lock, no wait.
    ///
    /// Sound because (1) every number is written before the second check, and `Standing::close` is called before the owner
    /// reads the numbers, so a release on another thread is seen here or sees this number; (2) the number counts as
    /// unfinished until the signal behind the work has passed, also when the device failed half way; (3) work of one
    /// stream runs in order, and a conflict with another stream or the host is refused unless an order is known.
    /// The first check is there so that a refused use leaves no number behind in the ordinary case.
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
        uses.clone().for_each(|u| u.claim.stamp(ticket, u.access));
        let sent = uses.clone().try_for_each(check);
        keeper.counters().submitted.fetch_add(1, Relaxed);
        self.issued = ticket.number;
        let sent = sent.and_then(|()| enqueue(&self.device, &mut self.queue));
        self.device.signal(&mut self.queue, Signal(ticket));
        sent.map(|()| ticket)
    }
}

/// Gives the stream back. Its number stays reserved until its work is done; if this destructor is leaked it stays reserved for
/// good, which costs a place in the table and nothing else.
impl<D: Device> Drop for Stream<'_, D> {
    fn drop(&mut self) {
        self.device.keeper().clocks().detach(self.index, self.issued);
    }
}
