//! Cases by shape: what `check` compares, and what tests write to files.

use half::bf16;
use mlakit::{Dtype, E4m3, RecordFormat, RecordLayout};
use serde_json::{Map, Value, json};

use super::random::Random;
use super::sparse::SparseShape;
use crate::case::{Case, Tensor, Tensors};

/// A case that can be made.
#[derive(Clone, Debug)]
pub enum Shape {
    /// Of `dense`.
    Dense(DenseShape),
    /// Of `sparse`.
    Sparse(SparseShape),
    /// Of `merge`.
    Merge(MergeShape),
    /// Of `writer`.
    Writer(WriterShape),
    /// Of `projection`.
    Projection(ProjectionShape),
}

/// Dense attention over shuffled pages, with NaN in everything that must not be read.
#[derive(Clone, Debug)]
pub struct DenseShape {
    /// Query heads.
    pub heads: usize,
    /// Elements of a key, and of a value.
    pub widths: (usize, usize),
    /// Query rows of each request.
    pub rows: usize,
    /// Cached tokens of each request.
    pub kv_lens: Vec<usize>,
    /// Tokens of a page.
    pub page_size: usize,
    /// The cache record format.
    pub record: RecordFormat,
    /// Elements behind the key in a record, and bytes behind the payload of a page.
    pub padding: (usize, usize),
    /// How an E4M3 cache is asked.
    pub query: Query,
    /// A length for each row instead of the causal rule.
    pub row_lengths: bool,
    /// More fields of the spec.
    pub options: Value,
}

/// The queries of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Query {
    /// BF16, used as they are.
    Bf16,
    /// BF16, rounded to E4M3 first.
    Quantized,
    /// E4M3.
    E4m3,
}

/// A merge in which some parts are empty and hold NaN.
#[derive(Clone, Debug)]
pub struct MergeShape {
    /// Parts, rows, heads, value width.
    pub shape: [usize; 4],
    /// The dtype of the partial outputs.
    pub partial: Dtype,
    /// Whether there is a sink.
    pub sink: bool,
    /// More fields of the spec.
    pub options: Value,
}

/// A writer with slots to skip.
#[derive(Clone, Debug)]
pub struct WriterShape {
    /// Elements of the latent, and of the rotary part; or of the key, and 0.
    pub widths: (usize, usize),
    /// Tokens.
    pub rows: usize,
    /// Pages, and tokens of each.
    pub pages: (usize, usize),
    /// The cache record format.
    pub record: RecordFormat,
    /// Elements behind a record's values (where the format takes such), and bytes behind the payload of a page.
    pub padding: (usize, usize),
}

/// A projection.
#[derive(Clone, Debug)]
pub struct ProjectionShape {
    /// Rows, heads, widths of input and output.
    pub shape: [usize; 4],
    /// More fields of the spec.
    pub options: Value,
}

impl Shape {
    /// The operation.
    pub fn operation(&self) -> &'static str {
        match self {
            Self::Dense(_) => "dense",
            Self::Sparse(_) => "sparse",
            Self::Merge(_) => "merge",
            Self::Writer(_) => "writer",
            Self::Projection(_) => "projection",
        }
    }

    /// Makes the case.
    pub fn build(&self, seed: u64) -> Case<'static> {
        let mut random = Random::new(seed);
        let (fields, tensors) = match self {
            Self::Dense(shape) => shape.build(&mut random),
            Self::Sparse(shape) => shape.build(&mut random),
            Self::Merge(shape) => shape.build(&mut random),
            Self::Writer(shape) => shape.build(&mut random),
            Self::Projection(shape) => shape.build(&mut random),
        };
        let Value::Object(spec) = fields else { unreachable!("every shape has named fields") };
        let text = Value::Object(spec.clone()).to_string();
        let metadata = [("operation", self.operation().to_owned()), ("spec", text)]
            .map(|(k, v)| (k.into(), v));
        let operation = self.operation().into();
        Case { operation, spec, metadata: metadata.into(), tensors }
    }
}

/// `fields` with those of `options` beside them.
pub(super) fn with(mut fields: Value, options: &Value) -> Value {
    if let (Value::Object(fields), Value::Object(options)) = (&mut fields, options) {
        fields.extend(options.iter().map(|(name, value)| (name.clone(), value.clone())));
    }
    fields
}

