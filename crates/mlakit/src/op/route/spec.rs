//! What a caller declares of a router.

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::op::layer::{MAX_EXPERTS, MAX_ROW_WIDTH, one};
use crate::op::spec::{MAX_ROWS, Scalar, checked_spec, within};

/// How logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scoring {
    /// `1 / (1 + exp(-z))`, each expert for itself.
    Sigmoid,
    /// `exp(z) / sum exp(z)` over all experts.
    Softmax,
}

/// How the experts of a group make its score.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupScore {
    /// The sum of the two best.
    #[default]
    #[serde(rename = "top2_sum")]
    TopTwoSum,
    /// The best.
    Max,
}

fn one_group() -> usize {
    1
}

/// The fields of a [`RouteSpec`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouteFields {
    /// Elements of a row of `x`.
    pub hidden: usize,
    /// Experts, all groups together.
    pub experts: usize,
    /// Experts of a row.
    pub used: usize,
    /// Groups of equal size.
    #[serde(default = "one_group")]
    pub groups: usize,
    /// Groups whose experts a row may use; all if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_groups: Option<usize>,
    /// How logits become scores.
    pub scoring: Scoring,
    /// Whether a bias is added for the comparison (`e_score_correction_bias`).
    #[serde(default)]
    pub bias: bool,
    /// How the experts of a group make its score.
    #[serde(default)]
    pub group_score: GroupScore,
    /// Whether the gates of a row are divided by their sum (`norm_topk_prob`).
    #[serde(default)]
    pub normalize: bool,
    /// Multiplies every gate (`routed_scaling_factor`).
    #[serde(default = "one")]
    pub scale: Scalar,
    /// Row capacity.
    pub max_rows: usize,
}

checked_spec! {
    /// A router that can exist.
    RouteSpec, RouteFields, "RouteFields"
}

impl RouteFields {
    /// Groups whose experts a row may use.
    pub fn used_groups(&self) -> usize {
        self.used_groups.unwrap_or(self.groups)
    }

    /// Experts of a group.
    pub fn group_size(&self) -> usize {
        self.experts / self.groups
    }

    fn check(&self) -> Result<(), Error> {
        within("hidden", self.hidden, 1, MAX_ROW_WIDTH)?;
        within("experts", self.experts, 1, MAX_EXPERTS)?;
        within("groups", self.groups, 1, self.experts)?;
        if !self.experts.is_multiple_of(self.groups) {
            let needed = format!("a divisor of {} experts", self.experts);
            return Err(Error::contract("groups", needed, self.groups));
        }
        within("used_groups", self.used_groups(), 1, self.groups)?;
        within("used", self.used, 1, self.used_groups() * self.group_size())?;
        let compared = self.used_groups() < self.groups;
        if compared && self.group_score == GroupScore::TopTwoSum && self.group_size() < 2 {
            let needed = "max where a group has one expert";
            return Err(Error::contract("group_score", needed, "top2_sum"));
        }
        within("max_rows", self.max_rows, 1, MAX_ROWS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"{"hidden":8,"experts":6,"used":2,"scoring":"sigmoid","max_rows":2}"#;

    fn refused(change: impl Fn(&mut RouteFields)) -> &'static str {
        let mut fields: RouteFields = serde_json::from_str(TEXT).unwrap();
        change(&mut fields);
        match RouteSpec::new(fields) {
            Err(Error::Contract { what, .. }) => what,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn bad_fields_are_named() {
        assert_eq!(refused(|f| f.hidden = 0), "hidden");
        assert_eq!(refused(|f| f.experts = 0), "experts");
        assert_eq!(refused(|f| f.experts = MAX_EXPERTS + 1), "experts");
        assert_eq!(refused(|f| f.groups = 0), "groups");
        assert_eq!(refused(|f| f.groups = 4), "groups");
        assert_eq!(refused(|f| (f.groups, f.used_groups) = (3, Some(0))), "used_groups");
        assert_eq!(refused(|f| (f.groups, f.used_groups) = (3, Some(4))), "used_groups");
        assert_eq!(refused(|f| f.used = 0), "used");
        assert_eq!(refused(|f| f.used = 7), "used");
        assert_eq!(refused(|f| (f.groups, f.used_groups, f.used) = (3, Some(1), 3)), "used");
        assert_eq!(refused(|f| (f.groups, f.used_groups) = (6, Some(2))), "group_score");
        assert_eq!(refused(|f| f.max_rows = 0), "max_rows");
    }

    #[test]
    fn json_has_defaults_and_no_unknown_field() {
        let spec: RouteSpec = serde_json::from_str(TEXT).unwrap();
        assert_eq!((spec.groups, spec.used_groups(), spec.scale.value()), (1, 1, 1.0));
        assert_eq!((spec.bias, spec.normalize), (false, false));
        let text = serde_json::to_string(&spec).unwrap();
        assert!(text.contains(r#""group_score":"top2_sum""#), "{text}");
        assert_eq!(spec, serde_json::from_str::<RouteSpec>(&text).unwrap());
        assert!(serde_json::from_str::<RouteSpec>(&TEXT.replace("used", "top_k")).is_err());
        assert!(serde_json::from_str::<RouteSpec>(&TEXT.replace("sigmoid", "relu")).is_err());
    }
}
