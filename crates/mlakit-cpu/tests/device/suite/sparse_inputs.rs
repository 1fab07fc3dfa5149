//! Inputs of sparse attention on the host: what a test varies, and operands with NaN in every byte
//! that no row may look at.

use std::ops::Range;

use half::bf16;
use mlakit::op::dense::{QueryCase, QueryDtype};
use mlakit::op::merge::Partial;
use mlakit::op::sparse::{
    ExtraCase, Selection, SelectionCase, SparseCase, SparseFields, SparseResult, SparseSpec, oracle,
};
use mlakit::op::spec::Scalar;
use mlakit::splits::{Budget, Division};
use mlakit::{E4m3, LseBase, PageGeometry, RecordFormat, RopePart, Splits};

use super::dense_inputs::Query;
use super::random::Rng;

/// A second scope.
#[derive(Clone, Copy, Debug)]
pub struct Extra {
    pub record: RecordFormat,
    pub page_size: usize,
    /// Entries of a row.
    pub width: usize,
    /// Cached tokens.
    pub tokens: usize,
}

/// What a test varies.
#[derive(Clone, Debug)]
pub struct SparseShape {
    pub heads: usize,
    pub qk_width: usize,
    pub value_width: usize,
    pub record: RecordFormat,
    pub query: Query,
    pub selection: Selection,
    pub page_size: usize,
    /// Elements behind a record, and bytes behind a page.
    pub padding: (usize, usize),
    /// Entries of a row.
    pub width: usize,
    /// Cached tokens and query rows of each request.
    pub requests: Vec<(usize, usize)>,
    /// Rows behind those of the last request, which select nothing.
    pub padding_rows: usize,
    pub extra: Option<Extra>,
    /// Live entries of every row; each its own without.
    pub count: Option<usize>,
    pub sink: bool,
    pub sink_in_lse: bool,
    pub splits: Splits,
    pub partial: Partial,
    pub lse: LseBase,
    /// Capacities beyond what the requests need, as a factor.
    pub slack: usize,
    /// Whether some entries are unused, twice there or out of bounds, and some pages bad.
    pub strange: bool,
    /// Whether F32 scales are powers of two, so that every decoded element is a BF16 number.
    pub exact: bool,
}

/// Widths and requests; the rest as in most tests.
pub fn shape(
    heads: usize,
    (qk_width, value_width): (usize, usize),
    width: usize,
    requests: &[(usize, usize)],
) -> SparseShape {
    SparseShape {
        heads,
        qk_width,
        value_width,
        record: RecordFormat::Bf16,
        query: Query::Bf16,
        selection: Selection::Positions,
        page_size: 16,
        padding: (0, 0),
        width,
        requests: requests.to_vec(),
        padding_rows: 0,
        extra: None,
        count: None,
        sink: false,
        sink_in_lse: false,
        splits: Splits::Auto,
        partial: Partial::Bf16,
        lse: LseBase::Natural,
        slack: 1,
        strange: false,
        exact: true,
    }
}

/// The records of attention.
pub fn records() -> impl Iterator<Item = RecordFormat> + Clone {
    RecordFormat::ALL.into_iter().filter(|record| !record.is_index())
}

/// Widths of query and value that a format can have, small or as models have them.
pub fn widths_of(record: RecordFormat, large: bool) -> (usize, usize) {
    match (record, record.rope(), large) {
        (RecordFormat::V4_584, _, true) => (512, 512),
        (RecordFormat::V4_584, _, false) => (192, 192),
        (_, RopePart::Apart, true) => (576, 512),
        (_, RopePart::Apart, false) => (154, 128),
        (_, RopePart::Absent, true) => (512, 512),
        (_, RopePart::Absent, false) => (128, 128),
        (RecordFormat::V41_528 | RecordFormat::V41_288, _, true) => (512, 512),
        (RecordFormat::V41_528 | RecordFormat::V41_288, _, false) => (96, 96),
        (_, RopePart::Within, true) => (576, 512),
        (_, RopePart::Within, false) => (66, 34),
    }
}

impl SparseShape {
    pub fn rows(&self) -> usize {
        self.requests.iter().map(|(_, rows)| rows).sum::<usize>() + self.padding_rows
    }

    /// Products of a query element and a key element.
    pub fn work(&self) -> usize {
        let extra = self.extra.map_or(0, |extra| extra.width);
        self.rows() * (self.width + extra) * self.heads * self.qk_width
    }

    /// With a record, and widths that it can have.
    pub fn with_record(mut self, record: RecordFormat, large: bool) -> Self {
        self.record = record;
        (self.qk_width, self.value_width) = widths_of(record, large);
        self
    }

