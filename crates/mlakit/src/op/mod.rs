//! What an operation is: Spec, Plan, Prepared, Bound; and probes, which cannot leave `prepare`.

use std::any::Any;
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::Arc;

use std::sync::atomic::Ordering::Relaxed;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::census::Entry;
use crate::clock::{Access, Claim, Epoch};
use crate::memory::{Use, Uses};
use crate::scratch::{Layout, RegionSpec};
use crate::{Category, Choice, Device, Error, Name, Region, Runs, Stream, Ticket};

pub mod activation;
pub mod dense;
pub mod embed;
pub mod hadamard;
pub mod indexer;
pub mod layer;
pub mod linear;
pub mod merge;
pub mod norm;
pub mod pool;
pub mod projection;
pub mod rotary;
pub mod route;
pub mod sample;
pub mod selection;
pub mod sparse;
pub mod spec;
#[cfg(feature = "sim")]
pub mod toy;
pub mod warm;
pub mod writer;

pub use warm::{Probe, ProbeCache, Warm};

/// An operation, on any device. Sealed: all of them are here. So `Runs` is implemented by device crates alone, and nobody else ever
/// sees a `Region`: this is what lets `Runs::launch` be a safe function.
pub trait Op: sealed::Sealed + Sized + Send + Sync + 'static {
    /// Its name in errors, CLI and files.
    const NAME: &'static str;
    /// What a caller declares; the identity of plans and code.
    type Spec: Clone + Debug + Eq + Hash + Serialize + DeserializeOwned + Send + Sync + 'static;
    /// The operands of one call, named.
    type Args<'a, D: Device>;
    /// The same operands as a kernel gets them, named.
    type Regions: Copy + Send + Sync + 'static;

    /// Scratch that the operation needs on any device, beside the fault block and what the device adds.
    fn scratch(spec: &Self::Spec, choice: &Choice) -> Vec<RegionSpec>;
    /// Checks the host arguments and declares each use.
    fn operands<'a, D: Device>(
        plan: &Plan<Self>,
        args: Self::Args<'a, D>,
        uses: &mut Uses<'a>,
    ) -> Result<Self::Regions, Error>;
    /// Launches on probes and checks the result.
    fn probe<'w, D: Runs<Self>>(warm: &mut Warm<'w, Self, D>) -> Result<(), Error>;
}

/// `Spec` + facts. Host data only; made, printed and tested where there is no device.
#[derive(Debug)]
pub struct Plan<O: Op> {
    // Private: kernels rely on sizes that were checked against these.
    spec: O::Spec,
    choice: Choice,
    scratch: Layout,
    planned_for: String,
}

impl<O: Op> Plan<O> {
    /// Plans for a device with these facts, or says why not and what to use instead.
    pub fn for_device<D: Runs<O>>(spec: &O::Spec, facts: &D::Facts) -> Result<Self, Error> {
        let choice = D::choose(facts, spec).map_err(Error::Refused)?;
        let mut regions = O::scratch(spec, &choice);
        regions.extend(choice.work.iter().cloned());
        let scratch = Layout::new(regions)
            .ok_or_else(|| Error::contract("scratch", "fewer bytes than a usize counts", "more"))?;
        let (spec, planned_for) = (spec.clone(), facts.to_string());
        Ok(Self { spec, choice, scratch, planned_for })
    }

    /// Compiles, launches on probes, checks; returns with every probe freed.
    pub fn prepare<D: Runs<O>>(&self, device: &D) -> Result<Prepared<O, D>, Error> {
        self.prepare_with(device, |_| Ok(())).map(|(prepared, ())| prepared)
    }

    /// The same, with more to do on probes (tuning, a whole layer). `'w` is any lifetime at all, so nothing that carries it can be
    /// in `R` or in the closure's surroundings.
    pub fn prepare_with<D: Runs<O>, R: 'static>(
        &self,
        device: &D,
        more: impl for<'w> FnOnce(&mut Warm<'w, O, D>) -> Result<R, Error>,
    ) -> Result<(Prepared<O, D>, R), Error> {
        if self.planned_for != device.facts().to_string() {
            return Err(Error::Foreign { what: "plan" });
        }
        device.keeper().counters().prepared.fetch_add(1, Relaxed);
        let identity = self.identity();
        let known = device.keeper().loaded::<Loaded<O, D>>(&identity);
        let fresh = known.is_none();
        let loaded = match known {
            Some(loaded) => loaded,
            None if device.keeper().frozen() => return Err(Error::Frozen { spec: identity }),
            None => Arc::new(Loaded::new(self.clone(), device)?),
        };
        let prepared = Prepared { loaded };
        let caller = device.own_stream()?;
        let stream = device.stream(&caller)?;
        let mut warm = Warm::new(&prepared, stream);
        if fresh {
            O::probe(&mut warm)?;
        }
        let more = more(&mut warm)?;
        drop(warm);
        device.keeper().remember(identity, &prepared.loaded);
        Ok((prepared, more))
    }

    /// What was declared.
    pub fn spec(&self) -> &O::Spec {
        &self.spec
    }

    /// What was picked.
    pub fn choice(&self) -> &Choice {
        &self.choice
    }

    /// The named scratch regions behind the fault block.
    pub fn scratch(&self) -> &[RegionSpec] {
        self.scratch.regions()
    }

    /// Bytes that a lane must have for it.
    pub fn scratch_bytes(&self) -> usize {
        self.scratch.bytes()
    }

    /// A named region in a lane; empty if the plan has none of that name.
    pub fn region(&self, lane: Region, name: &str) -> Region {
        self.scratch.find(lane, name)
    }

    /// What tells this plan's code from any other: operation, `Spec` and choice.
    pub fn identity(&self) -> String {
        format!("{} {:?} {:?}", O::NAME, self.spec, self.choice)
    }

    /// The facts that it was planned for, as text.
    pub fn planned_for(&self) -> &str {
        &self.planned_for
    }
}

