//! Weights of a Hugging Face checkpoint: safetensors, in one file or in shards, mapped or embedded.
//!
//! Nothing is copied: every [`Weight`] borrows the bytes of the file. Names are used without the
//! prefix `model.`, which a checkpoint may have or not.

use std::path::Path;

use crate::config::{
    AttentionConfig, ExpertsConfig, GateKind, IndexPool, IndexerConfig, MlpConfig, ModelConfig,
    QueryRank,
};
use crate::error::{CheckpointError, Error, InputError};

mod storage;
mod weight;

use storage::{Part, Storage};
use weight::weight_dtype;
pub use weight::{Dtype, Weight};

/// The tensors of a checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    storage: Storage,
}

/// A linear layer `y = W x + b`.
#[derive(Clone, Copy, Debug)]
pub struct LinearWeights<'a> {
    /// [out, in].
    pub weight: Weight<'a>,
    /// `[out]`.
    pub bias: Option<Weight<'a>>,
}

/// The query projection of latent attention.
#[derive(Clone, Copy, Debug)]
pub enum QueryWeights<'a> {
    /// One matrix [heads * qk width, hidden].
    Direct(Weight<'a>),
    /// Factors with a norm between them.
    LowRank {
        /// [rank, hidden].
        down: LinearWeights<'a>,
        /// `[rank]`.
        norm: Weight<'a>,
        /// [heads * qk width, rank].
        up: Weight<'a>,
    },
}

/// The tensors of one attention layer.
#[derive(Clone, Copy, Debug)]
pub struct AttentionWeights<'a> {
    /// The query projection.
    pub query: QueryWeights<'a>,
    /// `kv_a_proj_with_mqa`: hidden to latent and shared rope key, [latent + rope, hidden].
    pub kv_down: LinearWeights<'a>,
    /// `kv_a_layernorm` `[latent]`.
    pub kv_norm: Weight<'a>,
    /// `kv_b_proj` [heads * (nope + value), latent]; in each head the key rows, then the value
    /// rows.
    pub kv_up: Weight<'a>,
    /// `o_proj` [hidden, heads * value].
    pub output: LinearWeights<'a>,
    /// `g_proj` [heads, hidden] or [heads * value, hidden].
    pub gate: Option<Weight<'a>>,
    /// The sparse selection.
    pub indexer: Option<IndexerWeights<'a>>,
}

/// The tensors of a sparse selection.
#[derive(Clone, Copy, Debug)]
pub struct IndexerWeights<'a> {
    /// `wq_b` [index heads * index width, query rank].
    pub query_up: Weight<'a>,
    /// `wk` [index width, hidden].
    pub key: Weight<'a>,
    /// `k_norm.weight` [index width].
    pub key_norm: Weight<'a>,
    /// `k_norm.bias` [index width].
    pub key_norm_bias: Weight<'a>,
    /// `weights_proj` [index heads, hidden].
    pub head_weights: Weight<'a>,
    /// How keys are pooled.
    pub pool: Option<PoolWeights<'a>>,
}

/// The tensors of pooled index keys.
#[derive(Clone, Copy, Debug)]
pub struct PoolWeights<'a> {
    /// `index_kpool_compress_gate` [index width, hidden].
    pub gate: Weight<'a>,
    /// `index_kpool_compress_ape` [tokens of a pool, index width].
    pub ape: Weight<'a>,
}

/// The three matrices of a gated MLP: `down(silu(gate x) * up x)`.
#[derive(Clone, Copy, Debug)]
pub struct GatedMlpWeights<'a> {
    /// [width, hidden].
    pub gate: LinearWeights<'a>,
    /// [width, hidden].
    pub up: LinearWeights<'a>,
    /// [hidden, width].
    pub down: LinearWeights<'a>,
}

