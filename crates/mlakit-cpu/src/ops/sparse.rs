//! `sparse` on the CPU: rows, heads and splits become items, items are divided among threads by cost, then splits are merged.
//!
//! Rows share no keys, so an item has one row and as many of its heads as there are threads for: its records are decoded once for them.
//! What the items are follows from the counts of the rows alone, so each task finds its own by walking over them; there is no list.
//! An entry that is out of bounds is met by one split of its row, and of the items of one split the one with the first heads counts it.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use mlakit::op::dense::QueryDtype;
use mlakit::op::sparse::{Columns, Selection, Sparse, SparseRegions, SparseSpec};
use mlakit::scratch::{Fault, RegionSpec};
use mlakit::splits::Division;
use mlakit::{Choice, Error, PageGeometry, Plan, Refusal, Region, Runs};

use super::merge::{self, Shape as MergeShape};
use super::{Shared, fault, read, scale, view_words};
use crate::device::{Cpu, Facts, Queue};
use crate::kernel::{
    self, Attention, Geometry, Kernels, Lanes, List, OutFormat, Output, Queries, QueryFormat,
    RecordCache, RecordRows, Sink, SparseCall, SparseItem,
};
use crate::pool::Pool;

/// The region of a worker's own memory, `threads` of them.
const WORKERS: &str = "workers";

/// Heads of one item are a multiple of this, so that lanes are not wasted.
const HEAD_GRAIN: usize = 16;

/// Code of sparse attention: kernels, and what of the plan they need.
pub struct SparseCode {
    kernels: Kernels,
    spec: SparseSpec,
    division: Division,
    worker_bytes: usize,
}

fn geometry(spec: &SparseSpec) -> Geometry {
    Geometry { heads: spec.heads, qk_width: spec.qk_width, value_width: spec.value_width }
}

fn worker_bytes(facts: &Facts, spec: &SparseSpec) -> usize {
    let kernels = Kernels::new(facts.isa).ok();
    let bytes = kernels.map_or(0, |k| k.sparse_scratch_bytes(geometry(spec), spec.heads));
    bytes.next_multiple_of(256)
}

impl Runs<Sparse> for Cpu {
    type Code = Arc<SparseCode>;

    /// `Auto` gives each thread one split of every row, unless there are so many rows that they keep all threads busy.
    fn choose(facts: &Facts, spec: &SparseSpec) -> Result<Choice, Refusal> {
        let wanted = if spec.max_rows >= 4 * facts.threads { 1 } else { facts.threads };
        let splits = spec.capacity().resolve(wanted).map_err(|error| Refusal {
            what: format!("sparse attention with {} rows and splits", spec.max_rows),
            because: error.to_string(),
            instead: "a smaller capacity, or a budget".to_string(),
        })?;
        let workers = worker_bytes(facts, spec).saturating_mul(facts.threads);
        let work = vec![RegionSpec::new(WORKERS, workers)];
        Ok(Choice { splits, work, ..Choice::of(super::kernel_name("sparse", facts)) })
    }

    fn prepare(&self, plan: &Plan<Sparse>) -> Result<Self::Code, Error> {
        let spec = plan.spec().clone();
        let worker_bytes = worker_bytes(mlakit::Device::facts(self), &spec);
        let (kernels, division) = (self.kernels()?, plan.division());
        Ok(Arc::new(SparseCode { kernels, division, worker_bytes, spec }))
    }

    fn launch(
        &self,
        code: &Self::Code,
        plan: &Plan<Sparse>,
        regions: &SparseRegions,
        queue: &mut Queue,
    ) -> Result<(), Error> {
        let scratch = |name| plan.region(regions.scratch, name);
        let launch = Launch {
            code: code.clone(),
            r: *regions,
            partial_out: scratch(Sparse::PARTIAL_OUT),
            partial_lse: scratch(Sparse::PARTIAL_LSE),
            workers: scratch(WORKERS),
        };
        self.enqueue(queue, move |pool: &Pool| launch.run(pool))
    }
}

struct Launch {
    code: Arc<SparseCode>,
    r: SparseRegions,
    partial_out: Region,
    partial_lse: Region,
    workers: Region,
}

/// All items of a launch.
#[derive(Clone, Copy, Default)]
struct Work {
    /// Rows times splits that have columns.
    groups: usize,
    /// Columns times heads.
    cost: u64,
}

impl Launch {
    fn run(&self, pool: &Pool) {
        let call = self.call();
        let work = self.survey(&call);
        if work.cost > 0 {
            let grains = self.spec().heads.div_ceil(HEAD_GRAIN);
            let chunks = pool.threads().div_ceil(work.groups).min(grains);
            let tasks = pool.threads().min(work.groups * chunks);
            let shared = SharedCall(call);
            pool.run(tasks, &|task, worker| {
                let part = (task, tasks, work.cost);
                self.work(shared.get(), (part, chunks), worker);
            });
        }
        if self.splits() > 1 {
            self.merge(pool);
        }
    }

    fn spec(&self) -> &SparseSpec {
        &self.code.spec
    }

