//! Inputs of dense attention on the host: what a test varies, and operands with NaN in every byte
//! that no row may look at.

use std::ops::Range;

use half::bf16;
use mlakit::op::dense::{
    DenseCase, DenseFields, DenseResult, DenseSpec, QueryCase, QueryDtype, Visible, oracle,
};
use mlakit::op::merge::Partial;
use mlakit::op::spec::Scalar;
use mlakit::splits::{Budget, Division};
use mlakit::{E4m3, LseBase, RecordFormat, RecordLayout, Splits};

use super::random::Rng;

/// How queries arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Query {
    Bf16,
    E4m3,
    Quantized,
}

/// What a test varies.
#[derive(Clone, Debug)]
pub struct DenseShape {
    pub heads: usize,
    pub qk_width: usize,
    pub value_width: usize,
    pub record: RecordFormat,
    pub query: Query,
    pub page_size: usize,
    /// Elements behind a record, and bytes behind a page.
    pub padding: (usize, usize),
    /// Cached tokens and query rows of each request.
    pub requests: Vec<(usize, usize)>,
    /// Rows behind those of the last request.
    pub padding_rows: usize,
    pub splits: Splits,
    pub partial: Partial,
    pub window: Option<usize>,
    pub row_lengths: bool,
    pub lse: LseBase,
    /// Capacities beyond what the requests need, as a factor.
    pub slack: usize,
    /// Whether some of the page ids that rows need are -1 or out of the pool.
    pub bad_pages: bool,
}

/// Splits for every request: the rest as in most tests.
pub fn shape(
    heads: usize,
    (qk_width, value_width): (usize, usize),
    requests: &[(usize, usize)],
) -> DenseShape {
    DenseShape {
        heads,
        qk_width,
        value_width,
        record: RecordFormat::Bf16,
        query: Query::Bf16,
        page_size: 16,
        padding: (0, 0),
        requests: requests.to_vec(),
        padding_rows: 0,
        splits: Splits::Auto,
        partial: Partial::Bf16,
        window: None,
        row_lengths: false,
        lse: LseBase::Natural,
        slack: 1,
        bad_pages: false,
    }
}

impl DenseShape {
    pub fn rows(&self) -> usize {
        self.requests.iter().map(|(_, rows)| rows).sum::<usize>() + self.padding_rows
    }

    /// Products of a query element and a key element.
    pub fn work(&self) -> usize {
        let rows = self.requests.iter().map(|(tokens, rows)| tokens * rows);
        rows.sum::<usize>() * self.heads * self.qk_width
    }

    pub fn spec(&self) -> DenseSpec {
        let longest = self.requests.iter().map(|(tokens, _)| *tokens).max().unwrap_or(0);
        DenseSpec::new(DenseFields {
            heads: self.heads,
            qk_width: self.qk_width,
            value_width: self.value_width,
            record: self.record,
            record_width: (self.padding.0 > 0).then_some(self.qk_width + self.padding.0),
            page_size: self.page_size,
            softmax_scale: Scalar::try_from((self.qk_width as f32).sqrt().recip()).unwrap(),
            lse: self.lse,
            sink_in_lse: false,
            query: if self.query == Query::E4m3 { QueryDtype::E4m3 } else { QueryDtype::Bf16 },
            quantize_query: self.query == Query::Quantized,
            partial: self.partial,
            splits: self.splits,
            budget: Budget::default(),
            window: self.window,
            row_lengths: self.row_lengths,
            max_rows: self.rows().max(1) * self.slack,
            max_batch: self.requests.len().max(1) * self.slack,
            max_kv_tokens: longest.max(1) * self.slack,
            max_table_width: (longest.div_ceil(self.page_size) + 2) * self.slack,
        })
        .unwrap()
    }
}

/// The operands on the host.
#[derive(Clone, Debug)]
pub struct DenseInputs {
    pub shape: DenseShape,
    pub spec: DenseSpec,
    /// BF16 queries, or the E4M3 ones in `q8`.
    pub q: Vec<bf16>,
    pub q8: Vec<u8>,
    pub cache: Vec<u8>,
    pub pages: usize,
    pub page_stride_bytes: usize,
    pub table: Vec<i32>,
    pub kv_lens: Vec<i32>,
    pub q_offsets: Vec<i32>,
    pub row_kv_lens: Vec<i32>,
    pub kv_scale: f32,
    pub q_scale: f32,
    /// The bytes of `cache` that some row may read.
    pub referenced: Vec<Range<usize>>,
}

impl DenseInputs {
    pub fn new(shape: &DenseShape, seed: u64) -> Self {
        let spec = shape.spec();
        let mut rng = Rng(seed);
        let pages_of = |tokens: usize| tokens.div_ceil(shape.page_size);
        let used: usize = shape.requests.iter().map(|(tokens, _)| pages_of(*tokens)).sum();
        let pages = used + 3;
        let stride = spec.pages().payload_bytes() + shape.padding.1;
        let width = shape.requests.iter().map(|(t, _)| pages_of(*t)).max().unwrap_or(0) + 2;
        let scaled = |used: bool, scale: f32| if used { scale } else { 1.0 };
        let mut inputs = Self {
            q: Vec::new(),
            q8: Vec::new(),
            cache: vec![0xff; pages * stride],
            pages,
            page_stride_bytes: stride,
            table: vec![0; width * shape.requests.len()],
            kv_lens: shape.requests.iter().map(|(tokens, _)| *tokens as i32).collect(),
            q_offsets: vec![0],
            row_kv_lens: Vec::new(),
            kv_scale: scaled(spec.record.is_scaled(), 0.37),
            q_scale: scaled(spec.has_query_scale(), 0.11),
            referenced: Vec::new(),
            shape: shape.clone(),
            spec,
        };
        for (_, rows) in &shape.requests {
            inputs.q_offsets.push(inputs.q_offsets.last().unwrap() + *rows as i32);
        }
        inputs.fill_lengths(&mut rng);
        inputs.fill_tables(&mut rng);
        inputs.fill_cache(&mut rng);
        inputs.fill_queries(&mut rng);
        inputs
    }

