//! A Hugging Face `config.json` as a validated [`ModelConfig`].
//!
//! What an architecture implies without saying it is data in [`family`]; what the file says is read
//! here. Every size has a limit, so that no product of sizes can overflow and no allocation follows
//! from an absurd value.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::{CheckpointError, ConfigError, InputError, shorten};
use crate::rope::{self, RopeParameters};

pub mod family;
pub(crate) mod fields;
mod layers;
mod mlp;
mod quantization;
mod rotary;

pub use family::{FAMILIES, Family};
use family::{LatentEps, RotaryRule, ScaleRule, ScalingRule};
pub use fields::AssumedKey;
use fields::{Assumed, Fields};
pub use quantization::Quantization;
pub(crate) use rotary::rope_parameters;

/// Largest `hidden_size`, and largest width of a dense MLP.
pub const MAX_WIDTH: usize = 1 << 20;
/// Largest width or rank inside one attention head, and largest number of heads or experts.
pub const MAX_HEAD_WIDTH: usize = 1 << 16;
/// Largest number of layers.
pub const MAX_LAYERS: usize = 4096;
/// Largest vocabulary, and largest number of positions.
pub const MAX_COUNT: usize = 1 << 30;
/// Where a model of more than text has the keys of its text.
const TEXT: &str = "text_config";

/// Largest configuration file in bytes.
pub const MAX_CONFIG_BYTES: usize = 16 << 20;

/// A whole model: what `config.json` says, checked, with what the architecture implies.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The architecture's table entry.
    pub family: Family,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Number of token ids.
    pub vocab_size: usize,
    /// Positions the model was made for; `None` where the file does not say.
    pub max_position_embeddings: Option<usize>,
    /// Epsilon of the norms of the residual stream.
    pub rms_norm_eps: f64,
    /// The decoder layers, in order.
    pub layers: Vec<LayerConfig>,
    /// Further layers of multi-token prediction, stored after the decoder layers.
    pub draft_layers: usize,
    /// The output head is the embedding matrix.
    pub tie_word_embeddings: bool,
    /// The MLPs have biases.
    pub mlp_bias: bool,
    /// Embeddings are multiplied by this.
    pub embedding_scale: f64,
    /// The output of every attention and MLP is multiplied by this before it is added.
    pub residual_scale: f64,
    /// Logits are multiplied by this.
    pub logit_scale: f64,
    /// The id that begins a text.
    pub bos_token_id: Option<u32>,
    /// The ids that end one.
    pub eos_token_ids: Vec<u32>,
    /// How the checkpoint's weights are stored, where it is not as plain numbers.
    pub quantization: Option<Quantization>,
    /// Keys that decide what is computed and that the file leaves out, with what stands for them.
    pub assumed: Vec<AssumedKey>,
}

/// One decoder layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerConfig {
    /// Whether it has latent attention at all.
    pub kind: AttentionKind,
    /// Its attention; where that is of another kind, what the model's latent attention is.
    pub attention: AttentionConfig,
    /// Its MLP.
    pub mlp: MlpConfig,
}

impl LayerConfig {
    /// Its latent attention.
    ///
    /// # Errors
    /// [`CheckpointError::OtherAttention`], which names it as layer `layer`.
    pub fn latent(&self, layer: usize) -> Result<&AttentionConfig, CheckpointError> {
        match self.kind {
            AttentionKind::Latent => Ok(&self.attention),
            AttentionKind::Linear => Err(CheckpointError::OtherAttention { layer }),
        }
    }
}

/// What a layer attends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionKind {
    /// Latent attention.
    Latent,
    /// Linear attention (KDA), which is not run here.
    Linear,
}

