//! Dense attention inputs: random caches with poison wherever a kernel must not look.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use mlakit_cpu::e4m3;
use mlakit_cpu::kernel::{
    Attention, Counted, DenseCall, DenseItem, Geometry, Kernels, KeyCache, KeyFormat, Lanes,
    LseBase, OutFormat, Output, Queries, QueryFormat, Visible,
};
use mlakit_cpu::numerics::bf16_to_f32;

use crate::common::Rng;

/// What is to be generated.
#[derive(Clone, Debug)]
pub struct Shape {
    pub geometry: Geometry,
    pub format: KeyFormat,
    pub query: QueryFormat,
    pub page_size: usize,
    /// Bytes after a record's payload, and after a page's records.
    pub padding: [usize; 2],
    /// (keys, query rows) of each request.
    pub requests: Vec<(usize, usize)>,
    pub window: Option<usize>,
    /// Standard deviation of queries: wide ones make sharp softmaxes.
    pub query_scale: f32,
}

/// The heads, widths and rest that most tests vary a little.
pub fn shape(heads: usize, qk_width: usize, value_width: usize, kv_len: usize) -> Shape {
    Shape {
        geometry: Geometry { heads, qk_width, value_width },
        format: KeyFormat::Bf16,
        query: QueryFormat::Bf16,
        page_size: 16,
        padding: [0, 0],
        requests: vec![(kv_len, 1)],
        window: None,
        query_scale: 1.0,
    }
}

/// A generated case. The cache is poisoned with NaN where no visible key lies; unused table entries
/// are out of range.
pub struct Case {
    pub shape: Shape,
    pub cache: Vec<u16>,
    pub pages: usize,
    pub tables: Vec<i32>,
    pub table_width: usize,
    pub queries: Vec<u16>,
    pub kv_scale: f32,
    pub q_scale: f32,
    pub softmax_scale: f32,
}

impl Case {
    pub fn new(shape: &Shape, seed: u64) -> Case {
        let mut rng = Rng(seed);
        let pages_of = |kv_len: usize| kv_len.div_ceil(shape.page_size);
        let used: usize = shape.requests.iter().map(|r| pages_of(r.0)).sum();
        let table_width = shape.requests.iter().map(|r| pages_of(r.0)).max().unwrap() + 2;
        let mut case = Case {
            shape: shape.clone(),
            cache: Vec::new(),
            pages: used + 3,
            tables: vec![i32::MAX; table_width * shape.requests.len()],
            table_width,
            queries: Vec::new(),
            kv_scale: if shape.format == KeyFormat::E4m3 { 0.37 } else { 1.0 },
            q_scale: if shape.query == QueryFormat::Bf16 { 1.0 } else { 0.11 },
            softmax_scale: 1.0 / (shape.geometry.qk_width as f32).sqrt(),
        };
        case.cache = vec![0xffff; case.pages * case.page_stride() / 2];
        let mut free: Vec<i32> = (0..case.pages as i32).collect();
        for (request, (kv_len, _)) in shape.requests.iter().enumerate() {
            for page in 0..pages_of(*kv_len) {
                let id = free.swap_remove(rng.below(free.len()));
                case.tables[request * table_width + page] = id;
            }
            for position in 0..*kv_len {
                case.fill_record(request, position, &mut rng);
            }
        }
        case.fill_queries(&mut rng);
        case
    }

