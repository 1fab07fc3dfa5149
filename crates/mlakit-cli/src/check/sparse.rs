//! Cases of `sparse`.

use mlakit::{Dtype, PageGeometry, RecordFormat, RecordLayout};
use serde_json::{Map, Value, json};

use super::cases::{Shape, with};
use super::list::Named;
use super::random::Random;
use crate::case::{Tensor, Tensors};

/// Sparse attention over shuffled pages, with NaN in every token that no row selects, and entries
/// that are unused or out of bounds.
#[derive(Clone, Debug)]
pub struct SparseShape {
    /// Query heads.
    pub heads: usize,
    /// Elements of a key, and of a value.
    pub widths: (usize, usize),
    /// Query rows.
    pub rows: usize,
    /// Entries of a row.
    pub width: usize,
    /// Cached tokens of each of two requests.
    pub tokens: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// The cache record format.
    pub record: RecordFormat,
    /// Slots instead of positions.
    pub slots: bool,
    /// A second scope of this record, with pages of 16.
    pub extra: Option<RecordFormat>,
    /// Whether there is a sink.
    pub sink: bool,
    /// More fields of the spec.
    pub options: Value,
}

impl Default for SparseShape {
    fn default() -> Self {
        Self {
            heads: 8,
            widths: (576, 512),
            rows: 2,
            width: 130,
            tokens: 300,
            page_size: 64,
            record: RecordFormat::Bf16,
            slots: false,
            extra: None,
            sink: false,
            options: Value::Object(Map::new()),
        }
    }
}

/// Entries of a row in the second scope.
const EXTRA_WIDTH: usize = 40;
const KV_SCALE: f32 = 0.0125;

/// A cache in which only some tokens have keys.
struct Pool {
    geometry: PageGeometry,
    bytes: Vec<u8>,
    pages: usize,
    qk_width: usize,
}

impl Pool {
    fn new(layout: RecordLayout, page_size: usize, tokens: usize) -> Self {
        let geometry = PageGeometry { record: layout, page_size };
        let pages = tokens.div_ceil(page_size) + 1;
        let bytes = vec![0xff; pages * geometry.payload_bytes()];
        Self { geometry, bytes, pages, qk_width: layout.width }
    }

    fn key(&mut self, slot: usize, random: &mut Random) {
        let (planes, record) = (self.geometry.planes(), self.geometry.record);
        let size = self.geometry.page_size;
        let page = &mut self.bytes[slot / size * self.geometry.payload_bytes()..];
        let values = random.bf16s(self.qk_width, 1.0);
        planes.encode(record, (page, slot % size), [&values, &[]], KV_SCALE);
    }

    fn tensor(&self) -> Tensor<'static> {
        Tensor::new(Dtype::U8, vec![self.pages, self.geometry.payload_bytes()], &self.bytes)
    }
}

impl SparseShape {
    pub(super) fn build(&self, random: &mut Random) -> (Value, Tensors<'static>) {
        let (qk, value) = self.widths;
        let mut tensors = Tensors::default();
        let q = random.bf16s(self.rows * self.heads * qk, 2.0);
        tensors.insert("q", Tensor::new(Dtype::Bf16, vec![self.rows, self.heads, qk], &q));
        self.select(&mut tensors, random);
        let scaled = [Some(self.record), self.extra].into_iter().flatten();
        if scaled.into_iter().any(RecordFormat::is_scaled) {
            tensors.insert("kv_scale", Tensor::new(Dtype::F32, vec![1], &[KV_SCALE]));
        }
        if self.sink {
            let mut sink = random.f32s(self.heads, 2.0);
            sink[0] = f32::NEG_INFINITY;
            sink[self.heads / 2] = f32::INFINITY;
            tensors.insert("sink", Tensor::new(Dtype::F32, vec![self.heads], &sink));
        }
        let mut fields = json!({
            "heads": self.heads,
            "qk_width": qk,
            "value_width": value,
            "record": self.record.name(),
            "page_size": self.page_size,
            "softmax_scale": (qk as f32).powf(-0.5),
        });
        if let Some(record) = self.extra {
            self.select_extra(record, &mut tensors, random);
            let extra = json!({"extra_record": record.name(), "extra_page_size": 16});
            fields = with(fields, &extra);
        }
        (with(fields, &self.options), tensors)
    }

    fn layout(&self, record: RecordFormat) -> RecordLayout {
        RecordLayout::of_key(record, self.widths.0, self.widths.1)
    }

