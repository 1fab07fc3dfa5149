//! Two simulated devices on one simulated machine, for tests: [`AtOnce`] works when it is asked,
//! [`Late`] when its stream is pumped.
//!
//! Addresses are never used twice and every access is looked up, so what would be a use after free
//! or a race on a real device is counted here ([`Simulated::violations`]): an access to memory that
//! is gone or past its end, a free or a host copy under queued work, and two queues that hold
//! conflicting work of which neither waits for the other. Safe programs leave that count at zero. A
//! device can be told to run out of memory, to fail a launch, to compute wrong numbers or to break
//! down ([`Fault`]).
//!
//! It runs the toy operations of [`op::toy`](crate::op::toy), whose launches allocate nothing, and
//! the real ones by their oracles.

mod machine;
mod oracles;
mod toy;

use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use machine::{Job, Launch, Machine, Recorded};

use crate::device::PIECE_BYTES;
use crate::{Access, Device, Error, Foreign, Keeper, Lease, Pass, Region, Reporter, Ticket};

/// Works when it is asked.
pub type AtOnce = Simulated<Now>;
/// Works when it is pumped.
pub type Late = Simulated<Later>;

/// A simulated device. Cloning it names the same device.
pub struct Simulated<P>(Arc<Shared>, PhantomData<fn() -> P>);

/// When a device works.
pub trait Pace: Send + Sync + 'static {
    /// The device's name.
    const NAME: &'static str;
    /// Whether it works only when it is pumped.
    const LATE: bool;
}

/// The pace of [`AtOnce`].
#[derive(Debug)]
pub enum Now {}

/// The pace of [`Late`].
#[derive(Debug)]
pub enum Later {}

impl Pace for Now {
    const NAME: &'static str = "at once";
    const LATE: bool = false;
}

impl Pace for Later {
    const NAME: &'static str = "late";
    const LATE: bool = true;
}

/// What planning needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The device's name.
    pub name: &'static str,
    /// Things that work side by side.
    pub units: usize,
}

impl fmt::Display for Facts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} with {} units", self.name, self.units)
    }
}

/// What may go wrong with a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The n-th allocation from now on, from 1, finds no memory.
    Obtain(usize),
    /// The n-th launch, write or replay from now on, from 1, fails and is not enqueued.
    Work(usize),
    /// Launches from now on give a wrong first element.
    Numbers,
    /// What is done from now on is not reported: nobody knows but who waits.
    Silent,
    /// Nothing works any more, and what was enqueued is lost with its signals.
    Down,
}

struct Shared {
    facts: Facts,
    keeper: Keeper,
    machine: Mutex<Machine>,
}

impl Shared {
    fn machine(&self) -> MutexGuard<'_, Machine> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A stream as its owner, the caller, has it.
pub struct SimStream {
    shared: Arc<Shared>,
    queue: usize,
}

impl SimStream {
    /// Lets the device work off up to `jobs` jobs (a submission is its work and then one signal);
    /// says how many it did.
    pub fn pump(&self, jobs: usize) -> usize {
        let keeper = &self.shared.keeper;
        let mut machine = self.shared.machine();
        (0..jobs).find(|_| !machine.step(keeper, self.queue)).unwrap_or(jobs)
    }
}

/// A lent stream.
pub struct SimQueue {
    stream: SimStream,
    reporter: Arc<Reporter>,
    recording: Option<Vec<Launch>>,
}

/// An allocation.
pub struct SimMemory {
    shared: Arc<Shared>,
    address: u64,
    /// Of foreign memory. (Behind a lock, so that memory is `Sync` whatever the owner is.)
    _owner: Option<Mutex<Box<dyn Send>>>,
}

impl Drop for SimMemory {
    fn drop(&mut self) {
        self.shared.machine().free(self.address);
    }
}

impl<P> Clone for Simulated<P> {
    fn clone(&self) -> Self {
        Self(self.0.clone(), PhantomData)
    }
}

impl<P: Pace> Simulated<P> {
    /// A device with `units` units.
    pub fn new(units: usize) -> Self {
        let (facts, keeper) = (Self::facts_of(units), Keeper::default());
        Self(Arc::new(Shared { facts, keeper, machine: Mutex::default() }), PhantomData)
    }

    /// The facts of such a device, without one.
    pub fn facts_of(units: usize) -> Facts {
        Facts { name: P::NAME, units }
    }

    /// From here on, this goes wrong.
    pub fn inject(&self, fault: Fault) {
        self.0.machine().inject(fault);
    }

    /// Memory whose owner is outside: `owner` is dropped when nothing uses it any more.
    pub fn foreign(
        &self,
        bytes: usize,
        owner: impl Send + 'static,
    ) -> Result<Foreign<Self>, Error> {
        let address = self.0.machine().obtain(bytes)?;
        let memory = SimMemory {
            shared: self.0.clone(),
            address,
            _owner: Some(Mutex::new(Box::new(owner))),
        };
        Foreign::new(self, memory, bytes)
    }

    /// Work that a caller enqueued himself, past the core, on what is leased.
    pub fn outside<T>(&self, stream: &SimStream, lease: &Lease<T, Self>, access: Access) {
        let (inputs, outputs) = match access {
            Access::Read => (&[lease.region][..], &[][..]),
            Access::Write => (&[][..], &[lease.region][..]),
        };
        let nothing = machine::Kernel::Toy(|_, _, _| {}, [0; 3]);
        let launch = Launch::new(nothing, inputs, outputs, None);
        self.0.machine().push(stream.queue, Job::Launch(launch));
    }

