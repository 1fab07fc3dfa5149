//! What is read from well-formed configurations.

use mlakit_model::config::{
    ExpertsConfig, GroupScore, MlpConfig, ModelConfig, QueryRank, Rotary, RouterConfig, Scoring,
};
use serde_json::{Value, json};

use crate::common::vectors;

/// A configuration of DeepSeek-V3's form, with public sizes.
pub fn v3() -> Value {
    json!({
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
        "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432,
        "num_hidden_layers": 61, "num_attention_heads": 128, "vocab_size": 129280,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "attention_bias": false,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 163840,
        "first_k_dense_replace": 3, "moe_layer_freq": 1, "moe_intermediate_size": 2048,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "norm_topk_prob": true, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
        "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": false, "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
            "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0
        }
    })
}

pub fn parse(value: &Value) -> Result<ModelConfig, mlakit_model::ConfigError> {
    ModelConfig::from_json(value.to_string().as_bytes())
}

/// `v3()` with `changes` laid over it.
pub fn v3_with(changes: Value) -> Value {
    let mut config = v3();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

/// `v3()` with `changes` laid over it and without `keys`.
pub fn v3_without(changes: Value, keys: &[&str]) -> Value {
    let mut config = v3_with(changes);
    keys.iter().for_each(|key| drop(config.as_object_mut().unwrap().remove(*key)));
    config
}

/// The experts of the last layer.
fn experts(config: &Value) -> ExpertsConfig {
    match parse(config).unwrap().layers.last().unwrap().mlp.clone() {
        MlpConfig::Experts(experts) => experts,
        MlpConfig::Dense { .. } => panic!("experts expected"),
    }
}

/// Keys for which the configuration classes of transformers have a default.
const OPTIONAL: [&str; 15] = [
    "rms_norm_eps",
    "q_lora_rank",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "first_k_dense_replace",
    "n_shared_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "routed_scaling_factor",
    "scoring_func",
    "topk_method",
    "attention_bias",
];

/// Defaults of `DeepseekV3Config` and `DeepseekV32Config`, which are the values of the released
/// checkpoint; of `DeepseekV2Config` and `Glm4MoeLiteConfig` (transformers 5).
#[test]
fn absent_keys_mean_what_they_mean_in_transformers() {
    let absent = parse(&v3_without(json!({}), &OPTIONAL)).unwrap();
    assert_eq!(ModelConfig { assumed: Vec::new(), ..absent }, parse(&v3()).unwrap());

    let v2 = json!({"model_type": "deepseek_v2", "num_experts_per_tok": 6});
    let keys: Vec<_> = OPTIONAL.into_iter().filter(|key| *key != "num_experts_per_tok").collect();
    let config = parse(&v3_without(v2.clone(), &keys)).unwrap();
    assert_eq!((config.bos_token_id, config.eos_token_ids), (Some(1), vec![2]));
    assert_eq!(config.layers[0].attention.query_rank, QueryRank::Rank(1536));
    assert!(matches!(config.layers[0].mlp, MlpConfig::Experts(_)));
    let found = experts(&v3_without(v2, &keys));
    assert_eq!(found.shared_width, 2 * found.expert_width);
    let router = found.router;
    assert_eq!((router.groups, router.normalize, router.scaling_factor), (1, false, 1.0));

    let glm = v3_without(json!({"model_type": "glm4_moe_lite"}), &OPTIONAL);
    let config = parse(&glm).unwrap();
    assert_eq!((config.rms_norm_eps, config.tie_word_embeddings), (1e-5, false));
    assert_eq!(config.layers[0].attention.query_rank, QueryRank::Rank(768));
    assert!(matches!(config.layers[0].mlp, MlpConfig::Dense { .. }));
    let found = experts(&glm);
    assert!(matches!(config.layers[1].mlp, MlpConfig::Experts(_)));
    assert_eq!(found.shared_width, found.expert_width);
    let router = found.router;
    assert_eq!((router.groups, router.experts_per_token), (1, 4));
    assert_eq!((router.normalize, router.scaling_factor), (true, 1.8));
}

/// A key that decides what is computed is named, once, with its value, where it is absent, and only
/// there; a flag that means "no" in every model is not.
#[test]
fn what_is_assumed_is_named() {
    let assumed = |config: &Value| -> Vec<(String, Value)> {
        let keys = parse(config).unwrap().assumed.into_iter();
        keys.map(|assumed| (assumed.key, assumed.value)).collect()
    };
    assert_eq!(assumed(&v3()), []);
    for (key, value) in [
        ("q_lora_rank", json!(1536)),
        ("first_k_dense_replace", json!(3)),
        ("n_shared_experts", json!(1)),
        ("num_experts_per_tok", json!(8)),
        ("n_group", json!(8)),
        ("topk_group", json!(4)),
        ("norm_topk_prob", json!(true)),
        ("routed_scaling_factor", json!(2.5)),
        ("rms_norm_eps", json!(1e-6)),
        ("rope_theta", json!(10000.0)),
        ("tie_word_embeddings", json!(false)),
        ("bos_token_id", json!(0)),
        ("eos_token_id", json!(1)),
    ] {
        assert_eq!(assumed(&v3_without(json!({}), &[key])), [(key.to_owned(), value)]);
    }
    for key in ["attention_bias", "topk_method", "scoring_func", "moe_layer_freq"] {
        assert_eq!(assumed(&v3_without(json!({}), &[key])), [], "{key}");
    }
    assert_eq!(assumed(&v3_with(json!({"q_lora_rank": null}))), []);
    // What YaRN is scaled from, and where its ramp begins and ends.
    let mut yarn = v3();
    let inner = yarn["rope_scaling"].as_object_mut().unwrap();
    for key in ["original_max_position_embeddings", "beta_fast", "beta_slow"] {
        inner.remove(key).unwrap();
    }
    let pair = |key: &str, value| (format!("rope_scaling.{key}"), value);
    let needed = [
        pair("original_max_position_embeddings", json!(163_840)),
        pair("beta_fast", json!(32.0)),
        pair("beta_slow", json!(1.0)),
    ];
    assert_eq!(assumed(&yarn), needed);
    // DeepSeek-V2 has two methods to choose by.
    let v2 =
        json!({"model_type": "deepseek_v2", "scoring_func": "softmax", "norm_topk_prob": false});
    let method = ("topk_method".to_owned(), json!("greedy"));
    assert_eq!(assumed(&v3_without(v2, &["topk_method"])), [method]);
    let inner = v3_without(json!({}), &["q_lora_rank", "tie_word_embeddings"]);
    let vectors = assumed(&json!({ "hf_config": inner }));
    assert_eq!(vectors, [("hf_config.q_lora_rank".to_owned(), json!(1536))]);
}

/// What a file says of quantised weights.
#[test]
fn quantisation_is_read() {
    let form = |value: Value| {
        parse(&v3_with(json!({ "quantization_config": value }))).unwrap().quantization
    };
    assert_eq!(form(Value::Null), None);
    let fp8 = form(json!({
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
        "weight_block_size": [128, 64], "modules_to_not_convert": ["lm_head"]
    }));
    let fp8 = fp8.unwrap();
    assert!(fp8.is_fp8());
    assert_eq!((fp8.block, &fp8.plain_modules[..]), (Some([128, 64]), &["lm_head".into()][..]));
    let other = form(json!({"quant_method": "awq", "bits": 4})).unwrap();
    assert_eq!((other.method.as_str(), other.block, other.is_fp8()), ("awq", None, false));
}

/// A null is "none" or "no" where there can be none, whatever the default.
#[test]
fn nulls_are_not_defaults() {
    let nulls = json!({
        "n_shared_experts": null, "norm_topk_prob": null, "q_lora_rank": null,
        "bos_token_id": null, "eos_token_id": null, "rope_interleave": null
    });
    let config = parse(&v3_with(nulls.clone())).unwrap();
    let attention = &config.layers[0].attention;
    assert_eq!((attention.query_rank, attention.rotary), (QueryRank::ByTensor, Rotary::Half));
    assert_eq!((config.bos_token_id, config.eos_token_ids), (None, vec![]));
    let experts = experts(&v3_with(nulls));
    assert_eq!((experts.shared_width, experts.router.normalize), (0, false));
}

#[test]
fn the_other_names_of_keys() {
    let changes = json!({"num_local_experts": 64, "num_mtp_layers": 2});
    let config = v3_without(changes, &["n_routed_experts", "num_nextn_predict_layers"]);
    assert_eq!(experts(&config).router.experts, 64);
    assert_eq!(parse(&config).unwrap().draft_layers, 2);
    let types = json!(vec!["deepseek_sparse_attention"; 61]);
    let sparse = v3_with(json!({
        "model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128,
        "index_topk": 2048, "layer_types": types
    }));
    assert_eq!(parse(&sparse).unwrap().layers.len(), 61);
}

#[test]
fn deepseek_v3() {
    let config = parse(&v3()).unwrap();
    assert_eq!(config.layers.len(), 61);
    assert_eq!(config.draft_layers, 1);
    assert_eq!(config.layers[2].mlp, MlpConfig::Dense { width: 18432 });
    let experts = MlpConfig::Experts(ExpertsConfig {
        router: RouterConfig {
            experts: 256,
            experts_per_token: 8,
            groups: 8,
            groups_kept: 4,
            scoring: Scoring::Sigmoid,
            group_score: GroupScore::TopTwoSum,
            correction_bias: true,
            normalize: true,
            scaling_factor: 2.5,
        },
        expert_width: 2048,
        shared_width: 2048,
    });
    assert!(config.layers[3..].iter().all(|layer| layer.mlp == experts));
    let attention = &config.layers[60].attention;
    assert!((attention.softmax_scale - 0.135_233_78).abs() < 1e-8);
    assert_eq!((attention.qk_head_dim(), attention.cache_width()), (192, 576));
    assert_eq!((attention.query_rank, attention.rotary), (QueryRank::Rank(1536), Rotary::Pair));
    assert_eq!((config.bos_token_id, config.eos_token_ids), (Some(0), vec![1]));
}

#[test]
fn old_and_new_rotary_keys_mean_the_same() {
    let old = parse(&v3()).unwrap();
    let mut parameters = v3()["rope_scaling"].clone();
    parameters["rope_theta"] = json!(10000.0);
    parameters["rope_type"] = json!("yarn");
    let changes = json!({
        "rope_theta": null, "rope_scaling": null, "rope_parameters": parameters.clone()
    });
    assert_eq!(parse(&v3_with(changes)).unwrap(), old);
    parameters["type"] = json!("deepseek_yarn");
    parameters["rope_type"] = Value::Null;
    assert_eq!(parse(&v3_with(json!({"rope_scaling": parameters}))).unwrap(), old);

    let plain = parse(&v3_with(json!({"rope_scaling": null, "rope_theta": 5e5}))).unwrap();
    let rope = plain.layers[0].attention.rope.unwrap();
    assert_eq!((rope.theta, rope.yarn), (5e5, None));
    assert_eq!(plain.layers[0].attention.softmax_scale, 1.0 / 192.0_f64.sqrt());
    let mut both = v3()["rope_scaling"].clone();
    both["rope_theta"] = json!(10000.0);
    assert_eq!(parse(&v3_with(json!({"rope_parameters": both}))).unwrap(), old);
    let empty = json!({"rope_scaling": {}, "rope_theta": 5e5});
    assert_eq!(parse(&v3_with(empty)).unwrap(), plain);
    let typed = json!({"rope_scaling": null, "rope_parameters": {"rope_type": "default"}});
    assert_eq!(parse(&v3_with(typed)).unwrap().layers[0].attention.rope.unwrap().yarn, None);
}

#[test]
fn yarn_defaults_and_zeros() {
    let scaling = json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0}});
    let yarn = parse(&v3_with(scaling)).unwrap().layers[0].attention.rope.unwrap().yarn.unwrap();
    assert_eq!(yarn.original_max_position_embeddings, 163_840);
    assert_eq!((yarn.beta_fast, yarn.beta_slow, yarn.truncate), (32.0, 1.0, true));
    assert_eq!((yarn.mscale, yarn.mscale_all_dim, yarn.attention_factor), (None, None, None));
}