    pub fn spec(&self) -> SparseSpec {
        let longest = self.requests.iter().map(|(tokens, _)| *tokens).max().unwrap_or(0);
        SparseSpec::new(SparseFields {
            heads: self.heads,
            qk_width: self.qk_width,
            value_width: self.value_width,
            record: self.record,
            record_width: (self.padding.0 > 0).then_some(self.qk_width + self.padding.0),
            page_size: self.page_size,
            softmax_scale: Scalar::try_from((self.qk_width as f32).sqrt().recip()).unwrap(),
            lse: self.lse,
            sink: self.sink,
            sink_in_lse: self.sink_in_lse,
            query: if self.query == Query::E4m3 { QueryDtype::E4m3 } else { QueryDtype::Bf16 },
            quantize_query: self.query == Query::Quantized,
            partial: self.partial,
            splits: self.splits,
            budget: Budget::default(),
            window: None,
            selection: self.selection,
            width: self.width * self.slack,
            extra_record: self.extra.map(|extra| extra.record),
            extra_record_width: None,
            extra_page_size: self.extra.map(|extra| extra.page_size),
            extra_width: self.extra.map(|extra| extra.width.max(1) * self.slack),
            max_rows: self.rows().max(1) * self.slack,
            max_batch: self.requests.len().max(1) * self.slack,
            max_kv_tokens: longest.max(1),
            max_table_width: (longest.div_ceil(self.page_size) + 2) * self.slack,
        })
        .unwrap_or_else(|error| panic!("{self:?}: {error}"))
    }
}

/// A cache: its pages, and which bytes of them some row may read.
#[derive(Clone)]
pub struct Pool {
    pub geometry: PageGeometry,
    pub pages: usize,
    pub stride: usize,
    pub bytes: Vec<u8>,
    pub referenced: Vec<bool>,
}

impl Pool {
    fn new(geometry: PageGeometry, pages: usize, padding: usize) -> Self {
        let stride = geometry.payload_bytes() + padding;
        let (bytes, referenced) = (vec![0xff; pages * stride], vec![false; pages * stride]);
        Self { geometry, pages, stride, bytes, referenced }
    }

    /// The bytes of a token, in both planes.
    pub fn token(&self, page: usize, offset: usize) -> [Range<usize>; 2] {
        let planes = self.geometry.planes();
        [planes.data, planes.scales].map(|plane| {
            let range = plane.token(offset);
            page * self.stride + range.start..page * self.stride + range.end
        })
    }

    /// Writes a token's record; what pads it stays.
    pub fn write(&mut self, (page, offset): (usize, usize), values: &[bf16], kv_scale: f32) {
        let geometry = self.geometry;
        let page_bytes = &mut self.bytes[page * self.stride..];
        let values = [values, &[]];
        geometry.planes().encode(geometry.record, (page_bytes, offset), values, kv_scale);
        let width = values[0].len();
        for (plane, mut range) in self.token(page, offset).into_iter().enumerate() {
            if plane == 0 && geometry.record.format.is_plain() {
                range.end -= geometry.record.bytes() / geometry.record.width
                    * (geometry.record.width - width);
            }
            self.referenced[range].fill(true);
        }
    }
}

/// The operands.
#[derive(Clone)]
pub struct SparseInputs {
    pub shape: SparseShape,
    pub spec: SparseSpec,
    pub q: Vec<bf16>,
    pub q8: Vec<u8>,
    pub pool: Pool,
    pub extra_pool: Option<Pool>,
    /// `[R, T]`, both ways.
    pub positions: Vec<i32>,
    pub slots: Vec<i32>,
    pub counts: Vec<i32>,
    pub request: Vec<i32>,
    pub table: Vec<i32>,
    pub table_width: usize,
    pub extra_slots: Vec<i32>,
    pub extra_counts: Vec<i32>,
    pub sink: Vec<f32>,
    pub kv_scale: f32,
    pub q_scale: f32,
}

