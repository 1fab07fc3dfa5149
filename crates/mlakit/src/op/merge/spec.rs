//! What a caller declares of a merge.

use serde::{Deserialize, Serialize};

use crate::geometry::{MAX_HEADS, MAX_WIDTH};
use crate::op::spec::{MAX_ROWS, checked_spec, within};
use crate::{Dtype, Error, LseBase};

/// The dtype in which partial outputs are stored. It sizes their scratch region and nothing else; partial log-sum-exps are F32 in both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Partial {
    /// Half the bytes; an output is rounded once more.
    #[default]
    Bf16,
    /// Exact up to the last rounding.
    F32,
}

impl Partial {
    /// As an element type.
    pub fn dtype(self) -> Dtype {
        match self {
            Self::Bf16 => Dtype::Bf16,
            Self::F32 => Dtype::F32,
        }
    }
}

/// The fields of a [`MergeSpec`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MergeFields {
    /// Parts to merge.
    pub splits: usize,
    /// Query heads.
    pub heads: usize,
    /// Elements of an output.
    pub value_width: usize,
    /// The dtype of the partial outputs.
    #[serde(default)]
    pub partial: Partial,
    /// The base of all log-sum-exps, in and out.
    #[serde(default)]
    pub lse: LseBase,
    /// Whether there is a sink: one natural-log logit a head that enters the denominator once.
    #[serde(default)]
    pub sink: bool,
    /// Whether the returned log-sum-exp counts the sink; only with one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sink_in_lse: bool,
    /// Row capacity.
    pub max_rows: usize,
}

checked_spec! {
    /// A merge that can exist.
    MergeSpec, MergeFields, "MergeFields"
}

impl MergeFields {
    fn check(&self) -> Result<(), Error> {
        within("splits", self.splits, 1, 1 << 16)?;
        within("heads", self.heads, 1, MAX_HEADS)?;
        within("value_width", self.value_width, 1, MAX_WIDTH)?;
        within("max_rows", self.max_rows, 1, MAX_ROWS)?;
        if self.sink_in_lse && !self.sink {
            return Err(Error::contract("sink_in_lse", "a sink", "none"));
        }
        Ok(())
    }
}
