//! The cache writer puts exactly the oracle's bytes where they belong, and no byte anywhere else.

use half::bf16;
use mlakit::op::writer::{
    Writer, WriterArgs, WriterCase, WriterFields, WriterInput, WriterSpec, oracle,
};
use mlakit::{
    Buffer, Error, Graph, Input, Key, Lane, Pages, Plan, PoolView, Prepared, RecordFormat, Slots,
    Stream, ViewKey,
};

use super::SuiteDevice;
use super::dense_run::tensor;
use super::random::Rng;

const PAGES: usize = 7;

/// A writer, and the bytes around what it writes.
#[derive(Clone, Debug)]
struct Shape {
    record: RecordFormat,
    latent: usize,
    rope: usize,
    /// Elements behind a record, bytes behind a page.
    padding: (usize, usize),
    page_size: usize,
    rows: usize,
}

/// The widths of a writer's tokens: latent and rotary part, or key.
pub fn token((record, first, rope): (RecordFormat, usize, usize)) -> WriterFields {
    let is_index = record.is_index();
    WriterFields {
        record,
        latent_width: if is_index { 0 } else { first },
        rope_width: rope,
        key_width: if is_index { first } else { 0 },
        page_size: 1,
        ..WriterFields::default()
    }
}

impl Shape {
    /// Nothing where the format cannot store such tokens.
    fn try_spec(&self) -> Option<WriterSpec> {
        let width = self.latent + self.rope;
        let fields = WriterFields {
            record_width: (self.padding.0 > 0).then_some(width + self.padding.0),
            page_size: self.page_size,
            max_rows: self.rows,
            ..token((self.record, self.latent, self.rope))
        };
        WriterSpec::new(fields).ok()
    }

    fn spec(&self) -> WriterSpec {
        self.try_spec().unwrap()
    }

    /// Tokens of the record's kind.
    fn tokens<'a, D: SuiteDevice>(
        &self,
        first: Input<'a, bf16, D>,
        rope: Input<'a, bf16, D>,
    ) -> WriterInput<'a, D> {
        if self.record.is_index() {
            WriterInput::Key(first)
        } else {
            WriterInput::Latent { latent: first, rope: (self.rope > 0).then_some(rope) }
        }
    }
}

/// What the device writes; every device writes `bf16` and `e4m3`.
fn shapes<D: SuiteDevice>(device: &D) -> Vec<Shape> {
    let mut shapes = Vec::new();
    for record in RecordFormat::ALL {
        let mut written = 0;
        for (latent, rope) in [(512, 64), (512, 0), (33, 8), (1, 1), (128, 32), (448, 64), (192, 7)]
        {
            for (padding, page_size, rows) in
                [((0, 0), 1, 1), ((6, 34), 16, 5), ((0, 2), 48, 64), ((32, 0), 64, 200)]
            {
                let elements = if record.is_plain() { padding.0 } else { 0 };
                let padding = (elements, padding.1);
                let shape = Shape { record, latent, rope, padding, page_size, rows };
                let Some(spec) = shape.try_spec() else { continue };
                if Plan::<Writer>::for_device::<D>(&spec, device.facts()).is_ok() {
                    shapes.push(shape);
                    written += 1;
                }
            }
        }
        assert!(written > 0 || !record.is_plain(), "{record:?}");
    }
    shapes
}

/// What one write is given. Values include what E4M3 cannot hold; slots repeat, are negative, and
/// lie beyond the pool.
struct Step {
    latent: Vec<bf16>,
    rope: Vec<bf16>,
    slots: Vec<i64>,
    scale: f32,
}