    fn splits(&self) -> usize {
        self.code.division.splits
    }

    /// Counts what is out of bounds of a row as a whole, and finishes splits without columns.
    fn survey(&self, call: &SparseCall<'_>) -> Work {
        let (mut lengths, mut ids) = (0, 0);
        let mut work = Work::default();
        for row in 0..self.r.rows {
            let (columns, bad) = self.columns(row);
            lengths += bad.lengths;
            ids += bad.ids;
            for split in 0..self.splits() {
                let range = columns.split(self.code.division, split);
                if range.is_empty() {
                    self.attend(call, (row, split), (columns, 0..0), 0..self.spec().heads, 0);
                } else {
                    work.groups += 1;
                    work.cost += (range.len() * self.spec().heads) as u64;
                }
            }
        }
        self.count(Fault::Length, lengths);
        self.count(Fault::Id, ids);
        work
    }

    /// The live columns of a row.
    fn columns(&self, row: usize) -> (Columns, Bad) {
        let mut bad = Bad::default();
        // SAFETY: operands of this launch, bound at these sizes.
        let (counts, extra): (&[i32], &[i32]) = unsafe {
            let has_extra = self.spec().extra_record.is_some();
            let extra_rows = if has_extra { self.r.rows } else { 0 };
            (read(self.r.counts, self.r.rows), read(self.r.extra_counts, extra_rows))
        };
        let mut clamp = |count: i32, width: usize| {
            let (count, fine) = Columns::clamp_count(count, width);
            bad.lengths += u32::from(!fine);
            count
        };
        let main = clamp(counts[row], self.r.width);
        let extra = extra.get(row).map_or(0, |count| clamp(*count, self.r.extra_width));
        let main = match self.request(row) {
            _ if self.spec().selection == Selection::Slots => main,
            Some(request) if request < self.r.batch => main,
            request => {
                bad.ids += u32::from(request.is_some() && main > 0);
                0
            }
        };
        (Columns { main, extra }, bad)
    }

    /// The request of a row, where it has one.
    fn request(&self, row: usize) -> Option<usize> {
        let positions = self.spec().selection == Selection::Positions;
        // SAFETY: an operand of this launch, bound at this size where the spec has it.
        let request: &[i32] =
            unsafe { read(self.r.request, if positions { self.r.rows } else { 0 }) };
        request.get(row).and_then(|request| usize::try_from(*request).ok())
    }

    /// One task's share: the items whose middle lies in its part of the total cost.
    fn work(
        &self,
        call: &SparseCall<'_>,
        ((task, tasks, total), chunks): ((usize, usize, u64), usize),
        worker: usize,
    ) {
        let part = |task: usize| (u128::from(total) * task as u128 / tasks as u128) as u64;
        let own = part(task)..part(task + 1);
        let mut before = 0;
        for row in 0..self.r.rows {
            let (columns, _) = self.columns(row);
            for split in 0..self.splits() {
                let range = columns.split(self.code.division, split);
                for chunk in 0..if range.is_empty() { 0 } else { chunks } {
                    let heads = self.heads_of(chunk, chunks);
                    let cost = (range.len() * heads.len()) as u64;
                    if own.contains(&(before + cost / 2)) {
                        self.attend(call, (row, split), (columns, range.clone()), heads, worker);
                    }
                    before += cost;
                }
            }
            if before >= own.end {
                break;
            }
        }
    }

    fn heads_of(&self, chunk: usize, chunks: usize) -> Range<usize> {
        let heads = self.spec().heads;
        let grains = heads.div_ceil(HEAD_GRAIN);
        let at = |chunk: usize| (chunk * grains / chunks * HEAD_GRAIN).min(heads);
        at(chunk)..at(chunk + 1)
    }

    fn attend(
        &self,
        call: &SparseCall<'_>,
        (row, split): (usize, usize),
        (columns, range): (Columns, Range<usize>),
        heads: Range<usize>,
        worker: usize,
    ) {
        let item = SparseItem {
            counts_faults: heads.start == 0,
            lanes: Lanes { rows: row..row + 1, heads, out: self.output(split, row) },
            lists: self.lists(row),
            columns,
            range,
        };
        let scratch =
            Shared::<u8>::of(self.workers).get().wrapping_add(worker * self.code.worker_bytes);
        // SAFETY: operands and scratch were bound at the sizes of the plan; tasks have items of their own, items have outputs of their
        // own, and the pool gives a worker number to one thread at a time.
        unsafe { self.code.kernels.sparse(call, &item, scratch) };
    }

    fn lists(&self, row: usize) -> [List; 2] {
        let entries = |region: Region, width: usize| {
            (region.address() as *const i32).wrapping_add(row * width)
        };
        let main = entries(self.r.entries, self.r.width);
        let main = match (self.spec().selection, self.request(row)) {
            (Selection::Positions, request) => List::Positions {
                entries: main,
                table: (self.r.page_table.address() as *const i32)
                    .wrapping_add(request.unwrap_or(0) * self.r.table_width),
                covered: (self.r.table_width * self.spec().page_size)
                    .min(self.spec().max_kv_tokens),
            },
            (Selection::Slots, _) => List::Slots { entries: main },
        };
        let extra = entries(self.r.extra_slots, self.r.extra_width);
        [main, List::Slots { entries: extra }]
    }

