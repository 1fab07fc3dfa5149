//! Real operations on a device that works late: a step of writer, dense attention and merge, eager
//! and captured, while pools, views and requests change under it. The reference is the oracle on
//! the host.

mod common;
use common::*;
use mlakit::op::dense::{self, Dense, DenseArgs, DenseCase, DenseFields, DenseSpec, QueryCase};
use mlakit::op::dense::{QueryDtype, QueryInput};
use mlakit::op::merge::{self, LseInput, LseOutput, Merge, MergeArgs, MergeCase, MergeFields};
use mlakit::op::merge::{MergeSpec, Partial, PartialInput};
use mlakit::op::writer::{Writer, WriterArgs, WriterFields, WriterInput, WriterSpec};
use mlakit::splits::Budget;

const HEADS: usize = 2;
const QK: usize = 6;
const VALUE: usize = 4;
const PAGES: PageGeometry = PageGeometry {
    record: RecordLayout { format: RecordFormat::Bf16, width: QK, rope: 0 },
    page_size: 16,
};
/// Pages of the pool, and of a request at most.
const POOL: usize = 4;
/// Requests, each with one row a step.
const BATCH: usize = 2;

fn dense_spec() -> DenseSpec {
    DenseSpec::new(DenseFields {
        heads: HEADS,
        qk_width: QK,
        value_width: VALUE,
        record: RecordFormat::Bf16,
        record_width: None,
        page_size: PAGES.page_size,
        softmax_scale: 0.5f32.try_into().unwrap(),
        lse: LseBase::Natural,
        sink_in_lse: false,
        query: QueryDtype::Bf16,
        quantize_query: false,
        partial: Partial::F32,
        splits: Splits::Auto,
        budget: Budget::default(),
        window: None,
        row_lengths: false,
        max_rows: BATCH,
        max_batch: BATCH,
        max_kv_tokens: POOL * PAGES.page_size,
        max_table_width: POOL,
    })
    .unwrap()
}

fn writer_spec() -> WriterSpec {
    WriterSpec::new(WriterFields {
        record: RecordFormat::Bf16,
        record_width: None,
        page_size: PAGES.page_size,
        latent_width: VALUE,
        rope_width: QK - VALUE,
        max_rows: BATCH,
        key_width: 0,
    })
    .unwrap()
}

/// Code of one attention layer.
struct Layer<D: Runs<Dense> + Runs<Writer>> {
    writer: Prepared<Writer, D>,
    dense: Prepared<Dense, D>,
}

/// The operands of a step that change from call to call, by key or by lease.
struct Operands<D> {
    latent: Input<'static, bf16, D>,
    rope: Input<'static, bf16, D>,
    slots: Input<'static, i64, D>,
    q: Input<'static, bf16, D>,
    table: Input<'static, i32, D>,
    lengths: Input<'static, i32, D>,
    offsets: Input<'static, i32, D>,
    out: Output<'static, bf16, D>,
    lse: Output<'static, Lse<Natural>, D>,
}

impl<D: Runs<Dense> + Runs<Writer>> Layer<D> {
    fn new(device: &D) -> Result<Self, Error> {
        let writer =
            Plan::<Writer>::for_device::<D>(&writer_spec(), device.facts())?.prepare(device)?;
        let dense =
            Plan::<Dense>::for_device::<D>(&dense_spec(), device.facts())?.prepare(device)?;
        Ok(Self { writer, dense })
    }

    fn lane(&self, device: &D) -> Lane<D> {
        let bytes = [self.writer.plan().scratch_bytes(), self.dense.plan().scratch_bytes()];
        Lane::new(device, "lane", &bytes).unwrap()
    }

    /// This step's records into the pool, then attention over all of it.
    fn step<R: Runner<'static, D>>(
        &self,
        runner: &mut R,
        lane: &Lane<D>,
        (written, read): (CacheMut<'static, D>, Cache<'static, D>),
        o: Operands<D>,
    ) -> Result<(), Error> {
        let tokens = WriterInput::Latent { latent: o.latent, rope: Some(o.rope) };
        let scratch = lane.lease();
        let (slots, cache, kv_scale) = (o.slots, written, None);
        let args = WriterArgs { tokens, slots, cache, kv_scale, scratch };
        self.writer.bind(args)?.run(runner)?;
        self.dense
            .bind(DenseArgs {
                q: QueryInput::Bf16(o.q),
                cache: read,
                page_table: o.table,
                kv_lens: o.lengths,
                q_offsets: o.offsets,
                row_kv_lens: None,
                kv_scale: None,
                q_scale: None,
                out: o.out,
                lse: LseOutput::Natural(o.lse),
                scratch: lane.lease(),
            })?
            .run(runner)?;
        Ok(())
    }
}