/// The tensors of one layer's MLP.
#[derive(Clone, Debug)]
pub enum MlpWeights<'a> {
    /// One MLP.
    Dense(GatedMlpWeights<'a>),
    /// Routed experts.
    Experts(ExpertsWeights<'a>),
}

/// Routed and shared experts.
#[derive(Clone, Debug)]
pub struct ExpertsWeights<'a> {
    /// `gate.weight` [experts, hidden].
    pub router: Weight<'a>,
    /// `gate.e_score_correction_bias` `[experts]`.
    pub correction_bias: Option<Weight<'a>>,
    /// One MLP an expert.
    pub experts: Vec<GatedMlpWeights<'a>>,
    /// The shared experts as one MLP.
    pub shared: Option<GatedMlpWeights<'a>>,
}

/// The tensors of one decoder layer.
#[derive(Clone, Debug)]
pub struct LayerWeights<'a> {
    /// `input_layernorm` `[hidden]`.
    pub attention_norm: Weight<'a>,
    /// The attention.
    pub attention: AttentionWeights<'a>,
    /// `post_attention_layernorm` `[hidden]`.
    pub mlp_norm: Weight<'a>,
    /// The MLP.
    pub mlp: MlpWeights<'a>,
}

/// The tensors around the layers.
#[derive(Clone, Copy, Debug)]
pub struct ModelWeights<'a> {
    /// `embed_tokens` [vocabulary, hidden].
    pub embedding: Weight<'a>,
    /// `norm` `[hidden]`.
    pub final_norm: Weight<'a>,
    /// `lm_head` [vocabulary, hidden], the embedding where they are tied.
    pub head: Weight<'a>,
}

impl Checkpoint {
    /// Maps the checkpoint in folder `dir`: the shards of `model.safetensors.index.json`, else
    /// `model.safetensors`, else `weights.safetensors`, else the folder's only `*.safetensors`.
    ///
    /// # Errors
    /// [`CheckpointError`]: no clear set of weights, an unreadable or malformed file, an index
    /// whose shards leave the folder or lack a tensor, a tensor given twice.
    pub fn open(dir: &Path) -> Result<Self, CheckpointError> {
        Ok(Self { storage: Storage::open(dir)? })
    }

    /// A checkpoint of one safetensors file embedded in the program.
    ///
    /// # Errors
    /// [`CheckpointError`] for a malformed file or a tensor given twice.
    pub fn from_static(bytes: &'static [u8]) -> Result<Self, CheckpointError> {
        Ok(Self { storage: Storage::from_part(Part::Static(bytes), "embedded weights")? })
    }

