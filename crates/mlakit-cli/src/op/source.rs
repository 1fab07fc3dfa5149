//! Where the operands of a call are: in buffers of their own, or in the slots of a graph.

use std::any::Any;
use std::borrow::Cow;

use mlakit::{
    Buffer, Cache, CacheMut, Category, Device, Element, Error, Graph, Input, Key, Lane, Output,
    PageGeometry, Pages, PoolView, Recorder, Scratch, Slots, Stream, ViewKey,
};

use crate::case::Tensors;
use crate::case::tensor::values;

/// Rows with gaps: `width` elements every `stride`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strided {
    /// Elements that count.
    pub width: usize,
    /// From one row to the next.
    pub stride: usize,
}

impl Strided {
    /// The rows with gaps of zeros behind them.
    pub fn spread<T: Copy + Default>(self, rows: &[T]) -> Vec<T> {
        let mut all = Vec::with_capacity(rows.len() / self.width.max(1) * self.stride);
        for row in rows.chunks_exact(self.width) {
            all.extend_from_slice(row);
            all.resize(all.len() + self.stride - self.width, T::default());
        }
        all
    }

    /// The rows without their gaps.
    pub fn gather<T: Copy>(self, all: &[T]) -> Vec<T> {
        all.chunks_exact(self.stride).flat_map(|row| &row[..self.width]).copied().collect()
    }
}

/// How the elements of a tensor lie on the device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lying(pub Option<Strided>);

impl Lying {
    fn spread<'v, T: Copy + Default>(self, rows: Cow<'v, [T]>) -> Cow<'v, [T]> {
        match self.0 {
            Some(strided) => Cow::Owned(strided.spread(&rows)),
            None => rows,
        }
    }

    fn gather<T: Copy>(self, all: Vec<T>) -> Vec<T> {
        match self.0 {
            Some(strided) => strided.gather(&all),
            None => all,
        }
    }

    fn room(self, elements: usize) -> usize {
        match self.0 {
            Some(Strided { width, stride }) => elements / width.max(1) * stride,
            None => elements,
        }
    }
}

/// Gives operands by name. An operation names its operands once, and so runs eagerly and is
/// captured in the same way.
pub trait Source<D: Device> {
    /// An input.
    fn input<T: Element>(
        &mut self,
        name: &'static str,
        lying: Lying,
    ) -> Result<Input<'static, T, D>, Error>;
    /// An output of so many elements.
    fn output<T: Element>(
        &mut self,
        name: &'static str,
        elements: usize,
        lying: Lying,
    ) -> Result<Output<'static, T, D>, Error>;
    /// The pages, to be read.
    fn cache(&mut self) -> Result<Cache<'static, D>, Error>;
    /// The pages of a second scope, to be read.
    fn extra_cache(&mut self) -> Result<Cache<'static, D>, Error>;
    /// The pages, to be written.
    fn cache_mut(&mut self) -> Result<CacheMut<'static, D>, Error>;
    /// The scratch.
    fn scratch(&mut self) -> Scratch<'static, D>;
}

/// The error of an operand that no source has; the tables are checked before, so this is a mistake
/// in an operation's `args`.
fn unknown(name: &'static str) -> Error {
    Error::contract(name, "an operand of this case", "none")
}

/// Operands in buffers of their own.
pub struct Operands<'c, D: Device> {
    device: D,
    tensors: &'c Tensors<'c>,
    held: Vec<Held<D>>,
    /// The caches of the operation.
    pub(super) pools: Vec<Pool<D>>,
    /// The scratch.
    pub(super) lane: Lane<D>,
}

/// A cache of a case: its name, its pages, and the view of them.
pub(super) struct Pool<D: Device> {
    pub(super) name: &'static str,
    pub(super) pages: Pages<D>,
    view: PoolView<D>,
}

/// The names of the caches that a case may have.
pub(super) const CACHE: &str = "cache";
/// That of a second scope.
pub(super) const EXTRA_CACHE: &str = "extra_cache";

