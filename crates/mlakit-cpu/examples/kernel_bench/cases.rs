//! The shapes that are measured.

use std::sync::atomic::AtomicU32;

use mlakit::op::sparse::Columns;
use mlakit::{PageGeometry, RecordFormat, RecordLayout};
use mlakit_cpu::kernel::{
    Attention, BLOCK, Counted, DenseCall, DenseItem, Geometry, Kernels, KeyCache, KeyFormat, Lanes,
    LinearCall, LinearOut, List, LseBase, MergeCall, OutFormat, Output, ProjectionCall,
    ProjectionTask, Queries, QueryFormat, RecordCache, RecordRows, SparseCall, SparseItem, Visible,
};
use mlakit_cpu::pool::Pool;

/// A shape, before memory is made for it.
#[derive(Clone, Copy)]
pub enum Spec {
    /// Dense attention, widths 576 and 512.
    Dense { heads: usize, rows: usize, tokens: usize, format: KeyFormat },
    /// Sparse attention of one row, widths 576 and 512: so many of so many tokens.
    Sparse { heads: usize, selected: usize, tokens: usize, record: RecordFormat },
    /// A linear layer.
    Linear { rows: usize, inner: usize, outer: usize },
    /// A per-head projection.
    Projection { rows: usize, heads: usize, inner: usize, outer: usize },
    /// A merge of BF16 partials.
    Merge { splits: usize, heads: usize },
}

/// Everything that is measured.
pub fn cases(threads: usize) -> Vec<Spec> {
    let (bf16, e4m3) = (KeyFormat::Bf16, KeyFormat::E4m3);
    let dense = |heads, rows, tokens, format| Spec::Dense { heads, rows, tokens, format };
    let sparse = |heads, record| Spec::Sparse { heads, selected: 2048, tokens: 65_536, record };
    vec![
        dense(16, 1, 2048, bf16),
        dense(128, 1, 2048, bf16),
        dense(16, 1, 4096, bf16),
        dense(16, 1, 32768, bf16),
        dense(128, 1, 4096, bf16),
        dense(128, 1, 32768, bf16),
        dense(16, 1, 4096, e4m3),
        dense(16, 1, 32768, e4m3),
        dense(128, 1, 4096, e4m3),
        dense(16, 64, 4096, bf16),
        dense(8, 1, 4096, bf16),
        dense(1, 1, 4096, bf16),
        sparse(16, RecordFormat::Bf16),
        sparse(128, RecordFormat::Bf16),
        sparse(16, RecordFormat::Fp8_656),
        sparse(128, RecordFormat::Fp8_656),
        sparse(128, RecordFormat::Nvfp4_432),
        Spec::Linear { rows: 1, inner: 2048, outer: 2048 },
        Spec::Linear { rows: 64, inner: 2048, outer: 2048 },
        Spec::Linear { rows: 1024, inner: 1024, outer: 1024 },
        Spec::Projection { rows: 1, heads: 16, inner: 128, outer: 512 },
        Spec::Projection { rows: 64, heads: 16, inner: 512, outer: 128 },
        Spec::Merge { splits: threads.max(2), heads: 128 },
    ]
}

impl Spec {
    pub fn name(self) -> String {
        match self {
            Spec::Dense { heads, rows, tokens, format } => {
                let format = if format == KeyFormat::Bf16 { "bf16" } else { "e4m3" };
                format!("dense {format} heads {heads} rows {rows} tokens {tokens}")
            }
            Spec::Sparse { heads, selected, tokens, record } => {
                let record = record.name();
                format!("sparse {record} heads {heads}, {selected} of {tokens}")
            }
            Spec::Linear { rows, inner, outer } => format!("linear {rows} x {inner} x {outer}"),
            Spec::Projection { rows, heads, inner, outer } => {
                format!("projection rows {rows} heads {heads} {inner} x {outer}")
            }
            Spec::Merge { splits, heads } => format!("merge {splits} splits heads {heads}"),
        }
    }

