//! Pages, their epochs, and the view through which kernels find them. Every product of an id and a stride is 64 bits wide.

use std::fmt;
use std::marker::PhantomData;

use serde::{Deserialize, Serialize};

use crate::clock::{Access, Claim, Epoch};
use crate::memory::{Block, Use, Uses};
use crate::record::{Planes, RecordLayout};
use crate::{Category, Device, Error, Foreign, Name, Region, Stream, Ticket};

/// What of a pool a `Spec` may name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PageGeometry {
    /// The bytes of a token.
    pub record: RecordLayout,
    /// Tokens of a page: 1 or a multiple of 16 (`v4_584` also 2).
    pub page_size: usize,
}

impl PageGeometry {
    /// Checks the page size and the widths of the record, so that a page has at least one byte and its bytes can be counted.
    pub fn check(self) -> Result<Self, Error> {
        self.record.check(self.page_size).map(|()| self)
    }

    /// Bytes of the records of a page; a page's stride may be larger.
    pub fn payload_bytes(self) -> usize {
        self.page_size * self.record.bytes()
    }

    /// Where a token's bytes are in a page.
    pub fn planes(self) -> Planes {
        self.record.planes(self.page_size)
    }
}

impl fmt::Display for PageGeometry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RecordLayout { format, width, rope } = self.record;
        write!(f, "pages of {} tokens of {} x {width}", self.page_size, format.name())?;
        if rope > 0 { write!(f, " ({rope} of them apart)") } else { Ok(()) }
    }
}

/// The owner of the pages. Everyone else has an address behind a view and a lease.
pub struct Pages<D: Device> {
    device: D,
    kind: (Category, Name),
    geometry: PageGeometry,
    page_stride_bytes: usize,
    epoch: Epoch,
    pages: Option<Block<D>>,
}

impl<D: Device> Pages<D> {
    /// `pages` pages, one after the other without gaps.
    pub fn new(
        device: &D,
        owner: impl Into<Name>,
        geometry: PageGeometry,
        pages: usize,
    ) -> Result<Self, Error> {
        Self::with_stride(device, owner, geometry, (pages, geometry.payload_bytes()))
    }

    /// The same with a page stride of at least the payload: what is behind the payload belongs to someone else and is never read or
    /// written.
    pub fn with_stride(
        device: &D,
        owner: impl Into<Name>,
        geometry: PageGeometry,
        (pages, page_stride_bytes): (usize, usize),
    ) -> Result<Self, Error> {
        let kind = (Category::Cache, owner.into());
        Self::of_kind(device, kind, geometry, (pages, page_stride_bytes))
    }

    pub(crate) fn of_kind(
        device: &D,
        kind: (Category, Name),
        geometry: PageGeometry,
        (pages, page_stride_bytes): (usize, usize),
    ) -> Result<Self, Error> {
        check_stride(geometry, page_stride_bytes)?;
        let (device, epoch) = (device.clone(), Epoch::default());
        let mut pool = Self { device, kind, geometry, page_stride_bytes, epoch, pages: None };
        pool.refill(pages)?;
        Ok(pool)
    }

    /// Pages in memory from outside, as many as fit, of [`Category::Foreign`]. After a release they may be refilled, with memory of the
    /// device's.
    pub fn foreign(
        owner: impl Into<Name>,
        geometry: PageGeometry,
        page_stride_bytes: usize,
        foreign: Foreign<D>,
    ) -> Result<Self, Error> {
        check_stride(geometry, page_stride_bytes)?;
        let (device, kind) = (foreign.device().clone(), (Category::Cache, owner.into()));
        let epoch = Epoch::default();
        let pages = Some(Block::foreign(kind.1.clone(), foreign, epoch.clone()));
        Ok(Self { device, kind, geometry, page_stride_bytes, epoch, pages })
    }

    /// Lets the pages go, at once, whoever has leases. Bytes that work in flight uses are `retiring` until it is done.
    pub fn release(&mut self) {
        self.pages = None; // `Block::drop` does it
    }

    /// New pages of the same geometry, after a release or instead of the old ones. Old leases stay stale.
    pub fn refill(&mut self, pages: usize) -> Result<(), Error> {
        self.release();
        let bytes = pages.saturating_mul(self.page_stride_bytes);
        let block = Block::new(&self.device, self.kind.clone(), bytes, self.epoch.clone())?;
        self.pages = Some(block);
        Ok(())
    }

    /// Writes bytes of a page in stream order, from byte `first` of the page on.
    pub fn write_on(
        &mut self,
        stream: &mut Stream<'_, D>,
        (page, first): (usize, usize),
        bytes: &[u8],
    ) -> Result<Ticket, Error> {
        self.block()?.write_on(stream, self.offset(page, first), bytes)
    }

    /// Writes bytes from the host, from byte `first` of a page on; they may reach into the following pages.
    pub fn write(&mut self, (page, first): (usize, usize), bytes: &[u8]) -> Result<(), Error> {
        self.block()?.write(self.offset(page, first), bytes)
    }

