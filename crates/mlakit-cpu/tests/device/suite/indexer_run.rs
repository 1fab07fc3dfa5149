//! An indexer on a device: operands, one call, its outcome.

use half::bf16;
use mlakit::op::hadamard::Hadamard;
use mlakit::op::indexer::{Indexer, IndexerArgs, IndexerResult, IndexerSpec};
use mlakit::op::pool::Pool;
use mlakit::op::selection::Selection;
use mlakit::{Buffer, Error, Lane, Pages, Plan, PoolView, Prepared, Runs, Stream};

use super::SuiteDevice;
use super::dense_run::tensor;
use super::indexer_inputs::IndexerInputs;

/// A device that runs what selects, too.
pub trait IndexerDevice:
    SuiteDevice + Runs<Hadamard> + Runs<Indexer> + Runs<Selection> + Runs<Pool>
{
}

impl<D> IndexerDevice for D where
    D: SuiteDevice + Runs<Hadamard> + Runs<Indexer> + Runs<Selection> + Runs<Pool>
{
}

/// Plans and prepares.
pub fn prepare<D: IndexerDevice>(device: &D, spec: &IndexerSpec) -> Prepared<Indexer, D> {
    let plan = Plan::<Indexer>::for_device::<D>(spec, device.facts()).unwrap();
    plan.prepare(device).unwrap_or_else(|error| panic!("{spec:?}: {error}"))
}

/// What a call gave.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    pub positions: Vec<i32>,
    pub counts: Vec<i32>,
    /// The bits of the scores, all NaN alike.
    pub scores: Vec<u32>,
    pub faults: [u32; 3],
}

fn bits(scores: &[f32]) -> Vec<u32> {
    scores.iter().map(|s| if s.is_nan() { 0x7fc0_0000 } else { (s + 0.0).to_bits() }).collect()
}

impl Outcome {
    /// What the oracle says, if every score is exact.
    pub fn exact(result: &IndexerResult) -> Self {
        Self {
            positions: result.positions.clone(),
            counts: result.counts.clone(),
            scores: bits(&result.scores),
            faults: result.faults,
        }
    }

    /// The positions of a row.
    pub fn row(&self, row: usize) -> &[i32] {
        let topk = self.positions.len() / self.counts.len();
        &self.positions[row * topk..][..self.counts[row] as usize]
    }
}

/// The operands of one call, on the device.
pub struct Operands<D: IndexerDevice> {
    pub q: Buffer<bf16, D>,
    pub weights: Buffer<f32, D>,
    pub pool: Pages<D>,
    pub view: PoolView<D>,
    pub table: Buffer<i32, D>,
    pub kv_lens: Buffer<i32, D>,
    pub q_offsets: Buffer<i32, D>,
    pub last_position: Option<Buffer<i64, D>>,
    pub positions: Buffer<i32, D>,
    pub counts: Buffer<i32, D>,
    pub scores: Option<Buffer<f32, D>>,
    pub lane: Lane<D>,
}

impl<D: IndexerDevice> Operands<D> {
    /// Outputs begin as what no row selects, scratch as bytes that mean something else everywhere.
    pub fn new(
        stream: &mut Stream<'_, D>,
        inputs: &IndexerInputs,
        prepared: &Prepared<Indexer, D>,
    ) -> Self {
        let (device, spec) = (&stream.device().clone(), prepared.plan().spec());
        let (rows, selected) = (inputs.shape.rows(), inputs.shape.rows() * spec.topk);
        let size = (inputs.pages, inputs.page_stride_bytes);
        let mut pool = Pages::with_stride(device, "pool", spec.pages(), size).unwrap();
        pool.write((0, 0), &inputs.cache).unwrap();
        let mut view = PoolView::new(device, "view", spec.pages()).unwrap();
        view.bind(stream, &pool).unwrap();
        let mut lane = Lane::new(device, "lane", &[prepared.plan().scratch_bytes()]).unwrap();
        lane.poison(0xa5).unwrap();
        let last = spec.is_pooled().then(|| tensor::<i64, D>(device, &inputs.last_position));
        Self {
            q: tensor::<bf16, D>(device, &inputs.q),
            weights: tensor::<f32, D>(device, &inputs.weights),
            table: tensor::<i32, D>(device, &inputs.table),
            kv_lens: tensor::<i32, D>(device, &inputs.kv_lens),
            q_offsets: tensor::<i32, D>(device, &inputs.q_offsets),
            last_position: last,
            positions: tensor::<i32, D>(device, &vec![-77; selected]),
            counts: tensor::<i32, D>(device, &vec![-77; rows]),
            scores: spec.scores.then(|| tensor::<f32, D>(device, &vec![77.0; selected])),
            pool,
            view,
            lane,
        }
    }

    pub fn args(&mut self) -> IndexerArgs<'_, D> {
        IndexerArgs {
            q: (&self.q).into(),
            weights: (&self.weights).into(),
            cache: (&self.view).into(),
            page_table: (&self.table).into(),
            kv_lens: (&self.kv_lens).into(),
            q_offsets: (&self.q_offsets).into(),
            last_position: self.last_position.as_ref().map(Into::into),
            positions: (&mut self.positions).into(),
            counts: (&mut self.counts).into(),
            scores: self.scores.as_mut().map(Into::into),
            scratch: (&mut self.lane).into(),
        }
    }

    /// Runs once and reads everything that came out.
    pub fn run(&mut self, stream: &mut Stream<'_, D>, prepared: &Prepared<Indexer, D>) -> Outcome {
        self.try_run(stream, prepared).unwrap()
    }

    pub fn try_run(
        &mut self,
        stream: &mut Stream<'_, D>,
        prepared: &Prepared<Indexer, D>,
    ) -> Result<Outcome, Error> {
        self.lane.clear_faults()?;
        prepared.bind(self.args())?.run(stream)?;
        stream.wait()?;
        let scores = self.scores.as_ref().map(|scores| scores.read().unwrap());
        Ok(Outcome {
            positions: self.positions.read()?,
            counts: self.counts.read()?,
            scores: bits(&scores.unwrap_or_default()),
            faults: self.lane.faults()?,
        })
    }
}

/// Prepares, uploads, runs once.
pub fn run<D: IndexerDevice>(device: &D, inputs: &IndexerInputs) -> Outcome {
    run_prepared(device, &prepare(device, &inputs.spec), inputs)
}

/// Uploads and runs once.
pub fn run_prepared<D: IndexerDevice>(
    device: &D,
    prepared: &Prepared<Indexer, D>,
    inputs: &IndexerInputs,
) -> Outcome {
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    Operands::new(&mut stream, inputs, prepared).run(&mut stream, prepared)
}
