//! One shape of sparse decode: its pages, its slots and its captured graph. As in dense decode, the
//! cache exists once; every row selects other tokens of its request, in an order of their own.

use half::bf16;
use mlakit::op::dense::{QueryDtype, QueryInput};
use mlakit::op::merge::LseOutput;
use mlakit::op::sparse::{Selection, SelectionInput, Sparse, SparseArgs, SparseFields, SparseSpec};
use mlakit::op::spec::Scalar;
use mlakit::splits::Budget;
use mlakit::{
    Choice, Element, Graph, Key, Lane, Lse, LseBase, Natural, Pages, Plan, Prepared, Runs, Slots,
    Stream,
};

use super::Step;
use super::decode::{KV_SCALE, cache_bytes, fill};
use crate::args::BenchArgs;
use crate::check::random::Random;
use crate::failure::Failure;
use crate::machine;

/// A sparse decode step that can be replayed.
pub struct SparseDecode<'d, D: Runs<Sparse>> {
    // The graph goes first: it leases what is below.
    graph: Graph<D>,
    prepared: Prepared<Sparse, D>,
    stream: Stream<'d, D>,
    _pages: Pages<D>,
    _lane: Lane<D>,
}

/// The slots of the step.
struct Keys {
    q: Key<bf16>,
    positions: Key<i32>,
    counts: Key<i32>,
    request: Key<i32>,
    table: Key<i32>,
    kv_scale: Option<Key<f32>>,
    out: Key<bf16>,
    lse: Key<Lse<Natural>>,
}

/// Tokens that a row selects: no more than its request has.
pub fn selected(args: &BenchArgs, tokens: usize) -> usize {
    args.selected.min(tokens)
}

impl<'d, D: Runs<Sparse>> SparseDecode<'d, D> {
    /// Plans, prepares, fills pages and slots, and captures the step.
    ///
    /// # Errors
    /// A shape that is none, or needs more memory than there is; what the device refuses.
    pub fn new(
        args: &BenchArgs,
        (heads, tokens): (usize, usize),
        mut stream: Stream<'d, D>,
    ) -> Result<Self, Failure> {
        machine::ensure_memory("the cache of this shape", cache_bytes(args, tokens))?;
        let device = stream.device().clone();
        let spec = spec(args, heads, tokens)?;
        let plan = Plan::<Sparse>::for_device::<D>(&spec, device.facts())?;
        let width = tokens.div_ceil(args.page_size);
        let count = args.batch.saturating_mul(width);
        let pages = count.saturating_mul(spec.pages().payload_bytes());
        let results = spec.max_rows.saturating_mul(heads);
        let tensors = results.saturating_mul(2 * (2 * args.qk_width + args.value_width) + 4);
        let bytes = pages.saturating_add(tensors).saturating_add(plan.scratch_bytes());
        machine::ensure_memory("cache, queries and scratch of this shape", bytes)?;

        let prepared = plan.prepare(&device)?;
        let lane = Lane::new(&device, "bench", &[prepared.plan().scratch_bytes()])?;
        let mut random = Random::new(1);
        let mut cache = Pages::new(&device, "bench", spec.pages(), count)?;
        fill(&mut cache, spec.pages(), &mut random)?;
        let mut slots = Slots::new(&device);
        let keys = Keys::new(&mut slots, &spec, width)?;
        let view = slots.view("cache", spec.pages())?;
        let mut graph = slots.capture(&mut stream, |recorder| {
            let kv_scale = keys.kv_scale.map(|key| recorder.input(key)).transpose()?;
            let args = SparseArgs {
                q: QueryInput::Bf16(recorder.input(keys.q)?),
                cache: recorder.cache(view)?,
                selection: SelectionInput::Positions {
                    positions: recorder.input(keys.positions)?,
                    counts: recorder.input(keys.counts)?,
                    request: recorder.input(keys.request)?,
                    page_table: recorder.input(keys.table)?,
                    table_width: width,
                },
                extra: None,
                sink: None,
                kv_scale,
                q_scale: None,
                out: recorder.output(keys.out)?,
                lse: LseOutput::Natural(recorder.output(keys.lse)?),
                scratch: lane.lease(),
            };
            prepared.bind(args)?.run(recorder)
        })?;
        graph.bind(&mut stream, view, &cache)?;
        let mut step = Self { graph, prepared, stream, _pages: cache, _lane: lane };
        step.write(&keys, (args, tokens), &mut random)?;
        Ok(step)
    }

