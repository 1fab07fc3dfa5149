//! What a caller declares of sparse attention.

use serde::{Deserialize, Serialize};

use crate::op::dense::QueryDtype;
use crate::op::merge::Partial;
use crate::op::spec::{MAX_ROWS, Scalar, checked_spec, within};
use crate::splits::{BLOCK, Budget, Capacity, Splits};
use crate::{Error, Geometry, LseBase, PageGeometry, RecordFormat, RecordLayout};

/// Entries that a row may select at most.
pub const MAX_SELECTED: usize = 1 << 24;

/// How a row names its tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Selection {
    /// By logical position in its request; the kernel looks them up in the page table.
    #[default]
    Positions,
    /// By slot: page x page_size + offset.
    Slots,
}

/// The second scope: tokens of another cache, named by slot, that the same rows see too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExtraScope {
    /// The bytes of a token and the size of a page.
    pub pages: PageGeometry,
    /// Entries of a row at most.
    pub width: usize,
}

/// The fields of a [`SparseSpec`]. Every one that changes code or numbers is part of its identity; nothing about a particular pool is.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SparseFields {
    /// Query heads.
    pub heads: usize,
    /// Elements of a query and a key.
    pub qk_width: usize,
    /// Elements of a value and an output: the first ones of a record.
    pub value_width: usize,
    /// The cache record format.
    pub record: RecordFormat,
    /// Elements of a physical record, if it is wider than a key; what is behind the key is never read. Only `bf16` and `e4m3`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub record_width: Option<usize>,
    /// Tokens of a page: 1 or a multiple of 16.
    pub page_size: usize,
    /// Multiplies `q . k`; that of the expanded head width, never of `qk_width`.
    pub softmax_scale: Scalar,
    /// The base of the log-sum-exp.
    #[serde(default)]
    pub lse: LseBase,
    /// Whether there is a sink: one natural-log logit a head that enters the denominator once.
    #[serde(default)]
    pub sink: bool,
    /// Whether the returned log-sum-exp counts the sink; only with one.
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
    /// How a row's columns are divided; `fixed_tokens` counts columns.
    #[serde(default)]
    pub splits: Splits,
    /// What splitting may cost.
    #[serde(default)]
    pub budget: Budget,
    /// A selection says itself which keys a row sees, so this must be absent; it is here because all attention shares the field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<usize>,
    /// How a row names its tokens.
    #[serde(default)]
    pub selection: Selection,
    /// Entries of a row at most; 0 only beside a second scope.
    pub width: usize,
    /// The record format of the second scope, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extra_record: Option<RecordFormat>,
    /// As `record_width`, of the second scope.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extra_record_width: Option<usize>,
    /// Tokens of a page of the second scope.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extra_page_size: Option<usize>,
    /// Entries of a row in the second scope at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extra_width: Option<usize>,
    /// Row capacity.
    pub max_rows: usize,
    /// Request capacity; only positions need one.
    #[serde(default)]
    pub max_batch: usize,
    /// Cached tokens of a request at most: positions from there on are out of bounds. Only positions need one.
    #[serde(default)]
    pub max_kv_tokens: usize,
    /// Page table width at most; only positions need one.
    #[serde(default)]
    pub max_table_width: usize,
}

checked_spec! {
    /// Sparse attention that can exist.
    SparseSpec, SparseFields, "SparseFields"
}

impl SparseFields {
    /// Heads and widths.
    pub fn geometry(&self) -> Geometry {
        let Self { heads, qk_width, value_width, .. } = *self;
        Geometry { heads, qk_width, value_width }
    }

    /// The bytes of a token and the size of a page.
    pub fn pages(&self) -> PageGeometry {
        self.pages_of(self.record, self.record_width, self.page_size)
    }

    /// The second scope.
    pub fn extra(&self) -> Option<ExtraScope> {
        let (record, page_size) = (self.extra_record?, self.extra_page_size?);
        let pages = self.pages_of(record, self.extra_record_width, page_size);
        Some(ExtraScope { pages, width: self.extra_width? })
    }

