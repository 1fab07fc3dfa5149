//! Slots, and sequences that are recorded once and replayed. A graph owns its slots and views; everything else it leases.

use std::any::Any;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::census::Entry;
use crate::clock::{Access, Claim, Epoch};
use crate::memory::{Block, Use, bytes_of};
use crate::paging::CacheMut;
use crate::{
    Bound, Cache, Category, Device, Element, Error, Input, Name, Op, Output, PageGeometry, Pages,
    PoolView, Region, Runner, Runs, Stream, Ticket,
};

/// A buffer of fixed address whose contents change between runs.
pub struct Slot<T, D: Device> {
    block: Block<D>,
    element: PhantomData<T>,
}

impl<T: Element, D: Device> Slot<T, D> {
    /// A slot of `len` elements, zeroed.
    pub fn new(device: &D, name: impl Into<Name>, len: usize) -> Result<Self, Error> {
        let bytes = bytes_of::<T>(len);
        let block = Block::new(device, (Category::Slots, name.into()), bytes, Epoch::default())?;
        block.write(0, &vec![0; bytes])?;
        Ok(Self { block, element: PhantomData })
    }

    /// The only way to write it.
    pub fn as_mut(&mut self) -> SlotMut<'_, T, D> {
        SlotMut { block: &self.block, element: PhantomData }
    }
}

impl<'a, T: Element, D: Device> From<&'a Slot<T, D>> for Input<'a, T, D> {
    fn from(slot: &'a Slot<T, D>) -> Self {
        Self::of(slot.block.lease())
    }
}

/// Writes through to a slot. It is not a reference to the buffer, so there is nothing to assign, swap or take.
pub struct SlotMut<'a, T, D: Device> {
    block: &'a Block<D>,
    element: PhantomData<&'a mut T>,
}

impl<T: Element, D: Device> SlotMut<'_, T, D> {
    /// From the host, now. `InFlight` while a replay that uses it is not done.
    pub fn write(&mut self, values: &[T::Raw]) -> Result<(), Error> {
        self.block.write(0, bytemuck::cast_slice(values))
    }

    /// In stream order: after the replays enqueued before, before those enqueued later. Never `InFlight`.
    pub fn write_on(
        &mut self,
        stream: &mut Stream<'_, D>,
        values: &[T::Raw],
    ) -> Result<Ticket, Error> {
        self.block.write_on(stream, 0, bytemuck::cast_slice(values))
    }
}

/// The right name for a slot of one set. Plain data.
#[derive(Debug, PartialEq, Eq)]
pub struct Key<T> {
    set: u64,
    index: usize,
    element: PhantomData<fn() -> T>,
}

impl<T> Clone for Key<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Key<T> {}

/// The same for a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ViewKey {
    set: u64,
    index: usize,
}

/// Slots and views on their way into a graph.
pub struct Slots<D: Device> {
    set: u64,
    device: D,
    blocks: Vec<Block<D>>,
    views: Vec<PoolView<D>>,
}

impl<D: Device> Slots<D> {
    /// An empty set.
    pub fn new(device: &D) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let set = NEXT.fetch_add(1, Relaxed);
        Self { set, device: device.clone(), blocks: Vec::new(), views: Vec::new() }
    }

    /// Adds a slot.
    pub fn slot<T: Element>(&mut self, name: impl Into<Name>, len: usize) -> Result<Key<T>, Error> {
        self.blocks.push(Slot::<T, D>::new(&self.device, name, len)?.block);
        Ok(Key { set: self.set, index: self.blocks.len() - 1, element: PhantomData })
    }

    /// Adds a view; pools are bound to it later.
    pub fn view(
        &mut self,
        name: impl Into<Name>,
        geometry: PageGeometry,
    ) -> Result<ViewKey, Error> {
        self.views.push(PoolView::new(&self.device, name, geometry)?);
        Ok(ViewKey { set: self.set, index: self.views.len() - 1 })
    }

    /// Records. The stream is exclusively the recorder's meanwhile: no wait, no allocation, no host read can be written here.
    pub fn capture(
        self,
        stream: &mut Stream<'_, D>,
        record: impl FnOnce(&mut Recorder<'_, D>) -> Result<(), Error>,
    ) -> Result<Graph<D>, Error> {
        let device = self.device.clone();
        if device.keeper().id() != stream.device().keeper().id() {
            return Err(Error::Foreign { what: "stream" });
        }
        let queue = stream.queue();
        device.begin_capture(queue)?;
        let (queue, slots) = (Some(queue), &self);
        let (held, written, code) = Default::default();
        let mut recorder = Recorder { device, queue, slots, held, written, code };
        record(&mut recorder)?;
        let recorded = recorder.finish()?;
        Ok(self.into_graph(recorded))
    }

    fn into_graph(mut self, recorded: Recorded<D>) -> Graph<D> {
        let Recorded { executable, mut held, written, code } = recorded;
        written.into_iter().for_each(|view| self.views[view].mark_written());
        let device = self.device.clone();
        let claim = Claim::new(device.keeper().standing(Epoch::default()));
        held.push(Use::new("graph", Region::EMPTY, Access::Write, claim.clone()).relied());
        Graph { executable: Some(executable), claim, held, slots: self, _code: code, device }
    }

    fn block<T>(&self, key: Key<T>) -> Result<&Block<D>, Error> {
        let own = (key.set == self.set).then(|| self.blocks.get(key.index));
        own.flatten().ok_or(Error::Foreign { what: "key" })
    }
}

