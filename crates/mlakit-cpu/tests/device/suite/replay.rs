//! Replays of a captured graph: everything that changes lies in slots, and nothing is planned,
//! bound or allocated again.

use half::bf16;
use mlakit::op::dense::{Dense, DenseArgs, DenseSpec, QueryInput};
use mlakit::op::merge::{LseOutput, Partial};
use mlakit::op::writer::{Writer, WriterArgs, WriterFields, WriterInput, WriterSpec};
use mlakit::{
    Buffer, Category, Counts, Graph, Key, Lane, Lse, Natural, Pages, Plan, PoolView, Prepared,
    RecordFormat, Slots, Splits, Stream, ViewKey,
};

use super::SuiteDevice;
use super::compare::{same_lse, same_out};
use super::dense_inputs::{DenseShape, shape};
use super::dense_run::{prepare, tensor};
use super::random::Rng;

const HEADS: usize = 5;
const LATENT: usize = 40;
const ROPE: usize = 26;
const ROWS: usize = 4;
const BATCH: usize = 3;
const WIDTH: usize = 12;
const PAGES: usize = 40;
const PAGE: usize = 16;

/// Everything that changes from step to step.
#[derive(Clone)]
pub struct Step {
    q: Vec<bf16>,
    table: Vec<i32>,
    kv_lens: Vec<i32>,
    offsets: Vec<i32>,
    latent: Vec<bf16>,
    rope: Vec<bf16>,
    slots: Vec<i64>,
    /// Which of the pools is bound.
    pub pool: usize,
}

/// What a step gives.
#[derive(Clone, PartialEq)]
pub struct Given {
    out: Vec<bf16>,
    lse: Vec<f32>,
}

impl Step {
    pub fn new(rng: &mut Rng) -> Self {
        let mut pages: Vec<i32> = (0..PAGES as i32).collect();
        rng.shuffle(&mut pages);
        let mut offsets: Vec<i32> = (0..BATCH).map(|_| rng.below(ROWS + 1) as i32).collect();
        offsets.push(ROWS as i32 - i32::from(rng.chance(3)));
        offsets.sort_unstable();
        offsets[0] = 0;
        Self {
            q: rng.bf16s(ROWS * HEADS * (LATENT + ROPE)),
            table: pages[..BATCH * WIDTH].to_vec(),
            kv_lens: (0..BATCH).map(|_| rng.below(WIDTH * PAGE + 1) as i32).collect(),
            offsets,
            latent: rng.bf16s(ROWS * LATENT),
            rope: rng.bf16s(ROWS * ROPE),
            slots: (0..ROWS).map(|_| rng.below(PAGES * PAGE + 5) as i64 - 2).collect(),
            pool: rng.below(2),
        }
    }
}

/// The operations of a step and what stays: plans, code, pools, scratch.
pub struct World<D: SuiteDevice> {
    dense: Prepared<Dense, D>,
    writer: Prepared<Writer, D>,
    lane: Lane<D>,
    pub pools: [Pages<D>; 2],
}

fn dense_shape(splits: Splits, partial: Partial) -> DenseShape {
    let mut shape = shape(HEADS, (LATENT + ROPE, LATENT), &[(WIDTH * PAGE, ROWS)]);
    (shape.splits, shape.partial, shape.page_size) = (splits, partial, PAGE);
    shape
}

fn dense_spec(splits: Splits, partial: Partial) -> DenseSpec {
    let mut fields: mlakit::op::dense::DenseFields = dense_shape(splits, partial).spec().into();
    (fields.max_batch, fields.max_table_width) = (BATCH, WIDTH);
    DenseSpec::new(fields).unwrap()
}

impl<D: SuiteDevice> World<D> {
    pub fn new(device: &D, splits: Splits, partial: Partial) -> Self {
        let spec = dense_spec(splits, partial);
        let dense = prepare(device, &spec);
        let fields = WriterFields {
            record: RecordFormat::Bf16,
            record_width: None,
            page_size: PAGE,
            latent_width: LATENT,
            rope_width: ROPE,
            key_width: 0,
            max_rows: ROWS,
        };
        let plan =
            Plan::<Writer>::for_device::<D>(&WriterSpec::new(fields).unwrap(), device.facts());
        let writer = plan.unwrap().prepare(device).unwrap();
        let bytes = [dense.plan().scratch_bytes(), writer.plan().scratch_bytes()];
        let pools = [0, 1].map(|index| {
            let mut pool = Pages::new(device, "pool", spec.pages(), PAGES).unwrap();
            fill(&mut pool, index);
            pool
        });
        Self { dense, writer, lane: Lane::new(device, "lane", &bytes).unwrap(), pools }
    }
}