impl Default for DenseShape {
    fn default() -> Self {
        Self {
            heads: 16,
            widths: (576, 512),
            rows: 1,
            kv_lens: vec![100],
            page_size: 64,
            record: RecordFormat::Bf16,
            padding: (0, 0),
            query: Query::Bf16,
            row_lengths: false,
            options: Value::Object(Map::new()),
        }
    }
}

impl DenseShape {
    const KV_SCALE: f32 = 0.0125;
    const Q_SCALE: f32 = 0.01;

    fn build(&self, random: &mut Random) -> (Value, Tensors<'static>) {
        let (batch, (qk, value)) = (self.kv_lens.len(), self.widths);
        let rows = batch * self.rows;
        let mut tensors = Tensors::default();
        tensors.insert("q", self.queries([rows, self.heads, qk], random));
        self.pages(&mut tensors, random);
        let lens: Vec<i32> = self.kv_lens.iter().map(|len| *len as i32).collect();
        let offsets: Vec<i32> = (0..=batch).map(|b| (b * self.rows) as i32).collect();
        if self.row_lengths {
            let lens: Vec<i32> = (0..rows)
                .map(|row| random.below(self.kv_lens[row / self.rows] + 1) as i32)
                .collect();
            tensors.insert("row_kv_lens", Tensor::new(Dtype::I32, vec![rows], &lens));
        }
        tensors.insert("kv_lens", Tensor::new(Dtype::I32, vec![batch], &lens));
        tensors.insert("q_offsets", Tensor::new(Dtype::I32, vec![batch + 1], &offsets));
        if self.record.is_scaled() {
            tensors.insert("kv_scale", Tensor::new(Dtype::F32, vec![1], &[Self::KV_SCALE]));
        }
        if self.query != Query::Bf16 {
            tensors.insert("q_scale", Tensor::new(Dtype::F32, vec![1], &[Self::Q_SCALE]));
        }
        let fields = json!({
            "heads": self.heads,
            "qk_width": qk,
            "value_width": value,
            "record": self.record.name(),
            "record_width": qk + self.padding.0,
            "page_size": self.page_size,
            "softmax_scale": (qk as f32).powf(-0.5),
            "quantize_query": self.query == Query::Quantized,
        });
        (with(fields, &self.options), tensors)
    }

    fn queries(&self, shape: [usize; 3], random: &mut Random) -> Tensor<'static> {
        // Wide enough scores that attention is neither flat nor a single key.
        let values = random.bf16s(shape.iter().product(), 2.0);
        if self.query != Query::E4m3 {
            return Tensor::new(Dtype::Bf16, shape.to_vec(), &values);
        }
        let codes: Vec<u8> =
            values.iter().map(|v| E4m3::encode(v.to_f32() / Self::Q_SCALE)).collect();
        Tensor::new(Dtype::E4m3, shape.to_vec(), &codes)
    }

    /// The pages in a shuffled order, with as many more that belong to nobody; the table, wider
    /// than needed.
    fn pages(&self, tensors: &mut Tensors<'static>, random: &mut Random) {
        let qk = self.widths.0;
        let layout = RecordLayout { format: self.record, width: qk + self.padding.0, rope: 0 };
        let needed = |len: &usize| len.div_ceil(self.page_size);
        let width = self.kv_lens.iter().map(needed).max().unwrap_or(0) + 1;
        let used: usize = self.kv_lens.iter().map(needed).sum();
        let order = random.order(used + used / 8 + 1);
        let stride = self.page_size * layout.bytes() + self.padding.1;
        let mut cache = vec![0xff; order.len() * stride];
        let mut table = vec![-1i32; self.kv_lens.len() * width];
        let mut next = order.iter();
        for (request, len) in self.kv_lens.iter().enumerate() {
            for position in 0..*len {
                let entry = &mut table[request * width + position / self.page_size];
                if position % self.page_size == 0 {
                    *entry = *next.next().expect("there are as many as are needed") as i32;
                }
                let first = *entry as usize * stride + position % self.page_size * layout.bytes();
                let values = random.bf16s(qk, 1.0);
                layout.encode(
                    &mut cache[first..][..layout.bytes()],
                    &mut [],
                    &values,
                    Self::KV_SCALE,
                );
            }
        }
        let pages = vec![order.len(), stride];
        tensors.insert("cache", Tensor::new(Dtype::U8, pages, &cache));
        let shape = vec![self.kv_lens.len(), width];
        tensors.insert("page_table", Tensor::new(Dtype::I32, shape, &table));
    }
}

