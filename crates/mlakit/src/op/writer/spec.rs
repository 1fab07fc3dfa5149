//! What a caller declares of a cache writer.

use serde::{Deserialize, Serialize};

use crate::geometry::MAX_WIDTH;
use crate::op::spec::{MAX_ROWS, checked_spec, within};
use crate::{Error, PageGeometry, RecordFormat, RecordLayout};

/// The fields of a [`WriterSpec`]. A token is a latent and a rotary part, or, where the record is an index key, a key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WriterFields {
    /// The cache record format.
    pub record: RecordFormat,
    /// Elements of a physical record, if it is wider than latent and rotary part; only `bf16` and `e4m3` may be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub record_width: Option<usize>,
    /// Tokens of a page: 1 or a multiple of 16 (`v4_584` also 2).
    pub page_size: usize,
    /// Elements of the latent; 0 for index keys.
    #[serde(default)]
    pub latent_width: usize,
    /// Elements of the rotary part; 0 where the model has none, and for index keys.
    #[serde(default)]
    pub rope_width: usize,
    /// Elements of an index key; 0 for records of attention.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub key_width: usize,
    /// Row capacity.
    pub max_rows: usize,
}

fn is_zero(width: &usize) -> bool {
    *width == 0
}

fn none(what: &'static str, given: usize, needed: impl Fn() -> String) -> Result<(), Error> {
    if given == 0 { Ok(()) } else { Err(Error::contract(what, needed(), given)) }
}

checked_spec! {
    /// A writer that can exist.
    WriterSpec, WriterFields, "WriterFields"
}

impl WriterFields {
    /// The bytes of a token and the size of a page.
    pub fn pages(&self) -> PageGeometry {
        let record = self.token_record().padded(self.record_width);
        PageGeometry { record, page_size: self.page_size }
    }

    /// Elements of the two pieces in which a token arrives: latent and rotary part, or key and nothing.
    pub fn widths(&self) -> [usize; 2] {
        if self.record.is_index() {
            [self.key_width, 0]
        } else {
            [self.latent_width, self.rope_width]
        }
    }

    fn token_record(&self) -> RecordLayout {
        let [first, rope] = self.widths();
        RecordLayout::of(self.record, first, rope)
    }

    fn check(&self) -> Result<(), Error> {
        let [first, rope] = self.widths();
        let name = self.record.name();
        if self.record.is_index() {
            within("key_width", first, 1, MAX_WIDTH)?;
            let needed = || format!("0, since {name} stores keys of key_width");
            none("latent_width", self.latent_width, needed)?;
            none("rope_width", self.rope_width, needed)?;
        } else {
            within("latent_width", first, 1, MAX_WIDTH)?;
            within("rope_width", rope, 0, MAX_WIDTH)?;
            none("key_width", self.key_width, || format!("0, since {name} is no index key"))?;
        }
        within("max_rows", self.max_rows, 1, MAX_ROWS)?;
        self.record.check_parts(first, rope)?;
        self.token_record().check_width(self.record_width)?;
        self.pages().check().map(drop)
    }
}