#[test]
fn half_rotation_and_query_rank_by_tensor() {
    let changes = json!({"rope_interleave": false, "q_lora_rank": null});
    let config = parse(&v3_with(changes)).unwrap();
    assert_eq!(config.layers[0].attention.rotary, Rotary::Half);
    assert_eq!(config.layers[0].attention.query_rank, QueryRank::ByTensor);
}

#[test]
fn which_layers_have_experts() {
    let sparse = |changes| {
        let config = parse(&v3_with(changes)).unwrap();
        let layers = config.layers.iter();
        layers.map(|layer| matches!(layer.mlp, MlpConfig::Experts(_))).collect::<Vec<_>>()
    };
    let six = json!({"num_hidden_layers": 6, "moe_layer_freq": 2, "first_k_dense_replace": 1});
    assert_eq!(sparse(six), [false, false, true, false, true, false]);
    let named = json!({"num_hidden_layers": 2, "mlp_layer_types": ["sparse", "dense"]});
    assert_eq!(sparse(named), [true, false]);
    let none = json!({"n_routed_experts": null, "num_experts_per_tok": null});
    assert!(sparse(none).iter().all(|sparse| !sparse));
    let all = json!({"first_k_dense_replace": 0, "intermediate_size": null});
    assert!(sparse(all).iter().all(|sparse| *sparse));
}

