//! Hugging Face checkpoints of models with multi-head latent attention: configuration, weights,
//! tokenizer, and an f64 reference of whole models.
//!
//! ```
//! use mlakit_model::{ForwardOptions, ModelFolder, Reference, embedded};
//!
//! let model = ModelFolder::from_static(embedded::tiny_dsa())?;
//! let tokenizer = model.tokenizer.as_ref().expect("tiny-dsa has one");
//! let ids = tokenizer.encode("MACBETH.")?;
//! let reference = Reference::new(&model.config, &model.checkpoint)?;
//! let mut cache = reference.cache(0);
//! let forward = reference.forward(&ids, &mut cache, ForwardOptions::default())?;
//! let logits = reference.logits(&forward.last_hidden)?;
//! assert_eq!(logits.len(), ids.len() * model.config.vocab_size);
//! # Ok::<(), mlakit_model::Error>(())
//! ```

pub mod checkpoint;
pub mod config;
pub mod decoder;
pub mod embedded;
pub mod error;
mod folder;
pub mod procedural;
pub mod reference;
pub mod rope;
mod sha256;
mod tokenizer;
pub mod vectors;

pub use checkpoint::{AttentionWeights, Checkpoint, Dtype, LayerWeights, MlpWeights, Weight};
pub use config::{AttentionConfig, LayerConfig, MlpConfig, ModelConfig};
pub use error::{CheckpointError, ConfigError, Error, InputError, TokenizerError};
pub use folder::{EmbeddedFiles, ModelFolder};
pub use reference::{
    AttentionOutput, AttentionReference, Form, Forward, ForwardOptions, Keys, LatentCache,
    LayerTrace, Reference, Selected, Selection, Sequence, SequenceCache,
};
pub use rope::RopeTable;
pub use tokenizer::{TextStream, TextTokenizer};
