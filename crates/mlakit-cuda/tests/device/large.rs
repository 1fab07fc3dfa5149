//! Sizes that a 16-bit or a 32-bit number does not count, and many live inputs.

use half::bf16;
use mlakit::op::dense::{Dense, DenseArgs, DenseFields, DenseSpec, QueryInput};
use mlakit::op::merge::{
    LseInput, LseOutput, Merge, MergeArgs, MergeFields, MergeSpec, Partial, PartialInput,
};
use mlakit::{
    Buffer, Category, Device, Lane, Lse, LseBase, Natural, Pages, Plan, PoolView, Prepared, Slots,
    Splits, Stream,
};
use mlakit_cuda::Cuda;

use super::cuda;
use super::driver::Driver;
use super::suite::dense_inputs::shape;
use super::suite::dense_run::tensor;
use super::suite::random::Rng;

const WIDTH: usize = 8;

/// Two parts of one head.
pub fn merge_spec() -> MergeSpec {
    merge_of(1)
}

fn merge_of(rows: usize) -> MergeSpec {
    MergeSpec::new(MergeFields {
        splits: 2,
        heads: 1,
        value_width: WIDTH,
        partial: Partial::F32,
        lse: LseBase::Natural,
        sink: false,
        sink_in_lse: false,
        max_rows: rows,
    })
    .unwrap()
}

/// More rows than a grid has blocks in y or z, and more than a block and a grid of 65,535 take:
/// each row of two parts of equal weight is their mean.
#[test]
fn grids_beyond_65_535() {
    let Some(device) = cuda() else { return };
    let rows = 1_100_003;
    let plan = Plan::<Merge>::for_device::<Cuda>(&merge_of(rows), device.facts()).unwrap();
    let merge = plan.prepare(&device).unwrap();
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let value = |part: usize, row: usize| ((row % 251) + 2 * part) as f32;
    let parts = [0, 1].map(|part| (0..rows * WIDTH).map(move |i| value(part, i / WIDTH)));
    let outs: Vec<f32> = parts.into_iter().flatten().collect();
    let outs = tensor::<f32, Cuda>(&device, &outs);
    let lses = tensor::<Lse<Natural>, Cuda>(&device, &vec![0.25; 2 * rows]);
    let mut out = tensor::<bf16, Cuda>(&device, &vec![bf16::NAN; rows * WIDTH]);
    let mut lse = tensor::<Lse<Natural>, Cuda>(&device, &vec![f32::NAN; rows]);
    let mut lane = Lane::new(&device, "lane", &[plan.scratch_bytes()]).unwrap();
    let args = MergeArgs {
        outs: PartialInput::F32((&outs).into()),
        lses: LseInput::Natural((&lses).into()),
        sink: None,
        out: (&mut out).into(),
        lse: LseOutput::Natural((&mut lse).into()),
        scratch: (&mut lane).into(),
    };
    merge.bind(args).unwrap().run(&mut stream).unwrap();
    stream.wait().unwrap();
    for (index, given) in out.read().unwrap().into_iter().enumerate() {
        let needed = bf16::from_f32(value(0, index / WIDTH) + 1.0);
        assert_eq!(given, needed, "row {} element {}", index / WIDTH, index % WIDTH);
    }
    let needed = 0.25 + 2f32.ln();
    assert!(lse.read().unwrap().iter().all(|lse| (lse - needed).abs() < 1e-6));
}

const ROWS: usize = 4096;
const HEADS: usize = 64;
const QK: usize = 576;
const VALUE: usize = 512;
const BATCH: usize = 32;
const PAGE: usize = 64;
const TABLE: usize = 8;
const PAGES: usize = 300;

fn many_spec() -> DenseSpec {
    let requests = vec![(TABLE * PAGE, ROWS / BATCH); BATCH];
    let mut shape = shape(HEADS, (QK, VALUE), &requests);
    shape.page_size = PAGE;
    let mut fields: DenseFields = shape.spec().into();
    fields.max_table_width = TABLE;
    DenseSpec::new(fields).unwrap()
}

