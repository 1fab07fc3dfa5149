//! What a caller declares of a normalisation.

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::op::layer::{Float, MAX_ROW_WIDTH};
use crate::op::spec::{MAX_ROWS, Scalar, checked_spec, within};

/// The fields of a [`NormSpec`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NormFields {
    /// Elements that are normalised together.
    pub width: usize,
    /// Added to the mean square; above 0, so that a row of zeros gives zeros.
    pub eps: Scalar,
    /// Whether the mean is subtracted first: layer normalisation.
    #[serde(default)]
    pub center: bool,
    /// Whether a bias is added at the end.
    #[serde(default)]
    pub bias: bool,
    /// Row capacity.
    pub max_rows: usize,
    /// The dtype of `x`.
    pub input: Float,
    /// From one row of `x` to the next, in elements; `width` if absent. What lies between is not
    /// read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_stride: Option<usize>,
    /// From one row of `y` to the next, in elements; `width` if absent. What lies between stays as
    /// it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out_stride: Option<usize>,
    /// Whether the BF16 result `y` is written; without it nothing but `y_wide` is.
    #[serde(default = "yes")]
    pub narrow: bool,
    /// Whether the F32 result `y_wide` is written.
    #[serde(default)]
    pub wide: bool,
}

fn yes() -> bool {
    true
}

checked_spec! {
    /// A normalisation that can exist.
    NormSpec, NormFields, "NormFields"
}

impl NormFields {
    /// From one row of `x` to the next, in elements.
    pub fn in_stride(&self) -> usize {
        self.in_stride.unwrap_or(self.width)
    }

    /// From one row of `y` to the next, in elements.
    pub fn out_stride(&self) -> usize {
        self.out_stride.unwrap_or(self.width)
    }

    fn check(&self) -> Result<(), Error> {
        within("width", self.width, 1, MAX_ROW_WIDTH)?;
        within("in_stride", self.in_stride(), self.width, MAX_ROW_WIDTH)?;
        within("out_stride", self.out_stride(), self.width, MAX_ROW_WIDTH)?;
        within("max_rows", self.max_rows, 1, MAX_ROWS)?;
        if self.eps.value() <= 0.0 {
            return Err(Error::contract("eps", "above 0", self.eps.value()));
        }
        if !self.narrow && !self.wide {
            return Err(Error::contract("wide", "true where narrow is false", false));
        }
        if !self.narrow && self.out_stride.is_some() {
            return Err(Error::contract("out_stride", "none where there is no y", "one"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"{"width":4,"eps":1e-6,"max_rows":2,"input":"bf16"}"#;

    fn refused(change: impl Fn(&mut NormFields)) -> &'static str {
        let mut fields: NormFields = serde_json::from_str(TEXT).unwrap();
        change(&mut fields);
        match NormSpec::new(fields) {
            Err(Error::Contract { what, .. }) => what,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn bad_fields_are_named() {
        assert_eq!(refused(|f| f.width = 0), "width");
        assert_eq!(refused(|f| f.width = MAX_ROW_WIDTH + 1), "width");
        assert_eq!(refused(|f| f.in_stride = Some(3)), "in_stride");
        assert_eq!(refused(|f| f.out_stride = Some(3)), "out_stride");
        assert_eq!(refused(|f| f.out_stride = Some(usize::MAX)), "out_stride");
        assert_eq!(refused(|f| f.max_rows = MAX_ROWS + 1), "max_rows");
        assert_eq!(refused(|f| f.eps = Scalar::try_from(0.0).unwrap()), "eps");
        assert_eq!(refused(|f| f.eps = Scalar::try_from(-1e-6).unwrap()), "eps");
        assert_eq!(refused(|f| f.narrow = false), "wide");
        let strided = |f: &mut NormFields| {
            (f.narrow, f.wide, f.out_stride) = (false, true, Some(8));
        };
        assert_eq!(refused(strided), "out_stride");
    }

    #[test]
    fn json_has_defaults_and_no_unknown_field() {
        let spec: NormSpec = serde_json::from_str(TEXT).unwrap();
        assert_eq!((spec.in_stride(), spec.out_stride()), (4, 4));
        assert_eq!((spec.narrow, spec.wide), (true, false));
        assert_eq!((spec.center, spec.bias), (false, false));
        let again: NormSpec = serde_json::from_str(&serde_json::to_string(&spec).unwrap()).unwrap();
        assert_eq!(spec, again);
        assert!(serde_json::from_str::<NormSpec>(&TEXT.replace("eps", "epsilon")).is_err());
        assert!(serde_json::from_str::<NormSpec>(&TEXT.replace("bf16", "f16")).is_err());
    }
}
