//! What attention kernels are given, whatever keys a row sees.

use std::ops::Range;

/// Keys in a block. Blocks begin at multiples of this many absolute positions, or columns of a selection.
pub const BLOCK: usize = 64;

/// Heads and widths. The value is the first `value_width` elements of the key record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// Query heads, at least 1.
    pub heads: usize,
    /// Elements of a query and of a key record that enter the score: even, >= `value_width`.
    pub qk_width: usize,
    /// Elements of the output, at least 1.
    pub value_width: usize,
}

/// Element format of queries. Whatever it is, the kernel multiplies exact BF16.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum QueryFormat {
    /// BF16.
    Bf16,
    /// E4M3 codes; the scale is part of the score scale.
    E4m3,
    /// BF16 that is first rounded to E4M3 of `q / q_scale`; the scale is part of the score scale.
    Bf16AsE4m3 {
        /// The divisor.
        q_scale: f32,
    },
}

/// Query rows `[R, heads, qk_width]`.
#[derive(Clone, Copy, Debug)]
pub struct Queries {
    /// The first element, aligned to its size.
    pub base: *const u8,
    /// Element format.
    pub format: QueryFormat,
}

/// Element format of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OutFormat {
    /// BF16, rounded to nearest even.
    Bf16,
    /// F32.
    F32,
}

/// Base of a log-sum-exp.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LseBase {
    /// Natural logarithm.
    Natural,
    /// Logarithm to base 2.
    Two,
}

/// What all items of one call share.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// Heads and widths.
    pub geometry: Geometry,
    /// The queries.
    pub queries: Queries,
    /// Factor of a dot product of key rows and BF16 queries that gives the score times log2(e):
    /// [`Attention::score_scale`].
    pub score_scale_log2: f32,
    /// Factor of the output: what a key is times its row.
    pub value_scale: f32,
    /// A sink that enters the denominator of each item's rows; only where an item is all that its
    /// rows see.
    pub sink: Option<Sink>,
}

impl Attention {
    /// `softmax_scale * kv_scale * q_scale * log2(e)`, rounded once. Scales that do not apply are
    /// 1.
    pub fn score_scale(softmax_scale: f32, kv_scale: f32, q_scale: f32) -> f32 {
        let product = f64::from(softmax_scale) * f64::from(kv_scale) * f64::from(q_scale);
        (product * std::f64::consts::LOG2_E) as f32
    }
}

/// A logit a head that enters the denominator once.
#[derive(Clone, Copy, Debug)]
pub struct Sink {
    /// Natural-log logits `[heads]`.
    pub logits: *const f32,
    /// Whether the log-sum-exp counts it.
    pub in_lse: bool,
    /// What an output is rounded to before the sink shrinks it: the format of partial results, so that
    /// a row has the bits that a merge of one part gives.
    pub partial: OutFormat,
}

/// The query vectors of an item: every (row, head) is a lane.
#[derive(Clone, Debug)]
pub struct Lanes {
    /// Query rows, numbered through the whole call.
    pub rows: Range<usize>,
    /// Heads.
    pub heads: Range<usize>,
    /// Where the result goes.
    pub out: Output,
}

impl Lanes {
    /// How many there are.
    pub fn count(&self) -> usize {
        self.rows.len() * self.heads.len()
    }
}

/// Where an item's result goes: `[rows, heads of the geometry, value_width]` and `[rows, heads of
/// the geometry]`, both beginning at the item's first row and **head 0**. Rows and heads outside
/// the item are not touched.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    /// The outputs: softmax-weighted mean of values over the item's visible keys, 0 without any.
    pub values: *mut u8,
    /// Their format.
    pub format: OutFormat,
    /// Log-sum-exp of the scores of the item's visible keys, -inf without any.
    pub lse: *mut f32,
    /// Its base.
    pub lse_base: LseBase,
}

impl OutFormat {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            OutFormat::Bf16 => 2,
            OutFormat::F32 => 4,
        }
    }
}