    /// A checkpoint of one safetensors file in memory.
    ///
    /// # Errors
    /// [`CheckpointError`] for a malformed file or a tensor given twice.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self, CheckpointError> {
        Ok(Self { storage: Storage::from_part(Part::Owned(bytes), "weights in memory")? })
    }

    /// Names without the prefix `model.`, of every tensor that is stored, sorted.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.storage.entries().map(|(name, _)| name).collect();
        names.sort_unstable();
        names
    }

    /// Bytes of all tensors.
    pub fn tensor_bytes(&self) -> usize {
        self.storage.entries().map(|(_, entry)| entry.end - entry.begin).sum()
    }

    /// Checks that every tensor which `config` needs is there, with its shape and a dtype that is
    /// read; layers of multi-token prediction are not needed.
    ///
    /// # Errors
    /// The [`CheckpointError`] of the first tensor that is not.
    pub fn verify(&self, config: &ModelConfig) -> Result<(), Error> {
        self.model(config)?;
        for layer in 0..config.layers.len() {
            self.layer(config, layer)?;
        }
        Ok(())
    }

    /// The tensors around the layers.
    ///
    /// # Errors
    /// [`CheckpointError`] for a tensor that is missing or does not fit; [`InputError::NoHead`].
    pub fn model(&self, config: &ModelConfig) -> Result<ModelWeights<'_>, Error> {
        let matrix = [config.vocab_size, config.hidden_size];
        let embedding = self.weight("embed_tokens.weight", &matrix)?;
        let head = match self.weight_if("lm_head.weight", &matrix)? {
            Some(head) => head,
            None if config.tie_word_embeddings => embedding,
            None => return Err(InputError::NoHead.into()),
        };
        Ok(ModelWeights {
            embedding,
            final_norm: self.weight("norm.weight", &[config.hidden_size])?,
            head,
        })
    }

    /// The tensors of decoder layer `layer`.
    ///
    /// # Errors
    /// [`InputError::Layer`]; [`CheckpointError`] for a tensor that is missing or does not fit, and
    /// for a layer of multi-token prediction, which the config counts as a decoder layer.
    pub fn layer(&self, config: &ModelConfig, layer: usize) -> Result<LayerWeights<'_>, Error> {
        let hidden = config.hidden_size;
        let layer_config =
            config.layer(layer).ok_or(InputError::Layer { layer, layers: config.layers.len() })?;
        self.refuse_draft_layer(layer)?;
        let norm = |name: &str| self.weight(&format!("layers.{layer}.{name}.weight"), &[hidden]);
        let prefix = format!("layers.{layer}.mlp");
        Ok(LayerWeights {
            attention_norm: norm("input_layernorm")?,
            attention: self.attention(layer, hidden, layer_config.latent(layer)?)?,
            mlp_norm: norm("post_attention_layernorm")?,
            mlp: match &layer_config.mlp {
                MlpConfig::Dense { width } => {
                    MlpWeights::Dense(self.gated_mlp(&prefix, hidden, *width, config.mlp_bias)?)
                }
                MlpConfig::Experts(experts) => {
                    MlpWeights::Experts(self.experts(&prefix, hidden, experts)?)
                }
            },
        })
    }

    /// The tensors of the attention of layer `layer`, on a residual stream of `hidden` elements.
    ///
    /// # Errors
    /// [`CheckpointError`] for a tensor that is missing or does not fit.
    pub fn attention(
        &self,
        layer: usize,
        hidden: usize,
        config: &AttentionConfig,
    ) -> Result<AttentionWeights<'_>, CheckpointError> {
        let name = |tensor: &str| format!("layers.{layer}.self_attn.{tensor}");
        let (query, query_rank) = self.query(&name, hidden, config)?;
        let up_rows = config.heads * (config.qk_nope_head_dim + config.v_head_dim);
        let value_rows = config.heads * config.v_head_dim;
        let indexer = config
            .own_indexer()
            .map(|indexer| self.indexer(&name, hidden, query_rank, &indexer))
            .transpose()?;
        let down = [config.cache_width(), hidden];
        Ok(AttentionWeights {
            query,
            kv_down: self.linear(&name("kv_a_proj_with_mqa"), down, config.bias)?,
            kv_norm: self.weight(&name("kv_a_layernorm.weight"), &[config.kv_lora_rank])?,
            kv_up: self.weight(&name("kv_b_proj.weight"), &[up_rows, config.kv_lora_rank])?,
            output: self.linear(&name("o_proj"), [hidden, value_rows], config.bias)?,
            gate: self.gate(&name("g_proj.weight"), hidden, config)?,
            indexer,
        })
    }

    /// A stored tensor of any shape up to three dimensions, for tools that look at a checkpoint.
    ///
    /// # Errors
    /// [`CheckpointError`] for a tensor that is missing, has more dimensions, or another dtype than
    /// F32, BF16 and F16.
    pub fn tensor(&self, name: &str) -> Result<Weight<'_>, CheckpointError> {
        let shape = self.storage.entry(name).map(|(_, entry)| entry.shape.clone());
        match shape {
            Some(shape) if shape.len() <= 3 => self.weight(name, &shape),
            Some(shape) => Err(CheckpointError::Shape {
                tensor: name.to_string(),
                needed: "of at most three dimensions".to_string(),
                given: format!("{shape:?}"),
            }),
            None => self.weight(name, &[]),
        }
    }

    /// A layer of multi-token prediction has all tensors of a decoder layer, and some more.
    fn refuse_draft_layer(&self, layer: usize) -> Result<(), CheckpointError> {
        const MORE: [&str; 4] = ["eh_proj", "enorm", "hnorm", "shared_head.norm"];
        let names = MORE.into_iter().map(|name| format!("layers.{layer}.{name}.weight"));
        match names.into_iter().find(|name| self.storage.entry(name).is_some()) {
            Some(tensor) => Err(CheckpointError::DraftLayer { layer, tensor }),
            None => Ok(()),
        }
    }

    /// The query projection, and the width of what the indexer's query is projected from. A config
    /// that states no rank leaves the choice to the tensors.
    fn query(
        &self,
        name: &impl Fn(&str) -> String,
        hidden: usize,
        config: &AttentionConfig,
    ) -> Result<(QueryWeights<'_>, usize), CheckpointError> {
        let rows = config.heads * config.qk_head_dim();
        let stored = self.storage.entry(&name("q_a_proj.weight")).map(|(_, entry)| &entry.shape);
        let rank = match (config.query_rank, stored) {
            (QueryRank::Rank(rank), _) => rank,
            (QueryRank::ByTensor, Some(shape)) if shape.len() == 2 => shape[0],
            (QueryRank::ByTensor, _) => {
                let weight = self.weight(&name("q_proj.weight"), &[rows, hidden])?;
                return Ok((QueryWeights::Direct(weight), hidden));
            }
        };
        let query = QueryWeights::LowRank {
            down: self.linear(&name("q_a_proj"), [rank, hidden], config.bias)?,
            norm: self.weight(&name("q_a_layernorm.weight"), &[rank])?,
            up: self.weight(&name("q_b_proj.weight"), &[rows, rank])?,
        };
        Ok((query, rank))
    }

    /// A gate is where the config says one, or where there is a tensor for one.
    fn gate(
        &self,
        name: &str,
        hidden: usize,
        config: &AttentionConfig,
    ) -> Result<Option<Weight<'_>>, CheckpointError> {
        let values = config.heads * config.v_head_dim;
        let stored = self.storage.entry(name).map(|(_, entry)| entry.shape.as_slice());
        let rows = match (config.gate, stored) {
            (None, None) => return Ok(None),
            (Some(GateKind::PerHead), _) => config.heads,
            (Some(GateKind::PerElement), _) => values,
            (_, Some(shape)) if shape.first() == Some(&config.heads) => config.heads,
            _ => values,
        };
        self.weight(name, &[rows, hidden]).map(Some)
    }

    fn indexer(
        &self,
        name: &impl Fn(&str) -> String,
        hidden: usize,
        query_rank: usize,
        config: &IndexerConfig,
    ) -> Result<IndexerWeights<'_>, CheckpointError> {
        let weight =
            |tensor: &str, shape: &[usize]| self.weight(&name(&format!("indexer.{tensor}")), shape);
        let pool = |pool: IndexPool| -> Result<_, CheckpointError> {
            Ok(PoolWeights {
                gate: weight("index_kpool_compress_gate", &[config.head_dim, hidden])?,
                ape: weight("index_kpool_compress_ape", &[pool.size, config.head_dim])?,
            })
        };
        Ok(IndexerWeights {
            query_up: weight("wq_b.weight", &[config.heads * config.head_dim, query_rank])?,
            key: weight("wk.weight", &[config.head_dim, hidden])?,
            key_norm: weight("k_norm.weight", &[config.head_dim])?,
            key_norm_bias: weight("k_norm.bias", &[config.head_dim])?,
            head_weights: weight("weights_proj.weight", &[config.heads, hidden])?,
            pool: config.pool.map(pool).transpose()?,
        })
    }

    fn gated_mlp(
        &self,
        prefix: &str,
        hidden: usize,
        width: usize,
        bias: bool,
    ) -> Result<GatedMlpWeights<'_>, CheckpointError> {
        let linear = |name: &str, shape| self.linear(&format!("{prefix}.{name}"), shape, bias);
        Ok(GatedMlpWeights {
            gate: linear("gate_proj", [width, hidden])?,
            up: linear("up_proj", [width, hidden])?,
            down: linear("down_proj", [hidden, width])?,
        })
    }

    fn experts(
        &self,
        prefix: &str,
        hidden: usize,
        config: &ExpertsConfig,
    ) -> Result<ExpertsWeights<'_>, CheckpointError> {
        let count = config.router.experts;
        let bias = format!("{prefix}.gate.e_score_correction_bias");
        let packed = self.storage.entry(&format!("{prefix}.experts.gate_up_proj")).is_some();
        let experts = if packed {
            self.packed_experts(prefix, hidden, config)?
        } else {
            (0..count)
                .map(|expert| {
                    let prefix = format!("{prefix}.experts.{expert}");
                    self.gated_mlp(&prefix, hidden, config.expert_width, false)
                })
                .collect::<Result<_, _>>()?
        };
        let shared = (config.shared_width > 0)
            .then(|| {
                let prefix = format!("{prefix}.shared_experts");
                self.gated_mlp(&prefix, hidden, config.shared_width, false)
            })
            .transpose()?;
        Ok(ExpertsWeights {
            router: self.weight(&format!("{prefix}.gate.weight"), &[count, hidden])?,
            correction_bias: config
                .router
                .correction_bias
                .then(|| self.weight(&bias, &[count]))
                .transpose()?,
            experts,
            shared,
        })
    }

    /// transformers 5 keeps all experts in two tensors, the gate rows before the up rows.
    fn packed_experts(
        &self,
        prefix: &str,
        hidden: usize,
        config: &ExpertsConfig,
    ) -> Result<Vec<GatedMlpWeights<'_>>, CheckpointError> {
        let (count, width) = (config.router.experts, config.expert_width);
        let gate_up = format!("{prefix}.experts.gate_up_proj");
        let gate_up = self.weight(&gate_up, &[count, 2 * width, hidden])?;
        let down = self.weight(&format!("{prefix}.experts.down_proj"), &[count, hidden, width])?;
        let linear = |weight| LinearWeights { weight, bias: None };
        Ok((0..count)
            .map(|expert| GatedMlpWeights {
                gate: linear(gate_up.matrix(expert).rows(0, width)),
                up: linear(gate_up.matrix(expert).rows(width, 2 * width)),
                down: linear(down.matrix(expert)),
            })
            .collect())
    }

    fn linear(
        &self,
        name: &str,
        shape: [usize; 2],
        bias: bool,
    ) -> Result<LinearWeights<'_>, CheckpointError> {
        let weight = self.weight(&format!("{name}.weight"), &shape)?;
        let bias = bias.then(|| self.weight(&format!("{name}.bias"), &shape[..1])).transpose()?;
        Ok(LinearWeights { weight, bias })
    }

    fn weight(&self, name: &str, shape: &[usize]) -> Result<Weight<'_>, CheckpointError> {
        self.weight_if(name, shape)?.ok_or_else(|| CheckpointError::MissingTensor {
            tensor: name.to_string(),
            needed: if shape.is_empty() { "it".to_string() } else { format!("shape {shape:?}") },
        })
    }

    fn weight_if(
        &self,
        name: &str,
        shape: &[usize],
    ) -> Result<Option<Weight<'_>>, CheckpointError> {
        let Some((stored_name, entry)) = self.storage.entry(name) else { return Ok(None) };
        if entry.shape != shape {
            return Err(CheckpointError::Shape {
                tensor: name.to_string(),
                needed: format!("{shape:?}"),
                given: format!("{:?}", entry.shape),
            });
        }
        let dtype = weight_dtype(name, entry.dtype)?;
        Ok(Some(Weight::new(stored_name, dtype, shape, self.storage.bytes(entry))))
    }
}