/// The same bytes each time.
pub fn fill<D: SuiteDevice>(pool: &mut Pages<D>, seed: u64) {
    let values = Rng(seed).bf16s(PAGES * PAGE * (LATENT + ROPE));
    pool.write((0, 0), bytemuck::cast_slice(&values)).unwrap();
}

/// Eager calls: operands are borrowed, views belong to the caller.
pub struct Eager<D: SuiteDevice> {
    q: Buffer<bf16, D>,
    table: Buffer<i32, D>,
    kv_lens: Buffer<i32, D>,
    offsets: Buffer<i32, D>,
    latent: Buffer<bf16, D>,
    rope: Buffer<bf16, D>,
    slots: Buffer<i64, D>,
    view: PoolView<D>,
    out: Buffer<bf16, D>,
    lse: Buffer<Lse<Natural>, D>,
}

impl<D: SuiteDevice> Eager<D> {
    pub fn new(device: &D, world: &World<D>) -> Self {
        let i32s = |len| Buffer::zeroed(device, (Category::Tensors, "test"), len).unwrap();
        let bf16s = |len| tensor::<bf16, D>(device, &vec![bf16::NAN; len]);
        Self {
            q: bf16s(ROWS * HEADS * (LATENT + ROPE)),
            table: i32s(BATCH * WIDTH),
            kv_lens: i32s(BATCH),
            offsets: i32s(BATCH + 1),
            latent: bf16s(ROWS * LATENT),
            rope: bf16s(ROWS * ROPE),
            slots: Buffer::zeroed(device, (Category::Tensors, "test"), ROWS).unwrap(),
            view: PoolView::new(device, "view", world.pools[0].geometry()).unwrap(),
            out: bf16s(ROWS * HEADS * LATENT),
            lse: tensor::<Lse<Natural>, D>(device, &[f32::NAN; ROWS * HEADS]),
        }
    }

    pub fn run(&mut self, stream: &mut Stream<'_, D>, world: &mut World<D>, step: &Step) {
        self.q.write_on(stream, 0, &step.q).unwrap();
        self.table.write_on(stream, 0, &step.table).unwrap();
        self.kv_lens.write_on(stream, 0, &step.kv_lens).unwrap();
        self.offsets.write_on(stream, 0, &step.offsets).unwrap();
        self.latent.write_on(stream, 0, &step.latent).unwrap();
        self.rope.write_on(stream, 0, &step.rope).unwrap();
        self.slots.write_on(stream, 0, &step.slots).unwrap();
        self.view.bind(stream, &world.pools[step.pool]).unwrap();
        let write = WriterArgs {
            tokens: WriterInput::Latent {
                latent: (&self.latent).into(),
                rope: Some((&self.rope).into()),
            },
            slots: (&self.slots).into(),
            cache: (&mut self.view).into(),
            kv_scale: None,
            scratch: (&mut world.lane).into(),
        };
        world.writer.bind(write).unwrap().run(stream).unwrap();
        let attend = DenseArgs {
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
            scratch: (&mut world.lane).into(),
        };
        world.dense.bind(attend).unwrap().run(stream).unwrap();
    }

    pub fn given(&self, stream: &mut Stream<'_, D>) -> Given {
        stream.wait().unwrap();
        Given { out: self.out.read().unwrap(), lse: self.lse.read().unwrap() }
    }
}

/// The same step, recorded.
pub struct Replayed<D: SuiteDevice> {
    pub graph: Graph<D>,
    pub q: Key<bf16>,
    table: Key<i32>,
    kv_lens: Key<i32>,
    offsets: Key<i32>,
    latent: Key<bf16>,
    rope: Key<bf16>,
    slots: Key<i64>,
    pub view: ViewKey,
    out: Key<bf16>,
    lse: Key<Lse<Natural>>,
}