    fn fill_record(&mut self, request: usize, position: usize, rng: &mut Rng) {
        let width = self.shape.geometry.qk_width;
        let offset = self.record_offset(request, position).unwrap();
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.cache);
        match self.shape.format {
            KeyFormat::Bf16 => {
                let record = rng.bf16_vec(width, 1.0);
                bytes[offset..offset + 2 * width].copy_from_slice(bytemuck::cast_slice(&record));
            }
            KeyFormat::E4m3 => {
                for code in &mut bytes[offset..offset + width] {
                    *code = e4m3::encode(rng.normal() * 3.0);
                }
            }
        }
    }

    fn fill_queries(&mut self, rng: &mut Rng) {
        let count = self.rows() * self.shape.geometry.heads * self.shape.geometry.qk_width;
        let scale = self.shape.query_scale;
        self.queries = match self.shape.query {
            QueryFormat::E4m3 => {
                let code = |rng: &mut Rng| e4m3::encode(rng.normal() * scale / 0.11);
                let codes: Vec<u8> = (0..count + 1).map(|_| code(rng)).collect();
                codes.chunks_exact(2).map(|c| u16::from_le_bytes([c[0], c[1]])).collect()
            }
            _ => rng.bf16_vec(count, scale),
        };
        if let QueryFormat::Bf16AsE4m3 { q_scale } = &mut self.shape.query {
            *q_scale = self.q_scale;
        }
    }

    pub fn element_bytes(&self) -> usize {
        if self.shape.format == KeyFormat::Bf16 { 2 } else { 1 }
    }

    pub fn record_bytes(&self) -> usize {
        self.shape.geometry.qk_width * self.element_bytes() + self.shape.padding[0]
    }

    pub fn page_stride(&self) -> usize {
        self.record_bytes() * self.shape.page_size + self.shape.padding[1]
    }

    pub fn rows(&self) -> usize {
        self.shape.requests.iter().map(|r| r.1).sum()
    }

    pub fn table_of(&mut self, request: usize) -> &mut [i32] {
        &mut self.tables[request * self.table_width..][..self.table_width]
    }

    /// Where the record of a position begins; nothing where its page id is out of range.
    pub fn record_offset(&self, request: usize, position: usize) -> Option<usize> {
        let (page, token) = (position / self.shape.page_size, position % self.shape.page_size);
        let id = usize::try_from(self.tables[request * self.table_width + page]).ok()?;
        (id < self.pages).then(|| id * self.page_stride() + token * self.record_bytes())
    }

    /// The exact BF16 elements of a record, before `kv_scale`.
    pub fn record(&self, request: usize, position: usize) -> Option<Vec<u16>> {
        let offset = self.record_offset(request, position)?;
        let width = self.shape.geometry.qk_width;
        let bytes: &[u8] = bytemuck::cast_slice(&self.cache);
        Some(match self.shape.format {
            KeyFormat::Bf16 => {
                let pair = |c: &[u8]| u16::from_le_bytes([c[0], c[1]]);
                bytes[offset..offset + 2 * width].chunks_exact(2).map(pair).collect()
            }
            KeyFormat::E4m3 => {
                bytes[offset..offset + width].iter().map(|&c| e4m3::decode(c)).collect()
            }
        })
    }

    /// The exact BF16 elements of a query vector, before `q_scale`.
    pub fn query(&self, row: usize, head: usize) -> Vec<u16> {
        let Geometry { heads, qk_width, .. } = self.shape.geometry;
        let range = (row * heads + head) * qk_width..(row * heads + head + 1) * qk_width;
        match self.shape.query {
            QueryFormat::Bf16 => self.queries[range].to_vec(),
            QueryFormat::E4m3 => {
                let codes: &[u8] = bytemuck::cast_slice(&self.queries);
                codes[range].iter().map(|&c| e4m3::decode(c)).collect()
            }
            QueryFormat::Bf16AsE4m3 { q_scale } => {
                let round = |&x: &u16| e4m3::decode(e4m3::encode(bf16_to_f32(x) / q_scale));
                self.queries[range].iter().map(round).collect()
            }
        }
    }

    pub fn score_scale(&self) -> f32 {
        Attention::score_scale(self.softmax_scale, self.kv_scale, self.q_scale)
    }

    /// The keys that row `row` of a request sees.
    pub fn visible(&self, request: usize, row: usize) -> Range<usize> {
        let (kv_len, rows) = self.shape.requests[request];
        let end = (kv_len + row + 1).saturating_sub(rows);
        end.saturating_sub(self.shape.window.unwrap_or(usize::MAX))..end
    }

    pub fn first_row(&self, request: usize) -> usize {
        self.shape.requests[..request].iter().map(|r| r.1).sum()
    }

    pub fn call<'a>(&self, faults: &'a AtomicU32) -> DenseCall<'a> {
        DenseCall {
            attention: Attention {
                geometry: self.shape.geometry,
                queries: Queries { base: self.queries.as_ptr().cast(), format: self.shape.query },
                score_scale_log2: self.score_scale(),
                value_scale: self.kv_scale,
                sink: None,
            },
            cache: KeyCache {
                base: self.cache.as_ptr().cast(),
                pages: self.pages,
                page_size: self.shape.page_size,
                page_stride_bytes: self.page_stride() as u64,
                record_bytes: self.record_bytes() as u64,
                format: self.shape.format,
            },
            window: self.shape.window,
            faults,
        }
    }
}

