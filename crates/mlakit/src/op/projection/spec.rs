//! What a caller declares of a projection.

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::geometry::{MAX_HEADS, MAX_WIDTH};
use crate::op::layer::Float;
use crate::op::spec::{MAX_ROWS, checked_spec, within};

/// The fields of a [`ProjectionSpec`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProjectionFields {
    /// Heads, each with a matrix of its own.
    pub heads: usize,
    /// Elements of a head of `x`.
    pub in_width: usize,
    /// Elements of a head of `y`.
    pub out_width: usize,
    /// From one head of `x` to the next, in elements; `in_width` if absent. A row is `heads` of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_stride: Option<usize>,
    /// From one head of `y` to the next, in elements; `out_width` if absent. What lies between stays as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out_stride: Option<usize>,
    /// The dtype of `y`.
    #[serde(default = "narrow")]
    pub output: Float,
    /// Row capacity.
    pub max_rows: usize,
}

fn narrow() -> Float {
    Float::Bf16
}

checked_spec! {
    /// A projection that can exist.
    ProjectionSpec, ProjectionFields, "ProjectionFields"
}

impl ProjectionFields {
    /// From one head of `x` to the next, in elements.
    pub fn in_stride(&self) -> usize {
        self.in_stride.unwrap_or(self.in_width)
    }

    /// From one head of `y` to the next, in elements.
    pub fn out_stride(&self) -> usize {
        self.out_stride.unwrap_or(self.out_width)
    }

    fn check(&self) -> Result<(), Error> {
        within("heads", self.heads, 1, MAX_HEADS)?;
        within("in_width", self.in_width, 1, MAX_WIDTH)?;
        if !self.in_width.is_multiple_of(2) {
            return Err(Error::contract("in_width", "an even number", self.in_width));
        }
        within("out_width", self.out_width, 1, MAX_WIDTH)?;
        within("in_stride", self.in_stride(), self.in_width, MAX_WIDTH)?;
        within("out_stride", self.out_stride(), self.out_width, MAX_WIDTH)?;
        within("max_rows", self.max_rows, 1, MAX_ROWS)
    }
}