impl MergeShape {
    fn build(&self, random: &mut Random) -> (Value, Tensors<'static>) {
        let [splits, rows, heads, value] = self.shape;
        let parts = splits * rows * heads;
        let mut lses = random.f32s(parts, 3.0);
        let mut outs = random.f32s(parts * value, 1.0);
        for part in 0..parts {
            if random.below(5) == 0 {
                lses[part] = [f32::NEG_INFINITY, f32::NAN, f32::INFINITY][random.below(3)];
                outs[part * value..][..value].fill(f32::NAN);
            }
        }
        let mut tensors = Tensors::default();
        let outs = if self.partial == Dtype::F32 {
            Tensor::new(Dtype::F32, self.shape.to_vec(), &outs)
        } else {
            let narrow: Vec<bf16> = outs.iter().map(|v| bf16::from_f32(*v)).collect();
            Tensor::new(Dtype::Bf16, self.shape.to_vec(), &narrow)
        };
        tensors.insert("outs", outs);
        tensors.insert("lses", Tensor::new(Dtype::F32, vec![splits, rows, heads], &lses));
        if self.sink {
            let mut sink = random.f32s(heads, 2.0);
            sink[0] = f32::NEG_INFINITY;
            sink[heads / 2] = f32::INFINITY;
            tensors.insert("sink", Tensor::new(Dtype::F32, vec![heads], &sink));
        }
        (with(json!({}), &self.options), tensors)
    }
}

impl WriterShape {
    fn build(&self, random: &mut Random) -> (Value, Tensors<'static>) {
        let ((latent, rope), (pages, page_size)) = (self.widths, self.pages);
        let layout = RecordLayout::of(self.record, latent, rope);
        let record_width = (self.padding.0 > 0).then_some(layout.width + self.padding.0);
        let stride = page_size * layout.padded(record_width).bytes() + self.padding.1;
        let cache: Vec<u8> = (0..pages * stride).map(|_| random.bits() as u8).collect();
        // Each slot once, so that the order of writing does not show; some negative, one behind the
        // pool.
        let order = random.order(pages * page_size);
        let slot = |row: usize| match row % 7 {
            3 => -1 - row as i64,
            5 => (pages * page_size + row) as i64,
            _ => order[row % order.len()] as i64,
        };
        let slots: Vec<i64> = (0..self.rows.min(order.len())).map(slot).collect();
        let mut tensors = Tensors::default();
        let values = random.bf16s(self.rows * latent, 1.0);
        let first = if self.record.is_index() { "key" } else { "latent" };
        tensors.insert(first, Tensor::new(Dtype::Bf16, vec![self.rows, latent], &values));
        if rope > 0 {
            let values = random.bf16s(self.rows * rope, 1.0);
            tensors.insert("rope", Tensor::new(Dtype::Bf16, vec![self.rows, rope], &values));
        }
        tensors.insert("slots", Tensor::new(Dtype::I64, vec![slots.len()], &slots));
        tensors.insert("cache", Tensor::new(Dtype::U8, vec![pages, stride], &cache));
        if self.record.is_scaled() {
            tensors.insert("kv_scale", Tensor::new(Dtype::F32, vec![1], &[0.0125f32]));
        }
        let fields = json!({"record": self.record.name(), "page_size": page_size});
        (with(fields, &json!({"record_width": record_width})), tensors)
    }
}

impl ProjectionShape {
    fn build(&self, random: &mut Random) -> (Value, Tensors<'static>) {
        let [rows, heads, p, n] = self.shape;
        let mut tensors = Tensors::default();
        let x = random.bf16s(rows * heads * p, 1.0);
        tensors.insert("x", Tensor::new(Dtype::Bf16, vec![rows, heads, p], &x));
        let weight = random.bf16s(heads * p * n, (p as f32).powf(-0.5));
        tensors.insert("weight", Tensor::new(Dtype::Bf16, vec![heads, p, n], &weight));
        (with(json!({}), &self.options), tensors)
    }
}
