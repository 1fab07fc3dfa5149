//! Numbers and epochs: what has been asked of which stream, what is finished, and whether a right
//! still stands.
//!
//! Three parties meet here without a lock: a stream that is about to use an allocation, the owner
//! that lets it go, and a host copy. Each first *writes* its intention (a number beside the
//! allocation, the next epoch, the count of copies), then passes [`settle`], then *looks* at what
//! the others have written. With a sequentially consistent fence between the two, of any two
//! parties at least one sees the other; which one gives way is then a matter of courtesy.
//! Everything else is release and acquire. `clock/model.rs` tries every interleaving under loom.

use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release, SeqCst};

#[cfg(all(test, loom))]
use loom::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, fence};
#[cfg(not(all(test, loom)))]
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, fence};

use crate::{Error, Name};

#[cfg(all(test, loom))]
mod model;

/// Streams that one device tracks at a time. A mark is 16 bytes a stream and allocation, so this is
/// a small number.
pub const STREAMS: usize = if cfg!(all(test, loom)) { 2 } else { 8 };

/// What was written before is seen by whoever settles later, and the other way round: never do two
/// parties miss each other.
fn settle() {
    fence(SeqCst);
}

/// The number of a submission on its stream. Plain data: losing one loses nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    pub(crate) stream: usize,
    pub(crate) number: u64,
}

impl Ticket {
    /// The index of its stream, below [`STREAMS`].
    pub fn stream(self) -> usize {
        self.stream
    }

    /// Its place in that stream, from 1.
    pub fn number(self) -> u64 {
        self.number
    }
}

/// The one right to report what is done on one stream. The core makes it when the stream is
/// attached, the device keeps it and shows it to `Keeper::complete`. It cannot be made or copied by
/// anyone else, so no safe code can declare work finished that is not.
///
/// One for a stream, not one for each submission: a GPU writes the last finished number into
/// memory, and whoever reads it learns of all submissions before it at once.
#[derive(Debug)]
pub struct Reporter {
    pub(crate) device: u64,
    pub(crate) stream: usize,
}

impl Reporter {
    /// The index of its stream, below [`STREAMS`].
    pub fn stream(&self) -> usize {
        self.stream
    }
}

/// How work touches an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Access {
    Read,
    Write,
}

/// What is issued and what is finished, a stream.
#[derive(Debug, Default)]
pub(crate) struct Clocks {
    issued: [AtomicU64; STREAMS],
    done: [AtomicU64; STREAMS],
    attached: [AtomicBool; STREAMS],
}

impl Clocks {
    /// A free index. One whose last stream left work in flight stays taken until that work is done,
    /// so that the numbers of an index always describe one queue.
    pub(crate) fn attach(&self) -> Result<(usize, u64), Error> {
        let free = |i: &usize| {
            if self.attached[*i].compare_exchange(false, true, AcqRel, Acquire).is_err() {
                return false;
            }
            // Only now: before the exchange another stream could come and go, and leave work
            // behind.
            let idle = self.done(*i) >= self.issued[*i].load(Acquire);
            if !idle {
                self.attached[*i].store(false, Release);
            }
            idle
        };
        let index = (0..STREAMS).find(free).ok_or(Error::TooManyStreams)?;
        Ok((index, self.issued[index].load(Acquire)))
    }

    pub(crate) fn detach(&self, index: usize, issued: u64) {
        self.issued[index].store(issued, Release);
        self.attached[index].store(false, Release);
    }

    pub(crate) fn complete(&self, ticket: Ticket) {
        self.done[ticket.stream].fetch_max(ticket.number, AcqRel);
    }

    pub(crate) fn done(&self, stream: usize) -> u64 {
        self.done[stream].load(Acquire)
    }
}

/// How often an owner has let go. One counter for the successive allocations of one owner, so that
/// `current` is true even after three replacements.
#[derive(Clone, Debug, Default)]
pub(crate) struct Epoch(Arc<AtomicU64>);

impl Epoch {
    pub(crate) fn now(&self) -> u64 {
        self.0.load(Acquire)
    }
}

/// The control block beside one allocation (or executable, or code): some hundred host bytes,
/// shared by its owner and by the leases. It holds no device memory, so a forgotten lease pins
/// nothing.
#[derive(Debug)]
pub(crate) struct Standing {
    device: u64,
    epoch: Epoch,
    reads: [AtomicU64; STREAMS],
    writes: [AtomicU64; STREAMS],
    /// Host copies in progress: readers count up, a writer is -1.
    host: AtomicI32,
}

