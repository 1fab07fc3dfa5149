//! How long a text may be.

use super::error::DecodeError;
use crate::ModelConfig;

/// How long a text of a checkpoint may be.
#[derive(Clone, Copy, Debug)]
pub struct TextLimits {
    positions: Option<usize>,
}

impl TextLimits {
    /// Of the checkpoint.
    pub fn new(config: &ModelConfig) -> Self {
        Self { positions: config.max_position_embeddings }
    }

    /// Checks a prompt with so many new tokens; with 0 it is a text that is only read. The last new token is never read.
    ///
    /// # Errors
    /// [`DecodeError::Input`] beyond the checkpoint's positions.
    pub fn check(&self, prompt: usize, tokens: usize) -> Result<(), DecodeError> {
        let read = prompt + tokens.saturating_sub(1);
        match self.positions {
            Some(positions) if read > positions => Err(DecodeError::Input {
                what: "prompt and new tokens",
                needed: format!("at most {positions} that are read, the checkpoint's positions"),
                given: read.to_string(),
            }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::embedded;

    /// The embedded checkpoint has 4,096 positions.
    #[test]
    fn positions_bound_what_is_read() {
        let config = ModelConfig::from_json(embedded::tiny_dsa().config).unwrap();
        let limits = TextLimits::new(&config);
        limits.check(4096, 1).unwrap();
        limits.check(96, 4001).unwrap();
        assert!(matches!(limits.check(4096, 2), Err(DecodeError::Input { .. })));
        assert!(matches!(limits.check(4097, 0), Err(DecodeError::Input { .. })));
    }
}
