//! Every malformed value of a configuration is a typed error that names its key.

use mlakit_model::vectors::VectorConfig;
use mlakit_model::{ConfigError, ModelConfig};
use serde_json::{Value, json};

use crate::common::vectors;
use crate::config::{parse, v3_with, v3_without};

/// The key that an error names, and which kind of error it is.
fn kind(error: &ConfigError) -> (&str, &'static str) {
    match error {
        ConfigError::Missing { key, .. } => (key, "missing"),
        ConfigError::Invalid { key, .. } => (key, "invalid"),
        ConfigError::Unsupported { key, .. } => (key, "unsupported"),
        ConfigError::NotJson { .. } => ("", "not json"),
        ConfigError::Io { .. } => ("", "io"),
    }
}

fn refuse(changes: Value, key: &str, expected: &str) {
    let error = parse(&v3_with(changes.clone())).expect_err(&changes.to_string());
    assert_eq!(kind(&error), (key, expected), "{changes}: {error}");
    assert!(error.to_string().contains(key), "{error}");
    assert!(error.to_string().len() < 400, "an error of bounded length: {error}");
}

#[test]
fn wrong_quantisation() {
    refuse(json!({"quantization_config": "fp8"}), "quantization_config", "invalid");
    for block in [json!([128]), json!([128, 0]), json!([128, -1]), json!(["a", 128]), json!([])] {
        let form = json!({"quant_method": "fp8", "weight_block_size": block});
        let key = "quantization_config.weight_block_size";
        refuse(json!({ "quantization_config": form }), key, "invalid");
    }
    let form = json!({"quant_method": 8});
    refuse(json!({ "quantization_config": form }), "quantization_config.quant_method", "invalid");
}

#[test]
fn missing_keys() {
    for key in [
        "hidden_size",
        "vocab_size",
        "num_hidden_layers",
        "num_attention_heads",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "intermediate_size",
        "first_k_dense_replace",
        "moe_intermediate_size",
        "num_experts_per_tok",
        "n_group",
        "topk_group",
    ] {
        refuse(json!({ key: null }), key, "missing");
    }
    for key in ["rms_norm_eps", "routed_scaling_factor"] {
        refuse(json!({ key: null }), key, "missing");
    }
    // Nothing says how many experts there are, or that there are none.
    let error = parse(&v3_without(json!({}), &["n_routed_experts"])).unwrap_err();
    assert_eq!(kind(&error), ("n_routed_experts", "missing"), "{error}");
    // The class of DeepSeek-V2 has no default for these.
    for key in ["num_experts_per_tok", "n_group", "topk_group"] {
        let v2 = json!({
            "model_type": "deepseek_v2", "scoring_func": "softmax", "norm_topk_prob": false,
            "topk_method": "group_limited_greedy"
        });
        let error = parse(&v3_without(v2, &[key])).unwrap_err();
        assert_eq!(kind(&error), (key, "missing"), "{error}");
    }
    // Eight groups by default, which twelve experts do not make.
    let few = json!({"n_routed_experts": 12, "num_experts_per_tok": 2});
    let error = parse(&v3_without(few, &["n_group", "topk_group"])).unwrap_err();
    assert_eq!(kind(&error), ("n_group", "missing"), "{error}");
    refuse(json!({"model_type": null, "architectures": null}), "model_type", "missing");
    refuse(json!({"rope_scaling": {"type": "yarn"}}), "rope_scaling.factor", "missing");
    refuse(json!({"rope_scaling": {"factor": 40}}), "rope_scaling.rope_type", "missing");
    let yarn = json!({
        "rope_scaling": {"type": "yarn", "factor": 4}, "max_position_embeddings": null
    });
    refuse(yarn, "rope_scaling.original_max_position_embeddings", "missing");
    let sparse = |key: &str| {
        let mut config = json!({
            "model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128,
            "index_topk": 2048
        });
        assert!(parse(&v3_with(config.clone())).is_ok());
        config[key] = Value::Null;
        config
    };
    for key in ["index_n_heads", "index_head_dim", "index_topk"] {
        refuse(sparse(key), key, "missing");
    }
}