struct Held<D: Device> {
    name: &'static str,
    output: bool,
    buffer: Box<dyn Erased<D>>,
}

/// A buffer whose element type is forgotten.
trait Erased<D: Device> {
    /// Its contents without gaps.
    fn read(&self) -> Result<Vec<u8>, Error>;
    /// A slot of the same type and size.
    fn slot(
        &self,
        name: &'static str,
        slots: &mut Slots<D>,
    ) -> Result<Box<dyn ErasedSlot<D>>, Error>;
}

struct Typed<T, D: Device> {
    buffer: Buffer<T, D>,
    lying: Lying,
}

impl<T: Element, D: Device> Erased<D> for Typed<T, D> {
    fn read(&self) -> Result<Vec<u8>, Error> {
        let values = self.lying.gather(self.buffer.read()?);
        Ok(bytemuck::cast_slice(&values).to_vec())
    }

    fn slot(
        &self,
        name: &'static str,
        slots: &mut Slots<D>,
    ) -> Result<Box<dyn ErasedSlot<D>>, Error> {
        let key = slots.slot::<T>(name, self.buffer.len())?;
        Ok(Box::new(TypedSlot { key, len: self.buffer.len(), lying: self.lying }))
    }
}

/// The name of a slot whose element type is forgotten.
trait ErasedSlot<D: Device> {
    /// Writes the contents, given without gaps, in stream order.
    fn fill(
        &self,
        graph: &mut Graph<D>,
        stream: &mut Stream<'_, D>,
        bytes: &[u8],
    ) -> Result<(), Error>;
    /// Sets every bit, in stream order, so that what a replay does not write shows.
    fn poison(&self, graph: &mut Graph<D>, stream: &mut Stream<'_, D>) -> Result<(), Error>;
    /// Its contents without gaps.
    fn read(&self, graph: &Graph<D>) -> Result<Vec<u8>, Error>;
    /// The key, to be asked for its type.
    fn key(&self) -> &dyn Any;
}

struct TypedSlot<T> {
    key: Key<T>,
    len: usize,
    lying: Lying,
}

impl<T: Element, D: Device> ErasedSlot<D> for TypedSlot<T> {
    fn fill(
        &self,
        graph: &mut Graph<D>,
        stream: &mut Stream<'_, D>,
        bytes: &[u8],
    ) -> Result<(), Error> {
        let values = self.lying.spread(values::<T::Raw>(bytes));
        graph.slot_mut(self.key)?.write_on(stream, &values).map(drop)
    }

    fn poison(&self, graph: &mut Graph<D>, stream: &mut Stream<'_, D>) -> Result<(), Error> {
        let bytes = vec![0xff; self.len * T::DTYPE.bytes()];
        graph.slot_mut(self.key)?.write_on(stream, &values::<T::Raw>(&bytes)).map(drop)
    }

    fn read(&self, graph: &Graph<D>) -> Result<Vec<u8>, Error> {
        let values = self.lying.gather(graph.read(self.key)?);
        Ok(bytemuck::cast_slice(&values).to_vec())
    }

    fn key(&self) -> &dyn Any {
        &self.key
    }
}

impl<'c, D: Device> Operands<'c, D> {
    /// No operands yet; they are made when an operation names them.
    pub fn new(device: &D, tensors: &'c Tensors<'c>, lane: Lane<D>) -> Self {
        Self { device: device.clone(), tensors, held: Vec::new(), pools: Vec::new(), lane }
    }

