//! The machine: a heap that looks every access up, queues of jobs, and the faults that were asked
//! for.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use bytemuck::Pod;

use super::Fault;
use crate::clock::STREAMS;
use crate::device::PIECE_BYTES;
use crate::paging::ViewWords;
use crate::scratch::{self, ALIGN};
use crate::{Access, Error, Keeper, Region, Reporter, Ticket};

/// What an allocation holds at first: as F32 and in every second BF16 a NaN, as an id far out of
/// any pool.
const STALE: [u8; 4] = [0xde, 0xad, 0xc0, 0x7f];

/// More than a test needs; what is larger finds no memory.
const MOST_BYTES: usize = 1 << 30;

/// Memory with addresses that are never used twice.
#[derive(Default)]
pub(super) struct Heap {
    blocks: BTreeMap<u64, Box<[u8]>>,
    next: u64,
    violations: usize,
}

impl Heap {
    /// Copies out. A wrong access gives zeros, so that the simulation goes on.
    pub(super) fn load_into(&mut self, address: u64, into: &mut [u8]) {
        let len = into.len();
        match self.find(address, len) {
            Some(bytes) => into.copy_from_slice(bytes),
            None => into.fill(0),
        }
    }

    /// Copies in; a wrong access goes nowhere.
    pub(super) fn store(&mut self, address: u64, bytes: &[u8]) {
        if let Some(to) = self.find(address, bytes.len()) {
            to.copy_from_slice(bytes);
        }
    }

    pub(super) fn value<T: Pod>(&mut self, address: u64) -> T {
        let mut value = T::zeroed();
        self.load_into(address, bytemuck::bytes_of_mut(&mut value));
        value
    }

    pub(super) fn set<T: Pod>(&mut self, address: u64, value: T) {
        self.store(address, bytemuck::bytes_of(&value));
    }

    pub(super) fn values<T: Pod>(&mut self, region: Region, count: usize) -> Vec<T> {
        let mut values = vec![T::zeroed(); count];
        self.load_into(region.address(), bytemuck::cast_slice_mut(&mut values));
        values
    }

    pub(super) fn view(&mut self, address: u64) -> ViewWords {
        let mut bytes = [0; ViewWords::BYTES];
        self.load_into(address, &mut bytes);
        ViewWords::from_bytes(&bytes)
    }

    /// Adds to a word of the fault block at the head of `lane`.
    pub(super) fn count(&mut self, lane: u64, fault: scratch::Fault, more: u32) {
        let word = lane + 4 * fault as u64;
        let count: u32 = self.value(word);
        self.set(word, count + more);
    }

    pub(super) fn violations(&self) -> usize {
        self.violations
    }

    pub(super) fn blocks(&self) -> usize {
        self.blocks.len()
    }

    fn find(&mut self, address: u64, len: usize) -> Option<&mut [u8]> {
        if len == 0 {
            return None;
        }
        let block = self.blocks.range_mut(..=address).next_back();
        let found = block.and_then(|(base, bytes)| {
            let first = (address - base) as usize;
            bytes.get_mut(first..first.checked_add(len)?)
        });
        self.violations += usize::from(found.is_none());
        found
    }
}

/// Bytes from the first to before the second address.
#[derive(Clone, Copy)]
struct Span(u64, u64);

impl From<Region> for Span {
    fn from(region: Region) -> Self {
        Self(region.address(), region.address() + region.bytes() as u64)
    }
}

/// How a job or a copy touches memory.
type Touch = (Span, Access);

fn conflict((a, one): Touch, (b, other): Touch) -> bool {
    (one == Access::Write || other == Access::Write) && a.0.max(b.0) < a.1.min(b.1)
}

/// What a launch computes.
#[derive(Clone)]
pub(super) enum Kernel {
    /// Of the toy operations; enqueuing it allocates nothing.
    Toy(fn(&mut Heap, &Launch, [usize; 3]), [usize; 3]),
    /// Of a real operation: it copies its operands out, calls the oracle and writes the result.
    Oracle(Arc<dyn Fn(&mut Heap) + Send + Sync>),
}

/// The most operands of a launch.
const OPERANDS: usize = 10;

/// A recorded or enqueued kernel.
#[derive(Clone)]
pub(super) struct Launch {
    pub(super) kernel: Kernel,
    operands: [(Region, Access); OPERANDS],
    /// The view through which it finds pages, and how it uses those.
    view: Option<(Region, Access)>,
}