impl Standing {
    pub(crate) fn new(device: u64, epoch: Epoch) -> Arc<Self> {
        let (reads, writes) = Default::default();
        Arc::new(Self { device, epoch, reads, writes, host: AtomicI32::new(0) })
    }

    /// Ends every right to it. A submission on another thread now sees the new epoch, or the owner,
    /// who looks next, sees its number.
    pub(crate) fn close(&self) {
        self.epoch.0.fetch_add(1, AcqRel);
        settle();
    }

    /// No numbered work touches it any more. Nor does a host copy: that borrows the owner, who is
    /// asking.
    pub(crate) fn idle(&self, clocks: &Clocks) -> bool {
        !self.blocked(Access::Write, None, |t| clocks.done(t))
    }

    /// A host copy: refused, not waited for, while work is in flight.
    pub(crate) fn host<R>(
        &self,
        what: &Name,
        access: Access,
        clocks: &Clocks,
        copy: impl FnOnce() -> R,
    ) -> Result<R, Error> {
        struct Leave<'s>(&'s Standing, Access);
        impl Drop for Leave<'_> {
            fn drop(&mut self) {
                match self.1 {
                    Access::Read => self.0.host.fetch_sub(1, Release),
                    Access::Write => self.0.host.swap(0, Release),
                };
            }
        }
        let enter = |n: i32| match access {
            Access::Read => (n >= 0).then_some(n + 1),
            Access::Write => (n == 0).then_some(-1),
        };
        self.host
            .fetch_update(AcqRel, Acquire, enter)
            .map_err(|_| Error::Busy { what: what.clone() })?;
        let _leave = Leave(self, access);
        settle();
        if self.blocked(access, None, |t| clocks.done(t)) {
            return Err(Error::InFlight { what: what.clone() });
        }
        Ok(copy())
    }

    /// Is there a conflicting use, on a stream other than `stream`, beyond the numbers that are
    /// known to come before?
    fn blocked(&self, access: Access, stream: Option<usize>, known: impl Fn(usize) -> u64) -> bool {
        (0..STREAMS).filter(|t| Some(*t) != stream).any(|t| {
            let write = self.writes[t].load(Acquire);
            let read = if access == Access::Write { self.reads[t].load(Acquire) } else { 0 };
            write.max(read) > known(t)
        })
    }
}

/// The right to use something while its epoch stands. The untyped heart of a `Lease`.
#[derive(Clone, Debug)]
pub(crate) struct Claim {
    pub(crate) standing: Arc<Standing>,
    held: u64,
}

impl Claim {
    pub(crate) fn new(standing: Arc<Standing>) -> Self {
        let held = standing.epoch.now();
        Self { standing, held }
    }

    /// Ends every other right to it and keeps this one: the allocation stays, what it means is
    /// another.
    pub(crate) fn renew(&mut self) {
        self.standing.close();
        self.held = self.standing.epoch.now();
    }

    /// The same right to the same thing.
    pub(crate) fn same(&self, other: &Self) -> bool {
        self.is_of(&other.standing) && self.held == other.held
    }

    /// Whether it is of a device other than `device`.
    pub(crate) fn is_of_other(&self, device: u64) -> bool {
        self.standing.device != device
    }

    pub(crate) fn is_of(&self, standing: &Arc<Standing>) -> bool {
        Arc::ptr_eq(&self.standing, standing)
    }

    /// Writes the numbers of one submission beside everything that it uses, for whoever looks from
    /// now on.
    pub(crate) fn stamp<'c>(ticket: Ticket, uses: impl Iterator<Item = (&'c Self, Access)>) {
        for (claim, access) in uses {
            let marks = match access {
                Access::Read => &claim.standing.reads,
                Access::Write => &claim.standing.writes,
            };
            marks[ticket.stream].store(ticket.number, Release);
        }
        settle();
    }

    /// May stream `stream` of `device` use it now, given the numbers that it knows to be before it?
    pub(crate) fn check(
        &self,
        what: &'static str,
        access: Access,
        (device, stream): (u64, usize),
        known: impl Fn(usize) -> u64,
    ) -> Result<(), Error> {
        if self.standing.device != device {
            return Err(Error::Foreign { what });
        }
        let host = self.standing.host.load(Acquire);
        let copied = host < 0 || (access == Access::Write && host > 0);
        let busy = copied || self.standing.blocked(access, Some(stream), known);
        // The epoch is read last: a `renew` is done before the write behind it, so who finds that
        // write done finds the epoch too.
        let (held, current) = (self.held, self.standing.epoch.now());
        if held != current {
            return Err(Error::StaleEpoch { held, current });
        }
        if busy {
            return Err(Error::Busy { what: what.into() });
        }
        Ok(())
    }
}
