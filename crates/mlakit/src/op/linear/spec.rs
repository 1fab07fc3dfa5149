//! What a caller declares of a linear layer.

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::op::layer::{Float, MAX_EXPERTS, MAX_ROW_WIDTH, narrow};
use crate::op::spec::{MAX_ROWS, checked_spec, within};

/// The matrices of a mixture of experts, and how a row uses its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experts {
    /// Matrices in `weight`; taken from the operand if absent. The probe of `prepare` is as large
    /// as the `Spec` says, so leave it out where the experts are large: the probe then has three of
    /// them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<usize>,
    /// Experts of a row.
    pub used: usize,
    /// Whether the results of a row are summed, each times its gate; otherwise each is a row of its
    /// own.
    #[serde(default)]
    pub combine: bool,
}

/// The fields of a [`LinearSpec`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinearFields {
    /// Elements of a row of `x`.
    pub in_width: usize,
    /// Elements of a row of `y`.
    pub out_width: usize,
    /// Row capacity.
    pub max_rows: usize,
    /// The dtype of `x`. F32 keeps what a norm or an activation computed: products are then as
    /// exact as 16 bits of `x` allow, or better.
    #[serde(default = "narrow")]
    pub input: Float,
    /// The dtype of `y`.
    pub output: Float,
    /// Whether the result is added to what `y` holds; F32 output only.
    #[serde(default)]
    pub accumulate: bool,
    /// Whether there is a bias; not with experts.
    #[serde(default)]
    pub bias: bool,
    /// One matrix an expert, if present.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<Experts>,
}

checked_spec! {
    /// A linear layer that can exist.
    LinearSpec, LinearFields, "LinearFields"
}

impl LinearFields {
    /// Experts of a row; 1 where there are none.
    pub fn used(&self) -> usize {
        self.experts.map_or(1, |experts| experts.used)
    }

    /// Whether the results of a row's experts are summed.
    pub fn combines(&self) -> bool {
        self.experts.is_some_and(|experts| experts.combine)
    }

    /// Elements of `x` that belong to one row: `in_width`, for `combine` times `used`.
    pub fn x_row(&self) -> usize {
        self.in_width * if self.combines() { self.used() } else { 1 }
    }

    /// Elements of `y` that belong to one row: `out_width`, for `expand` times `used`.
    pub fn y_row(&self) -> usize {
        self.out_width * if self.combines() { 1 } else { self.used() }
    }

    /// Elements of one matrix.
    pub fn matrix(&self) -> usize {
        self.in_width * self.out_width
    }

    fn check(&self) -> Result<(), Error> {
        within("in_width", self.in_width, 1, MAX_ROW_WIDTH)?;
        within("out_width", self.out_width, 1, MAX_ROW_WIDTH)?;
        within("max_rows", self.max_rows, 1, MAX_ROWS)?;
        if self.accumulate && self.output != Float::F32 {
            return Err(Error::contract("accumulate", "an F32 output", self.output.dtype()));
        }
        let Some(experts) = self.experts else { return Ok(()) };
        let count = experts.count.unwrap_or(MAX_EXPERTS);
        within("experts.count", count, 1, MAX_EXPERTS)?;
        within("experts.used", experts.used, 1, count)?;
        if self.bias {
            return Err(Error::contract("bias", "none with experts", true));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields() -> LinearFields {
        LinearFields {
            in_width: 8,
            out_width: 4,
            max_rows: 2,
            input: Float::Bf16,
            output: Float::F32,
            accumulate: false,
            bias: false,
            experts: None,
        }
    }

    fn refused(fields: LinearFields) -> &'static str {
        match LinearSpec::new(fields) {
            Err(Error::Contract { what, .. }) => what,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn bad_fields_are_named() {
        let experts = |count, used| Some(Experts { count, used, combine: false });
        assert_eq!(refused(LinearFields { in_width: 0, ..fields() }), "in_width");
        assert_eq!(refused(LinearFields { out_width: MAX_ROW_WIDTH + 1, ..fields() }), "out_width");
        assert_eq!(refused(LinearFields { max_rows: 0, ..fields() }), "max_rows");
        let narrow = LinearFields { accumulate: true, output: Float::Bf16, ..fields() };
        assert_eq!(refused(narrow), "accumulate");
        let no_experts = LinearFields { experts: experts(Some(0), 1), ..fields() };
        assert_eq!(refused(no_experts), "experts.count");
        let too_many = LinearFields { experts: experts(Some(4), 5), ..fields() };
        assert_eq!(refused(too_many), "experts.used");
        let none_used = LinearFields { experts: experts(None, 0), ..fields() };
        assert_eq!(refused(none_used), "experts.used");
        let biased = LinearFields { bias: true, experts: experts(Some(4), 2), ..fields() };
        assert_eq!(refused(biased), "bias");
    }

    #[test]
    fn json_has_defaults_and_no_unknown_field() {
        let text = r#"{"in_width":8,"out_width":4,"max_rows":2,"output":"f32"}"#;
        let spec: LinearSpec = serde_json::from_str(text).unwrap();
        assert_eq!(spec, LinearSpec::new(fields()).unwrap());
        let again: LinearSpec =
            serde_json::from_str(&serde_json::to_string(&spec).unwrap()).unwrap();
        assert_eq!(spec, again);
        let unknown = text.replace("max_rows", "rows");
        assert!(serde_json::from_str::<LinearSpec>(&unknown).is_err());
        let refused = text.replace(":8", ":0");
        let error = serde_json::from_str::<LinearSpec>(&refused).unwrap_err().to_string();
        assert!(error.contains("in_width"), "{error}");
        let inner = text.replace('}', r#","experts":{"used":2,"top":1}}"#);
        assert!(serde_json::from_str::<LinearSpec>(&inner).is_err());
    }

    #[test]
    fn experts_shape_the_rows() {
        let of = |combine| LinearFields {
            experts: Some(Experts { count: None, used: 3, combine }),
            ..fields()
        };
        assert_eq!((of(false).x_row(), of(false).y_row()), (8, 12));
        assert_eq!((of(true).x_row(), of(true).y_row()), (24, 4));
        assert_eq!((fields().x_row(), fields().y_row(), fields().used()), (8, 4, 1));
    }
}