/// Latent attention of one layer. Widths are those of a head before absorption, in elements.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionConfig {
    /// Query heads.
    pub heads: usize,
    /// Rank of the query's factorisation.
    pub query_rank: QueryRank,
    /// Width of the cached latent.
    pub kv_lora_rank: usize,
    /// Part of a query and key head that carries no position.
    pub qk_nope_head_dim: usize,
    /// Part of a query head, and of the one shared key, that carries the position; may be 0.
    pub qk_rope_head_dim: usize,
    /// Width of a value head.
    pub v_head_dim: usize,
    /// Factor of the scores, YaRN's included.
    pub softmax_scale: f64,
    /// Epsilon of the query latent's norm.
    pub query_eps: f64,
    /// Epsilon of the key/value latent's norm.
    pub kv_eps: f64,
    /// The projections `q_a`, `kv_a` and `o` have biases.
    pub bias: bool,
    /// Layout of rotary pairs.
    pub rotary: Rotary,
    /// Rotary frequencies; `None` leaves the rope part unrotated (NoPE).
    pub rope: Option<RopeParameters>,
    /// Keys a row sees, its own included; `None` means all before it.
    pub window: Option<usize>,
    /// Gate between the attention and its output projection; where the file names none, a layer
    /// with a tensor for one has one nevertheless.
    pub gate: Option<GateKind>,
    /// The sparse selection; none where a row attends to every key that it sees.
    pub indexer: Option<LayerIndexer>,
}

impl AttentionConfig {
    /// Width of a query head before absorption.
    pub fn qk_head_dim(&self) -> usize {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }

    /// Elements a token has in the latent cache: the latent, then the rotated shared key.
    pub fn cache_width(&self) -> usize {
        self.kv_lora_rank + self.qk_rope_head_dim
    }

    /// The layer's own indexer; none where it is dense or shares another layer's selection.
    pub fn own_indexer(&self) -> Option<IndexerConfig> {
        match self.indexer {
            Some(LayerIndexer::Own(indexer)) => Some(indexer),
            Some(LayerIndexer::Shared) | None => None,
        }
    }

    /// The same layer attending to every key.
    pub fn dense(self) -> Self {
        Self { indexer: None, ..self }
    }
}

/// Rank of the query's factorisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryRank {
    /// `q_a_proj`, a norm and `q_b_proj` of this rank.
    Rank(usize),
    /// One matrix `q_proj`, or, where the checkpoint holds `q_a_proj`, factors of its rank.
    ByTensor,
}

/// Layout of rotary pairs in the rope part of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rotary {
    /// Elements 2j and 2j+1 rotate together.
    Pair,
    /// Elements j and j + width/2 rotate together.
    Half,
}

/// A gate: the attention's output is multiplied by the sigmoid of a projection of the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateKind {
    /// One factor a head: `g_proj.weight` [heads, hidden].
    PerHead,
    /// One factor an element: `g_proj.weight` [heads * v_head_dim, hidden].
    PerElement,
    /// One of the two, as the shape of the tensor says.
    ByTensor,
}

/// Where a sparse layer's selection of keys comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LayerIndexer {
    /// From its own indexer.
    Own(IndexerConfig),
    /// From the last layer before it that has its own.
    Shared,
}

/// Sparse selection of keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IndexerConfig {
    /// Index query heads.
    pub heads: usize,
    /// Width of an index query head and of the one index key.
    pub head_dim: usize,
    /// Keys selected for a row.
    pub topk: usize,
    /// Layout of rotary pairs in the first `qk_rope_head_dim` elements.
    pub rotary: Rotary,
    /// Epsilon of the index key's layer norm.
    pub key_norm_eps: f64,
    /// Keys of whole pools of tokens are scored; none where each token has its own.
    pub pool: Option<IndexPool>,
}

/// How index keys are pooled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexPool {
    /// Tokens of a pool.
    pub size: usize,
    /// The tokens behind the last complete pool that a row sees are always selected.
    pub always_tail: bool,
}

impl IndexerConfig {
    /// Tokens of a key.
    pub fn pool_size(&self) -> usize {
        self.pool.map_or(1, |pool| pool.size)
    }

    /// Tokens that a row selects at most.
    pub fn selected_width(&self) -> usize {
        let tail = self.pool.filter(|pool| pool.always_tail);
        self.topk + tail.map_or(0, |pool| pool.size - 1)
    }
}

/// The MLP of one layer.
#[derive(Clone, Debug, PartialEq)]
pub enum MlpConfig {
    /// `down(silu(gate x) * up x)`.
    Dense {
        /// Width between.
        width: usize,
    },
    /// Routed experts, and shared ones beside them.
    Experts(ExpertsConfig),
}

/// Routed and shared experts.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// How a row's experts are chosen.
    pub router: RouterConfig,
    /// Width of a routed expert.
    pub expert_width: usize,
    /// Width of the shared experts taken together; 0 where there are none.
    pub shared_width: usize,
}

