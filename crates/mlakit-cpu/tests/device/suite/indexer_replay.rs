//! Replays of a captured graph of an indexer and a selection: queries, lengths, tables, keys and the
//! pool itself change, the graph does not.

use half::bf16;
use mlakit::op::indexer::{Indexer, IndexerArgs};
use mlakit::op::selection::{Selection, SelectionArgs, SelectionFields, SelectionSpec};
use mlakit::{
    Buffer, Category, Graph, Key, Lane, Pages, PoolView, Prepared, Slots, Stream, ViewKey,
};

use super::dense_run::tensor;
use super::indexer_inputs::{FORMATS, IndexerInputs, IndexerShape, indexer_shape};
use super::indexer_run::{IndexerDevice, prepare};

const TOPK: usize = 40;
const ROWS: usize = 4;
const REQUEST: [i32; ROWS] = [0, 0, 0, 1];

/// What stays.
struct World<D: IndexerDevice> {
    shape: IndexerShape,
    indexer: Prepared<Indexer, D>,
    selection: Prepared<Selection, D>,
    lane: Lane<D>,
    request: Buffer<i32, D>,
}

/// What a step gives: positions, counts, slots, their counts.
#[derive(Clone, Debug, PartialEq)]
struct Given([Vec<i32>; 4]);

impl Given {
    fn nothing() -> Self {
        Self([ROWS * TOPK, ROWS, ROWS * TOPK, ROWS].map(|len| vec![-9; len]))
    }
}

impl<D: IndexerDevice> World<D> {
    fn new(device: &D, index: usize) -> Self {
        let mut shape = indexer_shape(6, TOPK, &[(300, 3), (70, 1)]);
        (shape.record, shape.width, shape.scores) = (FORMATS[index], 64, false);
        let indexer = prepare(device, &shape.spec());
        let fields = SelectionFields {
            page_size: shape.page_size,
            topk: TOPK,
            pool_size: 1,
            tail: true,
            pages: None,
            max_rows: ROWS,
            max_batch: 2,
            max_table_width: 9,
        };
        let spec = SelectionSpec::new(fields).unwrap();
        let selection = super::layer::prepare::<Selection, D>(device, &spec);
        let bytes = [indexer.plan().scratch_bytes(), selection.plan().scratch_bytes()];
        let lane = Lane::new(device, "lane", &bytes).unwrap();
        Self { shape, indexer, selection, lane, request: tensor::<i32, D>(device, &REQUEST) }
    }

    fn step(&self, seed: u64) -> IndexerInputs {
        let mut inputs = IndexerInputs::new(&self.shape, seed);
        inputs.kv_lens = vec![(seed * 37 % 301) as i32, (seed * 11 % 71) as i32];
        inputs
    }

    fn pool(&self, device: &D, step: &IndexerInputs) -> Pages<D> {
        let size = (step.pages, step.page_stride_bytes);
        let mut pool = Pages::with_stride(device, "pool", step.spec.pages(), size).unwrap();
        pool.write((0, 0), &step.cache).unwrap();
        pool
    }

    fn eager(&mut self, stream: &mut Stream<'_, D>, step: &IndexerInputs) -> Given {
        let device = &stream.device().clone();
        let pool = self.pool(device, step);
        let mut view = PoolView::new(device, "view", pool.geometry()).unwrap();
        view.bind(stream, &pool).unwrap();
        let (q, weights) =
            (tensor::<bf16, D>(device, &step.q), tensor::<f32, D>(device, &step.weights));
        let table = tensor::<i32, D>(device, &step.table);
        let lengths = tensor::<i32, D>(device, &step.kv_lens);
        let offsets = tensor::<i32, D>(device, &step.q_offsets);
        let mut given = Given::nothing().0.map(|values| tensor::<i32, D>(device, &values));
        let [positions, counts, slots, slot_counts] = &mut given;
        let index = IndexerArgs {
            q: (&q).into(),
            weights: (&weights).into(),
            cache: (&view).into(),
            page_table: (&table).into(),
            kv_lens: (&lengths).into(),
            q_offsets: (&offsets).into(),
            last_position: None,
            positions: (&mut *positions).into(),
            counts: counts.into(),
            scores: None,
            scratch: (&mut self.lane).into(),
        };
        self.indexer.bind(index).unwrap().run(stream).unwrap();
        let select = SelectionArgs {
            positions: (&*positions).into(),
            request: (&self.request).into(),
            page_table: (&table).into(),
            table_width: step.table.len() / 2,
            last_position: None,
            slots: slots.into(),
            slot_counts: slot_counts.into(),
            scratch: (&mut self.lane).into(),
        };
        self.selection.bind(select).unwrap().run(stream).unwrap();
        stream.wait().unwrap();
        Given(given.each_ref().map(|buffer| buffer.read().unwrap()))
    }
}