#[test]
fn deepseek_v2_routers() {
    let v2 = |method: Value| {
        let changes = json!({
            "model_type": "deepseek_v2", "scoring_func": "softmax", "norm_topk_prob": false,
            "topk_method": method, "n_routed_experts": 160, "topk_group": 3,
        });
        match parse(&v3_with(changes)).unwrap().layers[60].mlp.clone() {
            MlpConfig::Experts(experts) => experts.router,
            MlpConfig::Dense { .. } => panic!("experts expected"),
        }
    };
    let grouped = v2(json!("group_limited_greedy"));
    assert_eq!((grouped.groups, grouped.groups_kept), (8, 3));
    assert_eq!((grouped.scoring, grouped.group_score), (Scoring::Softmax, GroupScore::Max));
    assert!(!grouped.correction_bias);
    for method in [json!("greedy"), Value::Null] {
        assert_eq!(v2(method).groups, 1);
    }
}

#[test]
fn several_end_ids_and_architectures_without_model_type() {
    let changes = json!({"model_type": null, "eos_token_id": [1, 7], "bos_token_id": null});
    let config = parse(&v3_with(changes)).unwrap();
    assert_eq!((config.family.model_type, config.bos_token_id), ("deepseek_v3", None));
    assert_eq!(config.eos_token_ids, [1, 7]);
}

