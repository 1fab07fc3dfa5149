//! The CUDA device.

use std::ffi::c_void;
use std::sync::Arc;

use mlakit::device::PIECE_BYTES;
use mlakit::paging::{VIEW_BYTES, ViewWords};
use mlakit::{Device, Error, Foreign, Keeper, PageGeometry, Pass, Region, Reporter, Ticket};

use crate::driver::Context;
use crate::facts::Facts;
use crate::graph::{self, Executable};
use crate::memory::Memory;
use crate::module::cache::Cache;
use crate::module::compiler::Compiler;
use crate::module::store::Store;
use crate::module::{Kernel, LoadedKernel, Source};
use crate::options::Options;
use crate::stream::{CallerStream, Grid, Lines, Queue};
use crate::view;

/// A GPU. Cloning it names the same device.
///
/// It uses the primary context, which it retains, and leaves what is current in a thread as it was.
/// When the last clone goes, and with it the last thing that was made of it, it waits for what is
/// still in flight.
#[derive(Clone)]
pub struct Cuda(Arc<Shared>);

struct Shared {
    // Field order is the order of teardown: what is retiring, then the lines, then the context.
    keeper: Keeper,
    lines: Lines,
    write: Kernel,
    store: Store,
    facts: Facts,
    context: Arc<Context>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.lines.drain(&self.keeper);
    }
}

/// The parameter of `mlakit_write`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Piece {
    to: u64,
    bytes: u32,
    unused: u32,
    data: [u8; PIECE_BYTES],
}

/// Threads of a block of `mlakit_write`.
const WRITE_THREADS: u32 = 256;

impl Cuda {
    /// The device of that ordinal, with the default [`Options`].
    pub fn new(ordinal: u32) -> Result<Self, Error> {
        Self::with(Options { ordinal, ..Options::default() })
    }

    /// A device.
    ///
    /// # Errors
    /// `Unavailable` without a driver or a device, and what the driver says.
    pub fn with(options: Options) -> Result<Self, Error> {
        let (context, facts) = Context::new(options.ordinal)?;
        let facts = Facts { dense: options.dense, ..facts };
        let context = Arc::new(context);
        let disk = options.cache.map(|folder| Cache::new(&folder, options.notice));
        let store = Store::new(facts.architecture(), options.nvrtc, disk);
        let lines = Lines::new(&context);
        let write = write_kernel(&context)?;
        let keeper = Keeper::default();
        Ok(Self(Arc::new(Shared { keeper, lines, write, store, facts, context })))
    }

    /// Lends the device a stream of the driver (a `CUstream`; null is the legacy default stream).
    ///
    /// # Errors
    /// A stream of another context; the default stream of each thread, which is another in each.
    ///
    /// # Safety
    /// The stream stays valid until the result is dropped and everything that was enqueued through
    /// it is done. While it is attached, nobody captures with it, and no other `CallerStream` of
    /// the same stream is attached to another `Cuda` of this process.
    pub unsafe fn borrow_stream(&self, stream: *mut c_void) -> Result<CallerStream, Error> {
        // SAFETY: the caller's contract.
        unsafe { CallerStream::borrowed(&self.0.context, stream.cast()) }
    }

    /// Memory whose owner is outside. `owner` is dropped when nothing in flight uses it any more.
    ///
    /// # Errors
    /// An address that is not a multiple of [`FOREIGN_ALIGN`](mlakit::memory::FOREIGN_ALIGN).
    ///
    /// # Safety
    /// `bytes` bytes at `address` are memory that kernels of this device may read and write, until
    /// `owner` is dropped; and where others use it meanwhile, on the device or on the host, their
    /// work is in an order with the work enqueued here.
    pub unsafe fn foreign(
        &self,
        (address, bytes): (u64, usize),
        owner: impl Send + 'static,
    ) -> Result<Foreign<Self>, Error> {
        // SAFETY: the caller's contract.
        let memory = unsafe { Memory::foreign(&self.0.context, (address, bytes), Box::new(owner)) };
        Foreign::new(self, memory, bytes)
    }

    /// Gives memory that is obtained and not used back to the system. Freed memory of a mebibyte
    /// and more goes back by itself.
    pub fn trim(&self) -> Result<(), Error> {
        self.reclaim();
        self.0.context.trim()
    }

    /// Free and all bytes of the device, as the driver counts.
    pub fn memory_bytes(&self) -> Result<(usize, usize), Error> {
        self.0.context.memory_info()
    }

    /// The compiler of the kernels.
    ///
    /// # Errors
    /// `Unavailable`, with what to install.
    pub fn compiler(&self) -> Result<&Compiler, Error> {
        self.0.store.compiler()
    }

