//! What a caller declares of a Hadamard transform.

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::op::layer::Float;
use crate::op::spec::{MAX_ROWS, checked_spec, within};

/// The widest row.
pub const MAX_HADAMARD: usize = 1 << 10;

/// The fields of a [`HadamardSpec`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HadamardFields {
    /// Elements that are transformed together: a power of two.
    pub width: usize,
    /// The dtype of `x`.
    pub input: Float,
    /// Row capacity; a head is a row.
    pub max_rows: usize,
}

checked_spec! {
    /// A Hadamard transform that can exist.
    HadamardSpec, HadamardFields, "HadamardFields"
}

impl HadamardFields {
    /// What makes the transform orthogonal.
    pub fn scale(&self) -> f64 {
        (self.width as f64).sqrt().recip()
    }

    fn check(&self) -> Result<(), Error> {
        within("width", self.width, 1, MAX_HADAMARD)?;
        if !self.width.is_power_of_two() {
            return Err(Error::contract("width", "a power of two", self.width));
        }
        within("max_rows", self.max_rows, 1, MAX_ROWS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_fields_are_named() {
        let refused = |width, max_rows| {
            let fields = HadamardFields { width, input: Float::F32, max_rows };
            HadamardSpec::new(fields).unwrap_err().to_string()
        };
        assert!(refused(0, 1).starts_with("width"));
        assert!(refused(96, 1).starts_with("width"));
        assert!(refused(2 * MAX_HADAMARD, 1).starts_with("width"));
        assert!(refused(64, 0).starts_with("max_rows"));
    }
}