/// What a capture can do. It takes only calls that borrow nothing: slots, views and leases.
pub struct Recorder<'c, D: Device> {
    device: D,
    queue: Option<&'c mut D::Queue>,
    slots: &'c Slots<D>,
    held: Vec<Use>,
    /// The views whose pages some call writes.
    written: Vec<usize>,
    code: Vec<Arc<dyn Any + Send + Sync>>,
}

struct Recorded<D: Device> {
    executable: D::Executable,
    held: Vec<Use>,
    written: Vec<usize>,
    code: Vec<Arc<dyn Any + Send + Sync>>,
}

impl<D: Device> Recorder<'_, D> {
    /// A slot that is read.
    pub fn input<T: Element>(&self, key: Key<T>) -> Result<Input<'static, T, D>, Error> {
        Ok(Input::of(self.slots.block(key)?.lease()))
    }

    /// A slot that is written.
    pub fn output<T: Element>(&self, key: Key<T>) -> Result<Output<'static, T, D>, Error> {
        Ok(Output::of(self.slots.block(key)?.lease()))
    }

    /// The pool that will be bound to a view, to be written.
    pub fn cache_mut(&self, key: ViewKey) -> Result<CacheMut<'static, D>, Error> {
        self.cache(key).map(CacheMut::of)
    }

    /// The pool that will be bound to a view, to be read.
    pub fn cache(&self, key: ViewKey) -> Result<Cache<'static, D>, Error> {
        let own = (key.set == self.slots.set).then(|| self.slots.views.get(key.index));
        Ok(own.flatten().ok_or(Error::Foreign { what: "view" })?.of_graph())
    }

    fn finish(mut self) -> Result<Recorded<D>, Error> {
        let queue = self.queue.take().expect("only `finish` and `drop` take it");
        let executable = self.device.end_capture(queue)?;
        Ok(Recorded {
            executable,
            held: std::mem::take(&mut self.held),
            written: std::mem::take(&mut self.written),
            code: std::mem::take(&mut self.code),
        })
    }
}

/// After an error or a panic in the recording, the stream is as it was.
impl<D: Device> Drop for Recorder<'_, D> {
    fn drop(&mut self) {
        if let Some(queue) = self.queue.take() {
            drop(self.device.end_capture(queue));
        }
    }
}

impl<D: Device> Runner<'static, D> for Recorder<'_, D> {
    type Receipt = ();

