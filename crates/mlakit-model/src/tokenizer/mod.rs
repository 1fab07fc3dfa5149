//! Text to token ids and back, by the checkpoint's `tokenizer.json`.

use std::path::Path;

use serde_json::Value;
use tokenizers::Tokenizer;

use crate::config::ModelConfig;
use crate::error::TokenizerError;

mod stream;
mod vet;

pub use stream::TextStream;

const TOKENIZER_FILE: &str = "tokenizer.json";
const CONFIG_FILE: &str = "tokenizer_config.json";

/// The tokenizer of one model.
#[derive(Debug)]
pub struct TextTokenizer {
    inner: Tokenizer,
    vocab_size: usize,
    begin_id: Option<u32>,
    end_ids: Vec<u32>,
    add_begin: bool,
}

impl TextTokenizer {
    /// Reads `tokenizer.json` and, where there is one, `tokenizer_config.json` in `dir`.
    ///
    /// # Errors
    /// [`TokenizerError`] for a file that cannot be read and as [`TextTokenizer::from_bytes`].
    pub fn from_dir(dir: &Path, config: &ModelConfig) -> Result<Self, TokenizerError> {
        let read = |name: &str| {
            let path = dir.join(name);
            std::fs::read(&path).map_err(|source| TokenizerError::Io { path, source })
        };
        let settings = dir.join(CONFIG_FILE).is_file().then(|| read(CONFIG_FILE)).transpose()?;
        Self::from_bytes(&read(TOKENIZER_FILE)?, settings.as_deref(), config)
    }

    /// Reads the text of `tokenizer.json` and, where there is one, of `tokenizer_config.json`.
    ///
    /// # Errors
    /// [`TokenizerError::Malformed`].
    pub fn from_bytes(
        tokenizer: &[u8],
        settings: Option<&[u8]>,
        config: &ModelConfig,
    ) -> Result<Self, TokenizerError> {
        let malformed = |reason: String| TokenizerError::Malformed { file: TOKENIZER_FILE, reason };
        vet::check(tokenizer).map_err(malformed)?;
        let inner = Tokenizer::from_bytes(tokenizer).map_err(|e| malformed(e.to_string()))?;
        Ok(Self {
            inner,
            vocab_size: config.vocab_size,
            begin_id: config.bos_token_id,
            end_ids: config.eos_token_ids.clone(),
            add_begin: settings.map(add_begin).transpose()?.unwrap_or(false),
        })
    }

    /// The ids of `text`, begun as the model's texts begin: by the post-processor of
    /// `tokenizer.json`, or by the configuration's `bos_token_id` where `tokenizer_config.json`
    /// says `add_bos_token`.
    ///
    /// # Errors
    /// [`TokenizerError::Text`]; [`TokenizerError::Id`] for an id that the model does not have.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let encoding = self
            .inner
            .encode_fast(text, true)
            .map_err(|error| TokenizerError::Text { reason: error.to_string() })?;
        let mut ids = encoding.get_ids().to_vec();
        if self.add_begin
            && let Some(begin) = self.begin_id
            && ids.first() != Some(&begin)
        {
            ids.insert(0, begin);
        }
        match ids.iter().find(|&&id| id as usize >= self.vocab_size) {
            Some(&id) => Err(self.id_error(id)),
            None => Ok(ids),
        }
    }

    /// The text of `ids`, special tokens left out. Bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// [`TokenizerError::Id`] for an id that the model or the tokenizer does not have.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        for &id in ids {
            self.check_id(id)?;
        }
        self.decode_checked(ids)
    }

    /// A decoder for ids that arrive one by one.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream::new(self)
    }

    /// True for an id that ends a text.
    pub fn is_end(&self, id: u32) -> bool {
        self.end_ids.contains(&id)
    }

    /// The id that begins a text.
    pub fn begin_id(&self) -> Option<u32> {
        self.begin_id
    }

    fn decode_checked(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.inner
            .decode(ids, true)
            .map_err(|error| TokenizerError::Text { reason: error.to_string() })
    }

    fn check_id(&self, id: u32) -> Result<(), TokenizerError> {
        if id as usize >= self.vocab_size || self.inner.id_to_token(id).is_none() {
            return Err(self.id_error(id));
        }
        Ok(())
    }

    fn id_error(&self, id: u32) -> TokenizerError {
        let known = self.inner.get_vocab_size(true);
        let needed =
            format!("an id of the tokenizer's {known} and the model's {}", self.vocab_size);
        TokenizerError::Id { id, needed }
    }
}

/// `add_bos_token` of `tokenizer_config.json`.
fn add_begin(settings: &[u8]) -> Result<bool, TokenizerError> {
    let malformed = |reason: String| TokenizerError::Malformed { file: CONFIG_FILE, reason };
    let root: Value =
        serde_json::from_slice(settings).map_err(|error| malformed(error.to_string()))?;
    if !root.is_object() {
        return Err(malformed("not a JSON object".to_string()));
    }
    match root.get("add_bos_token") {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(add)) => Ok(*add),
        Some(other) => {
            Err(malformed(format!("add_bos_token: needed true or false, given {other}")))
        }
    }
}