    /// Pages with the contents of one of the case's caches.
    pub fn add_pool(
        &mut self,
        stream: &mut Stream<'_, D>,
        (name, geometry): (&'static str, PageGeometry),
    ) -> Result<(), Error> {
        let cache = self.tensors.find(name).ok_or_else(|| unknown(name))?;
        let (pages, stride) = (cache.shape[0], cache.shape[1]);
        let mut pool = Pages::with_stride(&self.device, "case", geometry, (pages, stride))?;
        pool.write((0, 0), &cache.bytes)?;
        let mut view = PoolView::new(&self.device, "case", geometry)?;
        view.bind(stream, &pool)?;
        self.pools.push(Pool { name, pages: pool, view });
        Ok(())
    }

    /// Writes the case's caches into the pages again.
    pub fn restore_pools(&mut self) -> Result<(), Error> {
        for pool in &mut self.pools {
            if let Some(cache) = self.tensors.find(pool.name) {
                pool.pages.write((0, 0), &cache.bytes)?;
            }
        }
        Ok(())
    }

    fn view(&self, name: &'static str) -> Result<&PoolView<D>, Error> {
        let pool = self.pools.iter().find(|pool| pool.name == name);
        pool.map(|pool| &pool.view).ok_or_else(|| unknown(name))
    }

    /// The contents of an output; `cache` is the pages.
    pub fn read(&self, name: &'static str) -> Result<Vec<u8>, Error> {
        match self.held.iter().find(|held| held.output && held.name == name) {
            Some(held) => held.buffer.read(),
            None => self.read_pool(name),
        }
    }

    fn read_pool(&self, name: &'static str) -> Result<Vec<u8>, Error> {
        let pool = self.pools.iter().find(|pool| pool.name == name);
        let pages = &pool.ok_or_else(|| unknown(name))?.pages;
        let mut bytes = vec![0; pages.pages() * pages.page_stride_bytes()];
        pages.read((0, 0), &mut bytes)?;
        Ok(bytes)
    }

    /// Slots of the same types and sizes as the buffers.
    pub fn slots(&self) -> Result<(Slots<D>, SlotKeys<D>), Error> {
        let mut slots = Slots::new(&self.device);
        let mut keys = Vec::with_capacity(self.held.len());
        for held in &self.held {
            let slot = held.buffer.slot(held.name, &mut slots)?;
            keys.push(HeldSlot { name: held.name, output: held.output, slot });
        }
        let mut views = Vec::with_capacity(self.pools.len());
        for pool in &self.pools {
            views.push((pool.name, slots.view(pool.name, pool.pages.geometry())?));
        }
        Ok((slots, SlotKeys { keys, views }))
    }
}

impl<D: Device> Source<D> for Operands<'_, D> {
    fn input<T: Element>(
        &mut self,
        name: &'static str,
        lying: Lying,
    ) -> Result<Input<'static, T, D>, Error> {
        let tensor = self.tensors.find(name).ok_or_else(|| unknown(name))?;
        let values = lying.spread(tensor.values::<T::Raw>());
        let buffer = Buffer::<T, D>::new(&self.device, (Category::Tensors, name), &values)?;
        let input = Input::from(&buffer.lease());
        let buffer = Box::new(Typed { buffer, lying });
        self.held.push(Held { name, output: false, buffer });
        Ok(input)
    }

    fn output<T: Element>(
        &mut self,
        name: &'static str,
        elements: usize,
        lying: Lying,
    ) -> Result<Output<'static, T, D>, Error> {
        let len = lying.room(elements);
        let buffer = Buffer::<T, D>::zeroed(&self.device, (Category::Tensors, name), len)?;
        let output = Output::from(&buffer.lease());
        let buffer = Box::new(Typed { buffer, lying });
        self.held.push(Held { name, output: true, buffer });
        Ok(output)
    }

    fn cache(&mut self) -> Result<Cache<'static, D>, Error> {
        Ok(self.view(CACHE)?.lease())
    }

    fn extra_cache(&mut self) -> Result<Cache<'static, D>, Error> {
        Ok(self.view(EXTRA_CACHE)?.lease())
    }

    fn cache_mut(&mut self) -> Result<CacheMut<'static, D>, Error> {
        Ok(self.view(CACHE)?.lease_mut())
    }

    fn scratch(&mut self) -> Scratch<'static, D> {
        self.lane.lease()
    }
}

