//! Directories of reference vectors: their `config.json` beyond `hf_config`, and the weights and
//! inputs that it describes instead of storing them.

use std::path::Path;

use half::bf16;
use safetensors::tensor::TensorView;
use serde_json::{Map, Value};

use crate::checkpoint::Checkpoint;
use crate::config::fields::Fields;
use crate::config::{
    AttentionConfig, GateKind, IndexPool, IndexerConfig, LayerIndexer, MAX_COUNT, MAX_HEAD_WIDTH,
    QueryRank, Rotary, parse_object, rope_parameters,
};
use crate::error::{CheckpointError, ConfigError, Error};
use crate::procedural::{Kind, values};
use crate::sha256;

/// Most elements a generated tensor may have.
const MAX_ELEMENTS: usize = 1 << 28;

/// The `config.json` of a directory of vectors.
#[derive(Clone, Debug)]
pub struct VectorConfig {
    root: Map<String, Value>,
    name: String,
    seed: u64,
}

impl VectorConfig {
    /// Reads `config.json` in `dir`.
    ///
    /// # Errors
    /// [`ConfigError`] for a file that cannot be read and as [`VectorConfig::from_json`].
    pub fn from_dir(dir: &Path) -> Result<Self, ConfigError> {
        let path = dir.join("config.json");
        let bytes = std::fs::read(&path).map_err(|source| ConfigError::Io { path, source })?;
        Self::from_json(&bytes)
    }

    /// Reads the text of such a `config.json`.
    ///
    /// # Errors
    /// [`ConfigError`] where it is not an object with `name`, `seed` and `weights`.
    pub fn from_json(bytes: &[u8]) -> Result<Self, ConfigError> {
        let root = parse_object(bytes)?;
        let fields = Fields::new(&root, "");
        let name = fields.text("name")?.ok_or_else(|| fields.missing("name", "a string"))?;
        let seed = fields
            .value("seed")
            .and_then(Value::as_u64)
            .ok_or_else(|| fields.invalid("seed", "an unsigned integer"))?;
        if fields.object("weights")?.is_none() {
            return Err(fields.missing("weights", "an object"));
        }
        Ok(Self { name: name.to_string(), seed, root })
    }

    /// The directory's name, which prefixes the names of a single layer's tensors.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// True where the directory describes one attention layer (key `arch`) whose weights are
    /// generated.
    pub fn is_single_layer(&self) -> bool {
        self.root.contains_key("arch")
    }

    /// The attention that `arch`, or `layers[label]`, describes.
    ///
    /// # Errors
    /// [`ConfigError`] for a missing or malformed key, or one that says what is not supported.
    pub fn attention(&self, label: &str) -> Result<AttentionConfig, ConfigError> {
        let root = Fields::new(&self.root, "");
        if let Some(arch) = root.object("arch")? {
            return attention(Fields::new(arch, "arch"));
        }
        let layers = root.object("layers")?.ok_or_else(|| root.missing("layers", "an object"))?;
        let layers = Fields::new(layers, "layers");
        let layer = layers.object(label)?.ok_or_else(|| layers.missing(label, "an object"))?;
        attention(Fields::new(layer, &layers.name(label)))
    }

    /// The generated tensor `name`, flat and row-major, with its shape. Where the manifest states a
    /// hash of its BF16 bytes, they are checked against it.
    ///
    /// # Errors
    /// [`CheckpointError::Index`] for a malformed manifest; [`CheckpointError::Hash`].
    pub fn generate(&self, name: &str) -> Result<(Vec<usize>, Vec<bf16>), CheckpointError> {
        let entry = self
            .root
            .get("weights")
            .and_then(|weights| weights.get(name))
            .ok_or_else(|| self.error(name, "an entry", "nothing"))?;
        let shape = self.shape(name, entry)?;
        let kind = self.kind(name, entry)?;
        let tensor: Vec<bf16> = values(name, self.seed, kind, shape.iter().product()).collect();
        if let Some(needed) = entry.get("bf16_sha256_16").and_then(Value::as_str) {
            let given = sha256::hex(&little_endian(&tensor))[..16].to_string();
            if given != needed {
                let (tensor, needed) = (name.to_string(), needed.to_string());
                return Err(CheckpointError::Hash { tensor, needed, given });
            }
        }
        Ok((shape, tensor))
    }

