//! Things that the tests share: one layer of two toy operations, on any device.
#![allow(dead_code, missing_docs, unused_imports)]

pub use half::bf16;
pub use mlakit::op::toy::{
    Scale, ScaleArgs, ScaleFields, ScaleSpec, Sum, SumArgs, SumFields, SumSpec,
};
pub use mlakit::sim::{AtOnce, Fault, Late};
pub use mlakit::*;

/// A page of 16 BF16 numbers.
pub const PAGE: PageGeometry = PageGeometry {
    record: RecordLayout { format: RecordFormat::Bf16, width: 1, rope: 0 },
    page_size: 16,
};
pub const ROWS: usize = 2;
pub const FACTOR: f32 = 10.0;

/// What a layer gives for a page that holds `value` everywhere.
pub const fn of_page(value: f32) -> f32 {
    FACTOR * value * PAGE.page_size as f32
}

/// A device that runs everything here.
pub trait Toy: Runs<Scale> + Runs<Sum> {}
impl<D: Runs<Scale> + Runs<Sum>> Toy for D {}

/// What a layer keeps: code, and leases of what others own. So one `step` serves a stream and a
/// recorder.
pub struct Layer<D: Toy> {
    pub scale: Prepared<Scale, D>,
    pub sum: Prepared<Sum, D>,
    pub factor: Lease<f32, D>,
}

pub fn scale_spec(rows: usize, pages: PageGeometry) -> ScaleSpec {
    ScaleSpec::new(ScaleFields { rows, pages }).unwrap()
}

pub fn sum_spec(rows: usize, width: usize) -> SumSpec {
    SumSpec::new(SumFields { rows, width }).unwrap()
}

pub fn plans<D: Toy>(facts: &D::Facts) -> (Plan<Scale>, Plan<Sum>) {
    let scale = Plan::for_device::<D>(&scale_spec(ROWS, PAGE), facts).unwrap();
    let sum = Plan::for_device::<D>(&sum_spec(ROWS, PAGE.page_size), facts).unwrap();
    (scale, sum)
}

/// A tensor of F32.
pub fn tensor<D: Device>(device: &D, name: &str, values: &[f32]) -> Buffer<f32, D> {
    Buffer::new(device, (Category::Tensors, name), values).unwrap()
}

/// A page table.
pub fn table<D: Device>(device: &D, ids: &[i32]) -> Buffer<i32, D> {
    Buffer::new(device, (Category::Tensors, "table"), ids).unwrap()
}

/// The bytes of a page that holds `value` everywhere.
pub fn page(value: f32) -> [u8; 32] {
    bytemuck::cast([bf16::from_f32(value); 16])
}

impl<D: Toy> Layer<D> {
    pub fn new(device: &D, factor: &Buffer<f32, D>) -> Self {
        let (scale, sum) = plans::<D>(device.facts());
        let (scale, sum) = (scale.prepare(device).unwrap(), sum.prepare(device).unwrap());
        Self { scale, sum, factor: factor.lease() }
    }

    pub fn lane(&self, device: &D) -> Lane<D> {
        let bytes = [self.scale.plan().scratch_bytes(), self.sum.plan().scratch_bytes()];
        Lane::new(device, "lane", &bytes).unwrap()
    }

    /// out[r] = factor * sum of page page_table[r]. All operands are leases: this is the one way of
    /// the data.
    pub fn step<R: Runner<'static, D>>(
        &self,
        runner: &mut R,
        lane: &Lane<D>,
        (page_table, cache): (Input<'static, i32, D>, Cache<'static, D>),
        scaled: &Lease<f32, D>,
        out: Output<'static, f32, D>,
    ) -> Result<(), Error> {
        let (factor, scratch) = ((&self.factor).into(), lane.lease());
        let args = ScaleArgs { factor, page_table, cache, out: scaled.into(), scratch };
        self.scale.bind(args)?.run(runner)?;
        self.sum.bind(SumArgs { x: scaled.into(), out, scratch: lane.lease() })?.run(runner)?;
        Ok(())
    }
}

/// A device with a layer, a captured graph and a bound pool whose page p holds p + 1 everywhere.
pub struct World<D: Toy> {
    pub graph: Graph<D>,
    pub table: Key<i32>,
    pub out: Key<f32>,
    pub view: ViewKey,
    pub pool: Pages<D>,
    pub factor: Buffer<f32, D>,
    pub scaled: Buffer<f32, D>,
    pub lane: Lane<D>,
    pub layer: Layer<D>,
}

/// Three pages that hold `first`, `first` + 1 and `first` + 2, written in stream order.
pub fn filled_pool<D: Device>(device: &D, stream: &mut Stream<'_, D>, first: f32) -> Pages<D> {
    let mut pool = Pages::new(device, "pool", PAGE, 3).unwrap();
    for i in 0..3 {
        pool.write_on(stream, (i, 0), &page(first + i as f32)).unwrap();
    }
    pool
}

impl<D: Toy> World<D> {
    pub fn new(device: &D, stream: &mut Stream<'_, D>) -> Self {
        let factor = Buffer::new(device, (Category::Weights, "factor"), &[FACTOR]).unwrap();
        let scaled = tensor(device, "scaled", &[0.0; ROWS * PAGE.page_size]);
        let layer = Layer::new(device, &factor);
        let lane = layer.lane(device);
        let mut slots = Slots::new(device);
        let table = slots.slot::<i32>("page_table", ROWS).unwrap();
        let out = slots.slot::<f32>("out", ROWS).unwrap();
        let view = slots.view("view", PAGE).unwrap();
        let mut graph = slots
            .capture(stream, |rec| {
                let (inputs, to) = ((rec.input(table)?, rec.cache(view)?), rec.output(out)?);
                layer.step(rec, &lane, inputs, &scaled.lease(), to)
            })
            .unwrap();
        let pool = filled_pool(device, stream, 1.0);
        graph.bind(stream, view, &pool).unwrap();
        Self { graph, table, out, view, pool, factor, scaled, lane, layer }
    }

    /// Replays and waits.
    pub fn replay(&mut self, stream: &mut Stream<'_, D>) -> Vec<f32> {
        self.graph.replay(stream).unwrap().wait(stream).unwrap();
        self.graph.read(self.out).unwrap()
    }
}

/// A test on a device that works late. Everything in it ends with: no wrong access, nothing left
/// behind.
pub fn late(test: impl FnOnce(&Late)) {
    let device = Late::new(2);
    test(&device);
    is_clean(&device);
}

/// No wrong access, nothing left behind.
pub fn is_clean<P: sim::Pace>(device: &sim::Simulated<P>) {
    device.reclaim();
    assert_eq!(device.violations(), 0, "accesses to what is gone, or in conflict");
    assert_eq!(device.census().lines(), [], "the ledger");
    assert_eq!(device.blocks(), 0, "the machine's own count");
}

/// Numbers that look random and are the same in every run.
pub struct Dice(pub u64);

impl Dice {
    pub fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % sides
    }
}
