//! What a caller declares of a cache writer.

use serde::{Deserialize, Serialize};

use crate::geometry::MAX_WIDTH;
use crate::op::spec::{MAX_ROWS, checked_spec, within};
use crate::{Error, PageGeometry, RecordFormat, RecordLayout};

/// The fields of a [`WriterSpec`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WriterFields {
    /// The cache record format.
    pub record: RecordFormat,
    /// Elements of a physical record, if it is wider than latent and rotary part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub record_width: Option<usize>,
    /// Tokens of a page: 1 or a multiple of 16.
    pub page_size: usize,
    /// Elements of the latent.
    pub latent_width: usize,
    /// Elements of the rotary part; 0 where the model has none.
    #[serde(default)]
    pub rope_width: usize,
    /// Row capacity.
    pub max_rows: usize,
}

checked_spec! {
    /// A writer that can exist.
    WriterSpec, WriterFields, "WriterFields"
}

impl WriterFields {
    /// The bytes of a token and the size of a page.
    pub fn pages(&self) -> PageGeometry {
        let width = self.record_width.unwrap_or(self.latent_width + self.rope_width);
        let record = RecordLayout { format: self.record, width };
        PageGeometry { record, page_size: self.page_size }
    }

    fn check(&self) -> Result<(), Error> {
        within("latent_width", self.latent_width, 1, MAX_WIDTH)?;
        within("rope_width", self.rope_width, 0, MAX_WIDTH)?;
        within("max_rows", self.max_rows, 1, MAX_ROWS)?;
        let width = self.latent_width + self.rope_width;
        let geometry = self.pages().check()?;
        within("record_width", geometry.record.width, width, 1 << 16)
    }
}