impl Step {
    fn new(shape: &Shape, rng: &mut Rng) -> Self {
        let odd = [f32::NAN, f32::INFINITY, -0.0, 1e30, -1e-30, 1e-40].map(bf16::from_f32);
        // Tokens of any magnitude, zeros among them, some with odd numbers in them.
        let mut token = |width: usize| -> Vec<bf16> {
            let scale = rng.pick(&[0.0, 1e-30, 1e-4, 1.0, 300.0]);
            let one_in = rng.pick(&[9, 1000, usize::MAX]);
            let value = |_| match rng.chance(one_in) {
                true => rng.pick(&odd),
                false => bf16::from_f32(rng.bf16().to_f32() * scale),
            };
            (0..width).map(value).collect()
        };
        let mut tokens = |width: usize| (0..shape.rows).flat_map(|_| token(width)).collect();
        let (latent, rope) = (tokens(shape.latent), tokens(shape.rope));
        let end = (PAGES * shape.page_size) as i64;
        let mut slots: Vec<i64> = (0..shape.rows).map(|_| rng.below(end as usize) as i64).collect();
        for slot in &mut slots {
            if rng.chance(5) {
                *slot = rng.pick(&[-1, -2, i64::MIN, end, end + 1, i64::MAX, 1 << 33]);
            }
        }
        Self { latent, rope, slots, scale: rng.pick(&[1.0, 0.25, 0.37]) }
    }

    fn case(&self, shape: &Shape, page_stride_bytes: usize) -> WriterCase<'_> {
        WriterCase {
            latent: &self.latent,
            rope: &self.rope,
            slots: &self.slots,
            page_stride_bytes,
            kv_scale: if shape.record.is_scaled() { self.scale } else { 1.0 },
        }
    }
}

impl Step {
    /// Writes, eagerly, and waits.
    fn run<D: SuiteDevice>(
        &self,
        stream: &mut Stream<'_, D>,
        shape: &Shape,
        prepared: &Prepared<Writer, D>,
        (view, lane): (&mut PoolView<D>, &mut Lane<D>),
    ) {
        let device = &stream.device().clone();
        let latent = tensor::<bf16, D>(device, &self.latent);
        let rope = tensor::<bf16, D>(device, &self.rope);
        let slots = tensor::<i64, D>(device, &self.slots);
        let scale: Buffer<f32, D> = tensor::<f32, D>(device, &[self.scale]);
        let args = WriterArgs {
            tokens: shape.tokens((&latent).into(), (&rope).into()),
            slots: (&slots).into(),
            cache: view.into(),
            kv_scale: shape.record.is_scaled().then(|| (&scale).into()),
            scratch: lane.into(),
        };
        prepared.bind(args).unwrap().run(stream).unwrap();
        stream.wait().unwrap();
    }
}

fn prepared<D: SuiteDevice>(device: &D, shape: &Shape) -> Prepared<Writer, D> {
    let plan = Plan::<Writer>::for_device::<D>(&shape.spec(), device.facts()).unwrap();
    plan.prepare(device).unwrap()
}

fn pool<D: SuiteDevice>(device: &D, shape: &Shape, seed: u64) -> (Pages<D>, Vec<u8>) {
    let geometry = shape.spec().pages();
    let stride = geometry.payload_bytes() + shape.padding.1;
    let mut pool = Pages::with_stride(device, "pool", geometry, (PAGES, stride)).unwrap();
    let mut rng = Rng(seed);
    let bytes: Vec<u8> = (0..PAGES * stride).map(|_| rng.bits() as u8).collect();
    pool.write((0, 0), &bytes).unwrap();
    (pool, bytes)
}

#[track_caller]
fn same_bytes<D: SuiteDevice>(what: &str, pool: &Pages<D>, needed: &[u8]) {
    let mut given = vec![0; needed.len()];
    pool.read((0, 0), &mut given).unwrap();
    if let Some(at) = given.iter().zip(needed).position(|(g, n)| g != n) {
        let (page, byte) = (at / pool.page_stride_bytes(), at % pool.page_stride_bytes());
        panic!("{what}: byte {byte} of page {page} is {}, needed {}", given[at], needed[at]);
    }
}

