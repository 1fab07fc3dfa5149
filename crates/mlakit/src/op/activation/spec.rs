//! What a caller declares of an activation.

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::op::layer::{Float, MAX_ROW_WIDTH, narrow};
use crate::op::spec::{MAX_ROWS, checked_spec, within};

/// The function of the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationKind {
    /// `v / (1 + exp(-v))`.
    Silu,
}

/// The fields of an [`ActivationSpec`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ActivationFields {
    /// Elements of a row of `y`; a row of `x` has twice as many.
    pub width: usize,
    /// Row capacity.
    pub max_rows: usize,
    /// The dtype of `x`.
    pub input: Float,
    /// The dtype of `y`.
    #[serde(default = "narrow")]
    pub output: Float,
    /// The function of the gate.
    pub kind: ActivationKind,
}

checked_spec! {
    /// An activation that can exist.
    ActivationSpec, ActivationFields, "ActivationFields"
}

impl ActivationFields {
    fn check(&self) -> Result<(), Error> {
        within("width", self.width, 1, MAX_ROW_WIDTH / 2)?;
        within("max_rows", self.max_rows, 1, MAX_ROWS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"{"width":4,"max_rows":2,"input":"bf16","kind":"silu"}"#;

    fn refused(change: impl Fn(&mut ActivationFields)) -> &'static str {
        let mut fields: ActivationFields = serde_json::from_str(TEXT).unwrap();
        change(&mut fields);
        match ActivationSpec::new(fields) {
            Err(Error::Contract { what, .. }) => what,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn bad_fields_are_named() {
        assert_eq!(refused(|f| f.width = 0), "width");
        assert_eq!(refused(|f| f.width = MAX_ROW_WIDTH), "width");
        assert_eq!(refused(|f| f.max_rows = 0), "max_rows");
    }

    #[test]
    fn json_has_defaults_and_no_unknown_field_or_function() {
        let spec: ActivationSpec = serde_json::from_str(TEXT).unwrap();
        assert_eq!(spec.output, Float::Bf16);
        let text = serde_json::to_string(&spec).unwrap();
        assert_eq!(spec, serde_json::from_str::<ActivationSpec>(&text).unwrap());
        assert!(serde_json::from_str::<ActivationSpec>(&TEXT.replace("silu", "gelu")).is_err());
        assert!(serde_json::from_str::<ActivationSpec>(&TEXT.replace("kind", "type")).is_err());
    }
}
