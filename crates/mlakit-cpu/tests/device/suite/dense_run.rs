//! Dense attention on a device: operands, one call, its outcome.

use half::bf16;
use mlakit::op::dense::{Dense, DenseArgs, DenseSpec, QueryInput};
use mlakit::op::merge::LseOutput;
use mlakit::{
    Base2, Buffer, Category, E4m3, Element, Lane, Lse, LseBase, Natural, Pages, Plan, PoolView,
    Prepared, Stream,
};

use super::SuiteDevice;
use super::dense_inputs::{DenseInputs, Query};

/// A tensor of a test.
pub fn tensor<T: Element, D: SuiteDevice>(device: &D, values: &[T::Raw]) -> Buffer<T, D> {
    Buffer::new(device, (Category::Tensors, "test"), values).unwrap()
}

/// Plans and prepares.
pub fn prepare<D: SuiteDevice>(device: &D, spec: &DenseSpec) -> Prepared<Dense, D> {
    let plan = Plan::<Dense>::for_device::<D>(spec, device.facts()).unwrap();
    plan.prepare(device).unwrap_or_else(|error| panic!("{spec:?}: {error}"))
}

/// What a call gave.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    pub out: Vec<bf16>,
    pub lse: Vec<f32>,
    pub faults: Vec<u32>,
}

/// The operands of one call, on the device.
pub struct Operands<D: SuiteDevice> {
    q: Buffer<bf16, D>,
    q8: Option<Buffer<E4m3, D>>,
    pub pool: Pages<D>,
    pub view: PoolView<D>,
    table: Buffer<i32, D>,
    kv_lens: Buffer<i32, D>,
    q_offsets: Buffer<i32, D>,
    row_kv_lens: Option<Buffer<i32, D>>,
    kv_scale: Option<Buffer<f32, D>>,
    q_scale: Option<Buffer<f32, D>>,
    out: Buffer<bf16, D>,
    natural: Buffer<Lse<Natural>, D>,
    base2: Buffer<Lse<Base2>, D>,
    pub lane: Lane<D>,
    lse: LseBase,
}

impl<D: SuiteDevice> Operands<D> {
    /// Outputs and scratch begin as NaN.
    pub fn new(
        stream: &mut Stream<'_, D>,
        inputs: &DenseInputs,
        prepared: &Prepared<Dense, D>,
    ) -> Self {
        let device = &stream.device().clone();
        let spec = prepared.plan().spec();
        let results = inputs.rows() * spec.heads;
        let size = (inputs.pages, inputs.page_stride_bytes);
        let mut pool = Pages::with_stride(device, "pool", spec.pages(), size).unwrap();
        pool.write((0, 0), &inputs.cache).unwrap();
        let mut view = PoolView::new(device, "view", spec.pages()).unwrap();
        view.bind(stream, &pool).unwrap();
        let mut lane = Lane::new(device, "lane", &[prepared.plan().scratch_bytes()]).unwrap();
        lane.poison(0xff).unwrap();
        let scaled = spec.record.is_scaled();
        let q8 = (inputs.shape.query == Query::E4m3).then_some(&inputs.q8);
        Self {
            q: tensor::<bf16, D>(device, &inputs.q),
            q8: q8.map(|q8| tensor::<E4m3, D>(device, q8)),
            table: tensor::<i32, D>(device, &inputs.table),
            kv_lens: tensor::<i32, D>(device, &inputs.kv_lens),
            q_offsets: tensor::<i32, D>(device, &inputs.q_offsets),
            row_kv_lens: spec.row_lengths.then(|| tensor::<i32, D>(device, &inputs.row_kv_lens)),
            kv_scale: scaled.then(|| tensor::<f32, D>(device, &[inputs.kv_scale])),
            q_scale: spec.has_query_scale().then(|| tensor::<f32, D>(device, &[inputs.q_scale])),
            out: tensor::<bf16, D>(device, &vec![bf16::NAN; results * spec.value_width]),
            natural: tensor::<Lse<Natural>, D>(device, &vec![f32::NAN; results]),
            base2: tensor::<Lse<Base2>, D>(device, &vec![f32::NAN; results]),
            lse: spec.lse,
            pool,
            view,
            lane,
        }
    }

    pub fn args(&mut self) -> DenseArgs<'_, D> {
        DenseArgs {
            q: match &self.q8 {
                Some(q8) => QueryInput::E4m3(q8.into()),
                None => QueryInput::Bf16((&self.q).into()),
            },
            cache: (&self.view).into(),
            page_table: (&self.table).into(),
            kv_lens: (&self.kv_lens).into(),
            q_offsets: (&self.q_offsets).into(),
            row_kv_lens: self.row_kv_lens.as_ref().map(Into::into),
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
    pub fn run(&mut self, stream: &mut Stream<'_, D>, prepared: &Prepared<Dense, D>) -> Outcome {
        self.lane.clear_faults().unwrap();
        prepared.bind(self.args()).unwrap().run(stream).unwrap();
        stream.wait().unwrap();
        self.outcome()
    }

    pub fn outcome(&self) -> Outcome {
        Outcome {
            out: self.out.read().unwrap().into_iter().collect(),
            lse: match self.lse {
                LseBase::Natural => self.natural.read().unwrap(),
                LseBase::Base2 => self.base2.read().unwrap(),
            },
            faults: self.lane.faults().unwrap().to_vec(),
        }
    }
}

/// Prepares, uploads, runs once.
pub fn run<D: SuiteDevice>(device: &D, inputs: &DenseInputs) -> Outcome {
    let prepared = prepare(device, &inputs.spec);
    run_prepared(device, &prepared, inputs)
}

/// Uploads and runs once.
pub fn run_prepared<D: SuiteDevice>(
    device: &D,
    prepared: &Prepared<Dense, D>,
    inputs: &DenseInputs,
) -> Outcome {
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    Operands::new(&mut stream, inputs, prepared).run(&mut stream, prepared)
}
