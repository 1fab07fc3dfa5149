//! Typed errors of the readers and of the reference. Each names what was wrong (a key, a tensor, a
//! file, an input), what was needed and what was given, so that its text alone says what to do.

use std::path::PathBuf;

/// A value of `config.json` that does not describe a model this crate can run.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The text is not a JSON object.
    #[error("the configuration is not a JSON object: {reason}")]
    NotJson {
        /// What the JSON reader said.
        reason: String,
    },
    /// A key that must be there is absent or null.
    #[error("config key `{key}`: needed {needed}, given nothing")]
    Missing {
        /// The key, with its enclosing object (`rope_scaling.factor`).
        key: String,
        /// What a value must be.
        needed: String,
    },
    /// A value has the wrong type, is out of range, or contradicts another key.
    #[error("config key `{key}`: needed {needed}, given {given}")]
    Invalid {
        /// The key, with its enclosing object.
        key: String,
        /// What a value must be.
        needed: String,
        /// The value, shortened.
        given: String,
    },
    /// The value is legal but names something that is not supported.
    #[error("config key `{key}`: {given} is not supported; supported: {supported}")]
    Unsupported {
        /// The key, with its enclosing object.
        key: String,
        /// The value, shortened.
        given: String,
        /// The values that are.
        supported: String,
    },
}

/// A checkpoint that cannot be read, or does not hold what its configuration says.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file could not be opened, mapped or read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// A folder without one clear set of weights.
    #[error(
        "{}: needed model.safetensors.index.json, model.safetensors, weights.safetensors or a \
         single *.safetensors file, found {found}",
        dir.display()
    )]
    NoWeights {
        /// The folder.
        dir: PathBuf,
        /// The candidates that were found instead.
        found: String,
    },
    /// A safetensors file whose header, offsets or length are wrong.
    #[error("{file}: not a valid safetensors file: {reason}")]
    Malformed {
        /// The file.
        file: String,
        /// What is wrong with it.
        reason: String,
    },
    /// An entry of `model.safetensors.index.json`, or of a manifest of vectors, is wrong.
    #[error("{file}: `{key}`: needed {needed}, given {given}")]
    Index {
        /// The file.
        file: String,
        /// The entry.
        key: String,
        /// What it must be.
        needed: String,
        /// What it is.
        given: String,
    },
    /// A layer that the configuration counts as a decoder layer predicts further tokens (MTP).
    #[error(
        "layer {layer}: needed a decoder layer, and `{tensor}` says that the checkpoint's predicts \
         further tokens (MTP): set `num_hidden_layers` to at most {layer}; \
         `num_nextn_predict_layers` counts such layers"
    )]
    DraftLayer {
        /// The layer.
        layer: usize,
        /// A tensor that only such a layer has.
        tensor: String,
    },
    /// A layer without latent attention.
    #[error(
        "layer {layer}: needed a layer of latent attention, and the configuration says that it has \
         linear attention"
    )]
    OtherAttention {
        /// The layer.
        layer: usize,
    },
    /// A tensor that the configuration needs is not there.
    #[error("tensor `{tensor}`: needed {needed}, and the checkpoint has no such tensor")]
    MissingTensor {
        /// The name without the prefix `model.`.
        tensor: String,
        /// The shape it would have.
        needed: String,
    },
    /// A tensor has another shape than the configuration needs.
    #[error("tensor `{tensor}`: needed shape {needed}, given {given}")]
    Shape {
        /// The name without the prefix `model.`.
        tensor: String,
        /// The shape that the configuration needs.
        needed: String,
        /// The shape in the file.
        given: String,
    },
    /// A tensor has a dtype that is not read.
    #[error("tensor `{tensor}`: needed dtype F32, BF16 or F16, given {given}")]
    Dtype {
        /// The name without the prefix `model.`.
        tensor: String,
        /// The dtype in the file.
        given: String,
    },
    /// Two tensors have one name once the prefix `model.` is removed, or two shards hold it.
    #[error("tensor `{tensor}`: needed once, given twice ({first} and {second})")]
    Duplicate {
        /// The name without the prefix `model.`.
        tensor: String,
        /// The file that holds the first.
        first: String,
        /// The file that holds the second.
        second: String,
    },
    /// Procedural weights do not have the hash that their manifest states.
    #[error("tensor `{tensor}`: needed sha256 {needed}, generated {given}")]
    Hash {
        /// The manifest's name.
        tensor: String,
        /// The first 16 digits that the manifest states.
        needed: String,
        /// The first 16 digits of what was generated.
        given: String,
    },
}

/// A tokenizer that cannot be read, or text and ids it cannot convert.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// `tokenizer.json` or `tokenizer_config.json` is not what it should be.
    #[error("{file}: {reason}")]
    Malformed {
        /// The file.
        file: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// An id that the model or the tokenizer does not have.
    #[error("token id {id}: needed {needed}")]
    Id {
        /// The id.
        id: u32,
        /// The ids there are.
        needed: String,
    },
    /// The tokenizer could not convert a text.
    #[error("the text cannot be converted: {reason}")]
    Text {
        /// What the tokenizer said.
        reason: String,
    },
}

/// Arguments of a call of the reference that do not fit the model.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    /// A tensor or list has the wrong length.
    #[error("`{what}`: needed {needed}, given {given}")]
    Shape {
        /// The argument.
        what: &'static str,
        /// What it must be.
        needed: String,
        /// What it is.
        given: String,
    },
    /// A token id outside the vocabulary.
    #[error("token id {id} in row {row}: needed an id below {vocabulary}")]
    TokenId {
        /// The row.
        row: usize,
        /// The id.
        id: u32,
        /// The size of the vocabulary.
        vocabulary: usize,
    },
    /// A layer that the model does not have.
    #[error("layer {layer}: needed a layer below {layers}")]
    Layer {
        /// The layer asked for.
        layer: usize,
        /// The number of layers.
        layers: usize,
    },
    /// A layer that attends to another layer's selection, and no selection was given.
    #[error(
        "a layer that shares the selection of the last layer with an indexer: needed that \
         selection, or dense attention, given neither"
    )]
    SharedSelection,
    /// A model of which only the layers of latent attention are run.
    #[error(
        "a model of type {model_type} is not run as a whole: {because}; run its layers of latent \
         attention alone"
    )]
    LayersOnly {
        /// `model_type` of the configuration.
        model_type: &'static str,
        /// Why.
        because: &'static str,
    },
    /// The checkpoint has no output head and its embeddings are not tied.
    #[error("the checkpoint holds no lm_head.weight and tie_word_embeddings is false")]
    NoHead,
}

/// Any error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// See [`ConfigError`].
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// See [`CheckpointError`].
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// See [`TokenizerError`].
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// See [`InputError`].
    #[error(transparent)]
    Input(#[from] InputError),
}

/// Shortens a value for an error text, at a character boundary.
pub(crate) fn shorten(text: &str) -> String {
    const LIMIT: usize = 80;
    if text.chars().count() <= LIMIT {
        return text.to_string();
    }
    let mut short: String = text.chars().take(LIMIT).collect();
    short.push_str("...");
    short
}