/// How a run divides its work.
#[derive(Clone, Debug)]
pub struct Division {
    pub rows_per_item: usize,
    pub heads_per_item: usize,
    pub tokens: Range<usize>,
}

/// Everything at once.
pub const WHOLE: Division =
    Division { rows_per_item: usize::MAX, heads_per_item: usize::MAX, tokens: 0..usize::MAX };

/// F32 outputs, base-2 log-sum-exps, and faults.
pub struct Outcome {
    pub out: Vec<f32>,
    pub lse: Vec<f32>,
    pub faults: u32,
}

/// Runs a case. Scratch and outputs begin as NaN; what is not written stays so.
pub fn run(kernels: Kernels, case: &Case, division: &Division) -> Outcome {
    let geometry = case.shape.geometry;
    let lanes = case.rows() * geometry.heads;
    let mut outcome = Outcome {
        out: vec![f32::NAN; lanes * geometry.value_width],
        lse: vec![f32::NAN; lanes],
        faults: 0,
    };
    let faults = AtomicU32::new(0);
    let call = case.call(&faults);
    for request in 0..case.shape.requests.len() {
        let rows = case.shape.requests[request].1;
        let mut first = 0;
        while first < rows {
            let count = division.rows_per_item.min(rows - first);
            let mut head = 0;
            while head < geometry.heads {
                let heads = head..(head + division.heads_per_item.min(geometry.heads - head));
                head = heads.end;
                let counts = first == 0 && heads.start == 0;
                let mut item = item(case, request, first..first + count, heads, &mut outcome);
                item.tokens = division.tokens.clone();
                let from = case.visible(request, 0).start;
                let seen = case.shape.requests[request].0;
                let counted = division.tokens.start..division.tokens.end.min(seen);
                item.counted = Counted { first: from, tokens: if counts { counted } else { 0..0 } };
                run_item(kernels, &call, &item);
            }
            first += count;
        }
    }
    outcome.faults = faults.load(Ordering::Relaxed);
    outcome
}

/// The item of some rows (counted in their request) and heads, over all tokens.
pub fn item(
    case: &Case,
    request: usize,
    rows: Range<usize>,
    heads: Range<usize>,
    outcome: &mut Outcome,
) -> DenseItem {
    let geometry = case.shape.geometry;
    let (kv_len, request_rows) = case.shape.requests[request];
    let first = case.first_row(request) + rows.start;
    let lane = first * geometry.heads;
    DenseItem {
        page_table: case.tables[request * case.table_width..].as_ptr(),
        table_width: case.table_width,
        lanes: Lanes {
            rows: first..first + rows.len(),
            heads,
            out: Output {
                values: outcome.out[lane * geometry.value_width..].as_mut_ptr().cast(),
                format: OutFormat::F32,
                lse: outcome.lse[lane..].as_mut_ptr(),
                lse_base: LseBase::Two,
            },
        },
        visible: Visible::RightAligned {
            kv_len: kv_len as i32,
            rows: request_rows,
            first: rows.start,
        },
        tokens: 0..usize::MAX,
        counted: Counted::default(),
    }
}

/// Runs an item in scratch full of NaN, at an odd address, and checks that it stays inside.
pub fn run_item(kernels: Kernels, call: &DenseCall<'_>, item: &DenseItem) {
    let bytes = kernels.dense_scratch_bytes(
        call.attention.geometry,
        call.cache.format,
        item.lanes.rows.len(),
        item.lanes.heads.len(),
    );
    let mut scratch = vec![0xff_u8; bytes + 65];
    // SAFETY: inputs and outputs are those of the case, the scratch is as long as was asked.
    unsafe { kernels.dense(call, item, scratch.as_mut_ptr().add(1)) };
    assert!(scratch[bytes + 1..].iter().all(|&b| b == 0xff), "wrote past the scratch");
}