    /// Most rows see fewer keys than the request has; one asks for more and is clamped.
    fn fill_lengths(&mut self, rng: &mut Rng) {
        for (tokens, rows) in &self.shape.requests {
            for row in 0..*rows {
                let beyond = row == 1;
                let length = if beyond { *tokens + 3 } else { rng.below(*tokens + 1) };
                self.row_kv_lens.push(length as i32);
            }
        }
        self.row_kv_lens.resize(self.shape.rows(), 1 << 20);
    }

    /// Pages in any order; entries that no row needs hold anything.
    fn fill_tables(&mut self, rng: &mut Rng) {
        let mut free: Vec<i32> = (0..self.pages as i32).collect();
        rng.shuffle(&mut free);
        let width = self.table_width();
        for request in 0..self.shape.requests.len() {
            let needed = self.span(request);
            let size = self.shape.page_size;
            for entry in 0..width {
                let live = entry < self.shape.requests[request].0.div_ceil(size);
                let is_needed = (entry + 1) * size > needed.start && entry * size < needed.end;
                self.table[request * width + entry] = match (live, is_needed) {
                    (true, true) if self.shape.bad_pages && rng.chance(4) => {
                        rng.pick(&[-1, -2, i32::MIN, i32::MAX, self.pages as i32])
                    }
                    (true, true) => free.pop().unwrap(),
                    _ => rng.pick(&[-1, -7, 0, 1, i32::MAX, self.pages as i32]),
                };
            }
        }
    }

    fn fill_cache(&mut self, rng: &mut Rng) {
        let layout = self.spec.pages().record;
        let payload = RecordLayout { width: self.shape.qk_width, ..layout }.bytes();
        for request in 0..self.shape.requests.len() {
            for position in self.span(request) {
                let values = rng.bf16s(self.shape.qk_width);
                let Some(first) = self.record(request, position) else { continue };
                let record = &mut self.cache[first..first + payload];
                layout.encode(record, &mut [], &values, self.kv_scale);
                self.referenced.push(first..first + payload);
            }
        }
    }

    fn fill_queries(&mut self, rng: &mut Rng) {
        let count = self.shape.rows() * self.shape.heads * self.shape.qk_width;
        self.q = rng.bf16s(count);
        if self.shape.query == Query::E4m3 {
            let code = |v: &bf16| E4m3::encode(v.to_f32() / self.q_scale);
            self.q8 = self.q.iter().map(code).collect();
        }
    }

    /// The keys that a row (counted in its request) sees.
    pub fn keys(&self, request: usize, row: usize) -> Range<usize> {
        let (tokens, rows) = self.shape.requests[request];
        let visible = Visible { rows, kv_len_tokens: tokens, window: self.shape.window };
        if !self.shape.row_lengths {
            return visible.causal(row);
        }
        let length = self.row_kv_lens[self.q_offsets[request] as usize + row];
        visible.until(Visible::clamp_length(length, tokens).0)
    }

    /// From the first to the last key that some row of a request sees.
    pub fn span(&self, request: usize) -> Range<usize> {
        let keys = (0..self.shape.requests[request].1).map(|row| self.keys(request, row));
        let live: Vec<_> = keys.filter(|keys| !keys.is_empty()).collect();
        let first = live.iter().map(|keys| keys.start).min().unwrap_or(0);
        first..live.iter().map(|keys| keys.end).max().unwrap_or(0)
    }

    pub fn table_width(&self) -> usize {
        self.table.len() / self.shape.requests.len().max(1)
    }

    /// Where the record of a position begins; nothing where its page is not in the pool.
    pub fn record(&self, request: usize, position: usize) -> Option<usize> {
        let (page, token) = (position / self.shape.page_size, position % self.shape.page_size);
        let id = usize::try_from(self.table[request * self.table_width() + page]).ok()?;
        let bytes = self.spec.pages().record.bytes();
        (id < self.pages).then(|| id * self.page_stride_bytes + token * bytes)
    }

    /// Which bytes of the cache some row may read.
    pub fn is_referenced(&self) -> Vec<bool> {
        let mut referenced = vec![false; self.cache.len()];
        self.referenced.iter().for_each(|range| referenced[range.clone()].fill(true));
        referenced
    }

    pub fn rows(&self) -> usize {
        self.q.len() / (self.shape.heads * self.shape.qk_width)
    }

    pub fn case(&self) -> DenseCase<'_> {
        DenseCase {
            q: match self.shape.query {
                Query::E4m3 => QueryCase::E4m3(&self.q8),
                _ => QueryCase::Bf16(&self.q),
            },
            cache: &self.cache,
            page_stride_bytes: self.page_stride_bytes,
            page_table: &self.table,
            kv_lens: &self.kv_lens,
            q_offsets: &self.q_offsets,
            row_kv_lens: self.shape.row_lengths.then_some(&self.row_kv_lens[..]),
            kv_scale: self.kv_scale,
            q_scale: self.q_scale,
        }
    }

    pub fn oracle(&self, division: Division) -> DenseResult {
        oracle(&self.spec, division, &self.case())
    }
}
