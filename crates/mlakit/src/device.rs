//! What a device must offer: memory, streams, capture; and per operation, how it runs.

use std::fmt::{Debug, Display};

use serde::Serialize;

use crate::scratch::RegionSpec;
use crate::{Census, Error, Keeper, Op, Plan, Refusal, Region, Signal, Stream, Ticket};

/// A device: memory, streams, capture. It enqueues; the core decides what may be enqueued and what may be freed.
pub trait Device: Clone + Send + Sync + 'static {
    /// What planning needs to know. Plain data: there is one for a GPU that this machine does not have.
    type Facts: Clone + Debug + Display + Send + Sync + 'static;
    /// One allocation; dropping it frees at once, and only the core drops it.
    type Memory: Send + 'static;
    /// What the caller owns and lends. (CUDA: made from a raw stream by an `unsafe` function of that crate.)
    type CallerStream;
    /// The device's handle on a lent stream, in or out of capture. (CUDA: the raw stream and a fixed ring of events.)
    type Queue: Send;
    /// A recorded sequence, ready to replay.
    type Executable: Send + 'static;

    /// The facts of this device.
    fn facts(&self) -> &Self::Facts;
    /// The core's book-keeping, which the device owns and does not look into.
    fn keeper(&self) -> &Keeper;
    /// Obtains memory, aligned to [`ALIGN`](crate::scratch::ALIGN) bytes, zeroed or stale. Too much is `OutOfMemory`, whose owner the core fills in.
    fn obtain(&self, bytes: usize, pass: Pass) -> Result<Self::Memory, Error>;
    /// The address of an allocation; fixed.
    fn address(memory: &Self::Memory) -> u64;
    /// A host copy in. The core has checked that nothing in flight uses the region; `bytes` is not longer than it.
    fn copy_in(&self, region: Region, bytes: &[u8]) -> Result<(), Error>;
    /// A host copy out; `bytes` is not longer than the region.
    fn copy_out(&self, region: Region, bytes: &mut [u8]) -> Result<(), Error>;
    /// Reports what is finished by `Keeper::complete`. Never waits. (CUDA: queries events.)
    fn poll(&self);

    /// A stream of the device's own, for `prepare`.
    fn own_stream(&self) -> Result<Self::CallerStream, Error>;
    /// Takes a lent stream into use. Everything below needs the result, so only the core can enqueue, capture and replay.
    fn attach(&self, caller: &Self::CallerStream, pass: Pass) -> Result<Self::Queue, Error>;
    /// Enqueues a copy of at most [`PIECE_BYTES`] bytes, which the call takes with it. (CUDA: parameters of a tiny launch.)
    fn write(&self, queue: &mut Self::Queue, to: Region, bytes: &[u8]) -> Result<(), Error>;
    /// Enqueues "everything before this is done". (CUDA: records the next event of the ring.)
    fn signal(&self, queue: &mut Self::Queue, signal: Signal);
    /// Enqueues a wait of the device for another stream's ticket. (CUDA: cuStreamWaitEvent.)
    fn after(&self, queue: &mut Self::Queue, ticket: Ticket) -> Result<(), Error>;
    /// The host waits until the queue is empty.
    fn wait(&self, queue: &mut Self::Queue) -> Result<(), Error>;

    /// From here on launches are recorded, not executed.
    fn begin_capture(&self, queue: &mut Self::Queue) -> Result<(), Error>;
    /// Ends the recording, also after an error or a panic; the stream is as before.
    fn end_capture(&self, queue: &mut Self::Queue) -> Result<Self::Executable, Error>;
    /// Enqueues a recorded sequence.
    fn replay(&self, what: &Self::Executable, queue: &mut Self::Queue) -> Result<(), Error>;

    /// Attaches a lent stream. It is lent for as long as the result lives.
    fn stream<'s>(&self, caller: &'s Self::CallerStream) -> Result<Stream<'s, Self>, Error> {
        Stream::attach(self, caller)
    }

    /// Frees what is retired and finished. Called by every allocation and by `census`; no thread of its own.
    fn reclaim(&self) {
        self.poll();
        self.keeper().reclaim();
    }

    /// The ledger, up to date.
    fn census(&self) -> &Census {
        self.reclaim();
        self.keeper().census()
    }

    /// From here on, compiling is an error that names the `Spec`.
    fn freeze(&self) {
        self.keeper().freeze();
    }
}

/// The most bytes of one [`Device::write`]: what fits the parameters of a launch.
pub const PIECE_BYTES: usize = 1024;

/// Proof that the core is calling. These methods must be public, since devices live in other crates; without this anyone could attach
/// a second handle to a stream, capture numbered work with it and replay it unnumbered, or obtain memory past the ledger.
#[derive(Debug)]
pub struct Pass(pub(crate) ());

/// How a device runs one operation.
pub trait Runs<O: Op>: Device {
    /// Compiled code: no tensor, no address.
    type Code: Send + Sync + 'static;

    /// Picks a kernel. A function of facts, not of a device: it plans for machines that are not here.
    fn choose(facts: &Self::Facts, spec: &O::Spec) -> Result<Choice, Refusal>;
    /// Compiles. The only slow step.
    fn prepare(&self, plan: &Plan<O>) -> Result<Self::Code, Error>;
    /// Enqueues, or records while the queue is capturing. Safe, because regions come only from numbered, live memory. Allocates
    /// nothing unless it records.
    fn launch(
        &self,
        code: &Self::Code,
        plan: &Plan<O>,
        regions: &O::Regions,
        queue: &mut Self::Queue,
    ) -> Result<(), Error>;
}

/// What a device picked for a `Spec`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Choice {
    /// The kernel's name.
    pub kernel: &'static str,
    /// Parts that a row may be divided into; 1 where the operation has no splits.
    pub splits: usize,
    /// Whether the partial results stay inside the device's own fast memory, so that they need no scratch.
    pub partials_stay_on_chip: bool,
    /// Scratch beyond what the operation itself needs, by name.
    pub work: Vec<RegionSpec>,
}

impl Choice {
    /// A kernel without splits or scratch of its own.
    pub fn of(kernel: &'static str) -> Self {
        Self { kernel, splits: 1, partials_stay_on_chip: false, work: Vec::new() }
    }
}