    /// The generated weights as a checkpoint. Of a single layer `<name>.<tensor>` is called
    /// `layers.0.self_attn.<tensor>`, and its input `<name>.x` is left out.
    ///
    /// # Errors
    /// As [`VectorConfig::generate`].
    pub fn checkpoint(&self) -> Result<Checkpoint, Error> {
        let prefix = format!("{}.", self.name);
        let mut tensors = Vec::new();
        for name in self.root.get("weights").and_then(Value::as_object).into_iter().flatten() {
            let name = name.0;
            let stored = match name.strip_prefix(&prefix) {
                Some("x") => continue,
                Some(tensor) => format!("layers.0.self_attn.{tensor}"),
                None => name.clone(),
            };
            let (shape, values) = self.generate(name)?;
            tensors.push((stored, shape, little_endian(&values)));
        }
        let malformed = |error: safetensors::SafeTensorError| CheckpointError::Malformed {
            file: self.name.clone(),
            reason: error.to_string(),
        };
        let mut views = Vec::new();
        for (name, shape, bytes) in &tensors {
            let view = TensorView::new(safetensors::Dtype::BF16, shape.clone(), bytes);
            views.push((name.as_str(), view.map_err(malformed)?));
        }
        Ok(Checkpoint::from_bytes(safetensors::serialize(views, None).map_err(malformed)?)?)
    }

    /// The generated input of a single layer, [rows, hidden].
    ///
    /// # Errors
    /// As [`VectorConfig::generate`].
    pub fn input(&self) -> Result<(Vec<usize>, Vec<bf16>), CheckpointError> {
        self.generate(&format!("{}.x", self.name))
    }

    fn shape(&self, name: &str, entry: &Value) -> Result<Vec<usize>, CheckpointError> {
        let value = entry.get("shape").unwrap_or(&Value::Null);
        let shape: Option<Vec<usize>> = value.as_array().and_then(|dims| {
            dims.iter().map(|dim| dim.as_u64().and_then(|dim| usize::try_from(dim).ok())).collect()
        });
        shape
            .filter(|shape| {
                let elements = shape.iter().try_fold(1_usize, |all, &dim| all.checked_mul(dim));
                shape.len() <= 3 && elements.is_some_and(|elements| elements <= MAX_ELEMENTS)
            })
            .ok_or_else(|| {
                let needed = format!("a shape of at most {MAX_ELEMENTS} elements");
                self.error(name, &needed, &value.to_string())
            })
    }

    fn kind(&self, name: &str, entry: &Value) -> Result<Kind, CheckpointError> {
        let exponent = entry.get("exp").and_then(Value::as_i64);
        match (entry.get("kind").and_then(Value::as_str), exponent) {
            (Some("uniform"), Some(exponent @ -60..=60)) => {
                Ok(Kind::Uniform { exponent: exponent as i32 })
            }
            (Some("norm"), _) => Ok(Kind::Norm),
            _ => Err(self.error(name, "kind `uniform` with exp, or `norm`", &entry.to_string())),
        }
    }

    fn error(&self, name: &str, needed: &str, given: &str) -> CheckpointError {
        CheckpointError::Index {
            file: format!("weights of {}", self.name),
            key: crate::error::shorten(name),
            needed: needed.to_string(),
            given: crate::error::shorten(given),
        }
    }
}

