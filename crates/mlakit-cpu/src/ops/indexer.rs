//! `indexer` on the CPU: requests and rows become groups, groups are divided among threads by cost; where there are too few, their keys
//! are divided too and the candidates of the parts are joined.
//!
//! Nothing is as long as a request: a part of a group has a list of candidates for each of its rows, and that is all that outlives a
//! block of keys.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use half::bf16;
use mlakit::op::dense::{Rows, Visible};
use mlakit::op::indexer::{Indexer, IndexerRegions, IndexerSpec, pools_visible};
use mlakit::scratch::{ALIGN, FAULT_BYTES, Fault, RegionSpec};
use mlakit::{Choice, Error, Plan, RecordFormat, Refusal, Region, Runs};

use super::{Shared, fault, read, view_words, write};
use crate::device::{Cpu, Facts, Queue};
use crate::kernel::topk::{Candidates, capacity, list_bytes, score_of};
use crate::kernel::{IndexCache, IndexCall, IndexFormat, IndexItem, Kernels, MAX_ITEM_ROWS};
use crate::pool::Pool;

/// The region of candidates: lists of each part that is worked on at a time.
const CANDIDATES: &str = "candidates";
/// The region of a worker's own memory.
const WORKERS: &str = "workers";

/// Keys of a block, which is never divided.
const BLOCK: usize = 64;

/// Parts for each thread, where groups are divided: so many that a part more or less does not matter.
const PARTS: usize = 4;

/// Code of an indexer: kernels, and what of the plan they need.
pub struct IndexerCode {
    kernels: Kernels,
    spec: IndexerSpec,
    shape: Shape,
}

/// How work is divided, and how much memory that takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    /// Rows of a group at most.
    rows: usize,
    /// Parts of which candidates are held at a time.
    parts: usize,
    /// Threads that work at a time.
    workers: usize,
    /// Bytes of a list of candidates.
    list_bytes: usize,
    /// Bytes of a worker, and where in them the queries begin.
    worker_bytes: usize,
    queries_at: usize,
}

impl Shape {
    fn new(
        kernels: Option<Kernels>,
        spec: &IndexerSpec,
        (rows, parts, workers): (usize, usize, usize),
    ) -> Self {
        let kernel = kernels.map_or(0, |k| k.index_scratch_bytes(&call(spec), rows));
        let queries_at = kernel.next_multiple_of(ALIGN);
        // Rounded queries, and the codes, scales and values of one on the way.
        let queries = rows * spec.heads * spec.width * 2 + spec.layout().bytes() + spec.width * 4;
        let list_bytes = list_bytes(capacity(spec.topk, spec.max_kv_tokens)).next_multiple_of(64);
        let worker_bytes = (queries_at + queries + ALIGN).next_multiple_of(ALIGN);
        Self { rows, parts, workers, list_bytes, worker_bytes, queries_at }
    }

    fn regions(self) -> Vec<RegionSpec> {
        let lists = self.list_bytes.saturating_mul(self.rows).saturating_mul(self.parts);
        let workers = self.worker_bytes.saturating_mul(self.workers);
        vec![RegionSpec::new(CANDIDATES, lists), RegionSpec::new(WORKERS, workers)]
    }

    /// Bytes of a plan with these regions.
    fn bytes(self) -> usize {
        let aligned = |bytes: usize| bytes.saturating_add(ALIGN - 1) / ALIGN * ALIGN;
        let sum = |all: usize, region: &RegionSpec| all.saturating_add(aligned(region.bytes));
        self.regions().iter().fold(FAULT_BYTES, sum)
    }
}

/// The most memory that the budget allows: first fewer parts, then fewer rows, then fewer threads. The last is the least that works.
fn shape(facts: &Facts, spec: &IndexerSpec) -> Shape {
    let kernels = Kernels::new(facts.isa).ok();
    let threads = facts.threads.max(1);
    let rows = kernels.map_or(1, |k| k.index_rows_per_item(spec.heads)).min(spec.max_rows);
    let all_rows = std::iter::successors(Some(rows), |rows| (*rows > 1).then_some(rows / 2));
    let shapes = all_rows.flat_map(|rows| {
        [PARTS * threads, 2 * threads, threads].map(|parts| (rows, parts, threads))
    });
    let fewer = (1..threads).rev().map(|threads| (1, threads, threads));
    let mut shapes = shapes.chain(fewer).map(|sizes| Shape::new(kernels, spec, sizes));
    let least = Shape::new(kernels, spec, (1, 1, 1));
    shapes.find(|shape| shape.bytes() <= spec.budget_bytes).unwrap_or(least)
}

