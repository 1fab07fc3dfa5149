//! Replays of sparse attention: queries, selections, counts, requests, tables, sinks and pools change
//! from replay to replay, and nothing is planned, bound or allocated again.

use half::bf16;
use mlakit::op::dense::QueryInput;
use mlakit::op::merge::LseOutput;
use mlakit::op::sparse::{ExtraInput, SelectionInput, Sparse, SparseArgs};
use mlakit::{
    Base2, Counts, Graph, Key, Lane, Lse, Prepared, RecordFormat, Slots, Splits, Stream, ViewKey,
};

use super::compare::{same_lse, same_out};
use super::sparse_inputs::{Extra, SparseInputs, SparseShape, shape};
use super::sparse_run::{Bound, Operands, SparseDevice, prepare};

fn replayed_shape(splits: Splits) -> SparseShape {
    let record = RecordFormat::Fp8_656;
    let mut shape = shape(5, (0, 0), 200, &[(300, 2), (70, 3)]).with_record(record, false);
    shape.extra = Some(Extra { record: RecordFormat::Bf16, page_size: 48, width: 70, tokens: 90 });
    (shape.splits, shape.sink, shape.strange) = (splits, true, true);
    shape.lse = mlakit::LseBase::Base2;
    shape
}

/// One call, recorded.
struct Replayed<D: SparseDevice> {
    graph: Graph<D>,
    q: Key<bf16>,
    positions: Key<i32>,
    counts: Key<i32>,
    request: Key<i32>,
    table: Key<i32>,
    extra_slots: Key<i32>,
    extra_counts: Key<i32>,
    sink: Key<f32>,
    views: [ViewKey; 2],
    out: Key<bf16>,
    lse: Key<Lse<Base2>>,
    _lane: Lane<D>,
}

impl<D: SparseDevice> Replayed<D> {
    fn new(
        stream: &mut Stream<'_, D>,
        inputs: &SparseInputs,
        prepared: &Prepared<Sparse, D>,
    ) -> Self {
        let device = &stream.device().clone();
        let spec = prepared.plan().spec();
        let lane = Lane::new(device, "lane", &[prepared.plan().scratch_bytes()]).unwrap();
        let mut slots = Slots::new(device);
        let mut i32s = |name, list: &[i32]| slots.slot::<i32>(name, list.len()).unwrap();
        let positions = i32s("positions", &inputs.positions);
        let counts = i32s("counts", &inputs.counts);
        let request = i32s("request", &inputs.request);
        let table = i32s("table", &inputs.table);
        let extra_slots = i32s("extra slots", &inputs.extra_slots);
        let extra_counts = i32s("extra counts", &inputs.extra_counts);
        let q = slots.slot("q", inputs.q.len()).unwrap();
        let sink = slots.slot("sink", inputs.sink.len()).unwrap();
        let results = inputs.rows() * spec.heads;
        let out = slots.slot("out", results * spec.value_width).unwrap();
        let lse = slots.slot("lse", results).unwrap();
        let extra = spec.extra().unwrap().pages;
        let views =
            [slots.view("view", spec.pages()).unwrap(), slots.view("extra", extra).unwrap()];
        let graph = slots.capture(stream, |rec| {
            let args = SparseArgs {
                q: QueryInput::Bf16(rec.input(q)?),
                cache: rec.cache(views[0])?,
                selection: SelectionInput::Positions {
                    positions: rec.input(positions)?,
                    counts: rec.input(counts)?,
                    request: rec.input(request)?,
                    page_table: rec.input(table)?,
                    table_width: inputs.table_width,
                },
                extra: Some(ExtraInput {
                    cache: rec.cache(views[1])?,
                    slots: rec.input(extra_slots)?,
                    slot_counts: rec.input(extra_counts)?,
                }),
                sink: Some(rec.input(sink)?),
                kv_scale: None,
                q_scale: None,
                out: rec.output(out)?,
                lse: LseOutput::Base2(rec.output(lse)?),
                scratch: lane.lease(),
            };
            prepared.bind(args)?.run(rec)
        });
        let graph = graph.unwrap();
        let _lane = lane;
        Self {
            graph,
            q,
            positions,
            counts,
            request,
            table,
            extra_slots,
            extra_counts,
            sink,
            views,
            out,
            lse,
            _lane,
        }
    }

