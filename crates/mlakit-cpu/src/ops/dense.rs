//! `dense` on the CPU: requests, rows, heads and splits become items, items are divided among threads by cost, then splits are merged.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use mlakit::op::dense::{Dense, DenseRegions, DenseSpec, QueryDtype, Rows, Visible};
use mlakit::scratch::{Fault, RegionSpec};
use mlakit::splits::Division;
use mlakit::{Choice, Error, LseBase, Plan, RecordFormat, Refusal, Region, Runs};

use super::merge::{self, Shape as MergeShape};
use super::{Shared, fault, read, scale, view_words, write};
use crate::device::{Cpu, Facts, Queue};
use crate::kernel::{
    self, Attention, Counted, DenseCall, DenseItem, Geometry, Kernels, KeyCache, KeyFormat, Lanes,
    OutFormat, Output, Queries, QueryFormat,
};
use crate::pool::Pool;

/// The region of a worker's own memory, `threads` of them.
const WORKERS: &str = "workers";
/// The region of the list of items.
const ITEMS: &str = "items";

/// Heads of one item are a multiple of this, so that lanes are not wasted.
const HEAD_GRAIN: usize = 16;

/// Code of dense attention: kernels, and what of the plan they need.
pub struct DenseCode {
    kernels: Kernels,
    keys: KeyFormat,
    spec: DenseSpec,
    division: Division,
    threads: usize,
    rows_per_item: usize,
    worker_bytes: usize,
}

/// One piece of work, as it lies in the scratch.
#[derive(Clone, Copy)]
#[repr(C)]
struct Item {
    request: u32,
    split: u32,
    first_row: u32,
    rows: u32,
    first_head: u32,
    heads: u32,
    /// The request's first row, its rows and its keys.
    request_row: u32,
    request_rows: u32,
    kv_len: u32,
    /// Key rows times query rows times heads, of this item and all before it.
    cost_until: u64,
    begin: u64,
    end: u64,
}

/// What may be planned: how many rows an item takes, what a worker needs, how many items there may be.
fn shape(facts: &Facts, spec: &DenseSpec, splits: usize) -> Option<(usize, usize, usize)> {
    let kernels = Kernels::new(facts.isa).ok();
    let rows = if grouped(spec) {
        kernels.map_or(1, |k| k.dense_rows_per_item(spec.heads)).min(spec.max_rows)
    } else {
        1
    };
    let format = key_format(spec)?;
    let bytes =
        kernels.map_or(0, |k| k.dense_scratch_bytes(geometry(spec), format, rows, spec.heads));
    let groups = spec.max_rows.div_ceil(rows).checked_add(spec.max_batch)?;
    let items = groups.checked_mul(splits)?.checked_add(facts.threads * 2)?;
    Some((rows, bytes.next_multiple_of(256), items))
}

/// Whether rows of a request share items. With a window and splits of fixed size each row begins at a cut of its own.
fn grouped(spec: &DenseSpec) -> bool {
    spec.window.is_none() || !matches!(spec.splits, mlakit::Splits::FixedTokens(_))
}

fn geometry(spec: &DenseSpec) -> Geometry {
    Geometry { heads: spec.heads, qk_width: spec.qk_width, value_width: spec.value_width }
}

/// How dense attention reads a record, if it does.
fn key_format(spec: &DenseSpec) -> Option<KeyFormat> {
    match spec.record {
        RecordFormat::Bf16 => Some(KeyFormat::Bf16),
        RecordFormat::E4m3 => Some(KeyFormat::E4m3),
        _ => None,
    }
}

impl Runs<Dense> for Cpu {
    type Code = Arc<DenseCode>;