/// Sizes that are no sizes, for every key that is one.
#[test]
fn sizes() {
    let keys = [
        "hidden_size",
        "vocab_size",
        "num_hidden_layers",
        "num_attention_heads",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "intermediate_size",
        "max_position_embeddings",
        "moe_intermediate_size",
        "n_routed_experts",
        "n_shared_experts",
        "num_experts_per_tok",
        "n_group",
        "topk_group",
        "moe_layer_freq",
        "num_nextn_predict_layers",
        "bos_token_id",
        "first_k_dense_replace",
    ];
    let values = [
        json!(-1),
        json!(1.5),
        json!("64"),
        json!(true),
        json!([64]),
        json!({}),
        json!(1e18),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(4_294_967_296_u64),
        json!(1e300),
    ];
    for key in keys {
        for value in &values {
            refuse(json!({ key: value }), key, "invalid");
        }
    }
    let zero_is_legal = [
        "qk_rope_head_dim",
        "n_shared_experts",
        "num_nextn_predict_layers",
        "bos_token_id",
        "first_k_dense_replace",
    ];
    for key in keys.iter().filter(|key| !zero_is_legal.contains(key)) {
        refuse(json!({ *key: 0 }), key, "invalid");
    }
}

#[test]
fn sizes_that_contradict_each_other() {
    for (changes, key) in [
        (json!({"qk_rope_head_dim": 63}), "qk_rope_head_dim"),
        (json!({"n_group": 7}), "n_group"),
        (json!({"n_group": 256}), "n_group"),
        (json!({"n_group": 512}), "n_group"),
        (json!({"topk_group": 9}), "topk_group"),
        (json!({"num_experts_per_tok": 129}), "num_experts_per_tok"),
        (json!({"n_shared_experts": 1000}), "n_shared_experts"),
        (json!({"bos_token_id": 129_280}), "bos_token_id"),
        (json!({"eos_token_id": 129_280}), "eos_token_id"),
        (json!({"eos_token_id": [1, 129_280]}), "eos_token_id"),
        (json!({"eos_token_id": [1, "2"]}), "eos_token_id"),
        (json!({"eos_token_id": "1"}), "eos_token_id"),
        (json!({"mlp_layer_types": ["dense"]}), "mlp_layer_types"),
        (json!({"num_hidden_layers": 1, "mlp_layer_types": ["wide"]}), "mlp_layer_types"),
        (json!({"num_hidden_layers": 1, "mlp_layer_types": [1]}), "mlp_layer_types"),
        (json!({"mlp_layer_types": "dense"}), "mlp_layer_types"),
        (json!({"layer_types": ["full_attention"]}), "layer_types"),
        (json!({"layer_types": {}}), "layer_types"),
    ] {
        refuse(changes, key, "invalid");
    }
    let narrow = json!({
        "model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 32, "index_topk": 8
    });
    refuse(narrow, "index_head_dim", "invalid");
}

#[test]
fn numbers_and_flags() {
    let number = [json!("1"), json!(0), json!(-1), json!([]), json!(1e31)];
    for value in &number {
        for key in ["rms_norm_eps", "routed_scaling_factor", "rope_theta"] {
            refuse(json!({ key: value }), key, "invalid");
        }
        for key in ["factor", "beta_fast", "beta_slow", "attention_factor"] {
            let mut scaling = json!({"type": "yarn", "factor": 40});
            scaling[key] = value.clone();
            let name = format!("rope_scaling.{key}");
            refuse(json!({ "rope_scaling": scaling }), &name, "invalid");
        }
    }
    refuse(json!({"rms_norm_eps": 1}), "rms_norm_eps", "invalid");
    refuse(json!({"rope_theta": 1}), "rope_theta", "invalid");
    for (key, value) in [
        ("mscale", json!(-1)),
        ("mscale_all_dim", json!("one")),
        ("truncate", json!(1)),
        ("original_max_position_embeddings", json!(0)),
        ("rope_theta", json!(0.5)),
    ] {
        let mut scaling = json!({"type": "yarn", "factor": 40});
        scaling[key] = value;
        let name = format!("rope_scaling.{key}");
        refuse(json!({ "rope_scaling": scaling }), &name, "invalid");
    }
    for key in
        ["attention_bias", "tie_word_embeddings", "mlp_bias", "norm_topk_prob", "rope_interleave"]
    {
        for value in [json!(1), json!("true"), json!([])] {
            refuse(json!({ key: value }), key, "invalid");
        }
    }
    refuse(json!({"rope_scaling": []}), "rope_scaling", "invalid");
    refuse(json!({"rope_parameters": "yarn"}), "rope_parameters", "invalid");
    refuse(json!({"rope_scaling": {"type": 3}}), "rope_scaling.type", "invalid");
    let plain = json!({"rope_type": "default", "rope_theta": 10000});
    refuse(json!({"rope_parameters": plain}), "rope_parameters", "invalid");
    refuse(json!({"model_type": 3}), "model_type", "invalid");
    refuse(json!({"hidden_act": 3}), "hidden_act", "invalid");
}