    fn run(&mut self, stream: &mut Stream<'_, D>, step: &SparseInputs, pools: [&Bound<D>; 2]) {
        let graph = &mut self.graph;
        macro_rules! write {
            ($($key:ident),*) => {
                $(graph.slot_mut(self.$key).unwrap().write_on(stream, &step.$key).unwrap();)*
            };
        }
        write!(q, positions, counts, request, table, extra_slots, extra_counts, sink);
        for (view, pool) in self.views.into_iter().zip(pools) {
            graph.bind(stream, view, &pool.pool).unwrap();
        }
        let _ = graph.replay(stream).unwrap();
    }

    fn read_into(&self, stream: &mut Stream<'_, D>, out: &mut [bf16], lse: &mut [f32]) {
        stream.wait().unwrap();
        self.graph.read_into(self.out, out).unwrap();
        self.graph.read_into(self.lse, lse).unwrap();
    }
}

/// A hundred steps, each with other contents of everything and another pool: replays give the eager
/// runs' bits, and nothing is prepared, bound or allocated.
pub fn replays_equal_eager_runs<D: SparseDevice>(device: &D) {
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    for splits in [Splits::Count(1), Splits::Count(3), Splits::FixedTokens(64)] {
        let shape = replayed_shape(splits);
        let steps: Vec<_> = (0..100).map(|seed| SparseInputs::new(&shape, seed)).collect();
        let prepared = prepare(device, &steps[0].spec);
        let (mut needed, mut pools) = (Vec::new(), Vec::new());
        for step in &steps {
            let mut operands = Operands::new(&mut stream, step, &prepared);
            needed.push(operands.run(&mut stream, &prepared));
            pools.push((operands.main, operands.extra.unwrap()));
        }
        let mut replayed = Replayed::new(&mut stream, &steps[0], &prepared);
        let before = device.keeper().counts();
        let (mut out, mut lse) = (needed[0].out.clone(), needed[0].lse.clone());
        for (index, step) in steps.iter().enumerate() {
            replayed.run(&mut stream, step, [&pools[index].0, &pools[index].1]);
            replayed.read_into(&mut stream, &mut out, &mut lse);
            same_lse(&format!("replay {index}"), &lse, &needed[index].lse);
            same_out(&format!("replay {index}"), &out, &needed[index].out);
        }
        let Counts { prepared, bound, obtained, .. } = device.keeper().counts();
        assert_eq!((prepared, bound, obtained), (before.prepared, before.bound, before.obtained));
    }
}

/// Replays call the host's allocator not once; as `replay::nothing_is_allocated`.
pub fn nothing_is_allocated<D: SparseDevice>(device: &D, calls: &dyn Fn() -> usize) {
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    for splits in [Splits::Count(1), Splits::Count(3)] {
        let step = SparseInputs::new(&replayed_shape(splits), 5);
        let prepared = prepare(device, &step.spec);
        let mut operands = Operands::new(&mut stream, &step, &prepared);
        let pools =
            [&step.pool, step.extra_pool.as_ref().unwrap()].map(|p| Bound::new(&mut stream, p));
        let mut replayed = Replayed::new(&mut stream, &step, &prepared);
        let results = step.rows() * step.spec.heads;
        let mut out = vec![bf16::ZERO; results * step.spec.value_width];
        let mut lse = vec![0.0; results];
        let mut rounds = [0; 3];
        for round in &mut rounds {
            let before = calls();
            for _ in 0..20 {
                prepared.bind(operands.args()).unwrap().run(&mut stream).unwrap();
                replayed.run(&mut stream, &step, pools.each_ref());
                replayed.read_into(&mut stream, &mut out, &mut lse);
            }
            *round = calls() - before;
        }
        assert!(rounds.contains(&0), "{splits:?}: {rounds:?} calls of the allocator");
    }
}