    /// The inputs, which stay the same from replay to replay.
    fn write(
        &mut self,
        keys: &Keys,
        (args, tokens): (&BenchArgs, usize),
        random: &mut Random,
    ) -> Result<(), Failure> {
        let spec = self.prepared.plan().spec().clone();
        let width = tokens.div_ceil(args.page_size);
        let order = random.order(args.batch * width);
        let table: Vec<i32> = order.into_iter().map(|page| page as i32).collect();
        let q = random.bf16s(spec.max_rows * spec.heads * args.qk_width, 2.0);
        let mut positions = Vec::with_capacity(spec.max_rows * spec.width);
        for _ in 0..spec.max_rows {
            let order = random.order(tokens).into_iter().take(spec.width);
            positions.extend(order.map(|position| position as i32));
        }
        let request: Vec<i32> = (0..spec.max_rows).map(|row| (row / args.rows) as i32).collect();
        self.slot(keys.q, &q)?;
        self.slot(keys.positions, &positions)?;
        self.slot(keys.counts, &vec![spec.width as i32; spec.max_rows])?;
        self.slot(keys.request, &request)?;
        self.slot(keys.table, &table)?;
        if let Some(key) = keys.kv_scale {
            self.slot(key, &[KV_SCALE])?;
        }
        Ok(self.stream.wait()?)
    }

    fn slot<T: Element>(&mut self, key: Key<T>, values: &[T::Raw]) -> Result<(), Failure> {
        self.graph.slot_mut(key)?.write_on(&mut self.stream, values)?;
        Ok(())
    }
}

impl<D: Runs<Sparse>> Step for SparseDecode<'_, D> {
    fn replay(&mut self, times: usize) -> Result<(), Failure> {
        for _ in 0..times {
            self.graph.replay(&mut self.stream)?;
        }
        Ok(self.stream.wait()?)
    }

    fn choice(&self) -> &Choice {
        self.prepared.plan().choice()
    }
}

impl Keys {
    fn new<D: Runs<Sparse>>(
        slots: &mut Slots<D>,
        spec: &SparseSpec,
        table_width: usize,
    ) -> Result<Self, Failure> {
        let (rows, results) = (spec.max_rows, spec.max_rows * spec.heads);
        let scaled = spec.has_kv_scale();
        Ok(Self {
            q: slots.slot("q", results * spec.qk_width)?,
            positions: slots.slot("positions", rows * spec.width)?,
            counts: slots.slot("counts", rows)?,
            request: slots.slot("requests", rows)?,
            table: slots.slot("page table", spec.max_batch * table_width)?,
            kv_scale: scaled.then(|| slots.slot("kv_scale", 1)).transpose()?,
            out: slots.slot("out", results * spec.value_width)?,
            lse: slots.slot("lse", results)?,
        })
    }
}

fn spec(args: &BenchArgs, heads: usize, tokens: usize) -> Result<SparseSpec, Failure> {
    let scale = (args.qk_width as f32).powf(-0.5);
    Ok(SparseSpec::new(SparseFields {
        heads,
        qk_width: args.qk_width,
        value_width: args.value_width,
        record: args.record,
        record_width: None,
        page_size: args.page_size,
        softmax_scale: Scalar::try_from(scale)?,
        lse: LseBase::Natural,
        sink: false,
        sink_in_lse: false,
        query: QueryDtype::Bf16,
        quantize_query: false,
        partial: args.partial,
        splits: args.splits,
        budget: Budget::default(),
        window: None,
        selection: Selection::Positions,
        width: selected(args, tokens),
        extra_record: None,
        extra_record_width: None,
        extra_page_size: None,
        extra_width: None,
        max_rows: args.batch * args.rows,
        max_batch: args.batch,
        max_kv_tokens: tokens,
        max_table_width: tokens.div_ceil(args.page_size),
    })?)
}