    /// What the rate counts: operations, or bytes where memory is the limit.
    pub fn unit(self) -> &'static str {
        match self {
            Spec::Linear { rows: 1, .. } | Spec::Projection { rows: 1, .. } => "GB/s",
            Spec::Merge { .. } => "GB/s",
            _ => "GF/s",
        }
    }

    fn work(self) -> f64 {
        let product = |factors: &[usize]| factors.iter().map(|&f| f as f64).product::<f64>();
        match self {
            Spec::Dense { heads, rows, tokens, .. } => product(&[2, heads, rows, tokens, 1088]),
            Spec::Sparse { heads, selected, .. } => product(&[2, heads, selected, 1088]),
            Spec::Linear { rows: 1, inner, outer } => product(&[2, inner, outer]),
            Spec::Linear { rows, inner, outer } => product(&[2, rows, inner, outer]),
            Spec::Projection { rows: 1, heads, inner, outer } => product(&[2, heads, inner, outer]),
            Spec::Projection { rows, heads, inner, outer } => {
                product(&[2, rows, heads, inner, outer])
            }
            Spec::Merge { splits, heads } => product(&[2, splits, heads, 512]),
        }
    }

    /// Makes inputs, outputs and scratch.
    pub fn make(self, kernels: Kernels, pool: &Pool) -> Case {
        let bytes = |n: usize| Memory::new(n);
        let (a, b, c) = match self {
            Spec::Dense { heads, rows, tokens, .. } => {
                let out = pool.threads() * rows * heads * 512 * 4 + rows * heads * 64;
                (bytes(rows * heads * 576 * 2), bytes((tokens + 64) * 1152), bytes(out))
            }
            Spec::Sparse { heads, tokens, record, .. } => {
                let out = pool.threads() * heads * 512 * 4;
                let record = pages(record).record.bytes();
                (bytes(heads * 576 * 2), bytes(tokens * record), bytes(out))
            }
            Spec::Linear { rows, inner, outer } => {
                (bytes(rows * inner * 2), bytes(inner * outer * 2), bytes(rows * outer * 4))
            }
            Spec::Projection { rows, heads, inner, outer } => (
                bytes(rows * heads * inner * 2),
                bytes(heads * inner * outer * 2),
                bytes(rows * heads * outer * 4),
            ),
            Spec::Merge { splits, heads } => {
                (bytes(splits * heads * 512 * 2), bytes(splits * heads * 4), bytes(heads * 2048))
            }
        };
        let mut case = Case {
            spec: self,
            kernels,
            a,
            b,
            c,
            lse: vec![0.0; 64 * 1024],
            table: Vec::new(),
            scratch: Vec::new(),
            faults: AtomicU32::new(0),
        };
        if let Spec::Sparse { heads, selected, tokens, record } = self {
            let need = kernels.sparse_scratch_bytes(geometry(heads), heads);
            case.scratch = (0..pool.threads()).map(|_| vec![0; need]).collect();
            // Slots in a scattered order.
            case.table = (0..selected).map(|i| (i * 40_503 % tokens) as i32).collect();
            case.fill_records(record, tokens);
        }
        if let Spec::Dense { heads, rows, tokens, format } = self {
            let geometry = geometry(heads);
            let rows = rows.min(kernels.dense_rows_per_item(heads));
            let need = kernels.dense_scratch_bytes(geometry, format, rows, heads);
            case.scratch = (0..pool.threads()).map(|_| vec![0; need]).collect();
            // Pages in a scattered order.
            let pages = tokens / PAGE;
            let step = (0..).map(|i| 2 * i + 7).find(|s| gcd(*s, pages) == 1).unwrap();
            case.table = (0..pages).map(|i| (i * step % pages) as i32).collect();
        }
        case
    }
}

/// Pages of a record format.
fn pages(record: RecordFormat) -> PageGeometry {
    PageGeometry { record: RecordLayout::of_key(record, 576, 512), page_size: PAGE }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Tokens of a page.
const PAGE: usize = 64;

fn geometry(heads: usize) -> Geometry {
    Geometry { heads, qk_width: 576, value_width: 512 }
}

/// Zero-aligned memory filled with small BF16 (or E4M3) numbers.
struct Memory(Vec<u64>);

impl Memory {
    fn new(bytes: usize) -> Memory {
        let mut seed = 1_u64;
        let word = |_| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // Signs and mantissas vary; exponents are those of numbers around 0.25.
            (seed >> 1) & 0x807f_807f_807f_807f | 0x3e00_3e00_3e00_3e00
        };
        Memory((0..bytes.div_ceil(8)).map(word).collect())
    }

    fn bytes(&self) -> *mut u8 {
        self.0.as_ptr().cast_mut().cast()
    }
}

/// A shape with its memory.
pub struct Case {
    spec: Spec,
    kernels: Kernels,
    a: Memory,
    b: Memory,
    c: Memory,
    lse: Vec<f32>,
    table: Vec<i32>,
    scratch: Vec<Vec<u8>>,
    faults: AtomicU32,
}

