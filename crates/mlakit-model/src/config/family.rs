//! What distinguishes the architectures, as data: one [`Family`] an architecture.
//!
//! A family says which rule applies where `config.json` does not; the rules themselves are code
//! that reads a family and never its name. Formulas: README of the vectors and the public model
//! code of transformers 5.

use super::{GateKind, GroupScore, Rotary, Scoring};

/// How an architecture differs from the common form of latent attention.
#[derive(Clone, Debug, PartialEq)]
pub struct Family {
    /// `model_type` of `config.json`.
    pub model_type: &'static str,
    /// Entries of `architectures` that mean this family; used where `model_type` is absent.
    pub architectures: &'static [&'static str],
    /// Layout of the rotary pairs of the attention.
    pub rotary: RotaryRule,
    /// Epsilon of the norms of the query and key/value latents.
    pub latent_eps: LatentEps,
    /// Whether YaRN's `mscale_all_dim` enters the softmax scale.
    pub scale: ScaleRule,
    /// Gate between the attention and its output projection.
    pub gate: Option<GateKind>,
    /// How experts are chosen; none where no layer has experts.
    pub router: Option<RouterRule>,
    /// The sparse selection; none for dense attention.
    pub indexer: Option<IndexerRule>,
    /// Scaling of embeddings, residual branches and logits.
    pub scaling: ScalingRule,
    /// An absent `v_head_dim` means `hidden_size / num_attention_heads`.
    pub value_width_from_hidden: bool,
    /// The rope part, where there is one, is not rotated (NoPE).
    pub unrotated: bool,
    /// Which layers have linear attention instead, where `layer_types` does not say.
    pub linear_layers: LinearLayers,
    /// Other names of keys, each after the usual one.
    pub renamed: &'static [(&'static str, &'static str)],
    /// Why only the latent attention layers of such a model are run, and not the whole.
    pub layers_only: Option<&'static str>,
    /// What absent keys mean.
    pub defaults: Defaults,
}

/// What keys mean that `config.json` leaves out: the defaults of the architecture's configuration
/// class in transformers 5, so that a file means the same model here. Sizes that every file states
/// (widths, heads, layers, vocabulary) have none. A null is not an absent key: as in Python it is
/// "none" or "no", or an error where there must be a value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Defaults {
    /// `rms_norm_eps`.
    pub rms_norm_eps: f64,
    /// `q_lora_rank`; none leaves the choice to the tensors.
    pub query_rank: Option<usize>,
    /// `tie_word_embeddings`.
    pub tie_word_embeddings: bool,
    /// `bos_token_id`; where the vocabulary has no such id, none.
    pub bos_token_id: u32,
    /// `eos_token_id`; likewise.
    pub eos_token_id: u32,
}

/// Where the layout of the rotary pairs is stated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotaryRule {
    /// Always this one.
    Fixed(Rotary),
    /// A flag: true (also where absent) is [`Rotary::Pair`], false is [`Rotary::Half`].
    PairUnless(&'static str),
}

/// Epsilon of the latent norms. transformers hard-codes one in most classes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LatentEps {
    /// This value, whatever `rms_norm_eps` says.
    Fixed(f64),
    /// The value of `rms_norm_eps`.
    Config,
}

/// The softmax scale, from the width of a head before absorption.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleRule {
    /// `width^-0.5`.
    Plain,
    /// `width^-0.5 * m^2`, m from YaRN's `factor` and `mscale_all_dim` where both are given.
    Mscale,
}

/// How experts are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterRule {
    /// From logits to scores.
    pub scoring: Scoring,
    /// `scoring_func` that means `scoring`.
    pub scoring_func: &'static str,
    /// Score of a group of experts.
    pub group_score: GroupScore,
    /// `topk_method`s that choose without groups.
    pub plain_methods: &'static [&'static str],
    /// `topk_method`s that choose groups first.
    pub grouped_methods: &'static [&'static str],
    /// What an absent `topk_method` means.
    pub default_method: &'static str,
    /// A tensor `e_score_correction_bias` shifts the choice, not the weights.
    pub correction_bias: bool,
    /// `norm_topk_prob` is honoured. Where it is not, a true one is refused: implementations of
    /// that family disagree about it.
    pub normalizes: bool,
    /// Another name of `n_routed_experts`.
    pub experts_alias: &'static str,
    /// What absent keys mean.
    pub defaults: RouterDefaults,
}

/// As [`Defaults`], for the keys of experts and their router. `None` is a key without a default.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterDefaults {
    /// `first_k_dense_replace`.
    pub first_k_dense_replace: usize,
    /// `n_shared_experts`.
    pub n_shared_experts: usize,
    /// `num_experts_per_tok`.
    pub num_experts_per_tok: Option<usize>,
    /// `n_group`.
    pub n_group: Option<usize>,
    /// `topk_group`.
    pub topk_group: Option<usize>,
    /// `norm_topk_prob`.
    pub norm_topk_prob: bool,
    /// `routed_scaling_factor`.
    pub routed_scaling_factor: f64,
}