    fn output(&self, split: usize, row: usize) -> Output {
        let spec = self.spec();
        if self.splits() == 1 {
            let first = row * spec.heads;
            let values = Shared::<u8>::of(self.r.out).get();
            return Output {
                values: values.wrapping_add(first * spec.value_width * 2),
                format: OutFormat::Bf16,
                lse: Shared::<f32>::of(self.r.lse).get().wrapping_add(first),
                lse_base: merge::lse_base(spec.lse),
            };
        }
        let format = merge::format(spec.partial);
        let first = (split * self.r.rows + row) * spec.heads;
        let values = Shared::<u8>::of(self.partial_out).get();
        Output {
            values: values.wrapping_add(first * spec.value_width * format.bytes()),
            format,
            lse: Shared::<f32>::of(self.partial_lse).get().wrapping_add(first),
            lse_base: kernel::LseBase::Two,
        }
    }

    /// Where all records of the call are codes of one scale, rows are codes and the scale is a factor of scores and outputs.
    fn call(&self) -> SparseCall<'_> {
        let spec = self.spec();
        // SAFETY: operands of this launch, bound with one element where the spec has them.
        let (kv_scale, q_scale) = unsafe {
            (
                scale(spec.has_kv_scale(), self.r.kv_scale),
                scale(spec.has_query_scale(), self.r.q_scale),
            )
        };
        let all = [Some(spec.record), spec.extra_record];
        let as_codes = all.into_iter().flatten().all(|record| record.is_scaled());
        let row_scale = (!as_codes).then_some(kv_scale);
        let factor = if as_codes { kv_scale } else { 1.0 };
        let main = self.cache(self.r.view, spec.pages(), row_scale);
        let extra = spec.extra().map(|of| self.cache(self.r.extra_view, of.pages, row_scale));
        let softmax_scale = spec.softmax_scale.value();
        SparseCall {
            attention: Attention {
                geometry: geometry(spec),
                queries: Queries {
                    base: self.r.q.address() as *const u8,
                    format: match (spec.query, spec.quantize_query) {
                        (QueryDtype::E4m3, _) => QueryFormat::E4m3,
                        (QueryDtype::Bf16, true) => QueryFormat::Bf16AsE4m3 { q_scale },
                        (QueryDtype::Bf16, false) => QueryFormat::Bf16,
                    },
                },
                score_scale_log2: Attention::score_scale(softmax_scale, factor, q_scale),
                value_scale: factor,
                // A merge of several splits counts it.
                sink: (spec.sink && self.splits() == 1).then(|| Sink {
                    logits: self.r.sink.address() as *const f32,
                    in_lse: spec.sink_in_lse,
                    partial: merge::format(spec.partial),
                }),
            },
            caches: [main, extra.unwrap_or(main)],
            // SAFETY: the scratch of this launch.
            faults: unsafe { fault(self.r.scratch, Fault::Id) },
        }
    }

    fn cache(&self, view: Region, pages: PageGeometry, row_scale: Option<f32>) -> RecordCache {
        // SAFETY: a view of this launch.
        let words = unsafe { view_words(view) };
        let planes = pages.planes();
        RecordCache {
            base: words.base as *const u8,
            pages: words.pages as usize,
            page_size: pages.page_size,
            page_stride_bytes: words.page_stride_bytes,
            data: planes.data,
            scales: planes.scales,
            rows: RecordRows::new(pages.record, self.spec().qk_width, row_scale),
        }
    }

    fn merge(&self, pool: &Pool) {
        let spec = self.spec();
        let shape = MergeShape {
            splits: self.splits(),
            heads: spec.heads,
            width: spec.value_width,
            format: merge::format(spec.partial),
            lse_base: kernel::LseBase::Two,
            out_lse_base: merge::lse_base(spec.lse),
            nan_spreads: true,
            sink_in_lse: spec.sink_in_lse,
        };
        let operands = merge::Operands {
            rows: self.r.rows,
            outs: self.partial_out,
            lses: self.partial_lse,
            sink: self.r.sink,
            out: self.r.out,
            lse: self.r.lse,
        };
        merge::run(pool, self.code.kernels, shape, &operands);
    }

    fn count(&self, kind: Fault, bad: u32) {
        if bad > 0 {
            // SAFETY: the scratch of this launch.
            unsafe { fault(self.r.scratch, kind) }.fetch_add(bad, Relaxed);
        }
    }
}

/// What of a row as a whole was out of bounds.
#[derive(Clone, Copy, Default)]
struct Bad {
    lengths: u32,
    ids: u32,
}

/// A call that all tasks read.
struct SharedCall<'c>(SparseCall<'c>);

// SAFETY: its pointers are those of operands that the launch holds; tasks read them.
unsafe impl Sync for SharedCall<'_> {}

impl<'c> SharedCall<'c> {
    fn get(&self) -> &SparseCall<'c> {
        &self.0
    }
}