/// The call of a `Spec`, without a pool.
fn call(spec: &IndexerSpec) -> IndexCall {
    let planes = spec.layout().planes(spec.page_size);
    IndexCall {
        heads: spec.heads,
        width: spec.width,
        cache: IndexCache {
            base: std::ptr::null(),
            pages: 0,
            page_size: spec.page_size,
            page_stride_bytes: 0,
            data_stride: planes.data.stride,
            scales_first: planes.scales.first,
            scales_stride: planes.scales.stride,
            format: match spec.record {
                RecordFormat::IndexFp8_132 => IndexFormat::E4m3,
                RecordFormat::IndexMxfp4_68 => IndexFormat::E2m1,
                // A Spec has no other format than those of index keys.
                _ => IndexFormat::Bf16,
            },
        },
    }
}

impl Runs<Indexer> for Cpu {
    type Code = Arc<IndexerCode>;

    fn choose(facts: &Facts, spec: &IndexerSpec) -> Result<Choice, Refusal> {
        let shape = shape(facts, spec);
        if shape.bytes() > spec.budget_bytes {
            return Err(Refusal {
                what: format!("an indexer in {} bytes", spec.budget_bytes),
                because: format!(
                    "the candidates of one row for top-{} and one thread take {}",
                    spec.topk,
                    shape.bytes()
                ),
                instead: format!("`budget_bytes` {} or more", shape.bytes()),
            });
        }
        Ok(Choice { work: shape.regions(), ..Choice::of(super::kernel_name("indexer", facts)) })
    }

    fn prepare(&self, plan: &Plan<Indexer>) -> Result<Self::Code, Error> {
        let (spec, facts) = (plan.spec().clone(), mlakit::Device::facts(self));
        let shape = shape(facts, &spec);
        Ok(Arc::new(IndexerCode { kernels: self.kernels()?, spec, shape }))
    }

    fn launch(
        &self,
        code: &Self::Code,
        plan: &Plan<Indexer>,
        regions: &IndexerRegions,
        queue: &mut Queue,
    ) -> Result<(), Error> {
        let scratch = |name| plan.region(regions.scratch, name);
        let launch = Launch {
            code: code.clone(),
            r: *regions,
            candidates: scratch(CANDIDATES),
            workers: scratch(WORKERS),
        };
        self.enqueue(queue, move |pool: &Pool| launch.run(pool))
    }
}

struct Launch {
    code: Arc<IndexerCode>,
    r: IndexerRegions,
    candidates: Region,
    workers: Region,
}

/// Some rows of one request.
#[derive(Clone, Debug)]
struct Group {
    /// Its number in the launch.
    index: usize,
    request: usize,
    rows: Range<usize>,
    /// For each row the position behind the last that it sees.
    ends: [usize; MAX_ITEM_ROWS],
}

impl Group {
    fn end(&self) -> usize {
        self.ends[..self.rows.len()].iter().copied().max().unwrap_or(0)
    }

    /// The keys of one of `parts` parts.
    fn part(&self, part: usize, parts: usize) -> Range<usize> {
        let (end, blocks) = (self.end(), self.end().div_ceil(BLOCK));
        let at = |part: usize| (part * blocks / parts * BLOCK).min(end);
        at(part)..at(part + 1)
    }

    /// In rows times keys of a part; never 0, so that rows without keys are done by someone.
    fn cost(&self, keys: &Range<usize>) -> u64 {
        (self.rows.len() * (keys.len() + BLOCK)) as u64
    }
}