/// Elements of the queries.
const Q: usize = ROWS * HEADS * QK;

/// Elements of the numbers that are made once; the queries of a replay are some Q of them.
const NUMBERS: usize = Q + (1 << 22);

/// What changes from one replay to the next.
struct Step {
    /// The first of the numbers.
    first: usize,
    table: Vec<i32>,
    kv_lens: Vec<i32>,
    pool: usize,
}

impl Step {
    fn new(rng: &mut Rng) -> Self {
        let mut pages: Vec<i32> = (0..PAGES as i32).collect();
        rng.shuffle(&mut pages);
        Self {
            first: 2 * rng.below((NUMBERS - Q) / 2),
            table: pages[..BATCH * TABLE].to_vec(),
            kv_lens: (0..BATCH).map(|_| rng.below(TABLE * PAGE + 1) as i32).collect(),
            pool: rng.below(2),
        }
    }
}

/// The operation, what stays, and the operands of eager calls.
struct Many {
    dense: Prepared<Dense, Cuda>,
    pools: [Pages<Cuda>; 2],
    lane: Lane<Cuda>,
    q: Buffer<bf16, Cuda>,
    table: Buffer<i32, Cuda>,
    kv_lens: Buffer<i32, Cuda>,
    offsets: Buffer<i32, Cuda>,
    view: PoolView<Cuda>,
    out: Buffer<bf16, Cuda>,
    lse: Buffer<Lse<Natural>, Cuda>,
}

fn offsets() -> Vec<i32> {
    (0..=BATCH).map(|request| (request * ROWS / BATCH) as i32).collect()
}

impl Many {
    fn new(device: &Cuda) -> Self {
        let plan = Plan::<Dense>::for_device::<Cuda>(&many_spec(), device.facts()).unwrap();
        let geometry = plan.spec().pages();
        let pools = [0, 1].map(|seed| {
            let mut pool = Pages::new(device, "pool", geometry, PAGES).unwrap();
            let values = Rng(seed).bf16s(PAGES * PAGE * QK);
            pool.write((0, 0), bytemuck::cast_slice(&values)).unwrap();
            pool
        });
        Self {
            dense: plan.prepare(device).unwrap(),
            pools,
            lane: Lane::new(device, "lane", &[plan.scratch_bytes()]).unwrap(),
            q: Buffer::zeroed(device, (Category::Tensors, "q"), Q).unwrap(),
            table: tensor::<i32, Cuda>(device, &[-1; BATCH * TABLE]),
            kv_lens: tensor::<i32, Cuda>(device, &[0; BATCH]),
            offsets: tensor::<i32, Cuda>(device, &offsets()),
            view: PoolView::new(device, "view", geometry).unwrap(),
            out: Buffer::zeroed(device, (Category::Tensors, "out"), OUT).unwrap(),
            lse: Buffer::zeroed(device, (Category::Tensors, "lse"), ROWS * HEADS).unwrap(),
        }
    }

    /// One eager call, with the queries that are there.
    fn eager(&mut self, stream: &mut Stream<'_, Cuda>, step: &Step) {
        self.table.write(&step.table).unwrap();
        self.kv_lens.write(&step.kv_lens).unwrap();
        self.view.bind(stream, &self.pools[step.pool]).unwrap();
        let args = DenseArgs {
            q: QueryInput::Bf16((&self.q).into()),
            cache: (&self.view).into(),
            page_table: (&self.table).into(),
            kv_lens: (&self.kv_lens).into(),
            q_offsets: (&self.offsets).into(),
            row_kv_lens: None,
            kv_scale: None,
            q_scale: None,
            out: (&mut self.out).into(),
            lse: LseOutput::Natural((&mut self.lse).into()),
            scratch: (&mut self.lane).into(),
        };
        self.dense.bind(args).unwrap().run(stream).unwrap();
        stream.wait().unwrap();
    }
}

const OUT: usize = ROWS * HEADS * VALUE;

