//! One owner per allocation, and the operands that are made from owners.
//!
//! No reference into device memory leaves this crate's API, on the CPU either: a lease may write behind it. Hosts copy in
//! and out, and the copy is refused while work is in flight.

use std::marker::PhantomData;
use std::ops::Range;

use crate::census::Entry;
use crate::clock::{Access, Claim, Epoch};
use crate::device::{PIECE_BYTES, Pass};
use crate::{Category, Device, Element, Error, Name, Stream, Ticket};

/// What a kernel gets of an operand. Only this crate can make one, and it makes one only from memory whose use it has
/// numbered: that is why `Runs::launch` can be a safe function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    address: u64,
    bytes: usize,
}

impl Region {
    /// No memory.
    pub const EMPTY: Self = Self { address: 0, bytes: 0 };

    /// The device address of the first byte.
    pub fn address(self) -> u64 {
        self.address
    }

    /// The length in bytes.
    pub fn bytes(self) -> usize {
        self.bytes
    }

    /// A part of it; `None` past the end.
    pub fn part(self, first: usize, bytes: usize) -> Option<Self> {
        let end = first.checked_add(bytes)?;
        (end <= self.bytes).then(|| Self { address: self.address + first as u64, bytes })
    }

    pub(crate) fn overlaps(self, other: Self) -> bool {
        self.bytes > 0
            && other.bytes > 0
            && self.address < other.address + other.bytes as u64
            && other.address < self.address + self.bytes as u64
    }
}

/// The owner of one allocation. Everything public that owns memory wraps one.
pub(crate) struct Block<D: Device> {
    memory: Option<D::Memory>,
    pub(crate) region: Region,
    pub(crate) claim: Claim,
    entry: Entry,
    device: D,
}

impl<D: Device> Block<D> {
    pub(crate) fn new(
        device: &D,
        (category, owner): (Category, Name),
        bytes: usize,
        epoch: Epoch,
    ) -> Result<Self, Error> {
        device.reclaim();
        let memory = device.obtain(bytes, Pass(())).map_err(|error| match error {
            Error::OutOfMemory { bytes, .. } => Error::OutOfMemory { what: owner.clone(), bytes },
            other => other,
        })?;
        let phase = device.keeper().census().phase();
        let entry = Entry { category, owner, phase, bytes };
        device.keeper().census().add(&entry);
        Ok(Self {
            region: Region { address: D::address(&memory), bytes },
            memory: Some(memory),
            claim: Claim::new(device.keeper().standing(epoch)),
            entry,
            device: device.clone(),
        })
    }

    /// The owner of memory that came from outside. The caller has checked its length and alignment.
    pub(crate) fn foreign(owner: Name, foreign: Foreign<D>, epoch: Epoch) -> Self {
        let Foreign { device, memory, bytes } = foreign;
        device.reclaim();
        let phase = device.keeper().census().phase();
        let entry = Entry { category: Category::Foreign, owner, phase, bytes };
        device.keeper().census().add(&entry);
        Self {
            region: Region { address: D::address(&memory), bytes },
            memory: Some(memory),
            claim: Claim::new(device.keeper().standing(epoch)),
            entry,
            device,
        }
    }

    pub(crate) fn name(&self) -> &Name {
        &self.entry.owner
    }

    /// A host copy in. `InFlight` while enqueued work uses it.
    pub(crate) fn write(&self, first: usize, bytes: &[u8]) -> Result<(), Error> {
        let to = self.part(first, bytes.len())?;
        self.host(Access::Write, || self.device.copy_in(to, bytes))
    }

    /// A copy in stream order: never in conflict with work of the same stream, before or after.
    pub(crate) fn write_on(
        &self,
        stream: &mut Stream<'_, D>,
        first: usize,
        bytes: &[u8],
    ) -> Result<Ticket, Error> {
        self.part(first, bytes.len())?;
        let use_ = Use::new("written buffer", self.region, Access::Write, self.claim.clone());
        let sent = stream.submit(std::iter::once(&use_), |device, queue| {
            // In pieces that fit the parameters of a launch, so that no staging memory has to outlive the call.
            bytes.chunks(PIECE_BYTES).enumerate().try_for_each(|(i, piece)| {
                device.write(queue, self.part(first + i * PIECE_BYTES, piece.len())?, piece)
            })
        });
        sent.map_err(|error| match error {
            Error::Busy { .. } => Error::Busy { what: self.name().clone() },
            other => other,
        })
    }

    /// A host copy out. `InFlight` while enqueued work writes it.
    pub(crate) fn read(&self, first: usize, into: &mut [u8]) -> Result<(), Error> {
        let from = self.part(first, into.len())?;
        self.host(Access::Read, || self.device.copy_out(from, into))
    }