impl<O: Op> Clone for Plan<O> {
    fn clone(&self) -> Self {
        let (spec, choice) = (self.spec.clone(), self.choice.clone());
        Self { spec, choice, scratch: self.scratch.clone(), planned_for: self.planned_for.clone() }
    }
}

/// `Plan` + loaded code. No tensor.
pub struct Prepared<O: Op, D: Runs<O>> {
    loaded: Arc<Loaded<O, D>>,
}

/// Code is numbered like memory: unloading it under a running kernel is as bad as freeing its input.
pub(crate) struct Loaded<O: Op, D: Runs<O>> {
    plan: Plan<O>,
    code: Option<D::Code>,
    claim: Claim,
    entry: Entry,
    device: D,
}

impl<O: Op, D: Runs<O>> Loaded<O, D> {
    fn entry(device: &D) -> Entry {
        let (owner, phase) = (Name::from(O::NAME), device.keeper().census().phase());
        Entry { category: Category::Code, owner, phase, bytes: size_of::<D::Code>() }
    }

    fn new(plan: Plan<O>, device: &D) -> Result<Self, Error> {
        let code = Some(device.prepare(&plan)?);
        let entry = Self::entry(device);
        device.keeper().census().add(&entry);
        let claim = Claim::new(device.keeper().standing(Epoch::default()));
        Ok(Self { plan, code, claim, entry, device: device.clone() })
    }
}

impl<O: Op, D: Runs<O>> Drop for Loaded<O, D> {
    fn drop(&mut self) {
        self.claim.standing.close();
        if let Some(code) = self.code.take() {
            self.device.keeper().retire(Box::new(code), &self.claim.standing, self.entry.clone());
        }
    }
}

impl<O: Op, D: Runs<O>> Prepared<O, D> {
    /// Checks the operands of one call. Allocates nothing.
    pub fn bind<'a>(&self, args: O::Args<'a, D>) -> Result<Bound<'a, O, D>, Error> {
        let loaded = self.loaded.clone();
        loaded.device.keeper().counters().bound.fetch_add(1, Relaxed);
        let mut uses = Uses::new();
        let regions = O::operands(&loaded.plan, args, &mut uses)?;
        uses.add(Use::new(O::NAME, Region::EMPTY, Access::Read, loaded.claim.clone()))?;
        Ok(Bound { loaded, regions, uses })
    }

    /// The plan that it was made from.
    pub fn plan(&self) -> &Plan<O> {
        &self.loaded.plan
    }
}

/// One call. The borrows last while it exists and end at `run`: they order the program, and the stream orders the device in the
/// same way; whatever the owner does next is measured against the number that `run` wrote beside each operand.
#[must_use = "a bound call does nothing until it is run"]
pub struct Bound<'a, O: Op, D: Runs<O>> {
    loaded: Arc<Loaded<O, D>>,
    regions: O::Regions,
    pub(crate) uses: Uses<'a>,
}

impl<'a, O: Op, D: Runs<O>> Bound<'a, O, D> {
    /// Enqueues it on a stream, or records it.
    pub fn run<R: Runner<'a, D>>(self, runner: &mut R) -> Result<R::Receipt, Error> {
        runner.run(self)
    }

    pub(crate) fn launch(&self, device: &D, queue: &mut D::Queue) -> Result<(), Error> {
        let code = self.loaded.code.as_ref().expect("code leaves only when the last user drops it");
        device.launch(code, &self.loaded.plan, &self.regions, queue)
    }

    pub(crate) fn keep_code(&self) -> Arc<dyn Any + Send + Sync> {
        self.loaded.clone()
    }
}

/// Where a call can go: a stream takes calls that borrow, a recorder only `'static` ones. A layer that holds leases writes its step
/// once, against this trait.
pub trait Runner<'a, D: Device> {
    /// A ticket where it was enqueued.
    type Receipt;

    /// Takes one call.
    fn run<O: Op>(&mut self, bound: Bound<'a, O, D>) -> Result<Self::Receipt, Error>
    where
        D: Runs<O>;
}

impl<'a, D: Device> Runner<'a, D> for Stream<'_, D> {
    type Receipt = Ticket;

    fn run<O: Op>(&mut self, bound: Bound<'a, O, D>) -> Result<Ticket, Error>
    where
        D: Runs<O>,
    {
        if bound.uses.graph_views.iter().any(Option::is_some) {
            return Err(Error::Foreign { what: "view of a graph" });
        }
        let uses = bound.uses.list.iter().flatten();
        self.submit(uses, |device, queue| bound.launch(device, queue))
    }
}

pub(crate) mod sealed {
    pub trait Sealed {}
}
