//! The CPU device: work is done when `run` returns, and a capture records kernels and addresses.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use mlakit::{Device, Error, Keeper, Pass, Region, Reporter, Ticket};

use crate::isa::{Isa, IsaUnavailable};
use crate::kernel::Kernels;
use crate::memory::{self, Memory};
use crate::pool::{Pool, PoolOptions};

/// A CPU with a thread pool of its own. Cloning it is cheap and names the same device.
#[derive(Clone)]
pub struct Cpu(Arc<Shared>);

struct Shared {
    facts: Facts,
    keeper: Keeper,
    pool: Pool,
}

/// What planning needs to know of a CPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The instructions that kernels use.
    pub isa: Isa,
    /// Threads that work side by side, the caller's included.
    pub threads: usize,
}

impl Facts {
    /// Of this machine: the best instructions that it has and every processor that this process may use.
    pub fn detect() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Self { isa: Isa::detect(), threads }
    }
}

impl fmt::Display for Facts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let threads = if self.threads == 1 { "thread" } else { "threads" };
        write!(f, "cpu ({}, {} {threads})", self.isa.name(), self.threads)
    }
}

impl Cpu {
    /// A device with these facts; the pool's threads start now and end with the last clone.
    ///
    /// # Errors
    /// Instructions that this machine does not have, or threads that it does not give.
    pub fn new(facts: Facts) -> Result<Self, Error> {
        let failed = |call, message: String| Error::Device { call, message };
        Isa::choose(Some(facts.isa)).map_err(|e| failed("choose instructions", e.to_string()))?;
        let options = PoolOptions { threads: facts.threads.max(1), ..PoolOptions::default() };
        let pool = Pool::new(options).map_err(|e| failed("start threads", e.to_string()))?;
        Ok(Self(Arc::new(Shared { facts, keeper: Keeper::default(), pool })))
    }

    /// The device that fits this machine best.
    pub fn detect() -> Result<Self, Error> {
        Self::new(Facts::detect())
    }

    /// The kernels of the instructions that this device uses.
    pub(crate) fn kernels(&self) -> Result<Kernels, Error> {
        let failed = |e: IsaUnavailable| Error::Device {
            call: "choose instructions",
            message: e.to_string(),
        };
        Kernels::new(self.0.facts.isa).map_err(failed)
    }

    /// Runs a kernel now, or records it.
    pub(crate) fn enqueue(
        &self,
        queue: &mut Queue,
        kernel: impl Fn(&Pool) + Send + Sync + 'static,
    ) -> Result<(), Error> {
        match &mut queue.recording {
            Some(list) => list.push(Box::new(kernel)),
            None => kernel(&self.0.pool),
        }
        Ok(())
    }
}

/// A stream of the CPU: the order of the calls that it is lent to.
#[derive(Debug)]
pub struct CallerStream {
    key: u64,
}

/// A lent stream.
pub struct Queue {
    reporter: Reporter,
    recording: Option<Vec<Kernel>>,
}

type Kernel = Box<dyn Fn(&Pool) + Send + Sync>;

/// A recorded sequence: kernels with the addresses of their operands.
pub struct Recorded(Vec<Kernel>);

// SAFETY: an allocation is the `Memory`'s own until it is dropped, and nothing makes one but `obtain`; work is over when the call that
// enqueued it returns, so whatever is reported then is done and every order holds; kernels stay within the regions that the core gives
// and the pages that a view shows, since they check each id that they read; every stream has a key of its own.
unsafe impl Device for Cpu {
    type Facts = Facts;
    type Memory = Memory;
    type CallerStream = CallerStream;
    type Queue = Queue;
    type Executable = Recorded;

    fn facts(&self) -> &Facts {
        &self.0.facts
    }

    fn keeper(&self) -> &Keeper {
        &self.0.keeper
    }

    fn obtain(&self, bytes: usize, _: Pass) -> Result<Memory, Error> {
        Memory::obtain(bytes)
    }

    fn address(memory: &Memory) -> u64 {
        memory.address()
    }

    fn copy_in(&self, region: Region, bytes: &[u8]) -> Result<(), Error> {
        memory::copy_in(region, bytes);
        Ok(())
    }

    fn copy_out(&self, region: Region, bytes: &mut [u8]) -> Result<(), Error> {
        memory::copy_out(region, bytes);
        Ok(())
    }

    fn poll(&self) {} // work is done, and reported, when it was enqueued

    fn own_stream(&self) -> Result<CallerStream, Error> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Ok(CallerStream { key: NEXT.fetch_add(1, Relaxed) })
    }

    fn key(caller: &CallerStream) -> u64 {
        caller.key
    }

    fn attach(&self, _: &CallerStream, reporter: Reporter) -> Result<Queue, Error> {
        Ok(Queue { reporter, recording: None })
    }

    fn write(&self, _: &mut Queue, to: Region, bytes: &[u8]) -> Result<(), Error> {
        memory::copy_in(to, bytes);
        Ok(())
    }

    fn signal(&self, queue: &mut Queue, ticket: Ticket) {
        self.0.keeper.complete(&queue.reporter, ticket.number());
    }

    /// Whatever another stream was given is done, because its calls have returned.
    fn after(&self, _: &mut Queue, _: Ticket) -> Result<(), Error> {
        Ok(())
    }

    fn wait(&self, _: &mut Queue) -> Result<(), Error> {
        Ok(())
    }

    fn begin_capture(&self, queue: &mut Queue) -> Result<(), Error> {
        queue.recording = Some(Vec::new());
        Ok(())
    }

    fn end_capture(&self, queue: &mut Queue) -> Result<Recorded, Error> {
        Ok(Recorded(queue.recording.take().unwrap_or_default()))
    }

    fn replay(&self, what: &Recorded, _: &mut Queue) -> Result<(), Error> {
        what.0.iter().for_each(|kernel| kernel(&self.0.pool));
        Ok(())
    }
}