impl Launch {
    fn run(&self, pool: &Pool) {
        self.count_bounds();
        self.clear_padding();
        let (mut groups, shape) = (0, self.code.shape);
        self.groups(|_| groups += 1);
        if groups == 0 {
            return;
        }
        let tasks = pool.threads().min(shape.workers);
        let wanted = PARTS * tasks / groups;
        let parts = wanted.min(shape.parts / groups).max(1);
        if tasks == 1 || parts == 1 {
            let total = self.total(1);
            pool.run(tasks, &|task, worker| {
                self.share((task, tasks, total), 1, |group, keys, _| {
                    self.score(group, keys, (task, worker));
                    self.finish(group, task..task + 1);
                });
            });
            return;
        }
        let total = self.total(parts);
        pool.run(tasks, &|task, worker| {
            self.share((task, tasks, total), parts, |group, keys, part| {
                self.score(group, keys, (group.index * parts + part, worker));
            });
        });
        pool.run(tasks, &|task, _| {
            self.groups(|group| {
                if group.index % tasks == task {
                    self.finish(group, group.index * parts..(group.index + 1) * parts);
                }
            });
        });
    }

    fn spec(&self) -> &IndexerSpec {
        &self.code.spec
    }

    fn lengths(&self) -> &[i32] {
        // SAFETY: an operand of this launch, bound at this size.
        unsafe { read(self.r.kv_lens, self.r.batch) }
    }

    /// What a request covers at most, in keys.
    fn covered(&self) -> usize {
        (self.r.table_width * self.spec().page_size).min(self.spec().max_kv_tokens)
    }

    /// How many keys a row of a request sees, and whether its own position was in bounds.
    fn seen(&self, visible: Visible, rows: &Range<usize>, row: usize) -> (usize, bool) {
        if !self.spec().is_pooled() {
            return (visible.causal(row - rows.start).end, true);
        }
        // SAFETY: an operand of this launch, bound at this size where keys are pools.
        let last: &[i64] = unsafe { read(self.r.last_position, self.r.rows) };
        pools_visible(last[row], self.spec().pool_size, visible.kv_len_tokens)
    }

    /// Calls `each` with every request that has rows.
    fn requests(&self, mut each: impl FnMut(usize, Range<usize>, Visible)) {
        // SAFETY: an operand of this launch, bound at this size.
        let offsets: &[i32] = unsafe { read(self.r.q_offsets, self.r.batch + 1) };
        let (mut next, _) = Rows::begin(offsets[0], self.r.rows);
        for (request, length) in self.lengths().iter().enumerate() {
            let (rows, _) = next.until(offsets[request + 1]);
            let (kv_len_tokens, _) = Visible::clamp_length(*length, self.covered());
            if !rows.is_empty() {
                let visible = Visible { rows: rows.len(), kv_len_tokens, window: None };
                each(request, rows, visible);
            }
        }
    }

    /// Calls `each` with every group.
    fn groups(&self, mut each: impl FnMut(&Group)) {
        let (mut index, step) = (0, self.code.shape.rows);
        self.requests(|request, rows, visible| {
            for first in rows.clone().step_by(step) {
                let group_rows = first..(first + step).min(rows.end);
                let mut ends = [0; MAX_ITEM_ROWS];
                for (end, row) in ends.iter_mut().zip(group_rows.clone()) {
                    *end = self.seen(visible, &rows, row).0;
                }
                each(&Group { index, request, rows: group_rows, ends });
                index += 1;
            }
        });
    }

    fn total(&self, parts: usize) -> u64 {
        let mut total = 0;
        self.groups(|group| {
            total += (0..parts).map(|part| group.cost(&group.part(part, parts))).sum::<u64>();
        });
        total
    }

    /// One task's share: the parts whose middle lies in its part of the total cost.
    fn share(
        &self,
        (task, tasks, total): (usize, usize, u64),
        parts: usize,
        mut each: impl FnMut(&Group, Range<usize>, usize),
    ) {
        let at = |task: usize| (u128::from(total) * task as u128 / tasks as u128) as u64;
        let (own, mut before) = (at(task)..at(task + 1), 0);
        self.groups(|group| {
            for part in 0..parts {
                let keys = group.part(part, parts);
                let cost = group.cost(&keys);
                if own.contains(&(before + cost / 2)) {
                    each(group, keys, part);
                }
                before += cost;
            }
        });
    }

    /// The list of a row of a part.
    ///
    /// # Safety
    /// Nothing else uses it meanwhile.
    unsafe fn list<'l>(&self, part: usize, row: usize) -> Candidates<'l> {
        let shape = self.code.shape;
        let first = (part * shape.rows + row) * shape.list_bytes;
        let bytes = list_bytes(capacity(self.spec().topk, self.spec().max_kv_tokens));
        let memory = self.candidates.part(first, bytes).unwrap_or(Region::EMPTY);
        // SAFETY: scratch of this launch at an aligned place, this caller's alone.
        Candidates::in_memory(unsafe { write(memory, bytes / 4) }, self.spec().topk)
    }