/// Eager writes: every byte of the pool is the oracle's, skipped slots are counted.
pub fn writes_the_bytes_of_the_oracle<D: SuiteDevice>(device: &D) {
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    for (seed, shape) in shapes(device).iter().enumerate() {
        let mut rng = Rng(seed as u64);
        let prepared = prepared(device, shape);
        let (pool, mut needed) = pool(device, shape, seed as u64);
        let mut view = PoolView::new(device, "view", pool.geometry()).unwrap();
        view.bind(&mut stream, &pool).unwrap();
        let mut lane = Lane::new(device, "lane", &[prepared.plan().scratch_bytes()]).unwrap();
        let mut skipped = 0;
        for step in [0, 1].map(|_| Step::new(shape, &mut rng)) {
            let case = step.case(shape, pool.page_stride_bytes());
            skipped += oracle(&shape.spec(), &case, &mut needed);
            step.run(&mut stream, shape, &prepared, (&mut view, &mut lane));
            same_bytes(&format!("{shape:?}"), &pool, &needed);
        }
        assert_eq!(lane.faults().unwrap(), [skipped, 0, 0], "{shape:?}");
    }
}

struct Recorded<D: SuiteDevice> {
    graph: Graph<D>,
    view: ViewKey,
    latent: Key<bf16>,
    rope: Key<bf16>,
    slots: Key<i64>,
    scale: Key<f32>,
}

impl<D: SuiteDevice> Recorded<D> {
    fn new(
        stream: &mut Stream<'_, D>,
        shape: &Shape,
        (prepared, lane): (&Prepared<Writer, D>, &Lane<D>),
    ) -> Self {
        let mut set = Slots::new(&stream.device().clone());
        let view = set.view("view", shape.spec().pages()).unwrap();
        let latent = set.slot("latent", shape.rows * shape.latent).unwrap();
        let rope = set.slot("rope", shape.rows * shape.rope).unwrap();
        let slots = set.slot("slots", shape.rows).unwrap();
        let scale = set.slot("scale", 1).unwrap();
        let graph = set.capture(stream, |rec| {
            let args = WriterArgs {
                tokens: shape.tokens(rec.input(latent)?, rec.input(rope)?),
                slots: rec.input(slots)?,
                cache: rec.cache_mut(view)?,
                kv_scale: shape.record.is_scaled().then(|| rec.input(scale)).transpose()?,
                scratch: lane.lease(),
            };
            prepared.bind(args)?.run(rec)
        });
        Self { graph: graph.unwrap(), view, latent, rope, slots, scale }
    }
}

/// Replays with other keys, slots and scales, into pools that change: every byte is the oracle's.
pub fn replays_write_the_bytes_of_the_oracle<D: SuiteDevice>(device: &D) {
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    for (seed, shape) in shapes(device).iter().enumerate().step_by(3) {
        let mut rng = Rng(seed as u64 + 1000);
        let prepared = prepared(device, shape);
        let lane = Lane::new(device, "lane", &[prepared.plan().scratch_bytes()]).unwrap();
        let mut pools = [0, 1].map(|index| pool(device, shape, index));
        let mut recorded = Recorded::new(&mut stream, shape, (&prepared, &lane));
        let mut skipped = 0;
        for replay in 0..12 {
            let step = Step::new(shape, &mut rng);
            let (pool, needed) = &mut pools[replay % 2];
            let case = step.case(shape, pool.page_stride_bytes());
            skipped += oracle(&shape.spec(), &case, needed);
            let graph = &mut recorded.graph;
            graph.bind(&mut stream, recorded.view, pool).unwrap();
            graph.slot_mut(recorded.latent).unwrap().write(&step.latent).unwrap();
            graph.slot_mut(recorded.rope).unwrap().write(&step.rope).unwrap();
            graph.slot_mut(recorded.slots).unwrap().write(&step.slots).unwrap();
            graph.slot_mut(recorded.scale).unwrap().write(&[case.kv_scale]).unwrap();
            graph.replay(&mut stream).unwrap().wait(&mut stream).unwrap();
        }
        for (pool, needed) in &pools {
            same_bytes(&format!("replays of {shape:?}"), pool, needed);
        }
        assert_eq!(lane.faults().unwrap(), [skipped, 0, 0], "{shape:?}");
    }
}