impl SparseInputs {
    pub fn new(shape: &SparseShape, seed: u64) -> Self {
        let (spec, mut rng) = (shape.spec(), Rng(seed));
        let pages_of = |tokens: usize| tokens.div_ceil(shape.page_size);
        let used: usize = shape.requests.iter().map(|(tokens, _)| pages_of(*tokens)).sum();
        let longest = shape.requests.iter().map(|(tokens, _)| *tokens).max().unwrap_or(0);
        // Codes of one scale may have any; a product of a code and a scale is a BF16 number if the
        // scale is a power of two.
        let codes = shape.extra.is_none_or(|extra| extra.record == shape.record);
        let scale = if codes { 0.37 } else { 0.25 };
        let extra_pool = spec.extra().zip(shape.extra).map(|(scope, extra)| {
            Pool::new(scope.pages, extra.tokens.div_ceil(extra.page_size) + 1, shape.padding.1)
        });
        let mut inputs = Self {
            q: rng.bf16s(shape.rows() * shape.heads * shape.qk_width),
            q8: Vec::new(),
            pool: Pool::new(spec.pages(), used + 3, shape.padding.1),
            extra_pool,
            positions: Vec::new(),
            slots: Vec::new(),
            counts: Vec::new(),
            request: Vec::new(),
            table: Vec::new(),
            table_width: pages_of(longest) + 2,
            extra_slots: Vec::new(),
            extra_counts: Vec::new(),
            sink: (0..shape.heads).map(|_| 2.0 * rng.normal()).collect(),
            kv_scale: if spec.has_kv_scale() { scale } else { 1.0 },
            q_scale: if spec.has_query_scale() { 0.11 } else { 1.0 },
            shape: shape.clone(),
            spec,
        };
        if shape.query == Query::E4m3 {
            let code = |v: &bf16| E4m3::encode(v.to_f32() / inputs.q_scale);
            inputs.q8 = inputs.q.iter().map(code).collect();
        }
        inputs.fill_tables(&mut rng);
        for (request, (tokens, rows)) in shape.requests.iter().enumerate() {
            for _ in 0..*rows {
                inputs.add_row(request, *tokens, &mut rng);
            }
        }
        for _ in 0..shape.padding_rows {
            inputs.add_padding_row(&mut rng);
        }
        inputs
    }

    /// Pages in any order; entries that no token needs hold anything.
    fn fill_tables(&mut self, rng: &mut Rng) {
        let mut free: Vec<i32> = (0..self.pool.pages as i32).collect();
        rng.shuffle(&mut free);
        for (tokens, _) in &self.shape.requests {
            for entry in 0..self.table_width {
                let live = entry < tokens.div_ceil(self.shape.page_size);
                self.table.push(match live {
                    true if self.shape.strange && rng.chance(8) => {
                        rng.pick(&[-1, -2, i32::MIN, i32::MAX, self.pool.pages as i32])
                    }
                    true => free.pop().unwrap(),
                    false => rng.pick(&[-1, -7, 0, 1, i32::MAX, self.pool.pages as i32]),
                });
            }
        }
    }

    /// A key: numbers around 1. Where scales must be powers of two the largest of the latent is 21/4 and
    /// that of the rotary part 7/2, since formats divide these by 2688 and 448.
    pub fn key(&self, rng: &mut Rng) -> Vec<bf16> {
        let (qk, value) = (self.shape.qk_width, self.shape.value_width);
        let mut key = rng.bf16s(qk);
        if self.shape.exact && qk > 2 {
            key[rng.below(value.min(qk - 1))] = bf16::from_f32(5.25);
            key[qk - 1] = bf16::from_f32(3.5);
        }
        key
    }

    fn count(&self, width: usize, rng: &mut Rng) -> i32 {
        match self.shape.count {
            Some(count) => count.min(width) as i32,
            None if self.shape.strange && rng.chance(6) => {
                rng.pick(&[-1, 0, i32::MIN, i32::MAX, width as i32 + 1])
            }
            None => rng.below(width + 1) as i32,
        }
    }

    fn add_row(&mut self, request: usize, tokens: usize, rng: &mut Rng) {
        self.request.push(match self.shape.strange && rng.chance(9) {
            true => rng.pick(&[-1, i32::MIN, i32::MAX, self.shape.requests.len() as i32]),
            false => request as i32,
        });
        let there = *self.request.last().unwrap() == request as i32;
        let (width, limit) = (self.shape.width, self.table_width * self.shape.page_size);
        let limit = limit.min(self.spec.max_kv_tokens);
        let count = self.count(width, rng);
        self.counts.push(count);
        for index in 0..width {
            let strange = self.shape.strange && rng.chance(5);
            let position = match (strange, tokens) {
                (false, 1..) => rng.below(tokens) as i32,
                (true, _) => rng.pick(&[-1, -9, i32::MIN, i32::MAX, limit as i32, 2_147_480_000]),
                (false, 0) => -1,
            };
            // A row that has no request sees no position, but slots need none.
            let slots = self.shape.selection == Selection::Slots;
            let live = (index as i64) < i64::from(count) && (there || slots);
            let slot = self.slot_of(request, position, limit);
            self.positions.push(position);
            self.slots.push(slot);
            if live {
                self.refer(slot, rng);
            }
        }
        self.add_extra(rng);
    }

