//! What a caller declares of dense attention.

use serde::{Deserialize, Serialize};

use crate::op::merge::Partial;
use crate::op::spec::{MAX_ROWS, Scalar, checked_spec, within};
use crate::splits::{Budget, Capacity, Splits};
use crate::{Error, Geometry, LseBase, PageGeometry, RecordFormat, RecordLayout};

/// The dtype in which queries arrive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QueryDtype {
    /// BF16.
    #[default]
    Bf16,
    /// E4M3 with one scale for all: value = code x `q_scale`. Only with an `e4m3` record.
    E4m3,
}

/// The fields of a [`DenseSpec`]. Every one that changes code or numbers is part of its identity; nothing about a particular pool is.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DenseFields {
    /// Query heads.
    pub heads: usize,
    /// Elements of a query and a key.
    pub qk_width: usize,
    /// Elements of a value and an output.
    pub value_width: usize,
    /// The cache record format.
    pub record: RecordFormat,
    /// Elements of a physical record, if it is wider than a key; what is behind the key is never read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub record_width: Option<usize>,
    /// Tokens of a page: 1 or a multiple of 16.
    pub page_size: usize,
    /// Multiplies `q . k`; that of the expanded head width, never of `qk_width`.
    pub softmax_scale: Scalar,
    /// The base of the log-sum-exp.
    #[serde(default)]
    pub lse: LseBase,
    /// Dense attention has no sink, so this must be false; it is here because all attention shares the field.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sink_in_lse: bool,
    /// The dtype in which queries arrive.
    #[serde(default)]
    pub query: QueryDtype,
    /// Round a BF16 query to `E4M3(q / q_scale)` first.
    #[serde(default)]
    pub quantize_query: bool,
    /// The dtype in which split results are stored.
    #[serde(default)]
    pub partial: Partial,
    /// How a row's keys are divided.
    #[serde(default)]
    pub splits: Splits,
    /// What splitting may cost.
    #[serde(default)]
    pub budget: Budget,
    /// A row sees at most this many keys, the newest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<usize>,
    /// Whether each row says how many keys it sees (`row_kv_lens`), instead of the right-aligned causal rule.
    #[serde(default)]
    pub row_lengths: bool,
    /// Row capacity.
    pub max_rows: usize,
    /// Request capacity.
    pub max_batch: usize,
    /// Cached tokens of a request at most; longer lengths are clamped.
    pub max_kv_tokens: usize,
    /// Page table width at most.
    pub max_table_width: usize,
}

checked_spec! {
    /// Dense attention that can exist.
    DenseSpec, DenseFields, "DenseFields"
}

impl DenseFields {
    /// Heads and widths.
    pub fn geometry(&self) -> Geometry {
        let Self { heads, qk_width, value_width, .. } = *self;
        Geometry { heads, qk_width, value_width }
    }

    /// The bytes of a token and the size of a page.
    pub fn pages(&self) -> PageGeometry {
        let record = self.key_record().padded(self.record_width);
        PageGeometry { record, page_size: self.page_size }
    }

    /// What decides how many splits there may be.
    pub fn capacity(&self) -> Capacity {
        Capacity {
            splits: self.splits,
            budget: self.budget,
            max_rows: self.max_rows,
            max_kv_tokens: self.max_kv_tokens,
            window: self.window,
        }
    }

    /// Whether queries are scaled.
    pub fn has_query_scale(&self) -> bool {
        self.query == QueryDtype::E4m3 || self.quantize_query
    }

    fn key_record(&self) -> RecordLayout {
        RecordLayout::of_key(self.record, self.qk_width, self.value_width)
    }

    fn check(&self) -> Result<(), Error> {
        self.geometry().check()?;
        self.pages().check()?;
        within("max_rows", self.max_rows, 1, MAX_ROWS)?;
        within("max_batch", self.max_batch, 1, MAX_ROWS)?;
        within("max_kv_tokens", self.max_kv_tokens, 1, 1 << 30)?;
        within("max_table_width", self.max_table_width, 1, 1 << 30)?;
        self.record.check_key(self.qk_width, self.value_width)?;
        self.key_record().check_width(self.record_width)?;
        if self.softmax_scale.value() <= 0.0 {
            let given = self.softmax_scale.value();
            return Err(Error::contract("softmax_scale", "above 0", given));
        }
        if self.sink_in_lse {
            return Err(Error::contract("sink_in_lse", "false: dense attention has no sink", true));
        }
        if self.window == Some(0) {
            return Err(Error::contract("window", "at least 1 token", 0));
        }
        if self.record != RecordFormat::E4m3 && self.has_query_scale() {
            let given = self.record.name();
            return Err(Error::contract("record", "e4m3 for an E4M3 query", given));
        }
        if self.query == QueryDtype::E4m3 && self.quantize_query {
            return Err(Error::contract("quantize_query", "a BF16 query", "an E4M3 query"));
        }
        self.capacity().check()
    }
}