/// The sparse selection of a family.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IndexerRule {
    /// Layout of the rotary pairs of the index query and key, where `indexer_rope_interleave` does
    /// not say.
    pub rotary: Rotary,
    /// Epsilon of the layer norm of the index key.
    pub key_norm_eps: f64,
    /// `index_n_heads`, where absent.
    pub heads: usize,
    /// `index_kpool`, where absent; none for keys of single tokens.
    pub pool: Option<usize>,
}

/// Which layers of a hybrid have linear attention, which is not run here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearLayers {
    /// None.
    None,
    /// All but every fourth one, which the first three precede.
    ThreeOfFour,
    /// Those that `linear_attn_config` does not list in `full_attn_layers`, which counts from 1;
    /// where it does not, all but every fourth one, layer 0 included.
    Listed,
}

/// Scaling of the residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScalingRule {
    /// None.
    Unit,
    /// Embeddings times `scale_emb` (12 if absent), branches times `scale_depth / sqrt(layers)`
    /// (`scale_depth` 1.4 if absent; 1 if null), logits divided by `hidden_size / dim_model_base`
    /// (256 if absent; not divided if null).
    Depth,
}

/// The architectures that can be read.
pub static FAMILIES: &[Family] = &[
    Family {
        model_type: "deepseek_v2",
        architectures: &["DeepseekV2ForCausalLM", "DeepseekV2Model"],
        router: Some(SOFTMAX_ROUTER),
        defaults: Defaults { bos_token_id: 1, eos_token_id: 2, ..DEFAULTS },
        ..COMMON
    },
    Family {
        model_type: "deepseek_v3",
        architectures: &["DeepseekV3ForCausalLM", "DeepseekV3Model"],
        ..V3
    },
    Family {
        model_type: "deepseek_v32",
        architectures: &["DeepseekV32ForCausalLM", "DeepseekV32Model"],
        indexer: Some(IndexerRule {
            rotary: Rotary::Half,
            key_norm_eps: 1e-6,
            heads: 64,
            pool: None,
        }),
        ..V3
    },
    Family {
        model_type: "glm_moe_dsa",
        architectures: &["GlmMoeDsaForCausalLM", "GlmMoeDsaModel"],
        rotary: RotaryRule::Fixed(Rotary::Pair),
        indexer: Some(GLM_INDEXER),
        router: Some(RouterRule { defaults: GLM_ROUTER, ..SIGMOID_ROUTER }),
        defaults: Defaults { rms_norm_eps: 1e-5, query_rank: Some(2048), ..DEFAULTS },
        ..V3
    },
    Family {
        model_type: "glm5_next",
        architectures: &["Glm5NextForConditionalGeneration"],
        ..GLM5
    },
    Family { model_type: "glm5_next_text", architectures: &["Glm5NextTextModel"], ..GLM5 },
    Family {
        model_type: "kimi_linear",
        architectures: &["KimiLinearForCausalLM", "KimiLinearModel"],
        ..KIMI
    },
    Family {
        model_type: "kimi_k3",
        architectures: &["KimiK3ForConditionalGeneration", "KimiK3ForCausalLM"],
        latent_eps: LatentEps::Config,
        ..KIMI
    },
    Family {
        model_type: "glm4_moe_lite",
        architectures: &["Glm4MoeLiteForCausalLM", "Glm4MoeLiteModel"],
        router: Some(RouterRule {
            defaults: RouterDefaults {
                first_k_dense_replace: 1,
                num_experts_per_tok: Some(4),
                n_group: Some(1),
                topk_group: Some(1),
                routed_scaling_factor: 1.8,
                ..SIGMOID_ROUTER.defaults
            },
            ..SIGMOID_ROUTER
        }),
        defaults: Defaults { rms_norm_eps: 1e-5, query_rank: Some(768), ..DEFAULTS },
        ..V3
    },
    Family {
        model_type: "minicpm3",
        architectures: &["MiniCPM3ForCausalLM", "MiniCPM3Model"],
        rotary: RotaryRule::Fixed(Rotary::Half),
        scale: ScaleRule::Plain,
        scaling: ScalingRule::Depth,
        value_width_from_hidden: true,
        defaults: Defaults {
            rms_norm_eps: 1e-5,
            query_rank: Some(768),
            tie_word_embeddings: true,
            bos_token_id: 1,
            eos_token_id: 2,
        },
        ..COMMON
    },
];

