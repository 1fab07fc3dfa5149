//! What a caller declares of an indexer.

use serde::{Deserialize, Serialize};

use crate::geometry::{MAX_HEADS, MAX_WIDTH};
use crate::op::spec::{MAX_ROWS, checked_spec, within};
use crate::{Error, PageGeometry, RecordFormat, RecordLayout};

/// Keys that a row may select at most.
pub const MAX_SELECTED: usize = 1 << 16;

/// Tokens of a pool at most.
pub const MAX_POOL: usize = 1 << 10;

/// The fields of an [`IndexerSpec`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IndexerFields {
    /// Index heads.
    pub heads: usize,
    /// Elements of a query and a key; even.
    pub width: usize,
    /// The record format of the keys, one of the index formats.
    pub record: RecordFormat,
    /// Keys of a page: 1 or a multiple of 16.
    pub page_size: usize,
    /// Keys that a row selects at most.
    pub topk: usize,
    /// Whether the scores of the selected keys are written too.
    #[serde(default)]
    pub scores: bool,
    /// Tokens of a key; 1 where each token has its own.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub pool_size: usize,
    /// Bytes of scratch at most, the fault block included.
    #[serde(default = "default_budget")]
    pub budget_bytes: usize,
    /// Row capacity.
    pub max_rows: usize,
    /// Request capacity.
    pub max_batch: usize,
    /// Cached keys of a request at most (tokens, or pools); longer lengths are clamped.
    pub max_kv_tokens: usize,
    /// Page table width at most.
    pub max_table_width: usize,
}

fn one() -> usize {
    1
}

fn is_one(number: &usize) -> bool {
    *number == 1
}

/// Enough for 64 rows of any length on every device.
fn default_budget() -> usize {
    16 << 20
}

checked_spec! {
    /// An indexer that can exist.
    IndexerSpec, IndexerFields, "IndexerFields"
}

impl IndexerFields {
    /// The bytes of a key and the size of a page.
    pub fn pages(&self) -> PageGeometry {
        PageGeometry { record: self.layout(), page_size: self.page_size }
    }

    /// A key, and a query where it is rounded.
    pub fn layout(&self) -> RecordLayout {
        RecordLayout::of(self.record, self.width, 0)
    }

    /// Whether a key is more than one token.
    pub fn is_pooled(&self) -> bool {
        self.pool_size > 1
    }

    fn check(&self) -> Result<(), Error> {
        within("heads", self.heads, 1, MAX_HEADS)?;
        within("width", self.width, 2, MAX_WIDTH)?;
        if !self.width.is_multiple_of(2) {
            return Err(Error::contract("width", "an even number", self.width));
        }
        if !self.record.is_index() {
            let formats = RecordFormat::ALL.into_iter().filter(|format| format.is_index());
            let names: Vec<_> = formats.map(RecordFormat::name).collect();
            let needed = format!("one of {}", names.join(", "));
            return Err(Error::contract("record", needed, self.record.name()));
        }
        self.pages().check()?;
        within("topk", self.topk, 1, MAX_SELECTED)?;
        within("pool_size", self.pool_size, 1, MAX_POOL)?;
        within("max_rows", self.max_rows, 1, MAX_ROWS)?;
        within("max_batch", self.max_batch, 1, MAX_ROWS)?;
        within("max_kv_tokens", self.max_kv_tokens, 1, 1 << 30)?;
        within("max_table_width", self.max_table_width, 1, 1 << 30)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"{"heads":3,"width":32,"record":"index_fp8_132","page_size":16,"topk":5,
        "max_rows":2,"max_batch":2,"max_kv_tokens":64,"max_table_width":4}"#;

    fn refused(change: impl Fn(&mut IndexerFields)) -> &'static str {
        let mut fields: IndexerFields = serde_json::from_str(TEXT).unwrap();
        change(&mut fields);
        match IndexerSpec::new(fields) {
            Err(Error::Contract { what, .. }) => what,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn bad_fields_are_named() {
        assert_eq!(refused(|f| f.heads = 0), "heads");
        assert_eq!(refused(|f| f.width = 31), "width");
        assert_eq!(refused(|f| f.record = RecordFormat::Bf16), "record");
        assert_eq!(refused(|f| f.width = 34), "record");
        assert_eq!(refused(|f| f.page_size = 24), "page_size");
        assert_eq!(refused(|f| f.topk = 0), "topk");
        assert_eq!(refused(|f| f.topk = MAX_SELECTED + 1), "topk");
        assert_eq!(refused(|f| f.pool_size = 0), "pool_size");
        assert_eq!(refused(|f| f.max_kv_tokens = 0), "max_kv_tokens");
    }

    #[test]
    fn json_has_defaults_and_no_unknown_field() {
        let spec: IndexerSpec = serde_json::from_str(TEXT).unwrap();
        assert_eq!((spec.pool_size, spec.scores, spec.budget_bytes), (1, false, 16 << 20));
        let text = serde_json::to_string(&spec).unwrap();
        assert_eq!(spec, serde_json::from_str::<IndexerSpec>(&text).unwrap());
        assert!(serde_json::from_str::<IndexerSpec>(&TEXT.replace("heads", "head")).is_err());
    }
}