    pub(crate) fn lease<T>(&self) -> Lease<T, D> {
        Lease { region: self.region, claim: self.claim.clone(), of: PhantomData }
    }

    pub(crate) fn device(&self) -> &D {
        &self.device
    }

    fn host(&self, access: Access, copy: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        self.device.poll();
        self.claim.standing.host(self.name(), access, self.device.keeper().clocks(), copy)?
    }

    fn part(&self, first: usize, bytes: usize) -> Result<Region, Error> {
        let (needed, given) = (first.saturating_add(bytes), self.region.bytes);
        let error = || Error::Size { what: self.name().clone(), needed, given };
        self.region.part(first, bytes).ok_or_else(error)
    }
}

/// The whole of the asynchronous ownership: end every right, then free what is finished and retire what is not. If the
/// owner is leaked instead, the memory is leaked with it: costly, never dangling.
impl<D: Device> Drop for Block<D> {
    fn drop(&mut self) {
        self.claim.standing.close();
        if let Some(memory) = self.memory.take() {
            self.device.poll();
            let entry = self.entry.clone();
            self.device.keeper().retire(Box::new(memory), &self.claim.standing, entry);
        }
    }
}

/// Alignment of foreign memory, in bytes: the widest load of a kernel.
pub const FOREIGN_ALIGN: usize = 16;

/// Memory whose owner is outside, on its way into a [`Buffer`] or into [`Pages`](crate::Pages). Dropping it, here or as one of those,
/// drops the owner, as soon as nothing in flight uses the memory.
///
/// Two of them may share bytes: then a call that writes one and uses the other is [`Error::Overlap`], and the order of calls is the
/// caller's. What the owner writes behind the core's back is not seen, except what [`Stream::note_use`] says.
pub struct Foreign<D: Device> {
    device: D,
    memory: D::Memory,
    bytes: usize,
}

impl<D: Device> Foreign<D> {
    /// For devices: nobody else has a `Memory`.
    pub fn new(device: &D, memory: D::Memory, bytes: usize) -> Result<Self, Error> {
        let address = D::address(&memory);
        if !address.is_multiple_of(FOREIGN_ALIGN as u64)
            || address.checked_add(bytes as u64).is_none()
        {
            let needed = format!("an address at a multiple of {FOREIGN_ALIGN} bytes");
            return Err(Error::contract("foreign memory", needed, format!("{address:#x}")));
        }
        Ok(Self { device: device.clone(), memory, bytes })
    }

    /// Its length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The device that it is on.
    pub fn device(&self) -> &D {
        &self.device
    }
}

/// A tensor of the caller's, flat; operations give it its shape.
pub struct Buffer<T, D: Device> {
    pub(crate) block: Block<D>,
    element: PhantomData<fn() -> T>,
}

impl<T: Element, D: Device> Buffer<T, D> {
    /// Memory for `values`, with a copy of them.
    pub fn new(
        device: &D,
        (category, owner): (Category, impl Into<Name>),
        values: &[T::Raw],
    ) -> Result<Self, Error> {
        let buffer = Self::uninit(device, (category, owner), values.len())?;
        buffer.block.write(0, bytemuck::cast_slice(values))?;
        Ok(buffer)
    }

    /// Memory for `len` elements, zeroed.
    pub fn zeroed(
        device: &D,
        (category, owner): (Category, impl Into<Name>),
        len: usize,
    ) -> Result<Self, Error> {
        let buffer = Self::uninit(device, (category, owner), len)?;
        let zeros = vec![0; buffer.block.region.bytes.min(1 << 20)];
        let mut at = 0;
        while at < buffer.block.region.bytes {
            let piece = zeros.len().min(buffer.block.region.bytes - at);
            buffer.block.write(at, &zeros[..piece])?;
            at += piece;
        }
        Ok(buffer)
    }

    /// Memory for `len` elements of unknown contents, for a tensor that is written before it is read.
    pub fn uninit(
        device: &D,
        (category, owner): (Category, impl Into<Name>),
        len: usize,
    ) -> Result<Self, Error> {
        let (owner, bytes) = (owner.into(), bytes_of::<T>(len));
        let block = Block::new(device, (category, owner), bytes, Epoch::default())?;
        Ok(Self { block, element: PhantomData })
    }

    /// Memory from outside as a tensor: as many elements as fit. It is of [`Category::Foreign`].
    pub fn foreign(owner: impl Into<Name>, foreign: Foreign<D>) -> Self {
        let block = Block::foreign(owner.into(), foreign, Epoch::default());
        Self { block, element: PhantomData }
    }