/// How a row's experts are chosen and weighted.
#[derive(Clone, Debug, PartialEq)]
pub struct RouterConfig {
    /// Routed experts.
    pub experts: usize,
    /// Experts a row uses.
    pub experts_per_token: usize,
    /// Groups of consecutive experts; 1 means no groups.
    pub groups: usize,
    /// Groups a row may choose from.
    pub groups_kept: usize,
    /// From logits to scores.
    pub scoring: Scoring,
    /// Score of a group.
    pub group_score: GroupScore,
    /// A bias shifts the choice, not the weights.
    pub correction_bias: bool,
    /// The chosen weights are divided by their sum.
    pub normalize: bool,
    /// The weights are multiplied by this.
    pub scaling_factor: f64,
}

/// From router logits to scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// Over all experts.
    Softmax,
    /// Each alone.
    Sigmoid,
}

/// Score of a group of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupScore {
    /// The best score in it.
    Max,
    /// The sum of the two best.
    TopTwoSum,
}

impl ModelConfig {
    /// Reads `config.json` at `path`.
    ///
    /// # Errors
    /// [`ConfigError`] for a file that cannot be read and as [`ModelConfig::from_json`].
    pub fn from_file(path: &Path) -> Result<Self, ConfigError> {
        let bytes = std::fs::read(path)
            .map_err(|source| ConfigError::Io { path: path.to_path_buf(), source })?;
        Self::from_json(&bytes)
    }

    /// Reads the text of a `config.json`. A directory of reference vectors wraps it in the key
    /// `hf_config` and stores no output head: there the head is the embedding matrix.
    ///
    /// # Errors
    /// [`ConfigError`]: not a JSON object; an unknown architecture; a key that is missing, out of
    /// range, contradictory or unsupported, by name.
    pub fn from_json(bytes: &[u8]) -> Result<Self, ConfigError> {
        let root = parse_object(bytes)?;
        match root.get("hf_config") {
            Some(Value::Object(inner)) => {
                let mut config = Self::noted(Fields::new(inner, "hf_config"))?;
                config.tie_word_embeddings = true;
                config.assumed.retain(|assumed| !assumed.key.ends_with("tie_word_embeddings"));
                Ok(config)
            }
            _ => Self::noted(Fields::new(&root, "")),
        }
    }

    /// Refuses what cannot be run as a whole.
    ///
    /// # Errors
    /// [`InputError::LayersOnly`].
    pub fn check_whole(&self) -> Result<(), InputError> {
        match self.family.layers_only {
            None => Ok(()),
            Some(because) => {
                Err(InputError::LayersOnly { model_type: self.family.model_type, because })
            }
        }
    }

    /// The layer `layer`, where there is one.
    pub fn layer(&self, layer: usize) -> Option<&LayerConfig> {
        self.layers.get(layer)
    }

    fn noted(fields: Fields<'_>) -> Result<Self, ConfigError> {
        let assumed = Assumed::default();
        let config = Self::from_fields(fields.noting(&assumed))?;
        Ok(Self { assumed: assumed.into_keys(), ..config })
    }

    fn from_fields(fields: Fields<'_>) -> Result<Self, ConfigError> {
        let family = find_family(fields)?;
        // What describes the text model of several may stand in an object of its own.
        let inner = fields.object(TEXT)?.filter(|_| family.layers_only.is_some());
        let path = fields.name(TEXT);
        let fields = inner.map_or(fields, |inner| fields.inner(inner, &path));
        let fields = fields.renaming(family.renamed);
        if let Some(activation) = fields.text("hidden_act")?
            && activation != "silu"
        {
            return Err(fields.unsupported("hidden_act", "silu"));
        }
        let hidden_size = fields.size("hidden_size", 1, MAX_WIDTH)?;
        let vocab_size = fields.size("vocab_size", 1, MAX_COUNT)?;
        let count = fields.size("num_hidden_layers", 1, MAX_LAYERS)?;
        let attention = attention(fields, &family, hidden_size)?;
        let kinds = layers::kinds(fields, &family, count)?;
        let indexers = layers::indexers(fields, &family, (&kinds, attention.qk_rope_head_dim))?;
        let layers: Vec<LayerConfig> = mlp::layers(fields, &family, count)?
            .into_iter()
            .zip(kinds.into_iter().zip(indexers))
            .map(|(mlp, (kind, indexer))| {
                let attention = AttentionConfig { indexer, ..attention.clone() };
                LayerConfig { kind, attention, mlp }
            })
            .collect();
        let scaling = scaling(fields, &family, hidden_size, count)?;
        Ok(Self {
            hidden_size,
            vocab_size,
            max_position_embeddings: fields.size_or_none(
                "max_position_embeddings",
                1,
                MAX_COUNT,
            )?,
            rms_norm_eps: rms_norm_eps(fields, &family)?,
            layers,
            draft_layers: draft_layers(fields)?,
            tie_word_embeddings: fields
                .flag_or("tie_word_embeddings", family.defaults.tie_word_embeddings)?,
            mlp_bias: fields.flag("mlp_bias", false)?,
            embedding_scale: scaling[0],
            residual_scale: scaling[1],
            logit_scale: scaling[2],
            bos_token_id: bos_token_id(fields, &family, vocab_size)?,
            eos_token_ids: eos_token_ids(fields, &family, vocab_size)?,
            quantization: quantization::quantization(fields)?,
            assumed: Vec::new(),
            family,
        })
    }
}