    /// Entries and request of a row that selects nothing may hold anything.
    fn add_padding_row(&mut self, rng: &mut Rng) {
        self.request.push(rng.bits() as i32);
        self.counts.push(0);
        for _ in 0..self.shape.width {
            self.positions.push(rng.bits() as i32);
            self.slots.push(rng.bits() as i32);
        }
        let width = self.shape.extra.map_or(0, |extra| extra.width);
        self.extra_counts.push(0);
        self.extra_slots.extend((0..width).map(|_| rng.bits() as i32));
    }

    fn add_extra(&mut self, rng: &mut Rng) {
        let Some(extra) = self.shape.extra else { return };
        let count = self.count(extra.width, rng);
        self.extra_counts.push(count);
        for index in 0..extra.width {
            let strange = self.shape.strange && rng.chance(5);
            let slot = match (strange, extra.tokens) {
                (false, 1..) => rng.below(extra.tokens) as i32,
                (true, _) => rng.pick(&[-1, i32::MIN, i32::MAX]),
                (false, 0) => -1,
            };
            self.extra_slots.push(slot);
            if slot >= 0 && (index as i64) < i64::from(count) && slot < i32::MAX {
                let place = (slot as usize / extra.page_size, slot as usize % extra.page_size);
                let (key, scale) = (self.key(rng), self.kv_scale);
                let pool = self.extra_pool.as_mut().unwrap();
                if !pool.referenced[pool.token(place.0, place.1)[0].start] {
                    pool.write(place, &key, scale);
                }
            }
        }
    }

    /// The slot that a position is: -1 where it is unused, out of the pool where it is bad.
    pub fn slot_of(&self, request: usize, position: i32, limit: usize) -> i32 {
        let Ok(position) = usize::try_from(position) else { return position };
        if position >= limit {
            return i32::MAX;
        }
        let size = self.shape.page_size;
        match self.table[request * self.table_width + position / size] {
            -1 => -1,
            page if page < 0 || page as usize >= self.pool.pages => i32::MAX,
            page => page * size as i32 + (position % size) as i32,
        }
    }

    /// Gives the token of a slot a key, once.
    fn refer(&mut self, slot: i32, rng: &mut Rng) {
        let size = self.shape.page_size;
        let place = match usize::try_from(slot) {
            Ok(slot) if slot / size < self.pool.pages => (slot / size, slot % size),
            _ => return,
        };
        let key = self.key(rng);
        if !self.pool.referenced[self.pool.token(place.0, place.1)[0].start] {
            self.pool.write(place, &key, self.kv_scale);
        }
    }

    pub fn rows(&self) -> usize {
        self.counts.len()
    }

    pub fn case(&self) -> SparseCase<'_> {
        SparseCase {
            q: match self.shape.query {
                Query::E4m3 => QueryCase::E4m3(&self.q8),
                _ => QueryCase::Bf16(&self.q),
            },
            cache: &self.pool.bytes,
            page_stride_bytes: self.pool.stride,
            selection: match self.shape.selection {
                Selection::Positions => SelectionCase::Positions {
                    positions: &self.positions,
                    counts: &self.counts,
                    request: &self.request,
                    page_table: &self.table,
                    table_width: self.table_width,
                },
                Selection::Slots => {
                    SelectionCase::Slots { slots: &self.slots, counts: &self.counts }
                }
            },
            extra: self.extra_pool.as_ref().map(|pool| ExtraCase {
                cache: &pool.bytes,
                page_stride_bytes: pool.stride,
                slots: &self.extra_slots,
                slot_counts: &self.extra_counts,
            }),
            sink: self.spec.sink.then_some(&self.sink[..]),
            kv_scale: self.kv_scale,
            q_scale: self.q_scale,
        }
    }

    pub fn oracle(&self, division: Division) -> SparseResult {
        oracle(&self.spec, division, &self.case())
    }

    /// One row alone.
    pub fn alone(&self, row: usize) -> Self {
        let mut one = self.clone();
        let (width, vector) = (self.shape.width, self.shape.heads * self.shape.qk_width);
        let cut = |list: &[i32], width: usize| list[row * width..(row + 1) * width].to_vec();
        one.q = self.q[row * vector..(row + 1) * vector].to_vec();
        if !self.q8.is_empty() {
            one.q8 = self.q8[row * vector..(row + 1) * vector].to_vec();
        }
        (one.positions, one.slots) = (cut(&self.positions, width), cut(&self.slots, width));
        (one.counts, one.request) = (cut(&self.counts, 1), cut(&self.request, 1));
        if let Some(extra) = self.shape.extra {
            one.extra_slots = cut(&self.extra_slots, extra.width);
            one.extra_counts = cut(&self.extra_counts, 1);
        }
        one
    }
}