/// An attention layer as the vectors describe it. A key that is not known is refused: it would name
/// a part of the layer that is not computed.
fn attention(fields: Fields<'_>) -> Result<AttentionConfig, ConfigError> {
    const KNOWN: [&str; 24] = [
        "family",
        "heads",
        "nope",
        "rope_dim",
        "v",
        "kv_rank",
        "q_rank",
        "scale",
        "q_eps",
        "kv_eps",
        "rope_style",
        "rope",
        "window",
        "gate",
        "indexer",
        "index_n_heads",
        "index_head_dim",
        "index_topk",
        "idx_ln_eps",
        "idx_rope_at",
        "idx_rope_dim",
        "idx_rope_style",
        "index_kpool",
        "always_tail",
    ];
    if let Some(key) = fields.keys().find(|key| !KNOWN.contains(key)) {
        return Err(fields.unsupported(key, KNOWN.join(", ")));
    }
    if fields.text("family")? != Some("mla") {
        return Err(fields.unsupported("family", "mla"));
    }
    let width = |key, least| fields.size(key, least, MAX_HEAD_WIDTH);
    let rope_width = width("rope_dim", 0)?;
    if !rope_width.is_multiple_of(2) {
        return Err(fields.invalid("rope_dim", "an even integer"));
    }
    let rotates = fields.value("rope").is_some() && rope_width > 0;
    Ok(AttentionConfig {
        heads: width("heads", 1)?,
        query_rank: match fields.size_or_none("q_rank", 1, MAX_HEAD_WIDTH)? {
            Some(rank) => QueryRank::Rank(rank),
            None => QueryRank::ByTensor,
        },
        kv_lora_rank: width("kv_rank", 1)?,
        qk_nope_head_dim: width("nope", 1)?,
        qk_rope_head_dim: rope_width,
        v_head_dim: width("v", 1)?,
        softmax_scale: fields.number("scale", 0.0)?,
        query_eps: fields.number("q_eps", 0.0)?,
        kv_eps: fields.number("kv_eps", 0.0)?,
        bias: false,
        rotary: rotary(fields, "rope_style")?,
        rope: if rotates { Some(rope(fields)?) } else { None },
        window: fields.size_or_none("window", 1, MAX_COUNT)?,
        gate: match fields.text("gate")? {
            None => None,
            Some("head") => Some(GateKind::PerHead),
            Some("elem") => Some(GateKind::PerElement),
            Some(_) => return Err(fields.unsupported("gate", "head, elem")),
        },
        indexer: indexer(fields)?,
    })
}

/// The key `rope` holds what a configuration has in `rope_parameters`.
fn rope(fields: Fields<'_>) -> Result<crate::rope::RopeParameters, ConfigError> {
    let object = fields.object("rope")?.cloned().unwrap_or_default();
    let outer = Map::from_iter([("rope_parameters".to_string(), Value::Object(object))]);
    rope_parameters(Fields::new(&outer, &fields.name("rope")))
}

fn indexer(fields: Fields<'_>) -> Result<Option<LayerIndexer>, ConfigError> {
    let pooled = match fields.text("indexer")? {
        None => return Ok(None),
        Some("shared") => return Ok(Some(LayerIndexer::Shared)),
        Some("full") => false,
        Some("kpool") => true,
        Some(_) => return Err(fields.unsupported("indexer", "full, shared, kpool")),
    };
    if fields.text("idx_rope_at")? != Some("head") {
        return Err(fields.unsupported("idx_rope_at", "head"));
    }
    let pool = || -> Result<IndexPool, ConfigError> {
        Ok(IndexPool {
            size: fields.size("index_kpool", 2, MAX_HEAD_WIDTH)?,
            always_tail: fields.flag("always_tail", true)?,
        })
    };
    Ok(Some(LayerIndexer::Own(IndexerConfig {
        heads: fields.size("index_n_heads", 1, MAX_HEAD_WIDTH)?,
        head_dim: fields.size("index_head_dim", 1, MAX_HEAD_WIDTH)?,
        topk: fields.size("index_topk", 1, MAX_COUNT)?,
        rotary: rotary(fields, "idx_rope_style")?,
        key_norm_eps: fields.number("idx_ln_eps", 0.0)?,
        pool: pooled.then(pool).transpose()?,
    })))
}

fn rotary(fields: Fields<'_>, key: &str) -> Result<Rotary, ConfigError> {
    match fields.text(key)? {
        Some("pair") => Ok(Rotary::Pair),
        Some("half") => Ok(Rotary::Half),
        _ => Err(fields.invalid(key, "pair or half")),
    }
}

fn little_endian(values: &[bf16]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}
