//! The indexer and its selection, beside a matrix product of the same run.
//!
//! `cargo run --release -p mlakit-cpu --example index_bench -- [ROUNDS]`
//!
//! Prints one JSON object a measurement: every round's rate, and for the indexer the ratio to the BF16
//! product of 1024 x 1024 x 1024 of the same round (the larger, the better). Selection is given in
//! microseconds.

use std::time::Instant;

use half::bf16;
use mlakit::op::indexer::{Indexer, IndexerArgs, IndexerFields, IndexerSpec};
use mlakit::op::layer::{Float, FloatInput, FloatOutput};
use mlakit::op::linear::{Linear, LinearArgs, LinearFields, LinearSpec};
use mlakit::{
    Buffer, Category, Device, Element, Lane, Pages, Plan, PoolView, Prepared, RecordFormat, Stream,
};
use mlakit_cpu::Cpu;
use mlakit_cpu::kernel::Kernels;
use mlakit_cpu::kernel::topk::{Candidates, capacity, list_bytes};

const HEADS: usize = 64;
const WIDTH: usize = 128;
const PAGE: usize = 64;
const TOPK: usize = 2048;

fn main() {
    let rounds = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(5);
    let device = Cpu::detect().expect("a CPU");
    println!("{{\"device\": \"{}\", \"rounds\": {rounds}}}", device.facts());
    let caller = device.own_stream().expect("a stream");
    let mut stream = device.stream(&caller).expect("a stream");
    let mut gemm = Product::new(&device);
    for record in
        [RecordFormat::IndexBf16_256, RecordFormat::IndexFp8_132, RecordFormat::IndexMxfp4_68]
    {
        for (rows, keys) in [(1, 65_536), (4, 65_536), (64, 16_384)] {
            let mut index = Index::new(&mut stream, record, (rows, keys));
            let (mut rates, mut ratios) = (Vec::new(), Vec::new());
            for _ in 0..rounds {
                let product = 2.0 * 1024f64.powi(3) / best(|| gemm.run(&mut stream));
                let seen: usize = (0..rows).map(|row| keys - row).sum();
                let rate = (2 * seen * HEADS * WIDTH) as f64 / best(|| index.run(&mut stream));
                rates.push(rate / 1e9);
                ratios.push(rate / product);
            }
            let name = record.name();
            println!(
                "{{\"indexer\": \"{name}\", \"rows\": {rows}, \"keys\": {keys}, \"heads\": {HEADS}, \
                 \"width\": {WIDTH}, \"gflops\": {rates:.1?}, \"of_gemm\": {ratios:.3?}}}"
            );
        }
    }
    selection(&device, rounds);
}

/// Seconds of one call, the best of calls that fill 100 ms, after one that warms.
fn best(mut call: impl FnMut()) -> f64 {
    call();
    let (begin, mut best) = (Instant::now(), f64::MAX);
    while begin.elapsed().as_millis() < 100 {
        let start = Instant::now();
        call();
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}

/// A small generator, normal by a sum of four.
fn normals(count: usize) -> Vec<f32> {
    let mut seed = 1_u64;
    let next = |_| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let sum: u64 = (0..4).map(|i| seed >> (16 * i) & 0xffff).sum();
        (sum as f32 / 65_536.0 - 2.0) * 1.7
    };
    (0..count).map(next).collect()
}

fn narrow(values: Vec<f32>) -> Vec<bf16> {
    values.into_iter().map(bf16::from_f32).collect()
}

fn tensor<T: Element>(device: &Cpu, values: &[T::Raw]) -> Buffer<T, Cpu> {
    Buffer::new(device, (Category::Tensors, "bench"), values).expect("memory")
}

struct Product {
    prepared: Prepared<Linear, Cpu>,
    x: Buffer<bf16, Cpu>,
    weight: Buffer<bf16, Cpu>,
    y: Buffer<bf16, Cpu>,
    lane: Lane<Cpu>,
}

impl Product {
    fn new(device: &Cpu) -> Self {
        let fields = LinearFields {
            in_width: 1024,
            out_width: 1024,
            max_rows: 1024,
            input: Float::Bf16,
            output: Float::Bf16,
            accumulate: false,
            bias: false,
            experts: None,
        };
        let spec = LinearSpec::new(fields).expect("a spec");
        let plan = Plan::<Linear>::for_device::<Cpu>(&spec, device.facts()).expect("a plan");
        let prepared = plan.prepare(device).expect("code");
        let matrix = || tensor::<bf16>(device, &narrow(normals(1 << 20)));
        let lane = Lane::new(device, "bench", &[plan.scratch_bytes()]).expect("memory");
        Self { prepared, x: matrix(), weight: matrix(), y: matrix(), lane }
    }

    fn run(&mut self, stream: &mut Stream<'_, Cpu>) {
        let args = LinearArgs {
            x: FloatInput::Bf16((&self.x).into()),
            weight: (&self.weight).into(),
            bias: None,
            ids: None,
            gates: None,
            y: FloatOutput::Bf16((&mut self.y).into()),
            scratch: (&mut self.lane).into(),
        };
        self.prepared.bind(args).expect("operands").run(stream).expect("a run");
    }
}

