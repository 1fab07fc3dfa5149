//! How long a text may be.

use super::error::DecodeError;
use super::generate::Attention;
use crate::ModelConfig;

/// How long a text of a checkpoint may be.
#[derive(Clone, Copy, Debug)]
pub struct TextLimits {
    /// Keys that a row may see at most, where not all can be.
    visible: Option<usize>,
    positions: Option<usize>,
}

impl TextLimits {
    /// Of the checkpoint, attending so.
    pub fn new(config: &ModelConfig, attention: Attention) -> Self {
        let topk = config.layers.iter().filter_map(|layer| layer.attention.indexer);
        let visible = topk.map(|indexer| indexer.topk).min();
        Self {
            visible: visible.filter(|_| attention == Attention::Auto),
            positions: config.max_position_embeddings,
        }
    }

    /// Checks a prompt with so many new tokens; with 0 it is a text that is only read. The last new token is never read, so a row sees at
    /// most one key less than both together.
    ///
    /// # Errors
    /// [`DecodeError::Unsupported`] where an indexer would have to choose; [`DecodeError::Input`] beyond the checkpoint's positions.
    pub fn check(&self, prompt: usize, tokens: usize) -> Result<(), DecodeError> {
        let visible = prompt + tokens.saturating_sub(1);
        if let Some(topk) = self.visible.filter(|topk| visible > *topk) {
            let dense = "attend to all of them with --attention dense";
            return Err(DecodeError::Unsupported {
                what: match tokens {
                    0 => format!("a text of {prompt} tokens"),
                    _ => format!("a prompt of {prompt} tokens and {tokens} new ones"),
                },
                because: format!(
                    "the last row would see {visible} keys, of which this checkpoint's indexer selects {topk}, and sparse attention is not in this version"
                ),
                instead: match (topk + 1).checked_sub(prompt) {
                    Some(fits @ 1..) if tokens > 0 => {
                        format!("{dense}, or make at most {fits} new tokens with --tokens {fits}")
                    }
                    _ if tokens > 0 => {
                        format!("{dense}, or give a prompt of at most {topk} tokens")
                    }
                    _ => format!("{dense}, or give at most {topk} tokens (--tokens {topk})"),
                },
            });
        }
        match self.positions {
            Some(positions) if visible > positions => Err(DecodeError::Input {
                what: "prompt and new tokens",
                needed: format!("at most {positions} that are read, the checkpoint's positions"),
                given: visible.to_string(),
            }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::embedded;

    /// The embedded checkpoint: top-k 128, 4,096 positions.
    fn limits(attention: Attention) -> TextLimits {
        TextLimits::new(&ModelConfig::from_json(embedded::tiny_dsa().config).unwrap(), attention)
    }

    #[test]
    fn the_last_new_token_is_not_read() {
        let auto = limits(Attention::Auto);
        for (prompt, tokens) in [(9, 120), (128, 1), (1, 128), (128, 0)] {
            auto.check(prompt, tokens).unwrap();
        }
        for (prompt, tokens, advice) in [
            (9, 121, "--tokens 120"),
            (128, 2, "--tokens 1"),
            (129, 1, "a prompt of at most 128 tokens"),
            (129, 0, "at most 128 tokens (--tokens 128)"),
        ] {
            match auto.check(prompt, tokens).unwrap_err() {
                DecodeError::Unsupported { instead, .. } => {
                    assert!(instead.contains("--attention dense"), "{instead}");
                    assert!(instead.ends_with(advice), "{instead}");
                }
                other => panic!("{other}"),
            }
        }
    }

    #[test]
    fn positions_bound_what_is_read() {
        let dense = limits(Attention::Dense);
        dense.check(4096, 1).unwrap();
        dense.check(96, 4001).unwrap();
        assert!(matches!(dense.check(4096, 2), Err(DecodeError::Input { .. })));
        assert!(matches!(dense.check(4097, 0), Err(DecodeError::Input { .. })));
    }
}
