//! The core's book-keeping for one device: the ledger, the numbers, what is retiring, what is loaded.

use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::census::Entry;
use crate::clock::{Clocks, Epoch, Reporter, Standing};
use crate::{Category, Census, Error, Ticket};

/// The book-keeping that a device owns and does not look into.
pub struct Keeper {
    id: u64,
    census: Census,
    clocks: Clocks,
    frozen: AtomicBool,
    retiring: Mutex<Vec<Retired>>,
    /// Code by identity. Weak: the code lives as long as some `Prepared` or `Graph` has it.
    loaded: Mutex<HashMap<String, Weak<dyn Any + Send + Sync>>>,
    counters: Counters,
    /// The streams that are lent now, by `Device::key`.
    lent: Mutex<Vec<u64>>,
}

/// How often what was done; the tests that a replay calls neither `prepare` nor `bind` compare these.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) prepared: AtomicU64,
    pub(crate) bound: AtomicU64,
    pub(crate) submitted: AtomicU64,
}

/// A reading of the counters of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Calls of `prepare`.
    pub prepared: u64,
    /// Calls of `bind`.
    pub bound: u64,
    /// Submissions: runs, replays, writes in stream order.
    pub submitted: u64,
    /// Allocations.
    pub obtained: u64,
}

struct Retired {
    thing: Box<dyn Any + Send>,
    standing: Arc<Standing>,
    entry: Entry,
}

impl Default for Keeper {
    fn default() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            id: NEXT.fetch_add(1, SeqCst),
            census: Census::default(),
            clocks: Clocks::default(),
            frozen: AtomicBool::new(false),
            retiring: Mutex::default(),
            loaded: Mutex::default(),
            counters: Counters::default(),
            lent: Mutex::default(),
        }
    }
}

impl Keeper {
    /// The device reports that the submissions of a stream up to `number` are done.
    pub fn complete(&self, reporter: &Reporter, number: u64) {
        if reporter.device == self.id {
            self.clocks.complete(Ticket { stream: reporter.stream, number });
        }
    }

    /// The number up to which a stream was reported done.
    pub fn done(&self, reporter: &Reporter) -> u64 {
        self.clocks.done(reporter.stream)
    }

    /// Whether it was reported done.
    pub fn is_done(&self, ticket: Ticket) -> bool {
        self.clocks.done(ticket.stream) >= ticket.number
    }

    /// A reading of the counters.
    pub fn counts(&self) -> Counts {
        Counts {
            prepared: self.counters.prepared.load(SeqCst),
            bound: self.counters.bound.load(SeqCst),
            submitted: self.counters.submitted.load(SeqCst),
            obtained: self.census.obtained(),
        }
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }

    pub(crate) fn census(&self) -> &Census {
        &self.census
    }

    pub(crate) fn clocks(&self) -> &Clocks {
        &self.clocks
    }

    /// Notes that a stream is lent. Two queues of one stream would number one order of work twice, and could record into each
    /// other's capture.
    pub(crate) fn lend(&self, stream: u64) -> Result<(), Error> {
        let mut lent = lock(&self.lent);
        if lent.contains(&stream) {
            return Err(Error::StreamLent);
        }
        lent.push(stream);
        Ok(())
    }

    pub(crate) fn give_back(&self, stream: u64) {
        lock(&self.lent).retain(|other| *other != stream);
    }

    pub(crate) fn standing(&self, epoch: Epoch) -> Arc<Standing> {
        Standing::new(self.id, epoch)
    }

    pub(crate) fn freeze(&self) {
        self.frozen.store(true, SeqCst);
    }

    pub(crate) fn frozen(&self) -> bool {
        self.frozen.load(SeqCst)
    }

    /// Takes over what an owner let go: drops it now if nothing in flight uses it, else when `reclaim` finds it finished.
    /// The caller has closed `standing`, so no new use can start.
    pub(crate) fn retire(
        &self,
        thing: Box<dyn Any + Send>,
        standing: &Arc<Standing>,
        entry: Entry,
    ) {
        self.census.remove(&entry);
        if standing.idle(&self.clocks) {
            return; // drops `thing`
        }
        let entry = Entry { category: Category::Retiring, ..entry };
        self.census.add(&entry);
        lock(&self.retiring).push(Retired { thing, standing: standing.clone(), entry });
    }

    pub(crate) fn reclaim(&self) {
        let finished = |retired: &mut Retired| retired.standing.idle(&self.clocks);
        let ready: Vec<_> = lock(&self.retiring).extract_if(.., finished).collect();
        for Retired { thing, entry, .. } in ready {
            drop(thing); // outside the lock, in the order of retirement
            self.census.remove(&entry);
        }
    }

    pub(crate) fn loaded<T: Any + Send + Sync>(&self, identity: &str) -> Option<Arc<T>> {
        lock(&self.loaded).get(identity)?.upgrade()?.downcast().ok()
    }

    pub(crate) fn remember<T: Any + Send + Sync>(&self, identity: String, code: &Arc<T>) {
        let code: Arc<dyn Any + Send + Sync> = code.clone();
        let mut loaded = lock(&self.loaded);
        loaded.retain(|_, code| code.strong_count() > 0); // or the names of what is gone would pile up
        loaded.insert(identity, Arc::downgrade(&code));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