impl Launch {
    pub(super) fn new(
        kernel: Kernel,
        inputs: &[Region],
        outputs: &[Region],
        view: Option<(Region, Access)>,
    ) -> Self {
        let mut operands = [(Region::EMPTY, Access::Read); OPERANDS];
        let all = outputs.iter().map(|r| (*r, Access::Write));
        let all = all.chain(inputs.iter().map(|r| (*r, Access::Read)));
        operands.iter_mut().zip(all).for_each(|(to, operand)| *to = operand);
        assert!(inputs.len() + outputs.len() <= OPERANDS, "a launch of more operands");
        Self { kernel, operands, view }
    }

    /// The addresses of the operands: outputs, then inputs.
    pub(super) fn addresses(&self) -> [u64; OPERANDS] {
        self.operands.map(|(region, _)| region.address())
    }

    pub(super) fn view_address(&self) -> u64 {
        self.view.map_or(0, |(view, _)| view.address())
    }

    fn run(&self, heap: &mut Heap) {
        match &self.kernel {
            Kernel::Toy(kernel, constants) => kernel(heap, self, *constants),
            Kernel::Oracle(kernel) => kernel(heap),
        }
    }
}

/// A recorded sequence.
pub struct Recorded(pub(super) Vec<Launch>);

#[expect(clippy::large_enum_variant, reason = "enqueuing must not allocate, so nothing is boxed")]
pub(super) enum Job {
    Launch(Launch),
    Graph(Arc<Recorded>),
    Write(Region, [u8; PIECE_BYTES]),
    Signal(Arc<Reporter>, u64),
    After(Ticket),
}

impl Job {
    fn launches(&self) -> &[Launch] {
        match self {
            Job::Launch(launch) => std::slice::from_ref(launch),
            Job::Graph(list) => &list.0,
            Job::Write(..) | Job::Signal(..) | Job::After(_) => &[],
        }
    }

    /// Whether some touch of it fulfils `found`. `pages` says what a view shows.
    fn touches(
        &self,
        pages: impl Fn(Region) -> Option<Span>,
        mut found: impl FnMut(Touch) -> bool,
    ) -> bool {
        if let Job::Write(to, _) = self {
            return found(((*to).into(), Access::Write));
        }
        self.launches().iter().any(|launch| {
            let behind = launch.view.and_then(|(view, access)| Some((pages(view)?, access)));
            let view = launch.view.map(|(view, _)| (view.into(), Access::Read));
            let operands =
                launch.operands.iter().map(|(region, access)| ((*region).into(), *access));
            operands.chain(view).chain(behind).any(&mut found)
        })
    }
}

/// Memory, queues and faults; the lock around it is "the driver".
#[derive(Default)]
pub(super) struct Machine {
    pub(super) heap: Heap,
    queues: Vec<VecDeque<Job>>,
    obtain_fails: Option<usize>,
    work_fails: Option<usize>,
    wrong_numbers: bool,
    /// Signals are not reported.
    silent: bool,
    /// What is done, whether reported or not.
    finished: [u64; STREAMS],
    down: bool,
}

impl Machine {
    pub(super) fn new_queue(&mut self) -> usize {
        self.queues.push(VecDeque::with_capacity(256)); // so that enqueuing allocates nothing
        self.queues.len() - 1
    }

    pub(super) fn push(&mut self, queue: usize, job: Job) {
        if !self.down {
            self.queues[queue].push_back(job);
        }
    }

    /// Runs the next job of a queue; false if there is none or it has to wait for another queue.
    pub(super) fn step(&mut self, keeper: &Keeper, queue: usize) -> bool {
        let Some(job) = self.queues[queue].pop_front() else { return false };
        let comes = |t: Ticket| self.finished[t.stream()] < t.number();
        if matches!(job, Job::After(ticket) if comes(ticket)) {
            self.queues[queue].push_front(job);
            return false;
        }
        self.expect_no_race(keeper, &job, queue);
        match &job {
            Job::Write(to, bytes) => self.heap.store(to.address(), &bytes[..to.bytes()]),
            Job::Launch(_) | Job::Graph(_) => job.launches().iter().for_each(|l| self.run(l)),
            Job::Signal(..) | Job::After(_) => {}
        }
        if let Job::Signal(reporter, number) = job {
            self.finished[reporter.stream()] = number;
            if !self.silent {
                keeper.complete(&reporter, number);
            }
        }
        true
    }

    /// One round of every queue until nothing moves.
    pub(super) fn step_all(&mut self, keeper: &Keeper) {
        for queue in 0..self.queues.len() {
            while self.step(keeper, queue) {}
        }
    }