/// Pointers that tasks on several threads use for separate parts.
#[derive(Clone, Copy)]
struct Shared<T>(T);

// SAFETY: every task writes its own part of the outputs and its own worker's scratch.
unsafe impl<T> Sync for Shared<T> {}

impl<T: Copy> Shared<T> {
    fn take(&self) -> T {
        self.0
    }
}

impl Case {
    pub fn work(&self) -> f64 {
        self.spec.work()
    }

    pub fn run(&mut self, pool: &Pool) {
        match self.spec {
            Spec::Dense { heads, rows, tokens, format } => {
                self.dense(pool, heads, rows, tokens, format);
            }
            Spec::Sparse { heads, selected, record, .. } => {
                self.sparse(pool, heads, selected, record);
            }
            Spec::Linear { rows, inner, outer } => self.linear(pool, rows, inner, outer),
            Spec::Projection { rows, heads, inner, outer } => {
                self.projection(pool, [rows, heads, inner, outer]);
            }
            Spec::Merge { splits, heads } => self.merge(pool, splits, heads),
        }
    }

    fn dense(&mut self, pool: &Pool, heads: usize, rows: usize, tokens: usize, format: KeyFormat) {
        let element = if format == KeyFormat::Bf16 { 2 } else { 1 };
        let record_bytes = 576 * element;
        let call = DenseCall {
            attention: Attention {
                geometry: geometry(heads),
                queries: Queries { base: self.a.bytes(), format: QueryFormat::Bf16 },
                score_scale_log2: 0.05,
                value_scale: 1.0,
                sink: None,
            },
            cache: KeyCache {
                base: self.b.bytes(),
                pages: tokens / PAGE,
                page_size: PAGE,
                page_stride_bytes: PAGE as u64 * record_bytes,
                record_bytes,
                format,
            },
            window: None,
            faults: &self.faults,
        };
        let per_item = rows.min(self.kernels.dense_rows_per_item(heads));
        let groups = rows.div_ceil(per_item);
        // One row group is split over tokens, several are divided among the threads.
        let splits = if groups >= pool.threads() { 1 } else { pool.threads() };
        let scratch: Vec<*mut u8> = self.scratch.iter_mut().map(|s| s.as_mut_ptr()).collect();
        let outputs = (self.c.bytes(), self.lse.as_mut_ptr());
        let shared = Shared((call, outputs, self.table.as_ptr(), scratch.as_ptr()));
        let kernels = self.kernels;
        pool.run(groups * splits, &|task, worker| {
            let (call, (out, lse), table, scratch) = shared.take();
            let (group, split) = (task / splits, task % splits);
            let first = group * per_item;
            let at = |s: usize| (s * (tokens / BLOCK) / splits) * BLOCK;
            let lane = (split * rows + first) * heads;
            let item = DenseItem {
                page_table: table,
                table_width: tokens / PAGE,
                lanes: Lanes {
                    rows: first..(first + per_item).min(rows),
                    heads: 0..heads,
                    out: Output {
                        values: out.wrapping_add(lane * 512 * 2),
                        format: OutFormat::Bf16,
                        lse: lse.wrapping_add(lane),
                        lse_base: LseBase::Two,
                    },
                },
                visible: Visible::RightAligned { kv_len: tokens as i32, rows, first },
                tokens: at(split)..at(split + 1),
                counted: Counted::default(),
            };
            // SAFETY: inputs are as large as the call says; outputs and scratch are the task's.
            unsafe { kernels.dense(&call, &item, *scratch.add(worker)) };
        });
    }

    /// Real records: arbitrary bytes would be scales that are NaN.
    fn fill_records(&mut self, record: RecordFormat, tokens: usize) {
        let geometry = pages(record);
        let (planes, bytes) = (geometry.planes(), geometry.payload_bytes());
        let key: Vec<_> =
            (0..576).map(|i| half::bf16::from_f32((i % 37) as f32 / 19.0 - 0.95)).collect();
        let mut page = vec![0; bytes];
        for token in 0..PAGE {
            planes.encode(geometry.record, (&mut page, token), [&key, &[]], 1.0);
        }
        for number in 0..tokens / PAGE {
            let to = self.b.bytes().wrapping_add(number * bytes);
            // SAFETY: the memory has so many pages.
            unsafe { std::ptr::copy_nonoverlapping(page.as_ptr(), to, bytes) };
        }
    }