impl<D: SuiteDevice> Replayed<D> {
    pub fn new(stream: &mut Stream<'_, D>, world: &World<D>) -> Self {
        let mut slots = Slots::new(&stream.device().clone());
        let q = slots.slot("q", ROWS * HEADS * (LATENT + ROPE)).unwrap();
        let table = slots.slot("table", BATCH * WIDTH).unwrap();
        let kv_lens = slots.slot("lengths", BATCH).unwrap();
        let offsets = slots.slot("offsets", BATCH + 1).unwrap();
        let latent = slots.slot("latent", ROWS * LATENT).unwrap();
        let rope = slots.slot("rope", ROWS * ROPE).unwrap();
        let tokens = slots.slot("slots", ROWS).unwrap();
        let out = slots.slot("out", ROWS * HEADS * LATENT).unwrap();
        let lse = slots.slot("lse", ROWS * HEADS).unwrap();
        let view = slots.view("view", world.pools[0].geometry()).unwrap();
        let graph = slots.capture(stream, |rec| {
            let write = WriterArgs {
                tokens: WriterInput::Latent {
                    latent: rec.input(latent)?,
                    rope: Some(rec.input(rope)?),
                },
                slots: rec.input(tokens)?,
                cache: rec.cache_mut(view)?,
                kv_scale: None,
                scratch: world.lane.lease(),
            };
            world.writer.bind(write)?.run(rec)?;
            let attend = DenseArgs {
                q: QueryInput::Bf16(rec.input(q)?),
                cache: rec.cache(view)?,
                page_table: rec.input(table)?,
                kv_lens: rec.input(kv_lens)?,
                q_offsets: rec.input(offsets)?,
                row_kv_lens: None,
                kv_scale: None,
                q_scale: None,
                out: rec.output(out)?,
                lse: LseOutput::Natural(rec.output(lse)?),
                scratch: world.lane.lease(),
            };
            world.dense.bind(attend)?.run(rec)
        });
        let graph = graph.unwrap();
        Self { graph, q, table, kv_lens, offsets, latent, rope, slots: tokens, view, out, lse }
    }

    /// Slots in stream order, or from the host where `host` says so; the pool; the replay.
    pub fn run(
        &mut self,
        stream: &mut Stream<'_, D>,
        world: &World<D>,
        (step, host): (&Step, bool),
    ) {
        let graph = &mut self.graph;
        macro_rules! write {
            ($($key:ident),*) => {
                $(if host {
                    graph.slot_mut(self.$key).unwrap().write(&step.$key).unwrap();
                } else {
                    graph.slot_mut(self.$key).unwrap().write_on(stream, &step.$key).unwrap();
                })*
            };
        }
        write!(q, table, kv_lens, offsets, latent, rope, slots);
        graph.bind(stream, self.view, &world.pools[step.pool]).unwrap();
        let _ = graph.replay(stream).unwrap();
    }

    /// Waits and copies out what a replay gave; allocates nothing.
    pub fn read_into(&self, stream: &mut Stream<'_, D>, into: &mut Given) {
        stream.wait().unwrap();
        self.graph.read_into(self.out, &mut into.out).unwrap();
        self.graph.read_into(self.lse, &mut into.lse).unwrap();
    }

    pub fn given(&self, stream: &mut Stream<'_, D>) -> Given {
        let mut given = Given::nothing();
        self.read_into(stream, &mut given);
        given
    }
}

impl Given {
    pub fn nothing() -> Self {
        let out = vec![bf16::NAN; ROWS * HEADS * LATENT];
        Self { out, lse: vec![f32::NAN; ROWS * HEADS] }
    }
}

#[track_caller]
pub fn same(what: &str, given: &Given, needed: &Given) {
    same_lse(what, &given.lse, &needed.lse);
    same_out(what, &given.out, &needed.out);
}

/// All bytes of a pool.
pub fn bytes_of<D: SuiteDevice>(pool: &Pages<D>) -> Vec<u8> {
    let mut bytes = vec![0; pool.pages() * pool.page_stride_bytes()];
    pool.read((0, 0), &mut bytes).unwrap();
    bytes
}