    /// Entries by position and by slot; some unused, some out of bounds.
    fn select(&self, tensors: &mut Tensors<'static>, random: &mut Random) {
        let pages = self.tokens.div_ceil(self.page_size);
        let mut pool =
            Pool::new(self.layout(self.record), self.page_size, 2 * pages * self.page_size);
        let order = random.order(2 * pages);
        let table: Vec<i32> = order.iter().map(|page| *page as i32).collect();
        let (mut entries, mut counts, mut requests) = (Vec::new(), Vec::new(), Vec::new());
        for row in 0..self.rows {
            let request = row % 2;
            requests.push(request as i32);
            counts.push(if row == 0 { self.width } else { random.below(self.width + 1) } as i32);
            for _ in 0..self.width {
                let position = random.below(self.tokens);
                let page = table[request * pages + position / self.page_size] as usize;
                let slot = page * self.page_size + position % self.page_size;
                pool.key(slot, random);
                entries.push(match random.below(9) {
                    0 => -1 - position as i32,
                    1 => i32::MAX - position as i32,
                    _ if self.slots => slot as i32,
                    _ => position as i32,
                });
            }
        }
        tensors.insert("cache", pool.tensor());
        let shape = vec![self.rows, self.width];
        let (list, count) =
            if self.slots { ("slots", "slot_counts") } else { ("positions", "counts") };
        tensors.insert(list, Tensor::new(Dtype::I32, shape, &entries));
        tensors.insert(count, Tensor::new(Dtype::I32, vec![self.rows], &counts));
        if !self.slots {
            tensors.insert("request", Tensor::new(Dtype::I32, vec![self.rows], &requests));
            tensors.insert("page_table", Tensor::new(Dtype::I32, vec![2, pages], &table));
        }
    }

    fn select_extra(
        &self,
        record: RecordFormat,
        tensors: &mut Tensors<'static>,
        random: &mut Random,
    ) {
        const TOKENS: usize = 100;
        let mut pool = Pool::new(self.layout(record), 16, TOKENS);
        let mut slots = Vec::new();
        for _ in 0..self.rows * EXTRA_WIDTH {
            let slot = random.below(TOKENS);
            pool.key(slot, random);
            slots.push(if random.below(9) == 0 { -1 } else { slot as i32 });
        }
        let counts: Vec<i32> =
            (0..self.rows).map(|_| random.below(EXTRA_WIDTH + 1) as i32).collect();
        tensors.insert("extra_cache", pool.tensor());
        let shape = vec![self.rows, EXTRA_WIDTH];
        tensors.insert("extra_slots", Tensor::new(Dtype::I32, shape, &slots));
        tensors.insert("extra_slot_counts", Tensor::new(Dtype::I32, vec![self.rows], &counts));
    }
}

/// Records, lists, scopes, sinks, splits.
pub(super) fn all() -> Vec<Named> {
    let mut list = Vec::new();
    let mut add = |name: String, quick: bool, shape: SparseShape| {
        list.push(Named { name, shape: Shape::Sparse(shape), quick });
    };
    let base = SparseShape::default;
    for record in RecordFormat::ALL.into_iter().filter(|record| !record.is_index()) {
        let widths = widths(record);
        let quick = matches!(record, RecordFormat::Bf16 | RecordFormat::Fp8_656);
        add(record.name().into(), quick, SparseShape { record, widths, ..base() });
        let shape = SparseShape { record, widths, slots: true, page_size: 16, ..base() };
        add(format!("{}, slots, pages of 16", record.name()), false, shape);
    }
    for heads in [1, 3, 16, 63, 128] {
        add(format!("heads {heads}"), heads == 16, SparseShape { heads, ..base() });
    }
    for width in [1, 63, 64, 65, 2048, 2051, 2112] {
        let shape = SparseShape { width, heads: 3, tokens: 3000, ..base() };
        add(format!("{width} entries"), width == 65, shape);
    }
    let (record, extra) = (RecordFormat::V4_584, Some(RecordFormat::Bf16));
    for splits in [json!({"count": 1}), json!({"count": 3}), json!({"fixed_tokens": 64})] {
        for (sink, partial) in [(false, "bf16"), (true, "f32")] {
            let options = json!({
                "splits": splits.clone(), "partial": partial, "sink_in_lse": sink, "lse": "base2"
            });
            let name = format!("splits {splits}, partial {partial}, sink {sink}, two scopes");
            let widths = widths(record);
            let shape = SparseShape { record, extra, widths, sink, options, ..base() };
            add(name, sink, shape);
        }
    }
    list
}

/// Widths of a key and a value that a format can have.
fn widths(record: RecordFormat) -> (usize, usize) {
    match record.check_key(576, 512) {
        Ok(()) if record != RecordFormat::V4_584 => (576, 512),
        _ => (512, 512),
    }
}