    /// Rewrites the contents in stream order, from element `first` on. The address stays, so captured graphs stay valid (weights
    /// reload so).
    pub fn write_on(
        &mut self,
        stream: &mut Stream<'_, D>,
        first: usize,
        values: &[T::Raw],
    ) -> Result<Ticket, Error> {
        self.block.write_on(stream, bytes_of::<T>(first), bytemuck::cast_slice(values))
    }

    /// Rewrites the contents from the host, from the first element on.
    pub fn write(&mut self, values: &[T::Raw]) -> Result<(), Error> {
        self.block.write(0, bytemuck::cast_slice(values))
    }

    /// Rewrites `values.len()` elements from element `first` on.
    pub fn write_at(&mut self, first: usize, values: &[T::Raw]) -> Result<(), Error> {
        self.block.write(bytes_of::<T>(first), bytemuck::cast_slice(values))
    }

    /// Copies the contents to the host.
    pub fn read(&self) -> Result<Vec<T::Raw>, Error> {
        let mut values = vec![T::Raw::default(); self.len()];
        self.read_into(0, &mut values)?;
        Ok(values)
    }

    /// Copies `into.len()` elements from element `first` on; allocates nothing.
    pub fn read_into(&self, first: usize, into: &mut [T::Raw]) -> Result<(), Error> {
        self.block.read(bytes_of::<T>(first), bytemuck::cast_slice_mut(into))
    }

    /// A right to it that borrows nothing and is checked at each use.
    pub fn lease(&self) -> Lease<T, D> {
        self.block.lease()
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.block.region.bytes / T::DTYPE.bytes()
    }

    /// Whether it has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The fixed device address.
    pub fn address(&self) -> u64 {
        self.block.region.address
    }

    /// The device that it is on.
    pub fn device(&self) -> &D {
        self.block.device()
    }
}

/// The right to use a buffer while its epoch stands. Holds no device memory; `'static`, so that a graph can keep it.
#[derive(Debug)]
pub struct Lease<T, D> {
    pub(crate) region: Region,
    pub(crate) claim: Claim,
    of: PhantomData<fn() -> (T, D)>,
}

impl<T, D> Clone for Lease<T, D> {
    fn clone(&self) -> Self {
        Self { region: self.region, claim: self.claim.clone(), of: PhantomData }
    }
}

impl<T: Element, D> Lease<T, D> {
    /// Elements.
    pub fn len(&self) -> usize {
        self.region.bytes / T::DTYPE.bytes()
    }

    /// Whether it has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A part of it, in elements.
    pub fn part(&self, range: Range<usize>) -> Result<Self, Error> {
        let (first, len) = (bytes_of::<T>(range.start), bytes_of::<T>(range.len()));
        let (needed, given) = (first.saturating_add(len), self.region.bytes);
        let what = || Error::Size { what: "part of a lease".into(), needed, given };
        let region = self.region.part(first, len).ok_or_else(what)?;
        Ok(Self { region, claim: self.claim.clone(), of: PhantomData })
    }
}

/// Bytes of `len` elements. Saturates: a length that no memory has is refused as too large, not taken for a small one.
pub(crate) fn bytes_of<T: Element>(len: usize) -> usize {
    len.saturating_mul(T::DTYPE.bytes())
}

/// An operand that is read, by borrow (`From<&Buffer>`) or by lease (`From<&Lease>`, then `'static`).
pub struct Input<'a, T, D>(pub(crate) Lease<T, D>, PhantomData<&'a ()>);

/// An operand that is written, by unique borrow (`From<&mut Buffer>`) or by lease (then `'static`; `bind` compares bytes).
pub struct Output<'a, T, D>(pub(crate) Lease<T, D>, PhantomData<&'a mut ()>);

impl<'a, T: Element, D: Device> From<&'a Buffer<T, D>> for Input<'a, T, D> {
    fn from(buffer: &'a Buffer<T, D>) -> Self {
        Self(buffer.lease(), PhantomData)
    }
}

impl<T, D> From<&Lease<T, D>> for Input<'static, T, D> {
    fn from(lease: &Lease<T, D>) -> Self {
        Self(lease.clone(), PhantomData)
    }
}

impl<'a, T: Element, D: Device> From<&'a mut Buffer<T, D>> for Output<'a, T, D> {
    fn from(buffer: &'a mut Buffer<T, D>) -> Self {
        Self(buffer.lease(), PhantomData)
    }
}