    pub(super) fn obtain(&mut self, bytes: usize) -> Result<u64, Error> {
        self.is_up()?;
        if counts_down(&mut self.obtain_fails) || bytes > MOST_BYTES {
            return Err(Error::OutOfMemory { what: "machine".into(), bytes });
        }
        let heap = &mut self.heap;
        // The first address is not 0, and behind each block is a gap, so that running past the end
        // is seen.
        let address = (heap.next + 1).next_multiple_of(ALIGN as u64);
        heap.next = address + bytes as u64;
        let stale = STALE.into_iter().cycle().take(bytes).collect();
        heap.blocks.insert(address, stale);
        Ok(address)
    }

    pub(super) fn free(&mut self, address: u64) {
        if let Some(block) = self.heap.blocks.remove(&address) {
            let span = Span(address, address + block.len() as u64);
            self.expect_unused((span, Access::Write));
        }
    }

    pub(super) fn may_copy(&mut self, (region, access): (Region, Access)) -> Result<(), Error> {
        self.is_up()?;
        self.expect_unused((region.into(), access));
        Ok(())
    }

    pub(super) fn inject(&mut self, fault: Fault) {
        match fault {
            Fault::Obtain(nth) => self.obtain_fails = Some(nth),
            Fault::Work(nth) => self.work_fails = Some(nth),
            Fault::Numbers => self.wrong_numbers = true,
            Fault::Silent => self.silent = true,
            Fault::Down => {
                self.down = true;
                self.queues.iter_mut().for_each(VecDeque::clear);
            }
        }
    }

    pub(super) fn may_work(&mut self, call: &'static str) -> Result<(), Error> {
        self.is_up()?;
        if counts_down(&mut self.work_fails) {
            return Err(Error::Device { call, message: "a fault was injected".into() });
        }
        Ok(())
    }

    pub(super) fn is_up(&self) -> Result<(), Error> {
        if self.down {
            return Err(Error::Device { call: "any", message: "the device is down".into() });
        }
        Ok(())
    }

    pub(super) fn is_pending(&self, queue: usize) -> bool {
        !self.queues[queue].is_empty()
    }

    fn run(&mut self, launch: &Launch) {
        launch.run(&mut self.heap);
        if self.wrong_numbers {
            let first: u16 = self.heap.value(launch.addresses()[0]);
            self.heap.set(launch.addresses()[0], !first);
        }
    }

    /// The host or the allocator touches memory: a fault of the core if a job in a queue still
    /// conflicts.
    fn expect_unused(&mut self, touch: Touch) {
        let used = |job: &Job| job.touches(|view| self.settled(view), |t| conflict(t, touch));
        let used = self.queues.iter().flatten().any(used);
        self.heap.violations += usize::from(used);
    }

    /// A job begins: a fault of the core if another queue could begin a conflicting one now.
    fn expect_no_race(&mut self, keeper: &Keeper, job: &Job, queue: usize) {
        let mut races = 0;
        for (other, jobs) in self.queues.iter().enumerate() {
            let waits = |job: &&Job| matches!(job, Job::After(t) if !keeper.is_done(*t));
            let runnable = jobs.iter().take_while(|job| !waits(job)).filter(|_| other != queue);
            for rival in runnable {
                let meets = |mine: Touch| {
                    rival.touches(|view| self.settled(view), |theirs| conflict(mine, theirs))
                };
                races += usize::from(job.touches(|view| self.shown(view), meets));
            }
        }
        self.heap.violations += races;
    }

    /// The pages that a view shows now; nothing if its words are wrong, which is found when they
    /// are used.
    fn shown(&self, view: Region) -> Option<Span> {
        let (base, bytes) = self.heap.blocks.range(..=view.address()).next_back()?;
        let words = bytes.get((view.address() - base) as usize..)?.first_chunk()?;
        let ViewWords { base, pages, page_stride_bytes } = ViewWords::from_bytes(words);
        Some(Span(base, base.checked_add(pages.checked_mul(page_stride_bytes)?)?))
    }

    /// The same where no queue holds a write to the view: whoever is queued now will find these.
    fn settled(&self, view: Region) -> Option<Span> {
        let writes = |job: &Job| matches!(job, Job::Write(to, _) if to.overlaps(view));
        let changes = self.queues.iter().flatten().any(writes);
        if changes { None } else { self.shown(view) }
    }
}

/// Whether this was the one that fails.
fn counts_down(left: &mut Option<usize>) -> bool {
    *left = left.map(|n| n.saturating_sub(1));
    let now = *left == Some(0);
    if now {
        *left = None;
    }
    now
}