/// A thousand steps that write records and attend, each with other queries, lengths, tables,
/// offsets, keys, slots and pool: replays give the eager runs' bits, in the outputs and in the
/// pools, and nothing is prepared, bound or allocated.
pub fn a_thousand_replays_equal_eager_runs<D: SuiteDevice>(device: &D) {
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let mut rng = Rng(77);
    let steps: Vec<Step> = (0..1000).map(|_| Step::new(&mut rng)).collect();
    let (splits, partial) = (Splits::Count(3), Partial::Bf16);
    let mut world = World::new(device, splits, partial);
    let mut eager = Eager::new(device, &world);
    let mut needed = Vec::with_capacity(steps.len());
    for step in &steps {
        eager.run(&mut stream, &mut world, step);
        needed.push(eager.given(&mut stream));
    }
    let written = world.pools.each_ref().map(bytes_of);
    let faults = world.lane.faults().unwrap();
    assert!(faults[0] > 0, "some slots are out of the pool");

    for (seed, pool) in world.pools.iter_mut().enumerate() {
        fill(pool, seed as u64);
    }
    world.lane.clear_faults().unwrap();
    let mut replayed = Replayed::new(&mut stream, &world);
    let before = device.keeper().counts();
    let mut given = Given::nothing();
    for (index, step) in steps.iter().enumerate() {
        replayed.run(&mut stream, &world, (step, index % 2 == 0));
        replayed.read_into(&mut stream, &mut given);
        same(&format!("replay {index}"), &given, &needed[index]);
    }
    let Counts { prepared, bound, submitted, obtained } = device.keeper().counts();
    assert_eq!((prepared, bound, obtained), (before.prepared, before.bound, before.obtained));
    assert!(submitted >= before.submitted + 2 * steps.len() as u64, "a bind and a replay each");
    assert_eq!(world.lane.faults().unwrap(), faults);
    for (pool, written) in world.pools.iter().zip(&written) {
        assert!(bytes_of(pool) == *written, "pools differ after the replays");
    }
}

/// One eager step and one replay of it are the same bits in every split mode and both dtypes of
/// partial results, and so are repeats of the replay.
pub fn eager_and_replay_are_the_same_bits<D: SuiteDevice>(device: &D) {
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    for splits in [Splits::Count(1), Splits::Count(7), Splits::Auto, Splits::FixedTokens(64)] {
        for partial in [Partial::Bf16, Partial::F32] {
            let mut world = World::new(device, splits, partial);
            let mut eager = Eager::new(device, &world);
            let mut replayed = Replayed::new(&mut stream, &world);
            let step = Step::new(&mut Rng(5));
            eager.run(&mut stream, &mut world, &step);
            let needed = eager.given(&mut stream);
            for repeat in 0..20 {
                replayed.run(&mut stream, &world, (&step, repeat % 2 == 0));
                let given = replayed.given(&mut stream);
                same(&format!("{splits:?} {partial:?} repeat {repeat}"), &given, &needed);
            }
        }
    }
}

/// Writes to slots, binding pools, eager calls and replays call the host's allocator not once.
/// `calls` reads a counter of the whole process, in which the thread that started the test may
/// still be busy for a moment: so one of three rounds must be silent, and whatever a call itself
/// allocates would be in all of them.
pub fn nothing_is_allocated<D: SuiteDevice>(device: &D, calls: &dyn Fn() -> usize) {
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let mut rng = Rng(78);
    let steps: Vec<Step> = (0..50).map(|_| Step::new(&mut rng)).collect();
    for splits in [Splits::Count(1), Splits::Count(3), Splits::FixedTokens(64)] {
        let mut world = World::new(device, splits, Partial::F32);
        let mut eager = Eager::new(device, &world);
        let mut replayed = Replayed::new(&mut stream, &world);
        let mut given = Given::nothing();
        let obtained = device.keeper().counts().obtained;
        let mut rounds = [0; 3];
        for round in &mut rounds {
            let before = calls();
            for (index, step) in steps.iter().enumerate() {
                eager.run(&mut stream, &mut world, step);
                replayed.run(&mut stream, &world, (step, index % 2 == 0));
                replayed.read_into(&mut stream, &mut given);
            }
            *round = calls() - before;
        }
        assert!(
            rounds.contains(&0),
            "calls of the allocator in rounds with {splits:?}: {rounds:?}"
        );
        assert_eq!(device.keeper().counts().obtained, obtained);
    }
}
