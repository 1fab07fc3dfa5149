//! Inputs of an indexer, seeded: shapes, page tables with holes, keys in every index format.

use half::bf16;
use mlakit::RecordFormat;
use mlakit::op::indexer::{IndexerCase, IndexerFields, IndexerResult, IndexerSpec, oracle};

use super::random::Rng;

/// The formats of index keys.
pub const FORMATS: [RecordFormat; 3] =
    [RecordFormat::IndexBf16_256, RecordFormat::IndexFp8_132, RecordFormat::IndexMxfp4_68];

/// What numbers queries, keys and weights are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbers {
    /// Roughly normal: no two scores are equal.
    Normal,
    /// -1, 0 and 1, weights small and whole: scores are exact and many are equal.
    Whole,
}

/// An indexer and the requests of a call.
#[derive(Clone, Debug)]
pub struct IndexerShape {
    pub heads: usize,
    pub width: usize,
    pub record: RecordFormat,
    pub page_size: usize,
    pub topk: usize,
    pub scores: bool,
    pub pool_size: usize,
    /// Keys and rows of each.
    pub requests: Vec<(usize, usize)>,
    pub padding_rows: usize,
    /// Bytes behind a page.
    pub page_tail: usize,
    pub bad_pages: bool,
    pub numbers: Numbers,
    /// How much larger the capacities are.
    pub slack: usize,
}

/// 128 elements in BF16, pages of 64, whole numbers; nothing special.
pub fn indexer_shape(heads: usize, topk: usize, requests: &[(usize, usize)]) -> IndexerShape {
    IndexerShape {
        heads,
        width: 128,
        record: RecordFormat::IndexBf16_256,
        page_size: 64,
        topk,
        scores: true,
        pool_size: 1,
        requests: requests.to_vec(),
        padding_rows: 0,
        page_tail: 0,
        bad_pages: false,
        numbers: Numbers::Whole,
        slack: 1,
    }
}

impl IndexerShape {
    pub fn rows(&self) -> usize {
        self.requests.iter().map(|(_, rows)| rows).sum::<usize>() + self.padding_rows
    }