/// The same, recorded.
struct Replayed<D: IndexerDevice> {
    graph: Graph<D>,
    q: Key<bf16>,
    weights: Key<f32>,
    ints: [Key<i32>; 3],
    view: ViewKey,
    given: [Key<i32>; 4],
}

impl<D: IndexerDevice> Replayed<D> {
    fn new(stream: &mut Stream<'_, D>, world: &World<D>) -> Self {
        let mut slots = Slots::new(&stream.device().clone());
        let step = world.step(0);
        let q = slots.slot("q", step.q.len()).unwrap();
        let weights = slots.slot("weights", step.weights.len()).unwrap();
        let ints = [&step.table, &step.kv_lens, &step.q_offsets]
            .map(|values| slots.slot("ints", values.len()).unwrap());
        let given = Given::nothing().0.map(|values| slots.slot("given", values.len()).unwrap());
        let view = slots.view("view", step.spec.pages()).unwrap();
        let [table, lengths, offsets] = ints;
        let [positions, counts, to, slot_counts] = given;
        let request = world.request.lease();
        let graph = slots.capture(stream, |rec| {
            let index = IndexerArgs {
                q: rec.input(q)?,
                weights: rec.input(weights)?,
                cache: rec.cache(view)?,
                page_table: rec.input(table)?,
                kv_lens: rec.input(lengths)?,
                q_offsets: rec.input(offsets)?,
                last_position: None,
                positions: rec.output(positions)?,
                counts: rec.output(counts)?,
                scores: None,
                scratch: world.lane.lease(),
            };
            world.indexer.bind(index)?.run(rec)?;
            let select = SelectionArgs {
                positions: rec.input(positions)?,
                request: (&request).into(),
                page_table: rec.input(table)?,
                table_width: step.table.len() / 2,
                last_position: None,
                slots: rec.output(to)?,
                slot_counts: rec.output(slot_counts)?,
                scratch: world.lane.lease(),
            };
            world.selection.bind(select)?.run(rec)
        });
        Self { graph: graph.unwrap(), q, weights, ints, view, given }
    }

    fn run(&mut self, stream: &mut Stream<'_, D>, (step, pool): (&IndexerInputs, &Pages<D>)) {
        let graph = &mut self.graph;
        graph.slot_mut(self.q).unwrap().write_on(stream, &step.q).unwrap();
        graph.slot_mut(self.weights).unwrap().write_on(stream, &step.weights).unwrap();
        for (key, values) in
            self.ints.into_iter().zip([&step.table, &step.kv_lens, &step.q_offsets])
        {
            graph.slot_mut(key).unwrap().write_on(stream, values).unwrap();
        }
        graph.bind(stream, self.view, pool).unwrap();
        let _ = graph.replay(stream).unwrap();
        stream.wait().unwrap();
    }

    fn read_into(&self, given: &mut Given) {
        for (key, values) in self.given.into_iter().zip(&mut given.0) {
            self.graph.read_into(key, values).unwrap();
        }
    }
}

/// Many steps, each with other contents and another pool, over poisoned scratch.
pub fn replays_equal_eager_runs<D: IndexerDevice>(device: &D) {
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    for index in 0..FORMATS.len() {
        let mut world = World::new(device, index);
        let mut replayed = Replayed::new(&mut stream, &world);
        for seed in 0..60 {
            let step = world.step(seed);
            let needed = world.eager(&mut stream, &step);
            world.lane.poison(seed as u8 ^ 0x5a).unwrap();
            let pool = world.pool(device, &step);
            replayed.run(&mut stream, (&step, &pool));
            let mut given = Given::nothing();
            replayed.read_into(&mut given);
            assert_eq!(given, needed, "step {seed}");
            assert_eq!(given.0[0], step.oracle().positions, "step {seed}");
        }
    }
}

/// A bound call and a replay allocate nothing, by the ledger and by `count` of the host's allocations.
pub fn nothing_is_allocated<D: IndexerDevice>(device: &D, count: &dyn Fn() -> usize) {
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let world = World::new(device, 1);
    let mut replayed = Replayed::new(&mut stream, &world);
    let steps: Vec<_> = (0..4).map(|seed| world.step(seed)).collect();
    let pools: Vec<_> = steps.iter().map(|step| world.pool(device, step)).collect();
    replayed.run(&mut stream, (&steps[0], &pools[0]));
    let (before, live) = (count(), device.census().live(Category::Scratch));
    for (step, pool) in steps.iter().zip(&pools) {
        replayed.run(&mut stream, (step, pool));
    }
    assert_eq!(count(), before, "allocations of the host");
    assert_eq!(device.census().live(Category::Scratch), live);
}