    /// An order that a caller made himself, past the core, with an event of his own: `stream` waits for a ticket.
    pub fn outside_order(&self, stream: &SimStream, ticket: Ticket) {
        self.0.machine().push(stream.queue, Job::After(ticket));
    }

    /// What no safe program may do: see the module.
    pub fn violations(&self) -> usize {
        self.0.machine().heap.violations()
    }

    /// Live allocations of the machine itself, to compare with the ledger.
    pub fn blocks(&self) -> usize {
        self.0.machine().heap.blocks()
    }

    /// Enqueues a job that may fail.
    fn work(&self, queue: &mut SimQueue, call: &'static str, job: Job) -> Result<(), Error> {
        self.0.machine().may_work(call)?;
        self.enqueue(queue, job);
        Ok(())
    }

    fn enqueue(&self, queue: &mut SimQueue, job: Job) {
        let mut machine = self.0.machine();
        machine.push(queue.stream.queue, job);
        // Another thread may be the one whose work a job waits for, so the lock is free between two
        // tries.
        while !P::LATE && machine.is_pending(queue.stream.queue) {
            if !machine.step(&self.0.keeper, queue.stream.queue) {
                drop(machine);
                std::thread::yield_now();
                machine = self.0.machine();
            }
        }
    }

    /// Enqueues a kernel, or records it.
    fn launch(&self, queue: &mut SimQueue, launch: Launch) -> Result<(), Error> {
        match &mut queue.recording {
            Some(list) => {
                self.0.machine().may_work("record")?;
                list.push(launch);
                Ok(())
            }
            None => self.work(queue, "launch", Job::Launch(launch)),
        }
    }
}

// SAFETY: addresses are numbers that the machine looks up and never memory of this process, so nothing that this device does or says
// can break memory; a wrong use is counted.
#[allow(unsafe_code)]
unsafe impl<P: Pace> Device for Simulated<P> {
    type Facts = Facts;
    type Memory = SimMemory;
    type CallerStream = SimStream;
    type Queue = SimQueue;
    type Executable = Arc<Recorded>;

    fn facts(&self) -> &Facts {
        &self.0.facts
    }

    fn keeper(&self) -> &Keeper {
        &self.0.keeper
    }

    fn obtain(&self, bytes: usize, _: Pass) -> Result<SimMemory, Error> {
        let address = self.0.machine().obtain(bytes)?;
        Ok(SimMemory { shared: self.0.clone(), address, _owner: None })
    }

    fn address(memory: &SimMemory) -> u64 {
        memory.address
    }

    fn copy_in(&self, region: Region, bytes: &[u8]) -> Result<(), Error> {
        let mut machine = self.0.machine();
        machine.may_copy((region, Access::Write))?;
        machine.heap.store(region.address(), bytes);
        Ok(())
    }

    fn copy_out(&self, region: Region, bytes: &mut [u8]) -> Result<(), Error> {
        let mut machine = self.0.machine();
        machine.may_copy((region, Access::Read))?;
        machine.heap.load_into(region.address(), bytes);
        Ok(())
    }

    fn poll(&self) {} // jobs report themselves

    fn own_stream(&self) -> Result<SimStream, Error> {
        Ok(SimStream { shared: self.0.clone(), queue: self.0.machine().new_queue() })
    }

    fn key(caller: &SimStream) -> u64 {
        caller.queue as u64
    }

    fn attach(&self, caller: &SimStream, reporter: Reporter) -> Result<SimQueue, Error> {
        if !Arc::ptr_eq(&caller.shared, &self.0) {
            return Err(Error::Foreign { what: "stream" });
        }
        let stream = SimStream { shared: caller.shared.clone(), queue: caller.queue };
        Ok(SimQueue { stream, reporter: Arc::new(reporter), recording: None })
    }

    fn write(&self, queue: &mut SimQueue, to: Region, bytes: &[u8]) -> Result<(), Error> {
        let mut piece = [0; PIECE_BYTES];
        piece[..bytes.len()].copy_from_slice(bytes);
        self.work(queue, "write", Job::Write(to, piece))
    }

    fn signal(&self, queue: &mut SimQueue, ticket: Ticket) {
        let reporter = queue.reporter.clone();
        self.enqueue(queue, Job::Signal(reporter, ticket.number()));
    }

    fn after(&self, queue: &mut SimQueue, ticket: Ticket) -> Result<(), Error> {
        self.0.machine().is_up()?;
        self.enqueue(queue, Job::After(ticket));
        Ok(())
    }

    fn wait(&self, queue: &mut SimQueue) -> Result<(), Error> {
        let own = queue.stream.queue;
        loop {
            let mut machine = self.0.machine();
            machine.is_up()?;
            while machine.step(&self.0.keeper, own) {}
            if !machine.is_pending(own) {
                return Ok(());
            }
            machine.step_all(&self.0.keeper); // it waits for another stream
            drop(machine);
            std::thread::yield_now();
        }
    }

    fn begin_capture(&self, queue: &mut SimQueue) -> Result<(), Error> {
        self.0.machine().is_up()?;
        queue.recording = Some(Vec::new());
        Ok(())
    }

    fn end_capture(&self, queue: &mut SimQueue) -> Result<Self::Executable, Error> {
        let list = queue.recording.take().unwrap_or_default();
        self.0.machine().is_up()?;
        Ok(Arc::new(Recorded(list)))
    }

    fn replay(&self, what: &Self::Executable, queue: &mut SimQueue) -> Result<(), Error> {
        self.work(queue, "replay", Job::Graph(what.clone()))
    }
}