struct HeldSlot<D: Device> {
    name: &'static str,
    output: bool,
    slot: Box<dyn ErasedSlot<D>>,
}

/// The names of the slots of a graph that stand for the buffers of a call.
pub struct SlotKeys<D: Device> {
    keys: Vec<HeldSlot<D>>,
    /// The views that stand for the pages, by the names of the caches.
    pub(super) views: Vec<(&'static str, ViewKey)>,
}

impl<D: Device> SlotKeys<D> {
    /// Writes the inputs and sets every bit of the outputs, in stream order.
    pub fn fill(
        &self,
        graph: &mut Graph<D>,
        stream: &mut Stream<'_, D>,
        tensors: &Tensors<'_>,
    ) -> Result<(), Error> {
        for HeldSlot { name, output, slot } in &self.keys {
            match tensors.find(name) {
                Some(tensor) if !output => slot.fill(graph, stream, &tensor.bytes)?,
                _ => slot.poison(graph, stream)?,
            }
        }
        Ok(())
    }

    /// The contents of an output; `None` for one that is no slot.
    pub fn read(&self, name: &str, graph: &Graph<D>) -> Option<Result<Vec<u8>, Error>> {
        let held = self.keys.iter().find(|held| held.output && held.name == name)?;
        Some(held.slot.read(graph))
    }

    fn view(&self, name: &'static str) -> Result<ViewKey, Error> {
        let view = self.views.iter().find(|(of, _)| *of == name);
        view.map(|(_, key)| *key).ok_or_else(|| unknown(name))
    }

    fn key<T: 'static>(&self, name: &'static str) -> Result<Key<T>, Error> {
        let held = self.keys.iter().find(|held| held.name == name).ok_or_else(|| unknown(name))?;
        held.slot.key().downcast_ref().copied().ok_or_else(|| unknown(name))
    }
}

/// Operands in slots, while they are recorded.
pub struct Recording<'r, 'c, D: Device> {
    /// What records.
    pub recorder: &'r Recorder<'c, D>,
    /// The slots.
    pub keys: &'r SlotKeys<D>,
    /// The scratch, by lease.
    pub lane: &'r Lane<D>,
}

impl<D: Device> Source<D> for Recording<'_, '_, D> {
    fn input<T: Element>(
        &mut self,
        name: &'static str,
        _: Lying,
    ) -> Result<Input<'static, T, D>, Error> {
        self.recorder.input(self.keys.key::<T>(name)?)
    }

    fn output<T: Element>(
        &mut self,
        name: &'static str,
        _: usize,
        _: Lying,
    ) -> Result<Output<'static, T, D>, Error> {
        self.recorder.output(self.keys.key::<T>(name)?)
    }

    fn cache(&mut self) -> Result<Cache<'static, D>, Error> {
        self.recorder.cache(self.keys.view(CACHE)?)
    }

    fn extra_cache(&mut self) -> Result<Cache<'static, D>, Error> {
        self.recorder.cache(self.keys.view(EXTRA_CACHE)?)
    }

    fn cache_mut(&mut self) -> Result<CacheMut<'static, D>, Error> {
        self.recorder.cache_mut(self.keys.view(CACHE)?)
    }

    fn scratch(&mut self) -> Scratch<'static, D> {
        self.lane.lease()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_come_and_go() {
        let strided = Strided { width: 2, stride: 5 };
        let spread = strided.spread(&[1, 2, 3, 4]);
        assert_eq!(spread, [1, 2, 0, 0, 0, 3, 4, 0, 0, 0]);
        assert_eq!(strided.gather(&spread), [1, 2, 3, 4]);
        assert_eq!(Lying(Some(strided)).room(4), 10);
        assert_eq!(Lying(None).room(4), 4);
    }
}