    /// The kernels that something prepared has loaded now, by title.
    pub fn loaded_kernels(&self) -> Vec<LoadedKernel> {
        let loaded = |kernel: Kernel| LoadedKernel {
            title: kernel.title().to_owned(),
            resources: kernel.resources(),
            blocks_per_multiprocessor: kernel.blocks_per_multiprocessor(),
        };
        let mut kernels: Vec<_> = self.0.store.loaded().into_iter().map(loaded).collect();
        kernels.sort_by(|a, b| a.title.cmp(&b.title));
        kernels
    }

    /// For tests: the n-th allocation from now on, from 1, finds no memory.
    pub fn fail_allocation(&self, nth: usize) {
        self.0.context.fail_allocation(nth);
    }

    /// The loaded kernel: of memory, of the cache on disk, or compiled now.
    pub(crate) fn kernel(&self, source: &Source) -> Result<Kernel, Error> {
        self.0.store.kernel(&self.0.context, source)
    }
}

fn write_kernel(context: &Arc<Context>) -> Result<Kernel, Error> {
    const TEXT: &str = concat!(include_str!("../kernels/write.ptx"), "\0");
    let source = Source {
        family: "write",
        entry: "mlakit_write",
        text: &[TEXT],
        defines: Vec::new(),
        threads: WRITE_THREADS,
        dynamic_shared_bytes: 0,
        registers: 32,
    };
    Kernel::load(context, &source, TEXT.as_bytes())
}

// SAFETY: memory comes from `obtain`, which the pool makes exclusive until `Memory` is dropped, or
// from `foreign`, which is `unsafe`; the driver aligns it to 256 bytes at least. A number is
// reported when the event that was recorded behind it is done, which the stream orders behind all
// that was enqueued before, or when the context is lost and nothing of it runs. Streams run in
// order, and `after` is an event recorded behind the ticket. Kernels stay within the regions of
// their launch and the pages of its view, since they check each id that they read. The key is the
// driver's number of the stream.
unsafe impl Device for Cuda {
    type Facts = Facts;
    type Memory = Memory;
    type CallerStream = CallerStream;
    type Queue = Queue;
    type Executable = Executable;

    fn facts(&self) -> &Facts {
        &self.0.facts
    }

    fn keeper(&self) -> &Keeper {
        &self.0.keeper
    }

    fn obtain(&self, bytes: usize, _: Pass) -> Result<Memory, Error> {
        Memory::obtain(&self.0.context, bytes)
    }

    fn address(memory: &Memory) -> u64 {
        memory.address()
    }

    fn copy_in(&self, region: Region, bytes: &[u8]) -> Result<(), Error> {
        self.0.context.copy_in(region, bytes)
    }

    fn copy_out(&self, region: Region, bytes: &mut [u8]) -> Result<(), Error> {
        self.0.context.copy_out(region, bytes)
    }

    fn poll(&self) {
        self.0.lines.poll(&self.0.keeper);
    }

    fn own_stream(&self) -> Result<CallerStream, Error> {
        CallerStream::own(&self.0.context)
    }

    fn key(caller: &CallerStream) -> u64 {
        caller.key()
    }

    fn attach(&self, caller: &CallerStream, reporter: Reporter) -> Result<Queue, Error> {
        self.0.lines.attach(caller, reporter)
    }

    fn view(&self, geometry: PageGeometry, words: ViewWords) -> Result<[u8; VIEW_BYTES], Error> {
        let mut bytes = [0; VIEW_BYTES];
        bytes[..ViewWords::BYTES].copy_from_slice(&words.to_bytes());
        if self.0.facts.capability == (9, 0) {
            view::map(&self.0.context, (geometry, words), &mut bytes)?;
        }
        Ok(bytes)
    }

    fn write(&self, queue: &mut Queue, to: Region, bytes: &[u8]) -> Result<(), Error> {
        let (to, len) = (to.address(), bytes.len() as u32);
        let mut piece = Piece { to, bytes: len, unused: 0, data: [0; PIECE_BYTES] };
        piece.data[..bytes.len()].copy_from_slice(bytes);
        let grid = Grid::of(len.div_ceil(WRITE_THREADS));
        // SAFETY: `Piece` is the kernel's parameter, and its address is that of the region.
        unsafe { queue.launch(&self.0.write, grid, &piece) }
    }

    fn signal(&self, queue: &mut Queue, ticket: Ticket) {
        queue.signal(ticket);
    }

    fn after(&self, queue: &mut Queue, ticket: Ticket) -> Result<(), Error> {
        self.0.lines.after(queue, ticket, &self.0.keeper)
    }

    fn wait(&self, queue: &mut Queue) -> Result<(), Error> {
        let waited = queue.synchronize();
        self.poll(); // also after an error: a lost context has nothing in flight
        waited
    }

    fn begin_capture(&self, queue: &mut Queue) -> Result<(), Error> {
        graph::begin(queue)
    }

    fn end_capture(&self, queue: &mut Queue) -> Result<Executable, Error> {
        graph::end(queue)
    }

    fn replay(&self, what: &Executable, queue: &mut Queue) -> Result<(), Error> {
        what.replay(queue)
    }
}