/// The inputs of one step, on the host.
struct Inputs {
    latent: Vec<bf16>,
    rope: Vec<bf16>,
    slots: Vec<i64>,
    q: Vec<bf16>,
    table: Vec<i32>,
    lengths: Vec<i32>,
}

const OFFSETS: [i32; BATCH + 1] = [0, 1, 2];

impl Inputs {
    /// Step `step` of two requests, one of which is two tokens ahead; pages are handed out
    /// crosswise.
    fn new(step: usize, dice: &mut Dice) -> Self {
        let mut numbers = |count: usize| -> Vec<bf16> {
            (0..count).map(|_| bf16::from_f32(dice.roll(33) as f32 / 16.0 - 1.0)).collect()
        };
        let (latent, rope) = (numbers(BATCH * VALUE), numbers(BATCH * (QK - VALUE)));
        let q = numbers(BATCH * HEADS * QK);
        let table = vec![3, 0, -1, -1, 1, 2, -1, -1];
        let positions = [step, step + 2];
        let slot = |b: usize| {
            let page = table[b * POOL + positions[b] / PAGES.page_size] as i64;
            page * PAGES.page_size as i64 + (positions[b] % PAGES.page_size) as i64
        };
        let slots = (0..BATCH).map(slot).collect();
        let lengths = positions.map(|position| position as i32 + 1).to_vec();
        Self { latent, rope, slots, q, table, lengths }
    }

    /// What the step must give, and what it leaves in the pages.
    fn expect(&self, plan: &Plan<Dense>, pages: &mut [u8]) -> Vec<bf16> {
        let case = op::writer::WriterCase {
            latent: &self.latent,
            rope: &self.rope,
            slots: &self.slots,
            page_stride_bytes: PAGES.payload_bytes(),
            kv_scale: 1.0,
        };
        assert_eq!(op::writer::oracle(&writer_spec(), &case, pages), 0);
        let case = DenseCase {
            q: QueryCase::Bf16(&self.q),
            cache: pages,
            page_stride_bytes: PAGES.payload_bytes(),
            page_table: &self.table,
            kv_lens: &self.lengths,
            q_offsets: &OFFSETS,
            row_kv_lens: None,
            kv_scale: 1.0,
            q_scale: 1.0,
        };
        let out = dense::oracle(plan.spec(), plan.division(), &case).out;
        out.into_iter().map(bf16::from_f64).collect()
    }
}

/// The keys of a captured step.
struct Keys {
    latent: Key<bf16>,
    rope: Key<bf16>,
    slots: Key<i64>,
    q: Key<bf16>,
    table: Key<i32>,
    lengths: Key<i32>,
    out: Key<bf16>,
    view: ViewKey,
}

/// A captured step: writer and attention through one view.
fn capture<D: Runs<Dense> + Runs<Writer>>(
    device: &D,
    stream: &mut Stream<'_, D>,
    (layer, lane): (&Layer<D>, &Lane<D>),
) -> (Graph<D>, Keys) {
    let mut slots = Slots::new(device);
    let keys = Keys {
        latent: slots.slot("latent", BATCH * VALUE).unwrap(),
        rope: slots.slot("rope", BATCH * (QK - VALUE)).unwrap(),
        slots: slots.slot("slots", BATCH).unwrap(),
        q: slots.slot("q", BATCH * HEADS * QK).unwrap(),
        table: slots.slot("table", BATCH * POOL).unwrap(),
        lengths: slots.slot("lengths", BATCH).unwrap(),
        out: slots.slot("out", BATCH * HEADS * VALUE).unwrap(),
        view: slots.view("view", PAGES).unwrap(),
    };
    let offsets = slots.slot::<i32>("offsets", BATCH + 1).unwrap();
    let lse = slots.slot("lse", BATCH * HEADS).unwrap();
    let mut graph = slots
        .capture(stream, |rec| {
            let operands = Operands {
                latent: rec.input(keys.latent)?,
                rope: rec.input(keys.rope)?,
                slots: rec.input(keys.slots)?,
                q: rec.input(keys.q)?,
                table: rec.input(keys.table)?,
                lengths: rec.input(keys.lengths)?,
                offsets: rec.input(offsets)?,
                out: rec.output(keys.out)?,
                lse: rec.output(lse)?,
            };
            let caches = (rec.cache_mut(keys.view)?, rec.cache(keys.view)?);
            layer.step(rec, lane, caches, operands)
        })
        .unwrap();
    graph.slot_mut(offsets).unwrap().write(&OFFSETS).unwrap();
    (graph, keys)
}

