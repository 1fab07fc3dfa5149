//! What a caller declares of a rotary embedding.

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::geometry::{MAX_HEADS, MAX_WIDTH};
use crate::op::layer::{Float, one};
use crate::op::spec::{MAX_ROWS, Scalar, checked_spec, within};

/// Which elements rotate together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RotaryStyle {
    /// Neighbours: `2j` and `2j + 1`.
    Pair,
    /// One of each half: `j` and `j + width / 2`.
    Half,
}

/// The fields of a [`RotarySpec`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RotaryFields {
    /// Heads of a row.
    pub heads: usize,
    /// Elements of a head that are rotated; even.
    pub width: usize,
    /// Which elements rotate together.
    pub style: RotaryStyle,
    /// The dtype of `x`.
    pub input: Float,
    /// Elements of a head before the rotated ones, which are copied.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub before: usize,
    /// Elements of a head behind the rotated ones, which are copied.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub after: usize,
    /// From one head of `x` to the next, in elements; `head_width()` if absent. What lies between is
    /// not read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_stride: Option<usize>,
    /// From one head of `y` to the next, in elements; `head_width()` if absent. What lies between
    /// stays as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out_stride: Option<usize>,
    /// Multiplies cosine and sine.
    #[serde(default = "one")]
    pub attention_factor: Scalar,
    /// Row capacity.
    pub max_rows: usize,
}

fn is_zero(number: &usize) -> bool {
    *number == 0
}

checked_spec! {
    /// A rotary embedding that can exist.
    RotarySpec, RotaryFields, "RotaryFields"
}

impl RotaryFields {
    /// Elements of a head, those included that are copied.
    pub fn head_width(&self) -> usize {
        self.before.saturating_add(self.width).saturating_add(self.after)
    }

    /// From one head of `x` to the next, in elements.
    pub fn in_stride(&self) -> usize {
        self.in_stride.unwrap_or(self.head_width())
    }

    /// From one head of `y` to the next, in elements.
    pub fn out_stride(&self) -> usize {
        self.out_stride.unwrap_or(self.head_width())
    }

    /// The two elements of a head that pair `j` rotates.
    pub fn pair(&self, j: usize) -> (usize, usize) {
        match self.style {
            RotaryStyle::Pair => (self.before + 2 * j, self.before + 2 * j + 1),
            RotaryStyle::Half => (self.before + j, self.before + j + self.width / 2),
        }
    }

    fn check(&self) -> Result<(), Error> {
        within("heads", self.heads, 1, MAX_HEADS)?;
        within("width", self.width, 2, MAX_WIDTH)?;
        if !self.width.is_multiple_of(2) {
            return Err(Error::contract("width", "an even number", self.width));
        }
        within("before", self.before, 0, MAX_WIDTH)?;
        within("after", self.after, 0, MAX_WIDTH)?;
        within("in_stride", self.in_stride(), self.head_width(), MAX_WIDTH)?;
        within("out_stride", self.out_stride(), self.head_width(), MAX_WIDTH)?;
        within("max_rows", self.max_rows, 1, MAX_ROWS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"{"heads":2,"width":4,"style":"half","input":"f32","max_rows":2}"#;

    fn refused(change: impl Fn(&mut RotaryFields)) -> &'static str {
        let mut fields: RotaryFields = serde_json::from_str(TEXT).unwrap();
        change(&mut fields);
        match RotarySpec::new(fields) {
            Err(Error::Contract { what, .. }) => what,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn bad_fields_are_named() {
        assert_eq!(refused(|f| f.heads = 0), "heads");
        assert_eq!(refused(|f| f.width = 0), "width");
        assert_eq!(refused(|f| f.width = 5), "width");
        assert_eq!(refused(|f| f.in_stride = Some(3)), "in_stride");
        assert_eq!(refused(|f| (f.before, f.in_stride) = (2, Some(5))), "in_stride");
        assert_eq!(refused(|f| f.after = MAX_WIDTH + 1), "after");
        assert_eq!(refused(|f| f.out_stride = Some(MAX_WIDTH + 1)), "out_stride");
        assert_eq!(refused(|f| f.max_rows = 0), "max_rows");
    }

    #[test]
    fn json_has_defaults_and_no_unknown_field() {
        let spec: RotarySpec = serde_json::from_str(TEXT).unwrap();
        assert_eq!((spec.in_stride(), spec.out_stride()), (4, 4));
        assert_eq!(spec.attention_factor.value(), 1.0);
        let text = serde_json::to_string(&spec).unwrap();
        assert_eq!(spec, serde_json::from_str::<RotarySpec>(&text).unwrap());
        assert!(serde_json::from_str::<RotarySpec>(&TEXT.replace("half", "halves")).is_err());
        assert!(serde_json::from_str::<RotarySpec>(&TEXT.replace("heads", "head")).is_err());
    }
}
