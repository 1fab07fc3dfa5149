//! The cache writer puts exactly the oracle's bytes where they belong, and no byte anywhere else.

use half::bf16;
use mlakit::op::writer::{Writer, WriterArgs, WriterCase, WriterFields, WriterSpec, oracle};
use mlakit::{
    Buffer, Graph, Key, Lane, Pages, Plan, PoolView, Prepared, RecordFormat, Slots, Stream, ViewKey,
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

impl Shape {
    fn spec(&self) -> WriterSpec {
        let width = self.latent + self.rope;
        WriterSpec::new(WriterFields {
            record: self.record,
            record_width: (self.padding.0 > 0).then_some(width + self.padding.0),
            page_size: self.page_size,
            latent_width: self.latent,
            rope_width: self.rope,
            max_rows: self.rows,
        })
        .unwrap()
    }
}

fn shapes() -> Vec<Shape> {
    let mut shapes = Vec::new();
    for record in RecordFormat::ALL {
        for (latent, rope) in [(512, 64), (512, 0), (33, 8), (1, 1), (128, 32)] {
            for (padding, page_size, rows) in
                [((0, 0), 1, 1), ((6, 34), 16, 5), ((0, 2), 48, 64), ((32, 0), 64, 200)]
            {
                shapes.push(Shape { record, latent, rope, padding, page_size, rows });
            }
        }
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
        let odd = [f32::NAN, f32::INFINITY, -0.0, 1e30, -1e-30].map(bf16::from_f32);
        let mut values = |len: usize| -> Vec<bf16> {
            (0..len).map(|_| if rng.chance(9) { rng.pick(&odd) } else { rng.bf16() }).collect()
        };
        let (latent, rope) = (values(shape.rows * shape.latent), values(shape.rows * shape.rope));
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
    for (seed, shape) in shapes().iter().enumerate() {
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
            let (latent, rope) =
                (tensor::<bf16, D>(device, &step.latent), tensor::<bf16, D>(device, &step.rope));
            let slots = tensor::<i64, D>(device, &step.slots);
            let scale: Buffer<f32, D> = tensor::<f32, D>(device, &[case.kv_scale]);
            let args = WriterArgs {
                latent: (&latent).into(),
                rope: (shape.rope > 0).then(|| (&rope).into()),
                slots: (&slots).into(),
                cache: (&mut view).into(),
                kv_scale: shape.record.is_scaled().then(|| (&scale).into()),
                scratch: (&mut lane).into(),
            };
            prepared.bind(args).unwrap().run(&mut stream).unwrap();
            stream.wait().unwrap();
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
                latent: rec.input(latent)?,
                rope: (shape.rope > 0).then(|| rec.input(rope)).transpose()?,
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
    for (seed, shape) in shapes().iter().enumerate().step_by(3) {
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

/// A slot beyond 2^31 bytes of cache is that slot.
pub fn slots_beyond_two_gibibytes<D: SuiteDevice>(device: &D) {
    const STRIDE: usize = 1 << 22;
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let record = RecordFormat::Bf16;
    let shape = Shape { record, latent: 33, rope: 8, padding: (0, 0), page_size: 16, rows: 3 };
    let prepared = prepared(device, &shape);
    let geometry = shape.spec().pages();
    let pool = Pages::with_stride(device, "large pool", geometry, (1100, STRIDE)).unwrap();
    let mut view = PoolView::new(device, "view", geometry).unwrap();
    view.bind(&mut stream, &pool).unwrap();
    let mut lane = Lane::new(device, "lane", &[prepared.plan().scratch_bytes()]).unwrap();
    let mut rng = Rng(9);
    let (latent, rope) = (rng.bf16s(3 * 33), rng.bf16s(3 * 8));
    let slots = [511 * 16 + 3, 512 * 16, 1099 * 16 + 15];
    let device_tensors = (
        tensor::<bf16, D>(device, &latent),
        tensor::<bf16, D>(device, &rope),
        tensor::<i64, D>(device, &slots),
    );
    let args = WriterArgs {
        latent: (&device_tensors.0).into(),
        rope: Some((&device_tensors.1).into()),
        slots: (&device_tensors.2).into(),
        cache: (&mut view).into(),
        kv_scale: None,
        scratch: (&mut lane).into(),
    };
    prepared.bind(args).unwrap().run(&mut stream).unwrap();
    stream.wait().unwrap();
    for (row, slot) in slots.into_iter().enumerate() {
        let (page, offset) = (slot as usize / 16, slot as usize % 16);
        let mut given = vec![bf16::ZERO; 41];
        let at = (page, offset * geometry.record.bytes());
        pool.read(at, bytemuck::cast_slice_mut(&mut given)).unwrap();
        let needed = [&latent[row * 33..][..33], &rope[row * 8..][..8]].concat();
        assert_eq!(given, needed, "slot {slot}");
    }
    assert_eq!(lane.faults().unwrap(), [0; 3]);
}