fn feed<D: Device>(
    graph: &mut Graph<D>,
    stream: &mut Stream<'_, D>,
    (keys, inputs): (&Keys, &Inputs),
) -> Result<(), Error> {
    graph.slot_mut(keys.latent)?.write_on(stream, &inputs.latent)?;
    graph.slot_mut(keys.rope)?.write_on(stream, &inputs.rope)?;
    graph.slot_mut(keys.slots)?.write_on(stream, &inputs.slots)?;
    graph.slot_mut(keys.q)?.write_on(stream, &inputs.q)?;
    graph.slot_mut(keys.table)?.write_on(stream, &inputs.table)?;
    graph.slot_mut(keys.lengths)?.write_on(stream, &inputs.lengths)?;
    Ok(())
}

fn leased<T: Element, D: Device>(device: &D, values: &[T::Raw]) -> Buffer<T, D> {
    Buffer::new(device, (Category::Tensors, "operand"), values).unwrap()
}

/// Twenty steps of two growing requests, across a page boundary, fully asynchronous; in the middle
/// the pool is replaced under the replays in flight. Each result is that of the oracle, and an
/// eager step of leases gives the same bits.
#[test]
fn a_captured_decode_step_runs_late_and_changes_pools() {
    late(|device| {
        let caller = device.own_stream().unwrap();
        let mut stream = device.stream(&caller).unwrap();
        let layer = Layer::new(device).unwrap();
        let lane = layer.lane(device);
        let (mut graph, keys) = capture(device, &mut stream, (&layer, &lane));
        let mut pool = Pages::new(device, "pool", PAGES, POOL).unwrap();
        let mut pages = vec![0x3f; POOL * PAGES.payload_bytes()];
        pool.write((0, 0), &pages).unwrap();
        graph.bind(&mut stream, keys.view, &pool).unwrap();
        let (mut dice, plan) = (Dice(7), layer.dense.plan());
        for step in 0..20 {
            let inputs = Inputs::new(step, &mut dice);
            feed(&mut graph, &mut stream, (&keys, &inputs)).unwrap();
            let _ = graph.replay(&mut stream).unwrap();
            if step == 9 {
                // The next pool begins with the old one's pages, read when the stream has written
                // them.
                stream.wait().unwrap();
                let mut moved = vec![0; pages.len()];
                pool.read((0, 0), &mut moved).unwrap();
                let _ = graph.replay(&mut stream).unwrap(); // the same once more, in flight
                let mut other = Pages::new(device, "other", PAGES, POOL).unwrap();
                other.write((0, 0), &moved).unwrap();
                graph.bind(&mut stream, keys.view, &other).unwrap();
                pool = other; // the old one goes, with its replay in flight
            }
            let needed = inputs.expect(plan, &mut pages);
            if step % 3 == 2 {
                stream.wait().unwrap();
                assert_eq!(graph.read(keys.out).unwrap(), needed, "step {step}");
            }
        }
        stream.wait().unwrap();
        let mut left = vec![0; pages.len()];
        pool.read((0, 0), &mut left).unwrap();
        assert_eq!(left, pages);
        assert_eq!(lane.faults().unwrap(), [0; 3]);
        eager(device, &mut stream, (&layer, &lane), (&mut pool, &mut pages));
    });
}

/// One eager step by leases, through a view of its own.
fn eager(
    device: &Late,
    stream: &mut Stream<'_, Late>,
    (layer, lane): (&Layer<Late>, &Lane<Late>),
    (pool, pages): (&mut Pages<Late>, &mut [u8]),
) {
    let inputs = Inputs::new(20, &mut Dice(8));
    let mut view = PoolView::new(device, "view", PAGES).unwrap();
    view.bind(stream, pool).unwrap();
    let out = leased::<bf16, _>(device, &[bf16::NAN; BATCH * HEADS * VALUE]);
    let lse = leased::<Lse<Natural>, _>(device, &[f32::NAN; BATCH * HEADS]);
    {
        let (latent, rope) = (leased(device, &inputs.latent), leased(device, &inputs.rope));
        let (slots, q) = (leased(device, &inputs.slots), leased(device, &inputs.q));
        let (table, lengths) = (leased(device, &inputs.table), leased(device, &inputs.lengths));
        let offsets = leased(device, &OFFSETS);
        let operands = Operands {
            latent: (&latent.lease()).into(),
            rope: (&rope.lease()).into(),
            slots: (&slots.lease()).into(),
            q: (&q.lease()).into(),
            table: (&table.lease()).into(),
            lengths: (&lengths.lease()).into(),
            offsets: (&offsets.lease()).into(),
            out: (&out.lease()).into(),
            lse: (&lse.lease()).into(),
        };
        layer.step(stream, lane, (view.lease_mut(), view.lease()), operands).unwrap();
    } // every input is dropped in flight
    drop(view);
    pool.release();
    assert_eq!(out.read().err(), Some(Error::InFlight { what: "operand".into() }));
    stream.wait().unwrap();
    assert_eq!(out.read().unwrap(), inputs.expect(layer.dense.plan(), pages));
}