    fn sparse(&mut self, pool: &Pool, heads: usize, selected: usize, record: RecordFormat) {
        let of = pages(record);
        let planes = of.planes();
        let cache = RecordCache {
            base: self.b.bytes(),
            pages: usize::MAX,
            page_size: PAGE,
            page_stride_bytes: of.payload_bytes() as u64,
            data: planes.data,
            scales: planes.scales,
            rows: RecordRows::new(of.record, 576, None),
        };
        let call = SparseCall {
            attention: Attention {
                geometry: geometry(heads),
                queries: Queries { base: self.a.bytes(), format: QueryFormat::Bf16 },
                score_scale_log2: 0.05,
                value_scale: 1.0,
                sink: None,
            },
            caches: [cache; 2],
            faults: &self.faults,
        };
        let splits = pool.threads();
        let scratch: Vec<*mut u8> = self.scratch.iter_mut().map(|s| s.as_mut_ptr()).collect();
        let outputs = (self.c.bytes(), self.lse.as_mut_ptr());
        let shared = Shared((call, outputs, self.table.as_ptr(), scratch.as_ptr()));
        let kernels = self.kernels;
        pool.run(splits, &|split, worker| {
            let (call, (out, lse), entries, scratch) = shared.take();
            let at = |s: usize| (s * (selected / BLOCK) / splits) * BLOCK;
            let item = SparseItem {
                lanes: Lanes {
                    rows: 0..1,
                    heads: 0..heads,
                    out: Output {
                        values: out.wrapping_add(split * heads * 512 * 2),
                        format: OutFormat::Bf16,
                        lse: lse.wrapping_add(split * heads),
                        lse_base: LseBase::Two,
                    },
                },
                lists: [List::Slots { entries }; 2],
                columns: Columns { main: selected, extra: 0 },
                range: at(split)..at(split + 1),
                counts_faults: true,
            };
            // SAFETY: inputs are as large as the call says; outputs and scratch are the task's.
            unsafe { kernels.sparse(&call, &item, *scratch.add(worker)) };
        });
    }

    fn linear(&mut self, pool: &Pool, rows: usize, inner: usize, outer: usize) {
        let shared = Shared(LinearCall {
            rows,
            in_features: inner,
            out_features: outer,
            x: self.a.bytes().cast(),
            x_stride: inner,
            packed: false,
            w: self.b.bytes().cast(),
            y: self.c.bytes(),
            y_stride: outer,
            out: LinearOut::F32,
            experts: None,
        });
        let (kernels, parts) = (self.kernels, pool.threads());
        pool.run(parts, &|task, _| {
            let at = |part: usize| part * (outer / 8) / parts * 8;
            // SAFETY: inputs and outputs are as large as the call says; outputs are the task's.
            unsafe { kernels.linear(&shared.take(), at(task)..at(task + 1)) };
        });
    }

    fn projection(&mut self, pool: &Pool, [rows, heads, inner, outer]: [usize; 4]) {
        let shared = Shared(ProjectionCall {
            heads,
            inner,
            outer,
            x: self.a.bytes().cast(),
            x_head_stride: inner,
            x_row_stride: heads * inner,
            weight: self.b.bytes().cast(),
            y: self.c.bytes(),
            y_head_stride: outer,
            y_row_stride: heads * outer,
            format: OutFormat::Bf16,
        });
        let (kernels, parts) = (self.kernels, pool.threads());
        pool.run(parts, &|task, _| {
            let heads = task * heads / parts..(task + 1) * heads / parts;
            let task = ProjectionTask { rows: 0..rows, heads, columns: 0..outer };
            // SAFETY: inputs and outputs are as large as the call says; outputs are the task's.
            unsafe { kernels.project(&shared.take(), &task) };
        });
    }

    fn merge(&mut self, pool: &Pool, splits: usize, heads: usize) {
        let shared = Shared(MergeCall {
            splits,
            heads,
            width: 512,
            outs: self.a.bytes(),
            format: OutFormat::Bf16,
            lses: self.b.bytes().cast(),
            lse_base: LseBase::Two,
            split_stride: heads,
            sink: std::ptr::null(),
            nan_spreads: false,
            sink_in_lse: false,
            out: self.c.bytes().cast(),
            lse: self.lse.as_mut_ptr(),
            out_lse_base: LseBase::Natural,
        });
        let (kernels, parts) = (self.kernels, pool.threads());
        pool.run(parts, &|task, _| {
            let lanes = task * heads / parts..(task + 1) * heads / parts;
            // SAFETY: inputs and outputs are as large as the call says; outputs are the task's.
            unsafe { kernels.merge(&shared.take(), lanes) };
        });
    }
}