/// The JSON object in `bytes`.
pub(crate) fn parse_object(bytes: &[u8]) -> Result<Map<String, Value>, ConfigError> {
    if bytes.len() > MAX_CONFIG_BYTES {
        let reason = format!("it has {} bytes, the limit is {MAX_CONFIG_BYTES}", bytes.len());
        return Err(ConfigError::NotJson { reason });
    }
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(other) => Err(ConfigError::NotJson { reason: shorten(&other.to_string()) }),
        Err(error) => Err(ConfigError::NotJson { reason: error.to_string() }),
    }
}

fn find_family(fields: Fields<'_>) -> Result<Family, ConfigError> {
    let supported = || FAMILIES.iter().map(|f| f.model_type).collect::<Vec<_>>().join(", ");
    if let Some(model_type) = fields.text("model_type")? {
        return FAMILIES
            .iter()
            .find(|family| family.model_type == model_type)
            .cloned()
            .ok_or_else(|| fields.unsupported("model_type", supported()));
    }
    let names = fields
        .array("architectures")?
        .ok_or_else(|| fields.missing("model_type", format!("one of {}", supported())))?;
    FAMILIES
        .iter()
        .find(|f| names.iter().any(|n| n.as_str().is_some_and(|n| f.architectures.contains(&n))))
        .cloned()
        .ok_or_else(|| fields.unsupported("architectures", supported()))
}

fn attention(
    fields: Fields<'_>,
    family: &Family,
    hidden_size: usize,
) -> Result<AttentionConfig, ConfigError> {
    let heads = fields.size("num_attention_heads", 1, MAX_HEAD_WIDTH)?;
    let width = |key, least| fields.size(key, least, MAX_HEAD_WIDTH);
    let rope_width = width("qk_rope_head_dim", 0)?;
    if !rope_width.is_multiple_of(2) {
        return Err(fields.invalid("qk_rope_head_dim", "an even integer"));
    }
    let nope_width = width("qk_nope_head_dim", 1)?;
    let v_head_dim = match fields.size_or_none("v_head_dim", 1, MAX_HEAD_WIDTH)? {
        None if family.value_width_from_hidden && hidden_size >= heads => {
            fields.assume("v_head_dim", hidden_size / heads);
            hidden_size / heads
        }
        None => return Err(fields.missing("v_head_dim", "a positive integer")),
        Some(width) => width,
    };
    let rope = (!family.unrotated).then(|| rope_parameters(fields)).transpose()?;
    let eps = match family.latent_eps {
        LatentEps::Fixed(eps) => eps,
        LatentEps::Config => rms_norm_eps(fields, family)?,
    };
    if fields.has("mla_use_nope") && fields.flag("mla_use_nope", false)? != family.unrotated {
        return Err(fields.unsupported("mla_use_nope", family.unrotated.to_string()));
    }
    let scale_rope = rope.as_ref().filter(|_| family.scale == ScaleRule::Mscale);
    let rank = family.defaults.query_rank;
    Ok(AttentionConfig {
        heads,
        query_rank: match fields.size_or("q_lora_rank", rank, (1, MAX_HEAD_WIDTH))? {
            Some(rank) => QueryRank::Rank(rank),
            None => QueryRank::ByTensor,
        },
        kv_lora_rank: width("kv_lora_rank", 1)?,
        qk_nope_head_dim: nope_width,
        qk_rope_head_dim: rope_width,
        v_head_dim,
        softmax_scale: rope::softmax_scale(nope_width + rope_width, scale_rope),
        query_eps: eps,
        kv_eps: eps,
        bias: fields.flag("attention_bias", false)?,
        rotary: match family.rotary {
            RotaryRule::Fixed(rotary) => rotary,
            RotaryRule::PairUnless(key) if fields.flag(key, true)? => Rotary::Pair,
            RotaryRule::PairUnless(_) => Rotary::Half,
        },
        rope: rope.filter(|_| rope_width > 0),
        window: None,
        gate: match fields.flag("mla_use_output_gate", false)? {
            true => Some(GateKind::ByTensor),
            false => family.gate,
        },
        indexer: None,
    })
}

