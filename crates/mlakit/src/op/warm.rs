//! Probes: synthetic tensors that cannot leave `prepare`.

use std::fmt::Debug;
use std::marker::PhantomData;

use crate::memory::Use;
use crate::op::{Op, Prepared};
use crate::paging::CacheMut;
use crate::scratch::{FAULT_BYTES, FAULT_NAMES};
use crate::{
    Buffer, Cache, Category, Device, Element, Error, Input, Lease, Name, Output, PageGeometry,
    Pages, Plan, PoolView, Runs, Scratch, Stream,
};

/// What exists while `prepare` runs: a stream and the owner of all probes. A probe is only a handle, so forgetting one leaks
/// nothing.
pub struct Warm<'w, O: Op, D: Runs<O>> {
    prepared: Prepared<O, D>,
    owned: Vec<Buffer<u8, D>>,
    pools: Vec<(Pages<D>, PoolView<D>)>,
    stream: Stream<'w, D>,
    brand: PhantomData<fn(&'w ()) -> &'w ()>,
}

/// A synthetic tensor of `prepare`.
pub struct Probe<'w, T, D> {
    lease: Lease<T, D>,
    brand: PhantomData<fn(&'w ()) -> &'w ()>,
}

/// A synthetic cache of `prepare`: pages of its own, never those of a live pool.
pub struct ProbeCache<'w, D: Device> {
    cache: Cache<'static, D>,
    index: usize,
    brand: PhantomData<fn(&'w ()) -> &'w ()>,
}

impl<'w, O: Op, D: Runs<O>> Warm<'w, O, D> {
    pub(super) fn new(prepared: &Prepared<O, D>, stream: Stream<'w, D>) -> Self {
        let prepared = Prepared { loaded: prepared.loaded.clone() };
        Self { prepared, owned: Vec::new(), pools: Vec::new(), stream, brand: PhantomData }
    }