/// A graph that writes its pool conflicts with whatever reads that pool on another stream; graphs
/// that only read do not.
#[test]
fn a_pool_that_a_graph_writes_is_written() {
    late(|device| {
        let (left, right) = (device.own_stream().unwrap(), device.own_stream().unwrap());
        let mut one = device.stream(&left).unwrap();
        let mut two = device.stream(&right).unwrap();
        let layer = Layer::new(device).unwrap();
        let (lane, other) = (layer.lane(device), layer.lane(device));
        let (mut writes, keys) = capture(device, &mut one, (&layer, &lane));
        let (mut also, more) = capture(device, &mut two, (&layer, &other));
        let mut pool = Pages::new(device, "pool", PAGES, POOL).unwrap();
        writes.bind(&mut one, keys.view, &pool).unwrap();
        also.bind(&mut two, more.view, &pool).unwrap();
        let _ = writes.replay(&mut one).unwrap();
        let busy = also.replay(&mut two).err();
        assert_eq!(busy, Some(Error::Busy { what: "pool".into() }));
        let refused = pool.read((0, 0), &mut [0]);
        assert_eq!(refused, Err(Error::InFlight { what: "pool".into() }), "it is being written");
        let refused = pool.write((0, 0), &[0]);
        assert_eq!(refused, Err(Error::InFlight { what: "pool".into() }));
        two.wait_for(&one).unwrap();
        let _ = also.replay(&mut two).unwrap();
        two.wait().unwrap();
        pool.read((0, 0), &mut [0]).unwrap();
    });
}

#[test]
fn merge_runs_late() {
    late(|device| {
        let fields = MergeFields {
            splits: 3,
            heads: HEADS,
            value_width: VALUE,
            partial: Partial::F32,
            lse: LseBase::Natural,
            sink: true,
            sink_in_lse: false,
            max_rows: 2,
        };
        let spec = MergeSpec::new(fields).unwrap();
        let plan = Plan::<Merge>::for_device::<Late>(&spec, device.facts()).unwrap();
        let prepared = plan.prepare(device).unwrap();
        let caller = device.own_stream().unwrap();
        let mut stream = device.stream(&caller).unwrap();
        let mut dice = Dice(3);
        let mut numbers =
            |n: usize| (0..n).map(|_| dice.roll(64) as f32 / 8.0 - 4.0).collect::<Vec<_>>();
        let (parts, sinks) = (numbers(3 * 2 * HEADS * VALUE), numbers(HEADS));
        let mut logs = numbers(3 * 2 * HEADS);
        logs[1] = f32::NAN;
        let (outs, lses) =
            (leased::<f32, _>(device, &parts), leased::<Lse<Natural>, _>(device, &logs));
        let sink = leased::<f32, _>(device, &sinks);
        let mut out = leased::<bf16, _>(device, &[bf16::NAN; 2 * HEADS * VALUE]);
        let mut lse = leased::<Lse<Natural>, _>(device, &[f32::NAN; 2 * HEADS]);
        let mut lane = Lane::new(device, "lane", &[plan.scratch_bytes()]).unwrap();
        let args = MergeArgs {
            outs: PartialInput::F32((&outs).into()),
            lses: LseInput::Natural((&lses).into()),
            sink: Some((&sink).into()),
            out: (&mut out).into(),
            lse: LseOutput::Natural((&mut lse).into()),
            scratch: (&mut lane).into(),
        };
        prepared.bind(args).unwrap().run(&mut stream).unwrap();
        drop((outs, lses, sink, lane, prepared));
        stream.wait().unwrap();
        let case = MergeCase { outs: &parts, lses: &logs, sink: Some(&sinks) };
        let (needed, needed_lse) = merge::oracle(&spec, &case);
        let needed: Vec<_> = needed.into_iter().map(bf16::from_f64).collect();
        assert_eq!(out.read().unwrap(), needed);
        let needed: Vec<_> = needed_lse.into_iter().map(|l| l as f32).collect();
        assert_eq!(lse.read().unwrap(), needed);
    });
}

/// The probes of real operations check what they say: a device that computes something else does
/// not prepare.
#[test]
fn real_probes_have_teeth() {
    late(|device| {
        device.inject(Fault::Numbers);
        let wrong = Layer::new(device).err();
        assert!(matches!(wrong, Some(Error::ProbeMismatch { op: "writer", .. })), "{wrong:?}");
        let plan = Plan::<Dense>::for_device::<Late>(&dense_spec(), device.facts()).unwrap();
        let wrong = plan.prepare(device).err();
        assert!(matches!(wrong, Some(Error::ProbeMismatch { op: "dense", .. })), "{wrong:?}");
    });
}
