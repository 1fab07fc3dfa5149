//! What a caller declares of a gather.

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::op::layer::{Float, MAX_ROW_WIDTH, one};
use crate::op::spec::{MAX_ROWS, Scalar, checked_spec, within};

/// The most rows of a table: its ids are I32.
pub const MAX_TABLE_ROWS: usize = 1 << 30;

/// The fields of an [`EmbedSpec`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EmbedFields {
    /// Elements of a row.
    pub width: usize,
    /// Rows of the table; taken from the operand if absent. The probe of `prepare` is as large as
    /// the `Spec` says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vocab: Option<usize>,
    /// The dtype of the table.
    pub table: Float,
    /// The dtype of `y`.
    pub output: Float,
    /// Multiplies every element.
    #[serde(default = "one")]
    pub scale: Scalar,
    /// Row capacity.
    pub max_rows: usize,
}

checked_spec! {
    /// A gather that can exist.
    EmbedSpec, EmbedFields, "EmbedFields"
}

impl EmbedFields {
    fn check(&self) -> Result<(), Error> {
        within("width", self.width, 1, MAX_ROW_WIDTH)?;
        within("vocab", self.vocab.unwrap_or(1), 1, MAX_TABLE_ROWS)?;
        within("max_rows", self.max_rows, 1, MAX_ROWS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"{"width":4,"vocab":3,"table":"bf16","output":"f32","max_rows":2}"#;

    fn refused(change: impl Fn(&mut EmbedFields)) -> &'static str {
        let mut fields: EmbedFields = serde_json::from_str(TEXT).unwrap();
        change(&mut fields);
        match EmbedSpec::new(fields) {
            Err(Error::Contract { what, .. }) => what,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn bad_fields_are_named() {
        assert_eq!(refused(|f| f.width = 0), "width");
        assert_eq!(refused(|f| f.vocab = Some(0)), "vocab");
        assert_eq!(refused(|f| f.vocab = Some(1 << 31)), "vocab");
        assert_eq!(refused(|f| f.max_rows = 0), "max_rows");
    }

    #[test]
    fn json_has_defaults_and_no_unknown_field() {
        let spec: EmbedSpec = serde_json::from_str(TEXT).unwrap();
        assert_eq!((spec.vocab, spec.scale.value()), (Some(3), 1.0));
        let text = serde_json::to_string(&spec).unwrap();
        assert_eq!(spec, serde_json::from_str::<EmbedSpec>(&text).unwrap());
        let open: EmbedSpec = serde_json::from_str(&TEXT.replace(r#""vocab":3,"#, "")).unwrap();
        assert_eq!(open.vocab, None);
        assert!(serde_json::from_str::<EmbedSpec>(&TEXT.replace("vocab", "rows")).is_err());
    }
}
