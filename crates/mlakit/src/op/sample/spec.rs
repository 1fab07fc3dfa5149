//! What a caller declares of sampling.

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::op::layer::MAX_ROW_WIDTH;
use crate::op::spec::{MAX_ROWS, checked_spec, within};

/// The fields of a [`SampleSpec`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SampleFields {
    /// Logits of a row.
    pub vocab: usize,
    /// Row capacity.
    pub max_rows: usize,
    /// Whether there is a temperature, and with it a random number a row; greedy otherwise.
    #[serde(default)]
    pub temperature: bool,
}

checked_spec! {
    /// Sampling that can exist.
    SampleSpec, SampleFields, "SampleFields"
}

impl SampleFields {
    fn check(&self) -> Result<(), Error> {
        within("vocab", self.vocab, 1, MAX_ROW_WIDTH)?;
        within("max_rows", self.max_rows, 1, MAX_ROWS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(vocab: usize, max_rows: usize) -> &'static str {
        match SampleSpec::new(SampleFields { vocab, max_rows, temperature: false }) {
            Err(Error::Contract { what, .. }) => what,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn bad_fields_are_named() {
        assert_eq!(refused(0, 1), "vocab");
        assert_eq!(refused(MAX_ROW_WIDTH + 1, 1), "vocab");
        assert_eq!(refused(4, 0), "max_rows");
    }

    #[test]
    fn json_has_defaults_and_no_unknown_field() {
        let text = r#"{"vocab":4,"max_rows":2}"#;
        let spec: SampleSpec = serde_json::from_str(text).unwrap();
        assert!(!spec.temperature);
        let again = serde_json::to_string(&spec).unwrap();
        assert_eq!(spec, serde_json::from_str::<SampleSpec>(&again).unwrap());
        assert!(serde_json::from_str::<SampleSpec>(&text.replace("vocab", "width")).is_err());
        let number = text.replace('}', r#","temperature":0.7}"#);
        assert!(serde_json::from_str::<SampleSpec>(&number).is_err());
    }
}