    /// Copies bytes out, from byte `first` of a page on.
    pub fn read(&self, (page, first): (usize, usize), into: &mut [u8]) -> Result<(), Error> {
        self.block()?.read(self.offset(page, first), into)
    }

    /// Rises at each release.
    pub fn epoch(&self) -> u64 {
        self.epoch.now()
    }

    /// The geometry, which survives a release.
    pub fn geometry(&self) -> PageGeometry {
        self.geometry
    }

    /// From one page to the next.
    pub fn page_stride_bytes(&self) -> usize {
        self.page_stride_bytes
    }

    /// Pages; 0 after a release.
    pub fn pages(&self) -> usize {
        self.pages.as_ref().map_or(0, |block| block.region.bytes() / self.page_stride_bytes)
    }

    pub(crate) fn claim(&self) -> Option<&Claim> {
        self.pages.as_ref().map(|pages| &pages.claim)
    }

    fn block(&self) -> Result<&Block<D>, Error> {
        self.pages.as_ref().ok_or(Error::Unbound)
    }

    fn offset(&self, page: usize, first: usize) -> usize {
        page.saturating_mul(self.page_stride_bytes).saturating_add(first)
    }
}

fn check_stride(geometry: PageGeometry, given: usize) -> Result<(), Error> {
    let needed = geometry.check()?.payload_bytes();
    if given < needed {
        return Err(Error::Size { what: "page stride".into(), needed, given });
    }
    Ok(())
}

/// A descriptor in device memory that says where a pool is. Kernels read it; `bind` rewrites it in stream order.
pub struct PoolView<D: Device> {
    block: Block<D>,
    geometry: PageGeometry,
    /// The view as it is read by kernels. Its claim is renewed at each `bind`.
    view: Use,
    /// The pages behind it, as they are read or written by kernels.
    pool: Option<Use>,
    access: Access,
}

/// Bytes of a view. `[0, 8)` address of page 0, `[8, 16)` pages, `[16, 24)` page stride in bytes, all u64 little-endian; the rest is
/// a device's own (CUDA: tensor maps).
pub const VIEW_BYTES: usize = 256;

/// The words of a view that all devices share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ViewWords {
    /// The device address of page 0.
    pub base: u64,
    /// Pages.
    pub pages: u64,
    /// From one page to the next.
    pub page_stride_bytes: u64,
}

impl ViewWords {
    /// Bytes of these words.
    pub const BYTES: usize = 24;

    /// As they lie in a view.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let words = [self.base, self.pages, self.page_stride_bytes];
        bytes.chunks_exact_mut(8).zip(words).for_each(|(b, w)| b.copy_from_slice(&w.to_le_bytes()));
        bytes
    }

    /// From a view's first bytes.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let word = |i: usize| u64::from_le_bytes(std::array::from_fn(|b| bytes[8 * i + b]));
        Self { base: word(0), pages: word(1), page_stride_bytes: word(2) }
    }
}

impl<D: Device> PoolView<D> {
    /// A view that no pool is bound to.
    pub fn new(device: &D, owner: impl Into<Name>, geometry: PageGeometry) -> Result<Self, Error> {
        Self::of_kind(device, (Category::Slots, owner.into()), geometry)
    }

    pub(crate) fn of_kind(
        device: &D,
        kind: (Category, Name),
        geometry: PageGeometry,
    ) -> Result<Self, Error> {
        let geometry = geometry.check()?;
        let block = Block::new(device, kind, VIEW_BYTES, Epoch::default())?;
        let view = Use::new("view", block.region, Access::Read, block.claim.clone()).relied();
        Ok(Self { block, geometry, view, pool: None, access: Access::Read })
    }

    /// Points it at a pool, for the work enqueued from now on. Work enqueued before reads the old words, and the old pages live until
    /// it is done. Leases of the view end here: they would number the pages that the view showed before.
    ///
    /// # Errors
    /// A refusal (`Busy`, another geometry or device, a released pool) leaves the view as it was; after a failure of the device it is
    /// `Unbound`, because nobody knows what it holds.
    pub fn bind(&mut self, stream: &mut Stream<'_, D>, pool: &Pages<D>) -> Result<Ticket, Error> {
        let (needed, given) = (self.geometry, pool.geometry);
        if needed != given {
            let (needed, given) = (needed.to_string(), given.to_string());
            return Err(Error::PageGeometry { needed, given });
        }
        if pool.device.keeper().id() != stream.device().keeper().id() {
            return Err(Error::Foreign { what: "pool" });
        }
        let pages = pool.block()?;
        let words = ViewWords {
            base: pages.region.address(),
            pages: (pages.region.bytes() / pool.page_stride_bytes) as u64,
            page_stride_bytes: pool.page_stride_bytes as u64,
        };
        let bytes = stream.device().view(self.geometry, words)?;
        let to = self.view.region.part(0, VIEW_BYTES).expect("a view has these bytes");
        let written = Use { access: Access::Write, ..self.view.clone() };
        let (view, bound) = (&mut self.view, &mut self.pool);
        let ticket = stream.submit(std::iter::once(&written), |device, queue| {
            view.claim.renew();
            *bound = None;
            device.write(queue, to, &bytes)
        })?;
        self.pool = Some(Use::new("pool", pages.region, self.access, pages.claim.clone()));
        Ok(ticket)
    }

