//! Text of ids that arrive one by one.

use super::TextTokenizer;
use crate::error::TokenizerError;

/// What decoders write for bytes that are not, or not yet, a character.
const REPLACEMENT: char = '\u{FFFD}';
/// Tokens that may wait for the rest of a character. It has at most four bytes and a token at least
/// one, so that more waiting tokens hold bytes which belong to no character.
const MAX_PENDING: usize = 8;
/// Tokens that are searched for context.
const MAX_CONTEXT: usize = 8;

/// Decodes ids that arrive one by one. What it returns is whole characters: tokens that end inside
/// one wait until it is complete, and only bytes that can belong to none become U+FFFD.
///
/// A token is decoded together with the text before it, as far as decoders look at it: some take a
/// space away at the beginning of a text, some decode runs of byte tokens as a whole.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a TextTokenizer,
    /// The last tokens whose text was returned; they begin with a character.
    context: Vec<u32>,
    /// Tokens whose text was not returned.
    pending: Vec<u32>,
}

impl<'a> TextStream<'a> {
    pub(super) fn new(tokenizer: &'a TextTokenizer) -> Self {
        Self { tokenizer, context: Vec::new(), pending: Vec::new() }
    }

    /// Adds `id` and returns the text that is complete now, often a word, sometimes nothing.
    ///
    /// # Errors
    /// [`TokenizerError::Id`] for an id that the model or the tokenizer does not have; the stream
    /// is as it was.
    pub fn push(&mut self, id: u32) -> Result<String, TokenizerError> {
        self.tokenizer.check_id(id)?;
        self.pending.push(id);
        let text = self.pending_text()?;
        let Some(stable) = text.strip_suffix(REPLACEMENT) else {
            self.settle(self.pending.len())?;
            return Ok(text);
        };
        if self.pending.len() < MAX_PENDING {
            return Ok(String::new());
        }
        // The last replacement may stand for an incomplete character, which is the longest end of
        // the tokens that is written as one; those before it stand for bytes that are none.
        let mut begin = 0;
        while begin + 1 < self.pending.len()
            && self.tokenizer.decode_checked(&self.pending[begin..])? != REPLACEMENT.to_string()
        {
            begin += 1;
        }
        let stable = stable.to_string();
        self.settle(begin)?;
        Ok(stable)
    }

    /// Ends the stream and returns what was held back.
    ///
    /// # Errors
    /// [`TokenizerError::Text`] where the tokenizer cannot decode.
    pub fn finish(self) -> Result<String, TokenizerError> {
        self.pending_text()
    }

    /// What the pending tokens add to the text of the context; their own text where a decoder
    /// writes the context differently because of them.
    fn pending_text(&self) -> Result<String, TokenizerError> {
        let all = self.tokenizer.decode_checked(&[&self.context[..], &self.pending].concat())?;
        let before = self.tokenizer.decode_checked(&self.context)?;
        match all.strip_prefix(&before) {
            Some(text) => Ok(text.to_string()),
            None => self.tokenizer.decode_checked(&self.pending),
        }
    }

    /// The first `count` pending tokens were returned: the fewest of the last ones that begin with
    /// a character become the context.
    fn settle(&mut self, count: usize) -> Result<(), TokenizerError> {
        let mut settled = std::mem::take(&mut self.context);
        settled.extend(self.pending.drain(..count));
        let oldest = settled.len().saturating_sub(MAX_CONTEXT);
        for begin in (oldest..settled.len()).rev() {
            let text = self.tokenizer.decode_checked(&settled[begin..])?;
            if !text.is_empty() && !text.starts_with(REPLACEMENT) {
                self.context = settled.split_off(begin);
                break;
            }
        }
        Ok(())
    }
}