/// A slot beyond 2^31 bytes of cache is that slot, in every format: what low pages hold after a
/// write, high pages hold too, and no byte of a page around them changes.
pub fn slots_beyond_two_gibibytes<D: SuiteDevice>(device: &D) {
    const PAGE: usize = 16;
    const STRIDE: usize = 1 << 22;
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let high = [511, 512, 1099];
    for shape in shapes(device).iter().filter(|s| s.page_size == PAGE && s.padding.0 == 0) {
        let shape = &Shape { rows: high.len(), ..shape.clone() };
        let prepared = prepared(device, shape);
        let geometry = shape.spec().pages();
        let size = (1100, STRIDE);
        let mut pool = Pages::with_stride(device, "large pool", geometry, size).unwrap();
        let mut view = PoolView::new(device, "view", geometry).unwrap();
        let mut lane = Lane::new(device, "lane", &[prepared.plan().scratch_bytes()]).unwrap();
        let mut step = Step::new(shape, &mut Rng(9));
        // The oracle writes three pages that take the place of the high ones.
        let payload = geometry.payload_bytes();
        let mut needed = vec![0x5a; high.len() * payload];
        step.slots = vec![3, PAGE as i64, 2 * PAGE as i64 + 15];
        oracle(&shape.spec(), &step.case(shape, payload), &mut needed);
        step.slots = step.slots.iter().zip([511, 511, 1097]).map(|(s, p)| s + 16 * p).collect();
        for page in high {
            pool.write((page, 0), &vec![0x5a; payload]).unwrap();
        }
        view.bind(&mut stream, &pool).unwrap();
        step.run(&mut stream, shape, &prepared, (&mut view, &mut lane));
        for (page, needed) in high.into_iter().zip(needed.chunks_exact(payload)) {
            let mut given = vec![0; payload];
            pool.read((page, 0), &mut given).unwrap();
            assert_eq!(given, needed, "page {page} of {shape:?}");
        }
        assert_eq!(lane.faults().unwrap(), [0; 3], "{shape:?}");
    }
}

/// A latent where keys are stored, a key where latents are, and a call without tokens.
pub fn tokens_of_another_kind_are_refused<D: SuiteDevice>(device: &D) {
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let mut rng = Rng(3);
    for shape in shapes(device).iter().filter(|s| s.page_size == 16 && s.padding.0 == 0) {
        let prepared = prepared(device, shape);
        let (pool, needed) = pool(device, shape, 5);
        let mut view = PoolView::new(device, "view", pool.geometry()).unwrap();
        view.bind(&mut stream, &pool).unwrap();
        let lane = Lane::new(device, "lane", &[prepared.plan().scratch_bytes()]).unwrap();
        let step = Step::new(shape, &mut rng);
        let latent = tensor::<bf16, D>(device, &step.latent);
        let rope = tensor::<bf16, D>(device, &step.rope);
        let scale: Buffer<f32, D> = tensor::<f32, D>(device, &[1.0]);
        let mut write = |tokens: WriterInput<'_, D>, rows: usize| {
            let slots = tensor::<i64, D>(device, &step.slots[..rows]);
            let args = WriterArgs {
                tokens,
                slots: (&slots).into(),
                cache: view.lease_mut(),
                kv_scale: shape.record.is_scaled().then(|| (&scale).into()),
                scratch: lane.lease(),
            };
            prepared.bind(args)?.run(&mut stream)?;
            stream.wait()
        };
        let other = if shape.record.is_index() {
            WriterInput::Latent { latent: (&latent).into(), rope: None }
        } else {
            WriterInput::Key((&latent).into())
        };
        let refused = write(other, shape.rows).err();
        assert!(matches!(refused, Some(Error::Contract { what: "tokens", .. })), "{refused:?}");
        write(shape.tokens((&latent).into(), (&rope).into()), 0).unwrap();
        same_bytes(&format!("{shape:?}"), &pool, &needed);
    }
}