impl<T, D> From<&Lease<T, D>> for Output<'static, T, D> {
    fn from(lease: &Lease<T, D>) -> Self {
        Self(lease.clone(), PhantomData)
    }
}

/// A right to read may be given to several calls.
impl<T, D> Clone for Input<'_, T, D> {
    fn clone(&self) -> Self {
        Self(self.0.clone(), PhantomData)
    }
}

impl<T: Element, D> Input<'_, T, D> {
    /// A part of it, in elements.
    pub fn part(&self, range: Range<usize>) -> Result<Self, Error> {
        Ok(Self(self.0.part(range)?, PhantomData))
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether it has no element.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<T: Element, D> Output<'_, T, D> {
    /// Elements.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether it has no element.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<T, D> Input<'_, T, D> {
    /// Only for something that itself lives as long as `'a`, or for a lease.
    pub(crate) fn of(lease: Lease<T, D>) -> Self {
        Self(lease, PhantomData)
    }
}

impl<T, D> Output<'_, T, D> {
    /// Only for something borrowed uniquely for `'a`, or for a lease.
    pub(crate) fn of(lease: Lease<T, D>) -> Self {
        Self(lease, PhantomData)
    }
}

/// One numbered use of one allocation: what `run` stamps and checks.
#[derive(Clone, Debug)]
pub(crate) struct Use {
    pub(crate) what: &'static str,
    pub(crate) region: Region,
    pub(crate) access: Access,
    pub(crate) claim: Claim,
    /// Kernels rely on its contents (addresses in a view, divided work in scratch), so its order must be one that the core made.
    pub(crate) relied: bool,
}

impl Use {
    pub(crate) fn new(what: &'static str, region: Region, access: Access, claim: Claim) -> Self {
        Self { what, region, access, claim, relied: false }
    }

    pub(crate) fn relied(self) -> Self {
        Self { relied: true, ..self }
    }
}

/// The most operands of an operation, code included.
pub(crate) const MAX_USES: usize = 20;

/// Uses of one call. A fixed array: binding allocates nothing.
pub struct Uses<'a> {
    pub(crate) list: [Option<Use>; MAX_USES],
    /// The views of a graph that stand for whatever pool is bound at replay, with whether the pool is written.
    pub(crate) graph_views: [Option<(Region, Access)>; 2],
    borrow: PhantomData<&'a mut ()>,
}

impl<'a> Uses<'a> {
    pub(crate) fn new() -> Self {
        Self { list: [const { None }; MAX_USES], graph_views: [None; 2], borrow: PhantomData }
    }

    /// Declares an input of at least `needed` elements.
    pub fn input<T: Element, D>(
        &mut self,
        what: &'static str,
        input: Input<'a, T, D>,
        needed: usize,
    ) -> Result<Region, Error> {
        self.push(what, Access::Read, input.0, bytes_of::<T>(needed))
    }

    /// Declares an output of at least `needed` elements.
    pub fn output<T: Element, D>(
        &mut self,
        what: &'static str,
        output: Output<'a, T, D>,
        needed: usize,
    ) -> Result<Region, Error> {
        self.push(what, Access::Write, output.0, bytes_of::<T>(needed))
    }

    /// Declares scratch, on whose contents kernels rely.
    pub(crate) fn relied(
        &mut self,
        what: &'static str,
        Output(lease, _): Output<'a, u8, impl Sized>,
        needed: usize,
    ) -> Result<Region, Error> {
        let given = lease.region.bytes;
        if given < needed {
            return Err(Error::Size { what: what.into(), needed, given });
        }
        self.add(Use::new(what, lease.region, Access::Write, lease.claim).relied())?;
        Ok(lease.region)
    }

    pub(crate) fn push<T, D>(
        &mut self,
        what: &'static str,
        access: Access,
        lease: Lease<T, D>,
        needed: usize,
    ) -> Result<Region, Error> {
        let given = lease.region.bytes;
        if given < needed {
            return Err(Error::Size { what: what.into(), needed, given });
        }
        self.add(Use::new(what, lease.region, access, lease.claim))?;
        Ok(lease.region)
    }

    pub(crate) fn add(&mut self, new: Use) -> Result<(), Error> {
        for old in self.list.iter().flatten() {
            let written = new.access == Access::Write || old.access == Access::Write;
            if written && old.region.overlaps(new.region) {
                let (output, other) = if new.access == Access::Write {
                    (new.what, old.what)
                } else {
                    (old.what, new.what)
                };
                return Err(Error::Overlap { output, other });
            }
        }
        let free = self.list.iter_mut().find(|entry| entry.is_none());
        *free.expect("no operation has more operands than MAX_USES") = Some(new);
        Ok(())
    }
}