#[test]
fn minicpm3_scales_its_residual_stream() {
    let config = ModelConfig::from_file(&vectors("minicpm3").join("config.json")).unwrap();
    assert_eq!((config.embedding_scale, config.logit_scale), (12.0, 0.5));
    assert!((config.residual_scale - 1.4 / 2.0_f64.sqrt()).abs() < 1e-15);
    assert!(config.tie_word_embeddings);
    let text = std::fs::read(vectors("minicpm3").join("config.json")).unwrap();
    let mut root: Value = serde_json::from_slice(&text).unwrap();
    let inner = root["hf_config"].as_object_mut().unwrap();
    inner.remove("v_head_dim");
    assert_eq!(parse(&root).unwrap().layers[0].attention.v_head_dim, 16);
    let mut inner = root["hf_config"].clone();
    let written = parse(&inner).unwrap();
    for key in ["scale_emb", "scale_depth", "rms_norm_eps", "tie_word_embeddings", "bos_token_id"] {
        inner.as_object_mut().unwrap().remove(key).unwrap();
        let left_out = parse(&inner).unwrap();
        assert!(left_out.assumed.iter().any(|assumed| assumed.key == key), "{key}");
        let assumed = written.assumed.clone();
        assert_eq!(ModelConfig { assumed, ..left_out }, written, "{key}");
    }
    inner["scale_depth"] = Value::Null;
    inner["dim_model_base"] = Value::Null;
    let config = parse(&inner).unwrap();
    assert_eq!((config.residual_scale, config.logit_scale), (1.0, 1.0));
}
