//! A call on a device: prepared once, run eagerly, captured and replayed.

use mlakit::{Device, Graph, Lane, PageGeometry, Plan, Prepared, Runs, Stream};

use super::source::{CACHE, EXTRA_CACHE, Operands, Recording, SlotKeys};
use super::{Call, CaseOp, Outcome};
use crate::failure::Failure;
use crate::machine;

/// A prepared call.
pub struct Session<'s, O: CaseOp, D: Runs<O>> {
    call: &'s Call<'s, O>,
    prepared: Prepared<O, D>,
    stream: Stream<'s, D>,
    operands: Operands<'s, D>,
}

/// A call that was captured.
pub struct Captured<D: Device> {
    graph: Graph<D>,
    keys: SlotKeys<D>,
}

/// The caches of a Spec, by name.
fn pools<O: CaseOp>(spec: &O::Spec) -> impl Iterator<Item = (&'static str, PageGeometry)> {
    let main = O::pages(spec).map(|geometry| (CACHE, geometry));
    let extra = O::extra_pages(spec).map(|geometry| (EXTRA_CACHE, geometry));
    main.into_iter().chain(extra)
}

impl<'s, O: CaseOp, D: Runs<O>> Session<'s, O, D> {
    /// Plans, prepares, and copies the cache to the device.
    ///
    /// # Errors
    /// A refusal, more memory than there is, a probe that fails.
    pub fn new(
        call: &'s Call<'s, O>,
        device: &D,
        caller: &'s D::CallerStream,
    ) -> Result<Self, Failure> {
        let plan = Plan::<O>::for_device::<D>(&call.spec, device.facts())?;
        // Preparing has scratch and a few pages of its own, and copies of both on the host.
        machine::ensure_memory("scratch", plan.scratch_bytes().saturating_mul(3))?;
        for (_, geometry) in pools::<O>(&call.spec) {
            let pages = geometry.payload_bytes().saturating_mul(8);
            machine::ensure_memory("pages of the size that the spec gives", pages)?;
        }
        let prepared = plan.prepare(device)?;
        let mut stream = device.stream(caller)?;
        let lane = Lane::new(device, "case", &[plan.scratch_bytes()])?;
        let mut operands = Operands::new(device, &call.tensors, lane);
        for pool in pools::<O>(&call.spec) {
            operands.add_pool(&mut stream, pool)?;
        }
        Ok(Self { call, prepared, stream, operands })
    }

    /// Runs it eagerly. Once: it makes the buffers, and a writer changes the pages.
    ///
    /// # Errors
    /// What binding or running says.
    pub fn run(&mut self) -> Result<Outcome, Failure> {
        let args = O::args(self.call, &mut self.operands)?;
        self.prepared.bind(args)?.run(&mut self.stream)?;
        self.stream.wait()?;
        self.outcome(|_| None)
    }

    /// Captures it with its operands in slots and the pages behind a view. After [`Session::run`],
    /// which says what slots there are.
    ///
    /// # Errors
    /// What binding or capturing says.
    pub fn capture(&mut self) -> Result<Captured<D>, Failure> {
        let (slots, keys) = self.operands.slots()?;
        let (call, prepared, lane) = (self.call, &self.prepared, &self.operands.lane);
        let mut graph = slots.capture(&mut self.stream, |recorder| {
            let mut source = Recording { recorder, keys: &keys, lane };
            let args = O::args(call, &mut source)?;
            prepared.bind(args)?.run(recorder)
        })?;
        for ((_, view), pool) in keys.views.iter().zip(&self.operands.pools) {
            graph.bind(&mut self.stream, *view, &pool.pages)?;
        }
        Ok(Captured { graph, keys })
    }

    /// Replays it on the case's inputs, from the case's cache.
    ///
    /// # Errors
    /// What replaying says.
    pub fn replay(&mut self, captured: &mut Captured<D>) -> Result<Outcome, Failure> {
        let Captured { graph, keys } = captured;
        keys.fill(graph, &mut self.stream, &self.call.tensors)?;
        self.stream.wait()?;
        self.operands.restore_pools()?;
        self.operands.lane.clear_faults()?;
        graph.replay(&mut self.stream)?.wait(&mut self.stream)?;
        self.outcome(|name| keys.read(name, graph))
    }

    /// The plan.
    pub fn plan(&self) -> &Plan<O> {
        self.prepared.plan()
    }

    /// The outputs, from where `elsewhere` has them or else from the buffers.
    fn outcome(
        &self,
        elsewhere: impl Fn(&str) -> Option<Result<Vec<u8>, mlakit::Error>>,
    ) -> Result<Outcome, Failure> {
        let mut outputs = Vec::new();
        for expected in O::outputs(self.call) {
            let bytes = match elsewhere(expected.name) {
                Some(bytes) => bytes?,
                None => self.operands.read(expected.name)?,
            };
            outputs.push(expected.tensor(bytes));
        }
        Ok(Outcome { outputs, faults: self.operands.lane.faults()? })
    }
}