    /// Scores a part of a group into the lists of a part.
    fn score(&self, group: &Group, keys: Range<usize>, (part, worker): (usize, usize)) {
        let (spec, shape) = (self.spec(), self.code.shape);
        let mut lists: [Candidates<'_>; MAX_ITEM_ROWS] = std::array::from_fn(|row| {
            if row < group.rows.len() {
                // SAFETY: parts that are worked on at a time have lists of their own.
                let mut list = unsafe { self.list(part, row) };
                list.clear();
                list
            } else {
                Candidates::none()
            }
        });
        if keys.is_empty() {
            return;
        }
        // SAFETY: the view of this launch.
        let view = unsafe { view_words(self.r.view) };
        let mut call = call(spec);
        call.cache.base = view.base as *const u8;
        call.cache.pages = view.pages as usize;
        call.cache.page_stride_bytes = view.page_stride_bytes;
        debug_assert!(worker < shape.workers);
        let own = Shared::<u8>::of(self.workers).get().wrapping_add(worker * shape.worker_bytes);
        let table = Shared::<i32>::of(self.r.page_table).get();
        let weights = Shared::<f32>::of(self.r.weights).get();
        let scored = spec.scores || group.end() > spec.topk;
        let item = IndexItem {
            page_table: table.wrapping_add(group.request * self.r.table_width),
            keys,
            rows: group.rows.len(),
            ends: group.ends,
            queries: if scored { self.queries(group, own) } else { std::ptr::null() },
            weights: weights.wrapping_add(group.rows.start * spec.heads),
            scored,
        };
        // SAFETY: operands and scratch were bound at the sizes of the plan; the table covers the keys; the pool gives a worker number to
        // one thread at a time.
        unsafe { self.code.kernels.index(&call, &item, &mut lists, own) };
    }

    /// The queries of a group as they are multiplied: where they lie, or rounded into the worker's memory.
    fn queries(&self, group: &Group, own: *mut u8) -> *const u16 {
        let spec = self.spec();
        let row = spec.heads * spec.width;
        let first = group.rows.start * row;
        let base = Shared::<u16>::of(self.r.q).get();
        if spec.record == RecordFormat::IndexBf16_256 {
            return base.wrapping_add(first);
        }
        // SAFETY: an operand of this launch, bound at this size.
        let queries: &[bf16] = unsafe { read(self.r.q, self.r.rows * row) };
        let queries = &queries[first..first + group.rows.len() * row];
        let layout = spec.layout();
        let planes = layout.planes(1);
        let at = own.wrapping_add(self.code.shape.queries_at);
        let values_at = at.wrapping_add(at.align_offset(ALIGN));
        let rounded_at = values_at.wrapping_add(spec.width * 4);
        let codes_at = rounded_at.wrapping_add(queries.len() * 2);
        // SAFETY: the worker's memory has room for the values of a query, the rounded queries, and a record, one behind the other, and
        // is this worker's alone.
        let (values, rounded, codes) = unsafe {
            (
                std::slice::from_raw_parts_mut(values_at.cast::<f32>(), spec.width),
                std::slice::from_raw_parts_mut(rounded_at.cast::<bf16>(), queries.len()),
                std::slice::from_raw_parts_mut(codes_at, layout.bytes()),
            )
        };
        let (data, scales) = codes.split_at_mut(planes.data.bytes);
        let heads = queries.chunks_exact(spec.width).zip(rounded.chunks_exact_mut(spec.width));
        for (query, rounded) in heads {
            layout.encode(data, scales, query, 1.0);
            layout.decode(data, scales, 1.0, values);
            for (to, value) in rounded.iter_mut().zip(&*values) {
                // A few bits times a power of two: exact.
                *to = bf16::from_f32(*value);
            }
        }
        rounded.as_ptr().cast()
    }

    /// Joins the parts of a group and writes what its rows select.
    fn finish(&self, group: &Group, parts: Range<usize>) {
        let spec = self.spec();
        for (local, row) in group.rows.clone().enumerate() {
            // SAFETY: the parts have been scored, and this task alone uses their lists now.
            let mut all = unsafe { self.list(parts.start, local) };
            for part in parts.clone().skip(1) {
                // SAFETY: as above; another list.
                all.absorb(&unsafe { self.list(part, local) });
            }
            let (positions, numbers) = all.finish();
            let to = self.row(row);
            to.counts[0] = positions.len() as i32;
            to.positions[..positions.len()].copy_from_slice(positions);
            to.positions[positions.len()..].fill(-1);
            if spec.scores {
                for (score, number) in to.scores.iter_mut().zip(numbers) {
                    *score = score_of(*number);
                }
                to.scores[positions.len()..].fill(f32::NEG_INFINITY);
            }
        }
    }

    /// The outputs of a row, which has one task at a time.
    fn row<'o>(&self, row: usize) -> RowOutputs<'o> {
        let (topk, scores) =
            (self.spec().topk, if self.spec().scores { self.spec().topk } else { 0 });
        let positions = Shared::<i32>::of(self.r.positions).get().wrapping_add(row * topk);
        let counts = Shared::<i32>::of(self.r.counts).get().wrapping_add(row);
        let scores_at = Shared::<f32>::of(self.r.scores).get().wrapping_add(row * scores);
        // SAFETY: the row's part of each output of this launch, bound at this size; no other task has the row.
        unsafe {
            RowOutputs {
                positions: std::slice::from_raw_parts_mut(positions, topk),
                counts: std::slice::from_raw_parts_mut(counts, 1),
                scores: match scores {
                    0 => &mut [],
                    len => std::slice::from_raw_parts_mut(scores_at, len),
                },
            }
        }
    }

    /// Rows of no request select nothing.
    fn clear_padding(&self) {
        let mut next = 0;
        self.requests(|_, rows, _| {
            (next..rows.start).for_each(|row| self.row(row).clear());
            next = rows.end;
        });
        (next..self.r.rows).for_each(|row| self.row(row).clear());
    }

    /// Counts lengths, offsets and page ids that are out of bounds.
    fn count_bounds(&self) {
        // SAFETY: an operand of this launch, bound at this size.
        let offsets: &[i32] = unsafe { read(self.r.q_offsets, self.r.batch + 1) };
        let (mut next, fine) = Rows::begin(offsets[0], self.r.rows);
        let (mut bad_offsets, mut bad_lengths) = (u32::from(!fine), 0);
        for (request, length) in self.lengths().iter().enumerate() {
            bad_offsets += u32::from(!next.until(offsets[request + 1]).1);
            bad_lengths += u32::from(!Visible::clamp_length(*length, self.covered()).1);
        }
        let mut bad_ids = 0;
        self.requests(|request, rows, visible| {
            let mut longest = 0;
            for row in rows.clone() {
                let (seen, fine) = self.seen(visible, &rows, row);
                bad_lengths += u32::from(!fine);
                longest = longest.max(seen);
            }
            bad_ids += self.bad_pages(request, longest);
        });
        self.count(Fault::Offset, bad_offsets);
        self.count(Fault::Length, bad_lengths);
        self.count(Fault::Id, bad_ids);
    }

    /// Page ids of the first keys of a request that are neither -1 nor in the pool.
    fn bad_pages(&self, request: usize, keys: usize) -> u32 {
        let width = self.r.table_width;
        // SAFETY: an operand of this launch, bound at this size.
        let table: &[i32] = unsafe { read(self.r.page_table, self.r.batch * width) };
        // SAFETY: the view of this launch.
        let pages = unsafe { view_words(self.r.view) }.pages;
        let needed = &table[request * width..][..keys.div_ceil(self.spec().page_size)];
        let bad = |id: &&i32| **id != -1 && u64::try_from(**id).map_or(true, |id| id >= pages);
        needed.iter().filter(bad).count() as u32
    }

    fn count(&self, kind: Fault, bad: u32) {
        if bad > 0 {
            // SAFETY: the scratch of this launch.
            unsafe { fault(self.r.scratch, kind) }.fetch_add(bad, Relaxed);
        }
    }
}

struct RowOutputs<'o> {
    positions: &'o mut [i32],
    counts: &'o mut [i32],
    scores: &'o mut [f32],
}

impl RowOutputs<'_> {
    fn clear(self) {
        self.positions.fill(-1);
        self.counts.fill(0);
        self.scores.fill(f32::NEG_INFINITY);
    }
}