    /// A tensor with these values.
    pub fn probe<T: Element>(&mut self, values: &[T::Raw]) -> Result<Probe<'w, T, D>, Error> {
        let kind = (Category::Probe, O::NAME);
        let buffer =
            Buffer::<u8, D>::new(self.stream.device(), kind, bytemuck::cast_slice(values))?;
        let lease = buffer.block.lease();
        self.owned.push(buffer);
        Ok(Probe { lease, brand: PhantomData })
    }

    /// Scratch as the plan says, every byte behind the fault block set, so that an operation that reads what it did not write shows it.
    pub fn scratch(&mut self) -> Result<Probe<'w, u8, D>, Error> {
        let mut bytes = vec![0xff; self.prepared.plan().scratch_bytes()];
        bytes[..FAULT_BYTES].fill(0);
        self.probe::<u8>(&bytes)
    }

    /// A cache whose pages hold these bytes, one page after the other.
    pub fn cache(
        &mut self,
        geometry: PageGeometry,
        pages: &[u8],
    ) -> Result<ProbeCache<'w, D>, Error> {
        let device = self.stream.device().clone();
        let kind = (Category::Probe, Name::from(O::NAME));
        let stride = geometry.payload_bytes();
        let shape = (pages.len().div_ceil(stride.max(1)), stride);
        let mut pool = Pages::of_kind(&device, kind.clone(), geometry, shape)?;
        let mut view = PoolView::of_kind(&device, kind, geometry)?;
        pool.write((0, 0), pages)?;
        view.bind(&mut self.stream, &pool)?;
        let cache = view.lease();
        self.pools.push((pool, view));
        Ok(ProbeCache { cache, index: self.pools.len() - 1, brand: PhantomData })
    }

    /// Waits and copies the pages of a probe cache out.
    pub fn read_cache(&mut self, cache: &ProbeCache<'w, D>) -> Result<Vec<u8>, Error> {
        self.stream.wait()?;
        let (pool, _) = &self.pools[cache.index];
        let mut bytes = vec![0; pool.pages() * pool.page_stride_bytes()];
        pool.read((0, 0), &mut bytes)?;
        Ok(bytes)
    }

    /// Binds and runs, on probes only: a lease is `'static` and would pass the types, so owners are compared.
    pub fn run(&mut self, args: O::Args<'_, D>) -> Result<(), Error> {
        let bound = self.prepared.bind(args)?;
        let probes = self.owned.iter().map(|buffer| &buffer.block.claim);
        let pools = self
            .pools
            .iter()
            .flat_map(|(pool, view)| pool.claim().into_iter().chain([view.claim()]));
        let own: Vec<_> = probes.chain(pools).chain([&self.prepared.loaded.claim]).collect();
        let is_own = |u: &&Use| own.iter().any(|claim| claim.is_of(&u.claim.standing));
        if let Some(live) = bound.uses.list.iter().flatten().find(|u| !is_own(u)) {
            return Err(Error::Foreign { what: live.what });
        }
        bound.run(&mut self.stream).map(drop)
    }

    /// Waits and copies out.
    pub fn read<T: Element>(&mut self, probe: &Probe<'w, T, D>) -> Result<Vec<T::Raw>, Error> {
        self.stream.wait()?;
        let own = |buffer: &&Buffer<u8, D>| buffer.block.region == probe.lease.region;
        let owner = self.owned.iter().find(own).ok_or(Error::Foreign { what: "probe" })?;
        let mut values = vec![T::Raw::default(); owner.len() / T::DTYPE.bytes()];
        owner.block.read(0, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }

    /// Fails with the first element for which `agree` says no.
    pub fn expect<T: Debug>(
        needed: &[T],
        given: &[T],
        agree: impl Fn(&T, &T) -> bool,
    ) -> Result<(), Error> {
        let differs = needed.iter().zip(given).position(|(n, g)| !agree(n, g));
        match differs {
            None if needed.len() == given.len() => Ok(()),
            None => Err(Error::ProbeMismatch {
                op: O::NAME,
                index: needed.len().min(given.len()),
                needed: format!("{} elements", needed.len()),
                given: format!("{} elements", given.len()),
            }),
            Some(index) => Err(Error::ProbeMismatch {
                op: O::NAME,
                index,
                needed: format!("{:?}", needed[index]),
                given: format!("{:?}", given[index]),
            }),
        }
    }

    /// Waits and reads the fault block of probe scratch.
    pub fn faults(
        &mut self,
        scratch: &Probe<'w, u8, D>,
    ) -> Result<[u32; FAULT_NAMES.len()], Error> {
        let bytes = self.read(scratch)?;
        let word = |i: usize| u32::from_le_bytes(std::array::from_fn(|b| bytes[4 * i + b]));
        Ok(std::array::from_fn(word))
    }

    /// The plan that is being prepared.
    pub fn plan(&self) -> &Plan<O> {
        self.prepared.plan()
    }

    /// What is being prepared.
    pub fn spec(&self) -> O::Spec {
        self.prepared.plan().spec.clone()
    }
}

/// Also on an error or a panic: wait, so that no probe is left in `retiring`.
impl<O: Op, D: Runs<O>> Drop for Warm<'_, O, D> {
    fn drop(&mut self) {
        // A device that cannot wait any more has lost its signals too; the bytes then stay in `retiring`, which the ledger shows.
        let _ = self.stream.wait();
    }
}

impl<'p, T: Element, D> From<&'p Probe<'_, T, D>> for Input<'p, T, D> {
    fn from(probe: &'p Probe<'_, T, D>) -> Self {
        Self::of(probe.lease.clone())
    }
}

impl<'p, T: Element, D> From<&'p mut Probe<'_, T, D>> for Output<'p, T, D> {
    fn from(probe: &'p mut Probe<'_, T, D>) -> Self {
        Self::of(probe.lease.clone())
    }
}

impl<'p, D> From<&'p mut Probe<'_, u8, D>> for Scratch<'p, D> {
    fn from(probe: &'p mut Probe<'_, u8, D>) -> Self {
        Self(probe.into())
    }
}

impl<'p, D: Device> From<&'p ProbeCache<'_, D>> for Cache<'p, D> {
    fn from(probe: &'p ProbeCache<'_, D>) -> Self {
        probe.cache.clone()
    }
}

impl<'p, D: Device> From<&'p mut ProbeCache<'_, D>> for CacheMut<'p, D> {
    fn from(probe: &'p mut ProbeCache<'_, D>) -> Self {
        CacheMut::of(probe.cache.clone())
    }
}