/// Factors of the embeddings, of the residual branches and of the logits.
fn scaling(
    fields: Fields<'_>,
    family: &Family,
    hidden_size: usize,
    layers: usize,
) -> Result<[f64; 3], ConfigError> {
    match family.scaling {
        ScalingRule::Unit => Ok([1.0; 3]),
        ScalingRule::Depth => {
            let embedding = fields.number_or("scale_emb", 12.0, 0.0)?;
            let depth = fields.number_or("scale_depth", 1.4, 0.0)?;
            let base = fields.number_or("dim_model_base", 256.0, 0.0)?;
            Ok([
                embedding.ok_or_else(|| fields.missing("scale_emb", "a finite number above 0"))?,
                depth.map_or(1.0, |depth| depth / (layers as f64).sqrt()),
                base.map_or(1.0, |base| base / hidden_size as f64),
            ])
        }
    }
}

fn rms_norm_eps(fields: Fields<'_>, family: &Family) -> Result<f64, ConfigError> {
    const KEY: &str = "rms_norm_eps";
    let eps = fields.number_or(KEY, family.defaults.rms_norm_eps, 0.0)?;
    eps.filter(|eps| *eps < 1.0).ok_or_else(|| fields.invalid(KEY, "a number above 0 and below 1"))
}

/// Layers of multi-token prediction, by either name.
fn draft_layers(fields: Fields<'_>) -> Result<usize, ConfigError> {
    const KEYS: [&str; 2] = ["num_nextn_predict_layers", "num_mtp_layers"];
    let key = KEYS.into_iter().find(|key| fields.has(key)).unwrap_or(KEYS[0]);
    Ok(fields.size_or_none(key, 0, 64)?.unwrap_or(0))
}

/// The default where the file says nothing and the vocabulary has that id.
fn bos_token_id(
    fields: Fields<'_>,
    family: &Family,
    vocab_size: usize,
) -> Result<Option<u32>, ConfigError> {
    const KEY: &str = "bos_token_id";
    if !fields.has(KEY) {
        let default = Some(family.defaults.bos_token_id).filter(|id| (*id as usize) < vocab_size);
        fields.assume(KEY, default);
        return Ok(default);
    }
    let id = fields.size_or_none(KEY, 0, vocab_size - 1)?;
    Ok(id.map(|id| id as u32))
}

/// One id, or an array of ids; the default as for the first.
fn eos_token_ids(
    fields: Fields<'_>,
    family: &Family,
    vocab_size: usize,
) -> Result<Vec<u32>, ConfigError> {
    const KEY: &str = "eos_token_id";
    if !fields.has(KEY) {
        let default = Some(family.defaults.eos_token_id).filter(|id| (*id as usize) < vocab_size);
        fields.assume(KEY, default);
        return Ok(default.into_iter().collect());
    }
    let Some(Value::Array(ids)) = fields.value(KEY) else {
        let id = fields.size_or_none(KEY, 0, vocab_size - 1)?;
        return Ok(id.into_iter().map(|id| id as u32).collect());
    };
    ids.iter()
        .map(|id| id.as_u64().filter(|&id| id < vocab_size as u64).map(|id| id as u32))
        .collect::<Option<Vec<u32>>>()
        .ok_or_else(|| fields.invalid(KEY, format!("ids from 0 to {}", vocab_size - 1)))
}