    /// What decides how many splits there may be: columns take the place of tokens.
    pub fn capacity(&self) -> Capacity {
        let extra = self.extra_width.unwrap_or(0);
        let columns = self.width.next_multiple_of(if extra > 0 { BLOCK } else { 1 }) + extra;
        Capacity {
            splits: self.splits,
            budget: self.budget,
            max_rows: self.max_rows,
            max_kv_tokens: columns,
            window: None,
        }
    }

    /// Whether queries are scaled.
    pub fn has_query_scale(&self) -> bool {
        self.query == QueryDtype::E4m3 || self.quantize_query
    }

    /// Whether some record is: one `kv_scale` holds for the scaled records of both scopes.
    pub fn has_kv_scale(&self) -> bool {
        self.record.is_scaled() || self.extra_record.is_some_and(RecordFormat::is_scaled)
    }

    fn pages_of(
        &self,
        format: RecordFormat,
        record_width: Option<usize>,
        page_size: usize,
    ) -> PageGeometry {
        let record = RecordLayout::of_key(format, self.qk_width, self.value_width);
        PageGeometry { record: record.padded(record_width), page_size }
    }

    fn check(&self) -> Result<(), Error> {
        self.geometry().check()?;
        self.check_record(self.record, self.record_width)?;
        self.pages().check()?;
        within("max_rows", self.max_rows, 1, MAX_ROWS)?;
        let tables = usize::from(self.selection == Selection::Positions);
        within("max_batch", self.max_batch, tables, MAX_ROWS)?;
        within("max_kv_tokens", self.max_kv_tokens, tables, 1 << 30)?;
        within("max_table_width", self.max_table_width, tables, 1 << 30)?;
        if self.softmax_scale.value() <= 0.0 {
            let given = self.softmax_scale.value();
            return Err(Error::contract("softmax_scale", "above 0", given));
        }
        if self.sink_in_lse && !self.sink {
            return Err(Error::contract("sink_in_lse", "a sink", "none"));
        }
        if let Some(window) = self.window {
            let needed = "absent: a selection says which keys a row sees";
            return Err(Error::contract("window", needed, window));
        }
        self.check_query()?;
        self.check_extra()?;
        let least = usize::from(self.extra_record.is_none());
        within("width", self.width, least, MAX_SELECTED)?;
        self.capacity().check()
    }

    fn check_query(&self) -> Result<(), Error> {
        if self.record != RecordFormat::E4m3 && self.has_query_scale() {
            let given = self.record.name();
            return Err(Error::contract("record", "e4m3 for an E4M3 query", given));
        }
        if self.query == QueryDtype::E4m3 && self.quantize_query {
            return Err(Error::contract("quantize_query", "a BF16 query", "an E4M3 query"));
        }
        Ok(())
    }

    /// The second scope is there as a whole or not at all.
    fn check_extra(&self) -> Result<(), Error> {
        let Some(format) = self.extra_record else {
            let fields = [
                ("extra_record_width", self.extra_record_width),
                ("extra_page_size", self.extra_page_size),
                ("extra_width", self.extra_width),
            ];
            return match fields.into_iter().find_map(|(name, field)| Some((name, field?))) {
                Some((name, given)) => {
                    Err(Error::contract(name, "absent without extra_record", given))
                }
                None => Ok(()),
            };
        };
        self.check_record(format, self.extra_record_width)?;
        let absent = |what| Error::contract(what, "one beside extra_record", "none");
        let page_size = self.extra_page_size.ok_or_else(|| absent("extra_page_size"))?;
        let width = self.extra_width.ok_or_else(|| absent("extra_width"))?;
        within("extra_width", width, 1, MAX_SELECTED)?;
        self.pages_of(format, self.extra_record_width, page_size).check().map(drop)
    }

    fn check_record(&self, format: RecordFormat, record_width: Option<usize>) -> Result<(), Error> {
        format.check_key(self.qk_width, self.value_width)?;
        let record = RecordLayout::of_key(format, self.qk_width, self.value_width);
        record.check_width(record_width)
    }
}