/// 4,096 query rows of 64 heads: replays with other queries, lengths, pages and pool each time give
/// the eager run's bits, in every output and every log-sum-exp. Both are filled with different
/// words before, so what is not written differs.
#[test]
fn replays_of_many_rows_equal_eager_runs() {
    let Some(device) = cuda() else { return };
    let driver = Driver::new(&device);
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let mut rng = Rng(9);
    let numbers: Vec<bf16> = rng.bf16s(1 << 22).into_iter().cycle().take(NUMBERS).collect();
    let numbers = tensor::<bf16, Cuda>(&device, &numbers);
    let mut many = Many::new(&device);
    let mut slots = Slots::new(&device);
    let q = slots.slot("q", Q).unwrap();
    let table = slots.slot("table", BATCH * TABLE).unwrap();
    let kv_lens = slots.slot("lengths", BATCH).unwrap();
    let rows = slots.slot("offsets", BATCH + 1).unwrap();
    let view = slots.view("view", many.dense.plan().spec().pages()).unwrap();
    let out = Buffer::<bf16, Cuda>::zeroed(&device, (Category::Tensors, "out"), OUT).unwrap();
    let kind = (Category::Tensors, "lse");
    let lse = Buffer::<Lse<Natural>, Cuda>::zeroed(&device, kind, ROWS * HEADS).unwrap();
    let graph = slots.capture(&mut stream, |rec| {
        let args = DenseArgs {
            q: QueryInput::Bf16(rec.input(q)?),
            cache: rec.cache(view)?,
            page_table: rec.input(table)?,
            kv_lens: rec.input(kv_lens)?,
            q_offsets: rec.input(rows)?,
            row_kv_lens: None,
            kv_scale: None,
            q_scale: None,
            out: (&out.lease()).into(),
            lse: LseOutput::Natural((&lse.lease()).into()),
            scratch: many.lane.lease(),
        };
        many.dense.bind(args)?.run(rec)
    });
    let mut graph = graph.unwrap();
    graph.slot_mut(rows).unwrap().write(&offsets()).unwrap();
    let results = [
        (out.address(), many.out.address(), OUT / 2),
        (lse.address(), many.lse.address(), ROWS * HEADS),
    ];
    for index in 0..1000 {
        let step = Step::new(&mut rng);
        for to in [many.q.address(), graph.address(q).unwrap()] {
            driver.copy(to, numbers.address() + 2 * step.first as u64, Q / 2);
        }
        for (replayed, eager, words) in results {
            driver.fill(replayed, 0x7fc1_7fc1, words);
            driver.fill(eager, 0x7fc2_7fc2, words);
        }
        many.eager(&mut stream, &step);
        graph.slot_mut(table).unwrap().write(&step.table).unwrap();
        graph.slot_mut(kv_lens).unwrap().write(&step.kv_lens).unwrap();
        graph.bind(&mut stream, view, &many.pools[step.pool]).unwrap();
        graph.replay(&mut stream).unwrap().wait(&mut stream).unwrap();
        for (what, (replayed, eager, words)) in ["out", "lse"].into_iter().zip(results) {
            assert_eq!(
                driver.differing(replayed, eager, words),
                0,
                "replay {index}: words of {what}"
            );
        }
    }
}

/// One plan in every split mode, twenty times on the same inputs.
#[test]
fn twenty_repeats_are_the_same_bits() {
    let Some(device) = cuda() else { return };
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    for splits in [Splits::Auto, Splits::Count(7), Splits::FixedTokens(128)] {
        let mut shape = shape(128, (QK, VALUE), &[(5000, 1), (63, 4), (0, 1), (2049, 2)]);
        (shape.splits, shape.page_size) = (splits, 64);
        let inputs = super::suite::dense_inputs::DenseInputs::new(&shape, 11);
        let prepared = super::suite::dense_run::prepare(&device, &inputs.spec);
        let mut operands = super::suite::dense_run::Operands::new(&mut stream, &inputs, &prepared);
        let needed = operands.run(&mut stream, &prepared);
        for repeat in 1..20 {
            operands.lane.poison(repeat).unwrap();
            let given = operands.run(&mut stream, &prepared);
            super::suite::compare::same_bits("a repeat", &given, &needed);
        }
    }
}