struct Index {
    prepared: Prepared<Indexer, Cpu>,
    q: Buffer<bf16, Cpu>,
    weights: Buffer<f32, Cpu>,
    view: PoolView<Cpu>,
    table: Buffer<i32, Cpu>,
    lengths: Buffer<i32, Cpu>,
    offsets: Buffer<i32, Cpu>,
    positions: Buffer<i32, Cpu>,
    counts: Buffer<i32, Cpu>,
    lane: Lane<Cpu>,
    _pool: Pages<Cpu>,
}

impl Index {
    fn new(
        stream: &mut Stream<'_, Cpu>,
        record: RecordFormat,
        (rows, keys): (usize, usize),
    ) -> Self {
        let device = &stream.device().clone();
        let fields = IndexerFields {
            heads: HEADS,
            width: WIDTH,
            record,
            page_size: PAGE,
            topk: TOPK,
            scores: false,
            pool_size: 1,
            budget_bytes: 16 << 20,
            max_rows: rows,
            max_batch: 1,
            max_kv_tokens: keys,
            max_table_width: keys / PAGE,
        };
        let spec = IndexerSpec::new(fields).expect("a spec");
        let plan = Plan::<Indexer>::for_device::<Cpu>(&spec, device.facts()).expect("a plan");
        let prepared = plan.prepare(device).expect("code");
        let mut pool = Pages::new(device, "bench", spec.pages(), keys / PAGE).expect("memory");
        let (layout, bytes) = (spec.layout(), spec.pages().payload_bytes());
        let planes = layout.planes(PAGE);
        let values = narrow(normals(PAGE * WIDTH));
        for page in 0..keys / PAGE {
            let mut content = vec![0; bytes];
            let (data, scales) = content.split_at_mut(planes.scales.first);
            for (token, key) in values.chunks_exact(WIDTH).enumerate() {
                let at = token * planes.scales.stride;
                let scales = &mut scales[at..at + planes.scales.bytes];
                layout.encode(
                    &mut data[planes.data.token((token + page) % PAGE)],
                    scales,
                    key,
                    1.0,
                );
            }
            pool.write((page, 0), &content).expect("a page");
        }
        let mut view = PoolView::new(device, "bench", spec.pages()).expect("memory");
        view.bind(stream, &pool).expect("a pool");
        // Pages in a scattered order.
        let table: Vec<i32> = (0..keys / PAGE).map(|i| (i * 37 % (keys / PAGE)) as i32).collect();
        Self {
            prepared,
            q: tensor(device, &narrow(normals(rows * HEADS * WIDTH))),
            weights: tensor(device, &normals(rows * HEADS)),
            table: tensor(device, &table),
            lengths: tensor(device, &[keys as i32]),
            offsets: tensor(device, &[0, rows as i32]),
            positions: tensor(device, &vec![0; rows * TOPK]),
            counts: tensor(device, &vec![0; rows]),
            lane: Lane::new(device, "bench", &[plan.scratch_bytes()]).expect("memory"),
            view,
            _pool: pool,
        }
    }

    fn run(&mut self, stream: &mut Stream<'_, Cpu>) {
        let args = IndexerArgs {
            q: (&self.q).into(),
            weights: (&self.weights).into(),
            cache: (&self.view).into(),
            page_table: (&self.table).into(),
            kv_lens: (&self.lengths).into(),
            q_offsets: (&self.offsets).into(),
            last_position: None,
            positions: (&mut self.positions).into(),
            counts: (&mut self.counts).into(),
            scores: None,
            scratch: (&mut self.lane).into(),
        };
        self.prepared.bind(args).expect("operands").run(stream).expect("a run");
    }
}

/// The best 2,048 of 131,072 scores on one thread, in orders from kind to hostile.
fn selection(device: &Cpu, rounds: usize) {
    const SCORES: usize = 131_072;
    let kernels = Kernels::new(device.facts().isa).expect("the device's instructions");
    let random = normals(SCORES);
    let mut rising = random.clone();
    rising.sort_by(f32::total_cmp);
    let falling: Vec<f32> = rising.iter().rev().copied().collect();
    for (name, scores) in [
        ("random", random),
        ("all equal", vec![1.0; SCORES]),
        ("rising", rising),
        ("falling", falling),
    ] {
        let mut memory = vec![0; list_bytes(capacity(TOPK, SCORES)) / 4];
        let mut list = Candidates::in_memory(&mut memory, TOPK);
        let mut micros = Vec::new();
        for _ in 0..rounds {
            let seconds = best(|| {
                list.clear();
                kernels.select(&mut list, &scores, 0);
                std::hint::black_box(list.finish());
            });
            micros.push(seconds * 1e6);
        }
        println!(
            "{{\"select\": \"{name}\", \"topk\": {TOPK}, \"scores\": {SCORES}, \"threads\": 1, \
             \"microseconds\": {micros:.1?}}}"
        );
    }
}