    pub fn spec(&self) -> IndexerSpec {
        let longest = self.requests.iter().map(|(keys, _)| *keys).max().unwrap_or(0);
        IndexerSpec::new(IndexerFields {
            heads: self.heads,
            width: self.width,
            record: self.record,
            page_size: self.page_size,
            topk: self.topk,
            scores: self.scores,
            pool_size: self.pool_size,
            budget_bytes: 16 << 20,
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
pub struct IndexerInputs {
    pub shape: IndexerShape,
    pub spec: IndexerSpec,
    pub q: Vec<bf16>,
    pub weights: Vec<f32>,
    pub cache: Vec<u8>,
    pub pages: usize,
    pub page_stride_bytes: usize,
    pub table: Vec<i32>,
    pub kv_lens: Vec<i32>,
    pub q_offsets: Vec<i32>,
    pub last_position: Vec<i64>,
}

impl IndexerInputs {
    pub fn new(shape: &IndexerShape, seed: u64) -> Self {
        let (spec, mut rng) = (shape.spec(), Rng(seed));
        let pages_of = |keys: usize| keys.div_ceil(shape.page_size);
        let used: usize = shape.requests.iter().map(|(keys, _)| pages_of(*keys)).sum();
        let (pages, rows) = (used + 3, shape.rows());
        let page_stride_bytes = spec.pages().payload_bytes() + shape.page_tail;
        let mut q_offsets = vec![0];
        for (_, rows) in &shape.requests {
            q_offsets.push(q_offsets.last().unwrap() + *rows as i32);
        }
        let mut inputs = Self {
            q: (0..rows * shape.heads * shape.width).map(|_| element(shape, &mut rng)).collect(),
            weights: (0..rows * shape.heads).map(|_| weight(shape, &mut rng)).collect(),
            // NaN in every format, but for the scales of `index_fp8_132`, where it is one too.
            cache: vec![0xff; pages * page_stride_bytes],
            pages,
            page_stride_bytes,
            table: Vec::new(),
            kv_lens: shape.requests.iter().map(|(keys, _)| *keys as i32).collect(),
            q_offsets,
            last_position: Vec::new(),
            shape: shape.clone(),
            spec,
        };
        inputs.fill_table(&mut rng);
        for request in 0..shape.requests.len() {
            for position in 0..shape.requests[request].0 {
                let key: Vec<bf16> = (0..shape.width).map(|_| element(shape, &mut rng)).collect();
                inputs.put_key(request, position, &key);
            }
        }
        inputs.fill_last(&mut rng);
        inputs
    }

    fn fill_table(&mut self, rng: &mut Rng) {
        let shape = &self.shape;
        let width = shape.requests.iter().map(|(keys, _)| keys.div_ceil(shape.page_size)).max();
        let width = width.unwrap_or(0) + 2;
        let mut free: Vec<i32> = (0..self.pages as i32).collect();
        rng.shuffle(&mut free);
        for (keys, _) in &shape.requests {
            for entry in 0..width {
                let is_needed = entry * shape.page_size < *keys;
                self.table.push(match is_needed {
                    true if shape.bad_pages && rng.chance(4) => {
                        rng.pick(&[-1, -2, i32::MIN, i32::MAX, self.pages as i32])
                    }
                    true => free.pop().unwrap(),
                    false => rng.pick(&[-1, -7, 0, 1, i32::MAX, self.pages as i32]),
                });
            }
        }
    }

    /// A row's own position is in the pool behind those that it sees, or ends the last of them.
    fn fill_last(&mut self, rng: &mut Rng) {
        let size = self.shape.pool_size;
        for (pools, rows) in &self.shape.requests {
            let tokens = (pools * size + rng.below(size)) as i64;
            self.last_position.extend((0..*rows).map(|row| tokens - (*rows - row) as i64));
        }
        self.last_position.resize(self.shape.rows(), 5);
    }

    /// Writes a key, if its page is there.
    pub fn put_key(&mut self, request: usize, position: usize, key: &[bf16]) {
        let (size, layout) = (self.shape.page_size, self.spec.layout());
        let width = self.table.len() / self.shape.requests.len();
        let id = self.table[request * width + position / size];
        let Some(page) = usize::try_from(id).ok().filter(|page| *page < self.pages) else { return };
        let planes = layout.planes(size);
        let page = &mut self.cache[page * self.page_stride_bytes..][..self.page_stride_bytes];
        let (data, scales) = page.split_at_mut(planes.scales.first);
        let at = position % size * planes.scales.stride;
        let scales = &mut scales[at..at + planes.scales.bytes];
        layout.encode(&mut data[planes.data.token(position % size)], scales, key, 1.0);
    }

    pub fn case(&self) -> IndexerCase<'_> {
        IndexerCase {
            q: &self.q,
            weights: &self.weights,
            cache: &self.cache,
            page_stride_bytes: self.page_stride_bytes,
            page_table: &self.table,
            kv_lens: &self.kv_lens,
            q_offsets: &self.q_offsets,
            last_position: self.spec.is_pooled().then_some(&self.last_position[..]),
        }
    }

    pub fn oracle(&self) -> IndexerResult {
        oracle(&self.spec, &self.case())
    }

    /// What an F32 sum in another order may differ by: some units of the largest sum of magnitudes of
    /// a row.
    pub fn tolerance(&self, row: usize) -> f64 {
        let (heads, width) = (self.shape.heads, self.shape.width);
        let norm = |values: &[bf16]| values.iter().map(|v| v.to_f64().powi(2)).sum::<f64>().sqrt();
        let mut sum = 0.0;
        for head in row * heads..(row + 1) * heads {
            let query = norm(&self.q[head * width..(head + 1) * width]);
            sum += f64::from(self.weights[head].abs()) * query;
        }
        // A normal key of this width is no longer than this; quantised queries are a little longer.
        sum * 2.0 * (width as f64).sqrt() * 4.0 * f64::from(f32::EPSILON)
    }
}

fn element(shape: &IndexerShape, rng: &mut Rng) -> bf16 {
    match shape.numbers {
        Numbers::Normal => rng.bf16(),
        Numbers::Whole => bf16::from_f32(rng.below(3) as f32 - 1.0),
    }
}

fn weight(shape: &IndexerShape, rng: &mut Rng) -> f32 {
    match shape.numbers {
        Numbers::Normal => rng.normal(),
        Numbers::Whole => rng.below(7) as f32 - 3.0,
    }
}
