//! What a device must offer: memory, streams, capture; and per operation, how it runs.

use std::fmt::{Debug, Display};

use serde::Serialize;

use crate::paging::{VIEW_BYTES, ViewWords};
use crate::scratch::RegionSpec;
use crate::{
    Census, Error, Keeper, Op, PageGeometry, Plan, Refusal, Region, Reporter, Stream, Ticket,
};

/// A device: memory, streams, capture. It enqueues; the core decides what may be enqueued and what may be freed.
///
/// # Safety
/// The core makes [`Region`]s of what a device obtains and frees by what it reports, so a device that lies breaks the memory of its
/// users without a line of `unsafe` of theirs. Who implements it promises, for [`Runs`] too:
/// - the bytes at [`address`](Self::address) belong to the [`Memory`](Self::Memory) alone until it is dropped, as many as were asked
///   for (or as many as were given to [`Foreign::new`](crate::Foreign::new)), aligned to [`ALIGN`](crate::scratch::ALIGN) (foreign
///   memory: to [`FOREIGN_ALIGN`](crate::memory::FOREIGN_ALIGN)); `Memory` can be made by `obtain` alone, or by a function that is
///   `unsafe`;
/// - a number is reported done only when everything enqueued on its stream before `signal` was called with it is over, also what was
///   enqueued in part by a call that failed;
/// - work of one queue runs in the order of the calls, `after` holds the queue back until that ticket is done, and both hold for the
///   memory that the work reads and writes;
/// - work touches the bytes of its regions, and the pages that the view among them shows when it runs, and nothing else, whatever
///   the other bytes that it reads say;
/// - two streams with one [`key`](Self::key) are one stream.
#[allow(unsafe_code)] // the declaration of a promise; nothing is done
pub unsafe trait Device: Clone + Send + Sync + 'static {
    /// What planning needs to know. Plain data: there is one for a GPU that this machine does not have.
    type Facts: Clone + Debug + Display + Send + Sync + 'static;
    /// One allocation; dropping it frees at once, and only the core drops it.
    type Memory: Send + 'static;
    /// What the caller owns and lends. (CUDA: made from a raw stream by an `unsafe` function of that crate.)
    type CallerStream;
    /// The device's handle on a lent stream, in or out of capture. (CUDA: the raw stream and the place where its signals arrive.)
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
    /// Reports what is finished by `Keeper::complete`. Never waits. (CUDA: reads one number a stream.)
    fn poll(&self);

    /// A stream of the device's own, for `prepare`.
    fn own_stream(&self) -> Result<Self::CallerStream, Error>;
    /// What tells a stream from any other that exists now.
    fn key(caller: &Self::CallerStream) -> u64;
    /// Takes a lent stream into use. Everything below needs the result, so only the core can enqueue, capture and replay. What is
    /// done on it is reported with `reporter`, also after the queue is dropped.
    fn attach(&self, caller: &Self::CallerStream, reporter: Reporter)
    -> Result<Self::Queue, Error>;
    /// What a view of a pool holds: the words that all devices share and, behind them, what else kernels of this device need (CUDA: a
    /// tensor map). Host work alone.
    fn view(&self, _: PageGeometry, words: ViewWords) -> Result<[u8; VIEW_BYTES], Error> {
        let mut bytes = [0; VIEW_BYTES];
        bytes[..ViewWords::BYTES].copy_from_slice(&words.to_bytes());
        Ok(bytes)
    }
    /// Enqueues a copy of at most [`PIECE_BYTES`] bytes, which the call takes with it. (CUDA: parameters of a tiny launch.)
    fn write(&self, queue: &mut Self::Queue, to: Region, bytes: &[u8]) -> Result<(), Error>;
    /// Enqueues "everything before this is done": from then on `ticket` can be reported. (CUDA: a write of its number to host memory.)
    fn signal(&self, queue: &mut Self::Queue, ticket: Ticket);
    /// Enqueues a wait of the device for a ticket of another stream, whose queue another thread may be using now, or which is dropped
    /// already. (CUDA: cuStreamWaitEvent.)
    fn after(&self, queue: &mut Self::Queue, ticket: Ticket) -> Result<(), Error>;
    /// The host waits until the queue is empty.
    fn wait(&self, queue: &mut Self::Queue) -> Result<(), Error>;

    /// From here on launches are recorded, not executed.
    fn begin_capture(&self, queue: &mut Self::Queue) -> Result<(), Error>;
    /// Ends the recording, also after an error or a panic; the stream is as before.
    fn end_capture(&self, queue: &mut Self::Queue) -> Result<Self::Executable, Error>;
    /// Enqueues a recorded sequence.
    fn replay(&self, what: &Self::Executable, queue: &mut Self::Queue) -> Result<(), Error>;

    /// Attaches a lent stream. It is lent for as long as the result lives; a second time meanwhile is [`Error::StreamLent`].
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

/// Proof that the core is calling. These methods must be public, since devices live in other crates; without this anyone could obtain
/// memory past the ledger. (`attach` needs none: a [`Reporter`] proves the same.)
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
    /// Rows of partial results that there is room for, where the kernel needs fewer than one for each split, row and head.
    pub partial_rows: Option<usize>,
    /// Scratch beyond what the operation itself needs, by name.
    pub work: Vec<RegionSpec>,
    /// Why it is this kernel, where the device has one that is faster for other `Spec`s.
    pub note: Option<String>,
}

impl Choice {
    /// A kernel without splits or scratch of its own.
    pub fn of(kernel: &'static str) -> Self {
        Self { kernel, splits: 1, ..Self::default() }
    }
}