    /// `Auto` gives each thread one split of every request, unless there are so many rows that they keep all threads busy.
    fn choose(facts: &Facts, spec: &DenseSpec) -> Result<Choice, Refusal> {
        let refuse = |because: String| Refusal {
            what: format!("dense attention with {} rows and splits", spec.max_rows),
            because,
            instead: "a smaller capacity, or a budget".to_string(),
        };
        if key_format(spec).is_none() {
            return Err(Refusal {
                what: format!("dense attention over {} records", spec.record.name()),
                because: "its kernels read bf16 and e4m3".to_string(),
                instead: "sparse attention, or a cache of bf16 or e4m3 records".to_string(),
            });
        }
        let per_item = (128 / spec.heads.max(1)).max(1);
        let busy = spec.max_rows / per_item >= 4 * facts.threads;
        let wanted = if busy { 1 } else { facts.threads };
        let splits = spec.capacity().resolve(wanted).map_err(|e| refuse(e.to_string()))?;
        let too_many = || refuse("the list of items does not fit the address space".to_string());
        let (_, worker, items) = shape(facts, spec, splits).ok_or_else(too_many)?;
        Ok(Choice {
            splits,
            work: vec![
                RegionSpec::new(WORKERS, worker.saturating_mul(facts.threads)),
                RegionSpec::new(ITEMS, items.saturating_mul(size_of::<Item>())),
            ],
            ..Choice::of(super::kernel_name("dense", facts))
        })
    }

    fn prepare(&self, plan: &Plan<Dense>) -> Result<Self::Code, Error> {
        let spec = plan.spec().clone();
        let facts = mlakit::Device::facts(self);
        let (rows_per_item, worker_bytes, _) = shape(facts, &spec, plan.choice().splits)
            .ok_or_else(|| Error::contract("max_rows", "items that can be counted", "more"))?;
        let keys = key_format(&spec)
            .ok_or_else(|| Error::contract("record", "bf16 or e4m3", spec.record.name()))?;
        Ok(Arc::new(DenseCode {
            kernels: self.kernels()?,
            keys,
            division: plan.division(),
            threads: facts.threads,
            rows_per_item,
            worker_bytes,
            spec,
        }))
    }

    fn launch(
        &self,
        code: &Self::Code,
        plan: &Plan<Dense>,
        regions: &DenseRegions,
        queue: &mut Queue,
    ) -> Result<(), Error> {
        let scratch = |name| plan.region(regions.scratch, name);
        let launch = Launch {
            code: code.clone(),
            r: *regions,
            partial_out: scratch(Dense::PARTIAL_OUT),
            partial_lse: scratch(Dense::PARTIAL_LSE),
            workers: scratch(WORKERS),
            items: scratch(ITEMS),
        };
        self.enqueue(queue, move |pool: &Pool| launch.run(pool))
    }
}

struct Launch {
    code: Arc<DenseCode>,
    r: DenseRegions,
    partial_out: Region,
    partial_lse: Region,
    workers: Region,
    items: Region,
}

impl Launch {
    fn run(&self, pool: &Pool) {
        let items = self.list(pool.threads());
        let total = items.last().map_or(0, |item| item.cost_until);
        if total > 0 {
            let tasks = pool.threads().min(items.len());
            pool.run(tasks, &|task, worker| self.work(items, (task, tasks, total), worker));
        }
        if self.splits() > 1 {
            self.merge(pool);
        }
        self.clear_padding();
    }

    fn spec(&self) -> &DenseSpec {
        &self.code.spec
    }

    fn splits(&self) -> usize {
        self.code.division.splits
    }

    /// What a request covers at most, in tokens.
    fn covered(&self) -> usize {
        (self.r.table_width * self.spec().page_size).min(self.spec().max_kv_tokens)
    }

    fn lengths(&self) -> &[i32] {
        // SAFETY: an operand of this launch, bound at this size.
        unsafe { read(self.r.kv_lens, self.r.batch) }
    }

    fn row_lengths(&self) -> Option<&[i32]> {
        // SAFETY: an operand of this launch, bound at this size where the spec has it.
        self.spec().row_lengths.then(|| unsafe { read(self.r.row_kv_lens, self.r.rows) })
    }

    /// The keys of each row of a request.
    fn keys(&self, visible: Visible, rows: &Range<usize>, row: usize) -> Range<usize> {
        match self.row_lengths() {
            None => visible.causal(row - rows.start),
            Some(lengths) => {
                visible.until(Visible::clamp_length(lengths[row], visible.kv_len_tokens).0)
            }
        }
    }