/// Latent attention without experts; its name is never seen.
const COMMON: Family = Family {
    model_type: "",
    architectures: &[],
    rotary: RotaryRule::Fixed(Rotary::Pair),
    latent_eps: LatentEps::Fixed(1e-6),
    scale: ScaleRule::Mscale,
    gate: None,
    router: None,
    indexer: None,
    scaling: ScalingRule::Unit,
    value_width_from_hidden: false,
    unrotated: false,
    linear_layers: LinearLayers::None,
    renamed: &[],
    layers_only: None,
    defaults: DEFAULTS,
};

/// Those of DeepSeek-V3.
const DEFAULTS: Defaults = Defaults {
    rms_norm_eps: 1e-6,
    query_rank: Some(1536),
    tie_word_embeddings: false,
    bos_token_id: 0,
    eos_token_id: 1,
};

/// The form that most later models share: chosen by sigmoid with a correction bias.
const V3: Family = Family {
    rotary: RotaryRule::PairUnless("rope_interleave"),
    router: Some(SIGMOID_ROUTER),
    ..COMMON
};

/// GLM-5.3-Flash: every fourth layer has latent attention, with pooled index keys and no positions.
const GLM5: Family = Family {
    latent_eps: LatentEps::Config,
    scale: ScaleRule::Plain,
    indexer: Some(IndexerRule { rotary: Rotary::Half, pool: Some(16), ..GLM_INDEXER }),
    router: Some(RouterRule { defaults: GLM_ROUTER, ..SIGMOID_ROUTER }),
    unrotated: true,
    linear_layers: LinearLayers::ThreeOfFour,
    layers_only: Some("its residual stream is several, mixed between layers (mHC)"),
    defaults: Defaults {
        rms_norm_eps: 1e-5,
        bos_token_id: u32::MAX,
        eos_token_id: u32::MAX,
        ..DEFAULTS
    },
    ..V3
};

/// Kimi Linear and K3: every fourth layer has latent attention, whose rope part is not rotated.
const KIMI: Family = Family {
    scale: ScaleRule::Plain,
    router: Some(RouterRule {
        defaults: RouterDefaults {
            first_k_dense_replace: 1,
            routed_scaling_factor: 2.446,
            ..GLM_ROUTER
        },
        ..SIGMOID_ROUTER
    }),
    unrotated: true,
    linear_layers: LinearLayers::Listed,
    renamed: &[
        ("n_routed_experts", "num_experts"),
        ("num_experts_per_tok", "num_experts_per_token"),
        ("n_shared_experts", "num_shared_experts"),
        ("n_group", "num_expert_group"),
        ("norm_topk_prob", "moe_renormalize"),
        ("scoring_func", "moe_router_activation_func"),
        ("max_position_embeddings", "model_max_length"),
    ],
    layers_only: Some("its other layers have linear attention (KDA)"),
    defaults: Defaults {
        rms_norm_eps: 1e-5,
        query_rank: None,
        bos_token_id: 163_584,
        eos_token_id: 163_586,
        ..DEFAULTS
    },
    ..COMMON
};

const GLM_INDEXER: IndexerRule =
    IndexerRule { rotary: Rotary::Pair, key_norm_eps: 1e-6, heads: 32, pool: None };

const GLM_ROUTER: RouterDefaults =
    RouterDefaults { n_group: Some(1), topk_group: Some(1), ..SIGMOID_ROUTER.defaults };

const SOFTMAX_ROUTER: RouterRule = RouterRule {
    scoring: Scoring::Softmax,
    scoring_func: "softmax",
    group_score: GroupScore::Max,
    plain_methods: &["greedy"],
    grouped_methods: &["group_limited_greedy"],
    default_method: "greedy",
    correction_bias: false,
    normalizes: false,
    experts_alias: "num_experts",
    defaults: RouterDefaults {
        first_k_dense_replace: 0,
        n_shared_experts: 2,
        num_experts_per_tok: None,
        n_group: None,
        topk_group: None,
        norm_topk_prob: false,
        routed_scaling_factor: 1.0,
    },
};

const SIGMOID_ROUTER: RouterRule = RouterRule {
    scoring: Scoring::Sigmoid,
    scoring_func: "sigmoid",
    group_score: GroupScore::TopTwoSum,
    plain_methods: &[],
    grouped_methods: &["noaux_tc"],
    default_method: "noaux_tc",
    correction_bias: true,
    normalizes: true,
    experts_alias: "num_local_experts",
    defaults: RouterDefaults {
        first_k_dense_replace: 3,
        n_shared_experts: 1,
        num_experts_per_tok: Some(8),
        n_group: Some(8),
        topk_group: Some(4),
        norm_topk_prob: true,
        routed_scaling_factor: 2.5,
    },
};
