//! One shape of dense decode: its pages, its slots and its captured graph.
//!
//! The cache exists once, on the device: its pages are made one at a time and written where they
//! belong, so that a cache as large as the device's memory can be timed.

use half::bf16;
use mlakit::op::dense::{Dense, DenseArgs, DenseFields, DenseSpec, QueryDtype, QueryInput};
use mlakit::op::merge::LseOutput;
use mlakit::op::spec::Scalar;
use mlakit::splits::Budget;
use mlakit::{
    Choice, Device, Element, Graph, Key, Lane, Lse, LseBase, Natural, PageGeometry, Pages, Plan,
    Prepared, RecordLayout, Runs, Slots, Stream,
};

use super::Step;
use crate::args::BenchArgs;
use crate::check::random::Random;
use crate::failure::Failure;
use crate::machine;

/// The scale of a scaled cache.
pub(super) const KV_SCALE: f32 = 0.0125;

/// Bytes of the records of all requests, without what is left of their last pages.
pub fn cache_bytes(args: &BenchArgs, tokens: usize) -> usize {
    let record = RecordLayout::of_key(args.record, args.qk_width, args.value_width).bytes();
    args.batch.saturating_mul(tokens).saturating_mul(record)
}

/// A decode step that can be replayed.
pub struct Decode<'d, D: Runs<Dense>> {
    // The graph goes first: it leases what is below.
    graph: Graph<D>,
    prepared: Prepared<Dense, D>,
    stream: Stream<'d, D>,
    _pages: Pages<D>,
    _lane: Lane<D>,
}

/// The slots of the step.
struct Keys {
    q: Key<bf16>,
    table: Key<i32>,
    kv_lens: Key<i32>,
    q_offsets: Key<i32>,
    kv_scale: Option<Key<f32>>,
    out: Key<bf16>,
    lse: Key<Lse<Natural>>,
}

impl<'d, D: Runs<Dense>> Decode<'d, D> {
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
        let plan = Plan::<Dense>::for_device::<D>(&spec, device.facts())?;
        let width = tokens.div_ceil(args.page_size);
        let count = args.batch.saturating_mul(width);
        let pages = count.saturating_mul(spec.pages().payload_bytes());
        let results = spec.max_rows.saturating_mul(heads);
        // Queries on the host and in their slot, and outputs.
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
            let args = DenseArgs {
                q: QueryInput::Bf16(recorder.input(keys.q)?),
                cache: recorder.cache(view)?,
                page_table: recorder.input(keys.table)?,
                kv_lens: recorder.input(keys.kv_lens)?,
                q_offsets: recorder.input(keys.q_offsets)?,
                row_kv_lens: None,
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

    /// The inputs, which stay the same from replay to replay. Pages are given out in a shuffled
    /// order.
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
        let offsets: Vec<i32> = (0..=args.batch).map(|b| (b * args.rows) as i32).collect();
        let q = random.bf16s(spec.max_rows * spec.heads * args.qk_width, 2.0);
        self.slot(keys.q, &q)?;
        self.slot(keys.table, &table)?;
        self.slot(keys.kv_lens, &vec![tokens as i32; args.batch])?;
        self.slot(keys.q_offsets, &offsets)?;
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

impl<D: Runs<Dense>> Step for Decode<'_, D> {
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
    fn new<D: Runs<Dense>>(
        slots: &mut Slots<D>,
        spec: &DenseSpec,
        width: usize,
    ) -> Result<Self, Failure> {
        let (results, batch) = (spec.max_rows * spec.heads, spec.max_batch);
        let scaled = spec.record.is_scaled();
        Ok(Self {
            q: slots.slot("q", results * spec.qk_width)?,
            table: slots.slot("page table", batch * width)?,
            kv_lens: slots.slot("lengths", batch)?,
            q_offsets: slots.slot("offsets", batch + 1)?,
            kv_scale: scaled.then(|| slots.slot("kv_scale", 1)).transpose()?,
            out: slots.slot("out", results * spec.value_width)?,
            lse: slots.slot("lse", results)?,
        })
    }
}

fn spec(args: &BenchArgs, heads: usize, tokens: usize) -> Result<DenseSpec, Failure> {
    let scale = (args.qk_width as f32).powf(-0.5);
    Ok(DenseSpec::new(DenseFields {
        heads,
        qk_width: args.qk_width,
        value_width: args.value_width,
        record: args.record,
        record_width: None,
        page_size: args.page_size,
        softmax_scale: Scalar::try_from(scale)?,
        lse: LseBase::Natural,
        sink_in_lse: false,
        query: QueryDtype::Bf16,
        quantize_query: false,
        partial: args.partial,
        splits: args.splits,
        budget: Budget::default(),
        window: None,
        row_lengths: false,
        max_rows: args.batch * args.rows,
        max_batch: args.batch,
        max_kv_tokens: tokens,
        max_table_width: tokens.div_ceil(args.page_size),
    })?)
}

/// Every record of every page, a page at a time.
pub(super) fn fill<D: Device>(
    cache: &mut Pages<D>,
    geometry: PageGeometry,
    random: &mut Random,
) -> Result<(), Failure> {
    let (record, width, planes) = (geometry.record, geometry.record.width, geometry.planes());
    let mut bytes = vec![0; geometry.payload_bytes()];
    for page in 0..cache.pages() {
        for token in 0..geometry.page_size {
            let values = random.bf16s(width, 1.0);
            planes.encode(record, (&mut bytes, token), [&values, &[]], KV_SCALE);
        }
        cache.write((page, 0), &bytes)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Args, Command};
    use mlakit::Category;
    use mlakit_cpu::Cpu;

    fn args(line: &str) -> BenchArgs {
        let words: Vec<_> = line.split(' ').map(Into::into).collect();
        match Args::read(&words).unwrap().command {
            Command::Bench(args) => args,
            other => panic!("{other:?}"),
        }
    }

    /// The ledger has the cache once, and nothing else of its size.
    #[test]
    fn the_cache_exists_once() {
        let args = args("mlakit bench --heads 2 --tokens 3000 --batch 3 --record e4m3 --threads 1");
        let device = Cpu::detect().unwrap();
        let caller = device.own_stream().unwrap();
        let mut decode = Decode::new(&args, (2, 3000), device.stream(&caller).unwrap()).unwrap();
        decode.replay(1).unwrap();
        let (live, census) = (cache_bytes(&args, 3000), device.census());
        assert_eq!(census.live(Category::Cache), 3 * 47 * 64 * 576);
        assert!(census.live(Category::Cache) < live + live / 50);
        let rest = [Category::Tensors, Category::Slots, Category::Scratch];
        let rest: usize = rest.into_iter().map(|category| census.live(category)).sum();
        assert!(rest < live / 10, "{rest} bytes beside a cache of {live}");
    }
}
