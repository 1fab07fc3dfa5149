//! Numbers and epochs: what has been asked of which stream, what is finished, and whether a right still stands.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::SeqCst};

use crate::{Error, Name};

/// Streams that one device tracks at a time. A mark is 16 bytes a stream and allocation, so this is a small number.
pub const STREAMS: usize = 8;

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

/// The one right to report a ticket done. The core makes it, the device's queue carries it behind the work and hands it back to
/// `Keeper::complete`. It cannot be made, copied or kept by anyone else, so no safe code can declare work finished that is not.
#[derive(Debug)]
pub struct Signal(pub(crate) Ticket);

impl Signal {
    /// The ticket that it will report done.
    pub fn ticket(&self) -> Ticket {
        self.0
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
    /// A free index. One whose last stream left work in flight stays taken until that work is done, so that the numbers of an
    /// index always describe one queue.
    pub(crate) fn attach(&self) -> Result<(usize, u64), Error> {
        let free = |i: &usize| {
            self.done(*i) >= self.issued[*i].load(SeqCst)
                && self.attached[*i].compare_exchange(false, true, SeqCst, SeqCst).is_ok()
        };
        let index = (0..STREAMS).find(free).ok_or(Error::TooManyStreams)?;
        Ok((index, self.issued[index].load(SeqCst)))
    }

    pub(crate) fn detach(&self, index: usize, issued: u64) {
        self.issued[index].store(issued, SeqCst);
        self.attached[index].store(false, SeqCst);
    }

    pub(crate) fn complete(&self, ticket: Ticket) {
        self.done[ticket.stream].fetch_max(ticket.number, SeqCst);
    }

    pub(crate) fn done(&self, stream: usize) -> u64 {
        self.done[stream].load(SeqCst)
    }
}

/// The control block beside one allocation (or executable, or code): some hundred host bytes, shared by its owner and by
/// the leases. It holds no device memory, so a forgotten lease pins nothing.
#[derive(Debug)]
pub(crate) struct Standing {
    device: u64,
    /// Shared by the successive allocations of one owner, so that `current` is true even after three replacements.
    epoch: Arc<AtomicU64>,
    reads: [AtomicU64; STREAMS],
    writes: [AtomicU64; STREAMS],
    /// Host copies in progress: readers count up, a writer is -1.
    host: AtomicI32,
}

impl Standing {
    pub(crate) fn new(device: u64, epoch: Arc<AtomicU64>) -> Arc<Self> {
        let marks = || [const { AtomicU64::new(0) }; STREAMS];
        Arc::new(Self { device, epoch, reads: marks(), writes: marks(), host: AtomicI32::new(0) })
    }

    /// Ends every right to it. Together with `stamp` this is the store-then-load pair on both sides: either the submission
    /// sees the new epoch, or the owner sees the submission's number. Never neither.
    pub(crate) fn close(&self) {
        self.epoch.fetch_add(1, SeqCst);
    }

    /// No numbered work and no host copy touches it any more.
    pub(crate) fn idle(&self, clocks: &Clocks) -> bool {
        self.host.load(SeqCst) == 0 && !self.blocked(Access::Write, None, |t| clocks.done(t))
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
                    Access::Read => self.0.host.fetch_sub(1, SeqCst),
                    Access::Write => self.0.host.swap(0, SeqCst),
                };
            }
        }
        let enter = |n: i32| match access {
            Access::Read => (n >= 0).then_some(n + 1),
            Access::Write => (n == 0).then_some(-1),
        };
        self.host
            .fetch_update(SeqCst, SeqCst, enter)
            .map_err(|_| Error::Busy { what: what.clone() })?;
        let _leave = Leave(self, access);
        if self.blocked(access, None, |t| clocks.done(t)) {
            return Err(Error::InFlight { what: what.clone() });
        }
        Ok(copy())
    }

    /// Is there a conflicting use, on a stream other than `stream`, beyond the numbers that are known to come before?
    fn blocked(&self, access: Access, stream: Option<usize>, known: impl Fn(usize) -> u64) -> bool {
        (0..STREAMS).filter(|t| Some(*t) != stream).any(|t| {
            let write = self.writes[t].load(SeqCst);
            let read = if access == Access::Write { self.reads[t].load(SeqCst) } else { 0 };
            write.max(read) > known(t)
        })
    }
}

/// The right to use something while its epoch stands. The untyped heart of a `Lease`.
#[derive(Clone, Debug)]
pub(crate) struct Claim {
    pub(crate) standing: Arc<Standing>,
    pub(crate) held: u64,
}

impl Claim {
    pub(crate) fn new(standing: Arc<Standing>) -> Self {
        let held = standing.epoch.load(SeqCst);
        Self { standing, held }
    }

    pub(crate) fn stamp(&self, ticket: Ticket, access: Access) {
        let marks = match access {
            Access::Read => &self.standing.reads,
            Access::Write => &self.standing.writes,
        };
        marks[ticket.stream].store(ticket.number, SeqCst);
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
        let (held, current) = (self.held, self.standing.epoch.load(SeqCst));
        if held != current {
            return Err(Error::StaleEpoch { held, current });
        }
        let host = self.standing.host.load(SeqCst);
        let copied = host < 0 || (access == Access::Write && host > 0);
        if copied || self.standing.blocked(access, Some(stream), known) {
            return Err(Error::Busy { what: what.into() });
        }
        Ok(())
    }
}
