//! Everything of one model: configuration, weights and tokenizer.

use std::path::Path;

use crate::checkpoint::Checkpoint;
use crate::config::ModelConfig;
use crate::error::Error;
use crate::tokenizer::TextTokenizer;
use crate::vectors::VectorConfig;

/// What a folder of a Hugging Face checkpoint holds.
#[derive(Debug)]
pub struct ModelFolder {
    /// `config.json`.
    pub config: ModelConfig,
    /// The weights.
    pub checkpoint: Checkpoint,
    /// `tokenizer.json`; absent where the folder has none.
    pub tokenizer: Option<TextTokenizer>,
}

/// The files of a model that is embedded in a program.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddedFiles {
    /// `config.json`.
    pub config: &'static [u8],
    /// `model.safetensors`.
    pub weights: &'static [u8],
    /// `tokenizer.json`.
    pub tokenizer: &'static [u8],
    /// `tokenizer_config.json`.
    pub tokenizer_config: &'static [u8],
}

impl ModelFolder {
    /// Opens folder `dir`. A directory of reference vectors is accepted too: its configuration is
    /// in `hf_config`, its weights in `weights.safetensors`, or, for a single layer at real width,
    /// in no file: then they are generated, and only that layer's attention can be run.
    ///
    /// # Errors
    /// [`Error`] of the first file that cannot be read or is malformed.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        let config = ModelConfig::from_file(&dir.join("config.json"))?;
        let checkpoint = match VectorConfig::from_dir(dir) {
            Ok(vectors) if vectors.is_single_layer() => vectors.checkpoint()?,
            _ => Checkpoint::open(dir)?,
        };
        let tokenizer = dir
            .join("tokenizer.json")
            .is_file()
            .then(|| TextTokenizer::from_dir(dir, &config))
            .transpose()?;
        Ok(Self { config, checkpoint, tokenizer })
    }

    /// Opens a model that is embedded in the program.
    ///
    /// # Errors
    /// [`Error`] of the first file that is malformed.
    pub fn from_static(files: EmbeddedFiles) -> Result<Self, Error> {
        let config = ModelConfig::from_json(files.config)?;
        let settings = Some(files.tokenizer_config);
        let tokenizer = TextTokenizer::from_bytes(files.tokenizer, settings, &config)?;
        let checkpoint = Checkpoint::from_static(files.weights)?;
        Ok(Self { config, checkpoint, tokenizer: Some(tokenizer) })
    }
}