#[test]
fn values_that_are_not_supported() {
    for (changes, key) in [
        (json!({"model_type": "llama"}), "model_type"),
        (json!({"model_type": ""}), "model_type"),
        (json!({"model_type": null, "architectures": ["LlamaForCausalLM"]}), "architectures"),
        (json!({"model_type": null, "architectures": [1]}), "architectures"),
        (json!({"hidden_act": "gelu"}), "hidden_act"),
        (json!({"scoring_func": "softmax"}), "scoring_func"),
        (json!({"topk_method": "greedy"}), "topk_method"),
        (json!({"rope_scaling": {"type": "longrope"}}), "rope_scaling.type"),
        (json!({"rope_parameters": {"rope_type": "linear"}}), "rope_parameters.rope_type"),
        (json!({"num_hidden_layers": 1, "layer_types": ["linear_attention"]}), "layer_types"),
        (json!({"num_hidden_layers": 1, "layer_types": [null]}), "layer_types"),
        (
            json!({"num_hidden_layers": 1, "layer_types": ["deepseek_sparse_attention"]}),
            "layer_types",
        ),
    ] {
        refuse(changes, key, "unsupported");
    }
    let v2 = json!({"model_type": "deepseek_v2", "scoring_func": null, "topk_method": "greedy"});
    refuse(v2, "norm_topk_prob", "unsupported");
}

#[test]
fn texts_that_are_no_object() {
    let deep = "[".repeat(100_000);
    let texts = ["", "{", "[]", "null", "{\"a\":}", "{\"rope_theta\": NaN}", "\u{0}", &deep];
    for text in texts {
        let error = ModelConfig::from_json(text.as_bytes()).unwrap_err();
        assert_eq!(kind(&error).1, "not json", "{error}");
    }
    assert_eq!(kind(&ModelConfig::from_json(b"\xFF{}").unwrap_err()).1, "not json");
    let large = vec![b' '; (16 << 20) + 1];
    assert_eq!(kind(&ModelConfig::from_json(&large).unwrap_err()).1, "not json");
    let missing = ModelConfig::from_file(&vectors("no_such_model").join("config.json"));
    assert_eq!(kind(&missing.unwrap_err()).1, "io");
}

/// Descriptions of vectors are read as strictly, and what is not computed is refused.
#[test]
fn descriptions_of_vectors() {
    let text = std::fs::read(vectors("full_v3_h16").join("config.json")).unwrap();
    let root: Value = serde_json::from_slice(&text).unwrap();
    for (pointer, value, key, expected) in [
        ("/arch/heads", json!(0), "arch.heads", "invalid"),
        ("/arch/rope_dim", json!(3), "arch.rope_dim", "invalid"),
        ("/arch/rope_style", json!("third"), "arch.rope_style", "invalid"),
        ("/arch/scale", json!(-1), "arch.scale", "invalid"),
        ("/arch/family", json!("v4"), "arch.family", "unsupported"),
        ("/arch/rope/rope_type", json!("x"), "arch.rope.rope_parameters.rope_type", "unsupported"),
    ] {
        let mut root = root.clone();
        *root.pointer_mut(pointer).unwrap() = value;
        let config = VectorConfig::from_json(root.to_string().as_bytes()).unwrap();
        let error = config.attention("L0").unwrap_err();
        assert_eq!(kind(&error), (key, expected), "{error}");
    }
    for (key, value) in [("sinks", json!(true)), ("gate", json!("third"))] {
        let mut root = root.clone();
        root["arch"][key] = value;
        let config = VectorConfig::from_json(root.to_string().as_bytes()).unwrap();
        assert_eq!(kind(&config.attention("L0").unwrap_err()).1, "unsupported");
    }
    for key in ["name", "seed", "weights"] {
        let mut root = root.clone();
        root[key] = json!([]);
        let error = VectorConfig::from_json(root.to_string().as_bytes()).unwrap_err();
        assert_eq!(kind(&error), (key, "invalid"));
    }
}