    /// From the first to the last position that some row sees.
    fn span(&self, visible: Visible, rows: &Range<usize>) -> Range<usize> {
        let (mut first, mut end) = (usize::MAX, 0);
        for row in rows.clone() {
            let keys = self.keys(visible, rows, row);
            if !keys.is_empty() {
                (first, end) = (first.min(keys.start), end.max(keys.end));
            }
        }
        first.min(end)..end
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
                let window = self.spec().window;
                each(request, rows.clone(), Visible { rows: rows.len(), kv_len_tokens, window });
            }
        }
    }

    /// Lists the items of this launch in the scratch, counting what is out of bounds on the way.
    fn list(&self, threads: usize) -> &[Item] {
        self.count_bounds();
        let capacity = self.items.bytes() / size_of::<Item>();
        // SAFETY: scratch of this launch, used for nothing else.
        let items: &mut [Item] = unsafe { write(self.items, capacity) };
        let groups = self.groups();
        let chunks = threads.div_ceil(groups.max(1)).min(self.spec().heads.div_ceil(HEAD_GRAIN));
        let (mut count, mut cost) = (0, 0);
        self.requests(|request, rows, visible| {
            let span = self.span(visible, &rows);
            self.count_pages(request, &span);
            for split in 0..self.splits() {
                for group in self.row_groups(&rows) {
                    let tokens = self.tokens(visible, (&rows, &group), &span, split);
                    if tokens.is_empty() {
                        self.empty(split, &group);
                        continue;
                    }
                    for chunk in 0..chunks {
                        let heads = self.heads_of(chunk, chunks);
                        cost += (tokens.len() * group.len() * heads.len()) as u64;
                        items[count] = Item {
                            request: request as u32,
                            split: split as u32,
                            first_row: group.start as u32,
                            rows: group.len() as u32,
                            first_head: heads.start as u32,
                            heads: heads.len() as u32,
                            request_row: rows.start as u32,
                            request_rows: rows.len() as u32,
                            kv_len: visible.kv_len_tokens as u32,
                            cost_until: cost,
                            begin: tokens.start as u64,
                            end: tokens.end as u64,
                        };
                        count += 1;
                    }
                }
            }
        });
        &items[..count]
    }

    /// Row groups times splits of this launch.
    fn groups(&self) -> usize {
        let mut groups = 0;
        self.requests(|_, rows, _| groups += rows.len().div_ceil(self.code.rows_per_item));
        groups * self.splits()
    }

    fn row_groups(&self, rows: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let (rows, step) = (rows.clone(), self.code.rows_per_item);
        rows.clone().step_by(step).map(move |first| first..(first + step).min(rows.end))
    }

    fn heads_of(&self, chunk: usize, chunks: usize) -> Range<usize> {
        let heads = self.spec().heads;
        let grains = heads.div_ceil(HEAD_GRAIN);
        let at = |chunk: usize| (chunk * grains / chunks * HEAD_GRAIN).min(heads);
        at(chunk)..at(chunk + 1)
    }

    /// The positions of a split that some row of a group sees.
    fn tokens(
        &self,
        visible: Visible,
        (rows, group): (&Range<usize>, &Range<usize>),
        span: &Range<usize>,
        split: usize,
    ) -> Range<usize> {
        // A window and fixed splits have groups of one row; otherwise a split is the same for all rows of a request.
        let first = self.keys(visible, rows, group.start);
        let cut = if self.spec().window.is_none() { 0..span.end } else { first };
        let division = self.code.division;
        let all = match division.fixed_tokens {
            Some(_) => division.range(span, &cut, split),
            None => division.range(span, span, split),
        };
        let (mut begin, mut end) = (usize::MAX, 0);
        for row in group.clone() {
            let keys = self.keys(visible, rows, row);
            let seen = keys.start.max(all.start)..keys.end.min(all.end);
            if !seen.is_empty() {
                (begin, end) = (begin.min(seen.start), end.max(seen.end));
            }
        }
        if begin < end { begin..end } else { 0..0 }
    }

    /// A split without keys: what the merge would read of it says so.
    fn empty(&self, split: usize, group: &Range<usize>) {
        let heads = self.spec().heads;
        let (lse, first) = if self.splits() > 1 {
            (self.partial_lse, split * self.r.rows * heads)
        } else {
            (self.r.lse, 0)
        };
        let lses = Shared::<f32>::of(lse).get();
        for result in group.start * heads..group.end * heads {
            // SAFETY: the region has an element for each split, row and head.
            unsafe { *lses.add(first + result) = f32::NEG_INFINITY };
        }
        if self.splits() == 1 {
            self.zero(group);
        }
    }

    fn zero(&self, rows: &Range<usize>) {
        let row = self.spec().heads * self.spec().value_width;
        let out = Shared::<u16>::of(self.r.out).get();
        // SAFETY: the output has these rows; zero bytes are 0.0.
        unsafe { out.add(rows.start * row).write_bytes(0, rows.len() * row) };
    }

    /// One task's share: the items that begin in its part of the total cost.
    fn work(&self, items: &[Item], (task, tasks, total): (usize, usize, u64), worker: usize) {
        let part = |task: usize| (u128::from(total) * task as u128 / tasks as u128) as u64;
        let (low, high) = (part(task), part(task + 1));
        let mut before = 0;
        for item in items {
            // An item belongs where its middle lies.
            let middle = before + (item.cost_until - before) / 2;
            before = item.cost_until;
            if (low..high).contains(&middle) {
                self.attend(item, worker);
            }
        }
    }

    fn attend(&self, item: &Item, worker: usize) {
        let call = self.call();
        let rows = item.first_row as usize..(item.first_row + item.rows) as usize;
        let heads = item.first_head as usize..(item.first_head + item.heads) as usize;
        let table = Shared::<i32>::of(self.r.page_table).get();
        let item = DenseItem {
            page_table: table.wrapping_add(item.request as usize * self.r.table_width),
            table_width: self.r.table_width,
            visible: self.visible(item),
            tokens: item.begin as usize..item.end as usize,
            counted: Counted::default(),
            lanes: Lanes { out: self.output(item.split as usize, rows.start), rows, heads },
        };
        debug_assert!(worker < self.code.threads);
        let scratch =
            Shared::<u8>::of(self.workers).get().wrapping_add(worker * self.code.worker_bytes);
        // SAFETY: operands and scratch were bound at the sizes of the plan; tasks have items of their own, items have outputs of their
        // own, and the pool gives a worker number to one thread at a time.
        unsafe { self.code.kernels.dense(&call, &item, scratch) };
    }

    fn visible(&self, item: &Item) -> kernel::Visible {
        match self.row_lengths() {
            None => kernel::Visible::RightAligned {
                kv_len: item.kv_len as i32,
                rows: item.request_rows as usize,
                first: (item.first_row - item.request_row) as usize,
            },
            Some(lengths) => kernel::Visible::Lengths {
                lengths: lengths[item.first_row as usize..].as_ptr(),
                kv_len: item.kv_len as i32,
            },
        }
    }

    fn output(&self, split: usize, first_row: usize) -> Output {
        let spec = self.spec();
        if self.splits() == 1 {
            let first = first_row * spec.heads;
            let values = Shared::<u8>::of(self.r.out).get();
            return Output {
                values: values.wrapping_add(first * spec.value_width * 2),
                format: OutFormat::Bf16,
                lse: Shared::<f32>::of(self.r.lse).get().wrapping_add(first),
                lse_base: merge::lse_base(spec.lse),
            };
        }
        let format = merge::format(spec.partial);
        let first = (split * self.r.rows + first_row) * spec.heads;
        let values = Shared::<u8>::of(self.partial_out).get();
        Output {
            values: values.wrapping_add(first * spec.value_width * format.bytes()),
            format,
            lse: Shared::<f32>::of(self.partial_lse).get().wrapping_add(first),
            lse_base: kernel::LseBase::Two,
        }
    }

    fn call(&self) -> DenseCall<'_> {
        let spec = self.spec();
        // SAFETY: the view of this launch.
        let view = unsafe { view_words(self.r.view) };
        // SAFETY: operands of this launch, bound with one element where the spec has them.
        let (kv_scale, q_scale) = unsafe {
            (
                scale(spec.record.is_scaled(), self.r.kv_scale),
                scale(spec.has_query_scale(), self.r.q_scale),
            )
        };
        let attention = Attention {
            geometry: geometry(spec),
            queries: Queries {
                base: self.r.q.address() as *const u8,
                format: match (spec.query, spec.quantize_query) {
                    (QueryDtype::E4m3, _) => QueryFormat::E4m3,
                    (QueryDtype::Bf16, true) => QueryFormat::Bf16AsE4m3 { q_scale },
                    (QueryDtype::Bf16, false) => QueryFormat::Bf16,
                },
            },
            score_scale_log2: Attention::score_scale(spec.softmax_scale.value(), kv_scale, q_scale),
            value_scale: kv_scale,
            sink: None,
        };
        DenseCall {
            attention,
            cache: KeyCache {
                base: view.base as *const u8,
                pages: view.pages as usize,
                page_size: spec.page_size,
                page_stride_bytes: view.page_stride_bytes,
                record_bytes: spec.pages().record.bytes() as u64,
                format: self.code.keys,
            },
            window: spec.window,
            // SAFETY: the scratch of this launch.
            faults: unsafe { fault(self.r.scratch, Fault::Id) },
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
            out_lse_base: match spec.lse {
                LseBase::Natural => kernel::LseBase::Natural,
                LseBase::Base2 => kernel::LseBase::Two,
            },
            nan_spreads: true,
            sink_in_lse: false,
        };
        let operands = merge::Operands {
            rows: self.r.rows,
            outs: self.partial_out,
            lses: self.partial_lse,
            sink: Region::EMPTY,
            out: self.r.out,
            lse: self.r.lse,
        };
        merge::run(pool, self.code.kernels, shape, &operands);
    }

    /// Rows of no request: output 0, log-sum-exp -inf. The merge has left what its scratch held in them, so this comes last.
    fn clear_padding(&self) {
        let mut next = 0;
        self.requests(|_, rows, _| {
            self.clear_rows(next..rows.start);
            next = rows.end;
        });
        self.clear_rows(next..self.r.rows);
    }

    fn clear_rows(&self, rows: Range<usize>) {
        if rows.is_empty() {
            return;
        }
        self.zero(&rows);
        let heads = self.spec().heads;
        // SAFETY: the output of this launch, bound at this size; the tasks that wrote it have ended.
        let lse: &mut [f32] = unsafe { write(self.r.lse, self.r.rows * heads) };
        lse[rows.start * heads..rows.end * heads].fill(f32::NEG_INFINITY);
    }

    /// Counts lengths and offsets that were clamped.
    fn count_bounds(&self) {
        // SAFETY: an operand of this launch, bound at this size.
        let offsets: &[i32] = unsafe { read(self.r.q_offsets, self.r.batch + 1) };
        let (mut next, fine) = Rows::begin(offsets[0], self.r.rows);
        let (mut bad_offsets, mut bad_lengths) = (u32::from(!fine), 0);
        for (request, length) in self.lengths().iter().enumerate() {
            let (rows, fine) = next.until(offsets[request + 1]);
            bad_offsets += u32::from(!fine);
            let (kv_len, fine) = Visible::clamp_length(*length, self.covered());
            bad_lengths += u32::from(!fine);
            if let Some(lengths) = self.row_lengths() {
                let bad = |row: &usize| !Visible::clamp_length(lengths[*row], kv_len).1;
                bad_lengths += rows.filter(bad).count() as u32;
            }
        }
        self.count(Fault::Offset, bad_offsets);
        self.count(Fault::Length, bad_lengths);
    }

    /// Counts page ids that are neither -1 nor in the pool, among those that some row of a request needs.
    fn count_pages(&self, request: usize, span: &Range<usize>) {
        let (width, size) = (self.r.table_width, self.spec().page_size);
        // SAFETY: an operand of this launch, bound at this size.
        let table: &[i32] = unsafe { read(self.r.page_table, self.r.batch * width) };
        // SAFETY: the view of this launch.
        let pages = unsafe { view_words(self.r.view) }.pages;
        let needed = &table[request * width..][span.start / size..span.end.div_ceil(size)];
        let bad = |id: &&i32| **id != -1 && u64::try_from(**id).map_or(true, |id| id >= pages);
        self.count(Fault::Id, needed.iter().filter(bad).count() as u32);
    }

    fn count(&self, kind: Fault, bad: u32) {
        if bad > 0 {
            // SAFETY: the scratch of this launch.
            unsafe { fault(self.r.scratch, kind) }.fetch_add(bad, Relaxed);
        }
    }
}
