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
    /// `1 / (1 + exp(-v))`.
    Sigmoid,
}

/// The fields of an [`ActivationSpec`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ActivationFields {
    /// Elements of a row of `y`; a row of `x` has twice as many, or, where the gate is an operand of
    /// its own, as many.
    pub width: usize,
    /// How many elements of `y` in a row have one element of the gate, which then is an operand of
    /// its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gate_span: Option<usize>,
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
    /// Elements of a row of `x`.
    pub fn in_width(&self) -> usize {
        if self.gate_span.is_some() { self.width } else { 2 * self.width }
    }

    /// Elements of a row of the gate, where it is an operand of its own.
    pub fn gate_width(&self) -> Option<usize> {
        self.gate_span.map(|span| self.width / span)
    }

    fn check(&self) -> Result<(), Error> {
        within("width", self.width, 1, MAX_ROW_WIDTH / 2)?;
        if let Some(span) = self.gate_span.filter(|span| !self.width.is_multiple_of(*span)) {
            return Err(Error::contract("gate_span", format!("a divisor of {}", self.width), span));
        }
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
        assert_eq!(refused(|f| f.gate_span = Some(0)), "gate_span");
        assert_eq!(refused(|f| f.gate_span = Some(3)), "gate_span");
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