    fn run<O: Op>(&mut self, bound: Bound<'static, O, D>) -> Result<(), Error>
    where
        D: Runs<O>,
    {
        // A view of another graph would bring a pool that this graph does not check.
        for (view, access) in bound.uses.graph_views.iter().flatten() {
            let own = self.slots.views.iter().position(|mine| mine.region() == *view);
            let own = own.ok_or(Error::Foreign { what: "view of another graph" })?;
            if *access == Access::Write {
                self.written.push(own);
            }
        }
        for new in bound.uses.list.iter().flatten() {
            match self.held.iter_mut().find(|old| old.claim.same(&new.claim)) {
                // A write conflicts with all that a read conflicts with: one number says both.
                Some(old) if new.access == Access::Write => old.access = Access::Write,
                Some(_) => {}
                None => self.held.push(new.clone()),
            }
        }
        self.code.push(bound.keep_code());
        let queue = self.queue.as_deref_mut().expect("only `finish` and `drop` take it");
        bound.launch(&self.device, queue)
    }
}

/// A recorded sequence.
pub struct Graph<D: Device> {
    // Field order is the order of teardown: executable (by `Drop`), slots and views, code.
    executable: Option<D::Executable>,
    claim: Claim,
    held: Vec<Use>,
    slots: Slots<D>,
    _code: Vec<Arc<dyn Any + Send + Sync>>,
    device: D,
}

impl<D: Device> Graph<D> {
    /// Enqueues the sequence: checks every lease, numbers every use, calls neither plan nor bind, allocates nothing.
    pub fn replay(&mut self, stream: &mut Stream<'_, D>) -> Result<Submission<'_>, Error> {
        if !self.slots.views.iter().all(PoolView::is_bound) {
            return Err(Error::Unbound);
        }
        let executable = self.executable.as_ref().expect("only `drop` takes it");
        let caches = self.slots.views.iter().flat_map(PoolView::uses).flatten();
        let replay = |device: &D, queue: &mut D::Queue| device.replay(executable, queue);
        let ticket = stream.submit(self.held.iter().chain(caches), replay)?;
        Ok(Submission { ticket, graph: PhantomData })
    }

    /// Points a view at a pool, in stream order, without a new capture.
    pub fn bind(
        &mut self,
        stream: &mut Stream<'_, D>,
        view: ViewKey,
        pool: &Pages<D>,
    ) -> Result<Ticket, Error> {
        let own = (view.set == self.slots.set).then(|| self.slots.views.get_mut(view.index));
        own.flatten().ok_or(Error::Foreign { what: "view" })?.bind(stream, pool)
    }

    /// A slot, to write through.
    pub fn slot_mut<T: Element>(&mut self, key: Key<T>) -> Result<SlotMut<'_, T, D>, Error> {
        Ok(SlotMut { block: self.slots.block(key)?, element: PhantomData })
    }

    /// A slot's contents. `InFlight` while a replay that writes it is not done.
    pub fn read<T: Element>(&self, key: Key<T>) -> Result<Vec<T::Raw>, Error> {
        let bytes = self.slots.block(key)?.region.bytes();
        let mut values = vec![T::Raw::default(); bytes / T::DTYPE.bytes()];
        self.read_into(key, &mut values)?;
        Ok(values)
    }

    /// The first `into.len()` elements of a slot; allocates nothing.
    pub fn read_into<T: Element>(&self, key: Key<T>, into: &mut [T::Raw]) -> Result<(), Error> {
        self.slots.block(key)?.read(0, bytemuck::cast_slice_mut(into))
    }

    /// The fixed address of a slot.
    pub fn address<T: Element>(&self, key: Key<T>) -> Result<u64, Error> {
        Ok(self.slots.block(key)?.region.address())
    }
}

/// With launches in flight too: the executable waits in `retiring`, then so do slots and code by their own numbers.
impl<D: Device> Drop for Graph<D> {
    fn drop(&mut self) {
        self.claim.standing.close();
        if let Some(executable) = self.executable.take() {
            let census = self.device.keeper().census();
            let (owner, phase) = (Name::from("graph"), census.phase());
            let entry = Entry { category: Category::Code, owner, phase, bytes: 0 };
            self.device.keeper().retire(Box::new(executable), &self.claim.standing, entry);
        }
    }
}

/// A replay that was enqueued. While it is held, the compiler keeps the graph's slots untouched; dropping it neither waits nor
/// promises anything, and leaking it is harmless: from then on the numbers refuse what would be wrong.
#[derive(Debug)]
pub struct Submission<'g> {
    ticket: Ticket,
    graph: PhantomData<&'g mut ()>,
}

impl Submission<'_> {
    /// Waits until the stream is done, and gives the graph back.
    pub fn wait<D: Device>(self, stream: &mut Stream<'_, D>) -> Result<(), Error> {
        stream.wait()
    }

    /// Its number, which borrows nothing.
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }
}
