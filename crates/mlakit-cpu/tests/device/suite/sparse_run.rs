//! Sparse attention on a device: operands, one call, its outcome.

use half::bf16;
use mlakit::op::dense::QueryInput;
use mlakit::op::merge::LseOutput;
use mlakit::op::sparse::{ExtraInput, Selection, SelectionInput, Sparse, SparseArgs, SparseSpec};
use mlakit::{
    Base2, Buffer, E4m3, Lane, Lse, LseBase, Natural, Pages, Plan, PoolView, Prepared, Runs, Stream,
};

use super::SuiteDevice;
use super::dense_inputs::Query;
use super::dense_run::{Outcome, tensor};
use super::sparse_inputs::{Pool, SparseInputs};

/// A device that runs sparse attention too.
pub trait SparseDevice: SuiteDevice + Runs<Sparse> {}

impl<D: SuiteDevice + Runs<Sparse>> SparseDevice for D {}

/// Plans and prepares.
pub fn prepare<D: SparseDevice>(device: &D, spec: &SparseSpec) -> Prepared<Sparse, D> {
    let plan = Plan::<Sparse>::for_device::<D>(spec, device.facts()).unwrap();
    plan.prepare(device).unwrap_or_else(|error| panic!("{spec:?}: {error}"))
}

/// A pool and its view.
pub struct Bound<D: SuiteDevice> {
    pub pool: Pages<D>,
    pub view: PoolView<D>,
}

impl<D: SuiteDevice> Bound<D> {
    pub fn new(stream: &mut Stream<'_, D>, of: &Pool) -> Self {
        let device = &stream.device().clone();
        let size = (of.pages, of.stride);
        let mut pool = Pages::with_stride(device, "pool", of.geometry, size).unwrap();
        pool.write((0, 0), &of.bytes).unwrap();
        let mut view = PoolView::new(device, "view", of.geometry).unwrap();
        view.bind(stream, &pool).unwrap();
        Self { pool, view }
    }
}

/// The operands of one call, on the device.
pub struct Operands<D: SuiteDevice> {
    q: Buffer<bf16, D>,
    q8: Option<Buffer<E4m3, D>>,
    pub main: Bound<D>,
    pub extra: Option<Bound<D>>,
    selection: Selection,
    entries: Buffer<i32, D>,
    counts: Buffer<i32, D>,
    request: Buffer<i32, D>,
    table: Buffer<i32, D>,
    table_width: usize,
    extra_slots: Buffer<i32, D>,
    extra_counts: Buffer<i32, D>,
    sink: Option<Buffer<f32, D>>,
    kv_scale: Option<Buffer<f32, D>>,
    q_scale: Option<Buffer<f32, D>>,
    out: Buffer<bf16, D>,
    natural: Buffer<Lse<Natural>, D>,
    base2: Buffer<Lse<Base2>, D>,
    pub lane: Lane<D>,
    lse: LseBase,
}

impl<D: SparseDevice> Operands<D> {
    /// Outputs and scratch begin as NaN.
    pub fn new(
        stream: &mut Stream<'_, D>,
        inputs: &SparseInputs,
        prepared: &Prepared<Sparse, D>,
    ) -> Self {
        let device = &stream.device().clone();
        let spec = prepared.plan().spec();
        let results = inputs.rows() * spec.heads;
        let mut lane = Lane::new(device, "lane", &[prepared.plan().scratch_bytes()]).unwrap();
        lane.poison(0xff).unwrap();
        let q8 = (inputs.shape.query == Query::E4m3).then_some(&inputs.q8);
        let entries = match spec.selection {
            Selection::Positions => &inputs.positions,
            Selection::Slots => &inputs.slots,
        };
        Self {
            q: tensor::<bf16, D>(device, &inputs.q),
            q8: q8.map(|q8| tensor::<E4m3, D>(device, q8)),
            main: Bound::new(stream, &inputs.pool),
            extra: inputs.extra_pool.as_ref().map(|pool| Bound::new(stream, pool)),
            selection: spec.selection,
            entries: tensor::<i32, D>(device, entries),
            counts: tensor::<i32, D>(device, &inputs.counts),
            request: tensor::<i32, D>(device, &inputs.request),
            table: tensor::<i32, D>(device, &inputs.table),
            table_width: inputs.table_width,
            extra_slots: tensor::<i32, D>(device, &inputs.extra_slots),
            extra_counts: tensor::<i32, D>(device, &inputs.extra_counts),
            sink: spec.sink.then(|| tensor::<f32, D>(device, &inputs.sink)),
            kv_scale: spec.has_kv_scale().then(|| tensor::<f32, D>(device, &[inputs.kv_scale])),
            q_scale: spec.has_query_scale().then(|| tensor::<f32, D>(device, &[inputs.q_scale])),
            out: tensor::<bf16, D>(device, &vec![bf16::NAN; results * spec.value_width]),
            natural: tensor::<Lse<Natural>, D>(device, &vec![f32::NAN; results]),
            base2: tensor::<Lse<Base2>, D>(device, &vec![f32::NAN; results]),
            lse: spec.lse,
            lane,
        }
    }

    pub fn args(&mut self) -> SparseArgs<'_, D> {
        SparseArgs {
            q: match &self.q8 {
                Some(q8) => QueryInput::E4m3(q8.into()),
                None => QueryInput::Bf16((&self.q).into()),
            },
            cache: (&self.main.view).into(),
            selection: match self.selection {
                Selection::Positions => SelectionInput::Positions {
                    positions: (&self.entries).into(),
                    counts: (&self.counts).into(),
                    request: (&self.request).into(),
                    page_table: (&self.table).into(),
                    table_width: self.table_width,
                },
                Selection::Slots => SelectionInput::Slots {
                    slots: (&self.entries).into(),
                    counts: (&self.counts).into(),
                },
            },
            extra: self.extra.as_ref().map(|extra| ExtraInput {
                cache: (&extra.view).into(),
                slots: (&self.extra_slots).into(),
                slot_counts: (&self.extra_counts).into(),
            }),
            sink: self.sink.as_ref().map(Into::into),
            kv_scale: self.kv_scale.as_ref().map(Into::into),
            q_scale: self.q_scale.as_ref().map(Into::into),
            out: (&mut self.out).into(),
            lse: match self.lse {
                LseBase::Natural => LseOutput::Natural((&mut self.natural).into()),
                LseBase::Base2 => LseOutput::Base2((&mut self.base2).into()),
            },
            scratch: (&mut self.lane).into(),
        }
    }

    /// Runs once and reads everything that came out.
    pub fn run(&mut self, stream: &mut Stream<'_, D>, prepared: &Prepared<Sparse, D>) -> Outcome {
        self.lane.clear_faults().unwrap();
        prepared.bind(self.args()).unwrap().run(stream).unwrap();
        stream.wait().unwrap();
        Outcome {
            out: self.out.read().unwrap(),
            lse: match self.lse {
                LseBase::Natural => self.natural.read().unwrap(),
                LseBase::Base2 => self.base2.read().unwrap(),
            },
            faults: self.lane.faults().unwrap().to_vec(),
        }
    }
}

/// Prepares, uploads, runs once.
pub fn run<D: SparseDevice>(device: &D, inputs: &SparseInputs) -> Outcome {
    let prepared = prepare(device, &inputs.spec);
    run_prepared(device, &prepared, inputs)
}

/// Uploads and runs once.
pub fn run_prepared<D: SparseDevice>(
    device: &D,
    prepared: &Prepared<Sparse, D>,
    inputs: &SparseInputs,
) -> Outcome {
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    Operands::new(&mut stream, inputs, prepared).run(&mut stream, prepared)
}