    /// The cache as it is bound now, borrowing nothing; after a release or another `bind` it is stale.
    pub fn lease(&self) -> Cache<'static, D> {
        Cache::from(self).unborrowed()
    }

    /// The same for an operation that writes.
    pub fn lease_mut(&self) -> CacheMut<'static, D> {
        CacheMut(self.lease())
    }

    /// What it is a view of.
    pub fn geometry(&self) -> PageGeometry {
        self.geometry
    }

    /// Some call of the graph that owns the view writes its pages.
    pub(crate) fn mark_written(&mut self) {
        self.access = Access::Write;
    }

    /// What a replay uses: the view, and the pages behind it.
    pub(crate) fn uses(&self) -> [Option<&Use>; 2] {
        [Some(&self.view), self.pool.as_ref()]
    }

    pub(crate) fn is_bound(&self) -> bool {
        self.pool.is_some()
    }

    pub(crate) fn claim(&self) -> &Claim {
        &self.view.claim
    }

    pub(crate) fn region(&self) -> Region {
        self.block.region
    }

    /// The view as an operand of a graph that owns it: view and pool are looked up at each replay.
    pub(crate) fn of_graph(&self) -> Cache<'static, D> {
        Cache { pool: Pool::OfGraph, ..self.lease() }
    }
}

/// The cache operand of an operation that reads: a view, and the pool behind it.
pub struct Cache<'a, D> {
    view: Use,
    geometry: PageGeometry,
    pool: Pool,
    borrow: PhantomData<(&'a (), D)>,
}

/// The cache operand of an operation that writes.
pub struct CacheMut<'a, D>(Cache<'a, D>);

#[derive(Clone)]
enum Pool {
    Bound(Option<Use>),
    OfGraph,
}

impl<D> Clone for Cache<'_, D> {
    fn clone(&self) -> Self {
        let (view, pool) = (self.view.clone(), self.pool.clone());
        Self { view, geometry: self.geometry, pool, borrow: PhantomData }
    }
}

impl<D> Cache<'_, D> {
    /// For probes, whose owner outlives every call.
    pub(crate) fn unborrowed(self) -> Cache<'static, D> {
        let Cache { view, geometry, pool, .. } = self;
        Cache { view, geometry, pool, borrow: PhantomData }
    }
}

impl<'a, D> CacheMut<'a, D> {
    /// Only where the pool is the caller's alone, or by lease.
    pub(crate) fn of(cache: Cache<'a, D>) -> Self {
        Self(cache)
    }
}

impl<'a, D: Device> From<&'a PoolView<D>> for Cache<'a, D> {
    fn from(view: &'a PoolView<D>) -> Self {
        let pool = Pool::Bound(view.pool.clone());
        Self { view: view.view.clone(), geometry: view.geometry, pool, borrow: PhantomData }
    }
}

impl<'a, D: Device> From<&'a mut PoolView<D>> for CacheMut<'a, D> {
    fn from(view: &'a mut PoolView<D>) -> Self {
        Self(Cache::from(&*view))
    }
}

impl<'a> Uses<'a> {
    /// Declares a cache that is read: its view and the pages behind it.
    pub fn cache<D>(
        &mut self,
        what: &'static str,
        cache: Cache<'a, D>,
        geometry: PageGeometry,
    ) -> Result<Region, Error> {
        self.paged(what, cache, geometry, Access::Read)
    }

    /// Declares a cache that is written.
    pub fn cache_mut<D>(
        &mut self,
        what: &'static str,
        cache: CacheMut<'a, D>,
        geometry: PageGeometry,
    ) -> Result<Region, Error> {
        self.paged(what, cache.0, geometry, Access::Write)
    }

    fn paged<D>(
        &mut self,
        what: &'static str,
        cache: Cache<'a, D>,
        geometry: PageGeometry,
        access: Access,
    ) -> Result<Region, Error> {
        let (needed, given) = (geometry, cache.geometry);
        if needed != given {
            let (needed, given) = (needed.to_string(), given.to_string());
            return Err(Error::PageGeometry { needed, given });
        }
        let view = cache.view.region;
        match cache.pool {
            Pool::Bound(pool) => {
                self.add(Use { what, ..cache.view })?;
                self.add(Use { access, ..pool.ok_or(Error::Unbound)? })?;
            }
            Pool::OfGraph => {
                let free = self.graph_views.iter_mut().find(|place| place.is_none());
                *free.expect("no operation has more than two caches") = Some((view, access));
            }
        }
        Ok(view)
    }
}
