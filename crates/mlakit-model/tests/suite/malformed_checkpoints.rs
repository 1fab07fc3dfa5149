//! Every malformed checkpoint is a typed error that names the file or tensor.

use std::path::Path;

use mlakit_model::vectors::VectorConfig;
use mlakit_model::{Checkpoint, CheckpointError, Error, InputError, ModelConfig, ModelFolder};
use serde_json::{Value, json};

use crate::checkpoint::{Stored, serialize, stored, write_shards};
use crate::common::{tiny_dsa, vectors};

/// A safetensors file of this header and `data_bytes` zeros.
fn file(header: &str, data_bytes: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data_bytes, 0);
    bytes
}

fn tensor(shape: &str, begin: u64, end: u64) -> String {
    format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":[{begin},{end}]}}}}"#)
}

#[test]
fn files_that_are_no_safetensors() {
    let good = tensor("[2,2]", 0, 16);
    assert!(Checkpoint::from_bytes(file(&good, 16)).is_ok());
    let mut long = file(&good, 16);
    long[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let mut past = file(&good, 16);
    past[..8].copy_from_slice(&1000_u64.to_le_bytes());
    let two = |second: &str| {
        let first = r#""a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#;
        file(&format!("{{{first},{second}}}"), 8)
    };
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("empty file", Vec::new()),
        ("seven bytes", vec![0; 7]),
        ("header of no bytes", vec![0; 8]),
        ("header longer than any", long),
        ("header past the end", past),
        ("header that is no JSON", file("{", 0)),
        ("header that is no object", file("[]", 0)),
        ("header that is no UTF-8", {
            let mut bytes = file("{ }", 0);
            bytes[9] = 0xFF;
            bytes
        }),
        ("data too short", file(&good, 15)),
        ("data too long", file(&good, 17)),
        ("shape larger than data", file(&tensor("[2,3]", 0, 16), 16)),
        ("shape that overflows", file(&tensor("[4294967296,4294967296,4]", 0, 16), 16)),
        ("bytes that overflow", file(&tensor("[9223372036854775807,2]", 0, 16), 16)),
        ("negative size", file(&tensor("[-2,-2]", 0, 16), 16)),
        ("fractional size", file(&tensor("[2.5]", 0, 10), 10)),
        ("size that is no number", file(&tensor("[NaN]", 0, 16), 16)),
        ("offsets backwards", file(&tensor("[2,2]", 16, 0), 16)),
        ("offsets past the end", file(&tensor("[2,2]", 16, 32), 16)),
        ("offsets that overflow", file(&tensor("[2,2]", u64::MAX - 15, u64::MAX), 16)),
        ("unknown dtype", file(&good.replace("F32", "F33"), 16)),
        ("no dtype", file(r#"{"a":{"shape":[1],"data_offsets":[0,4]}}"#, 4)),
        ("no offsets", file(r#"{"a":{"dtype":"F32","shape":[1]}}"#, 4)),
        ("overlap", two(r#""b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}"#)),
        ("hole", two(r#""b":{"dtype":"F32","shape":[0],"data_offsets":[6,6]}"#)),
        ("metadata that is no text", file(r#"{"__metadata__":{"a":1}}"#, 0)),
    ];
    for (what, bytes) in cases {
        match Checkpoint::from_bytes(bytes) {
            Err(CheckpointError::Malformed { .. }) => {}
            other => panic!("{what}: {other:?}"),
        }
    }
}

fn tiny() -> (ModelFolder, Vec<Stored>) {
    let folder = ModelFolder::open(&vectors("deepseek_v3")).unwrap();
    let tensors = stored(&folder.checkpoint);
    (folder, tensors)
}

/// Verifies the tiny model with `change` done to its tensors.
fn verify(change: impl Fn(&mut Vec<Stored>)) -> Error {
    let (folder, mut tensors) = tiny();
    change(&mut tensors);
    let checkpoint = Checkpoint::from_bytes(serialize(&tensors)).unwrap();
    checkpoint.verify(&folder.config).unwrap_err()
}

#[test]
fn a_missing_tensor_is_named_whichever_it_is() {
    let (_, tensors) = tiny();
    for index in 0..tensors.len() {
        let name = tensors[index].name.clone();
        let error = verify(|tensors| {
            tensors.remove(index);
        });
        // Without the packed gate and up projections the separate experts are looked for.
        let sought = match name.as_str() {
            "layers.1.mlp.experts.gate_up_proj" => "layers.1.mlp.experts.0.gate_proj.weight",
            other => other,
        };
        match error {
            Error::Checkpoint(CheckpointError::MissingTensor { tensor, .. }) => {
                assert_eq!(tensor, sought);
            }
            other => panic!("{name}: {other}"),
        }
    }
}

/// The layer behind the decoder layers has all of their tensors, and would run.
#[test]
fn a_layer_of_multi_token_prediction_is_no_decoder_layer() {
    let folder = ModelFolder::open(&tiny_dsa()).unwrap();
    let layers = folder.config.layers.len();
    let text = std::fs::read(tiny_dsa().join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&text).unwrap();
    config["num_hidden_layers"] = json!(layers + 1);
    let config = ModelConfig::from_json(config.to_string().as_bytes()).unwrap();
    match folder.checkpoint.verify(&config).unwrap_err() {
        Error::Checkpoint(CheckpointError::DraftLayer { layer, tensor }) => {
            assert_eq!((layer, tensor), (layers, format!("layers.{layers}.eh_proj.weight")));
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_wrong_shape_is_named_whichever_it_is() {
    let (_, tensors) = tiny();
    for index in 0..tensors.len() {
        let name = tensors[index].name.clone();
        let error = verify(|tensors| tensors[index].shape.insert(0, 1));
        match error {
            Error::Checkpoint(CheckpointError::Shape { tensor, given, .. }) => {
                assert_eq!(tensor, name);
                assert!(given.starts_with("[1, "), "{given}");
            }
            other => panic!("{name}: {other}"),
        }
    }
}

#[test]
fn dtypes_that_are_not_read() {
    for dtype in [safetensors::Dtype::F8_E4M3, safetensors::Dtype::I8, safetensors::Dtype::F64] {
        let error = verify(|tensors| {
            let tensor = &mut tensors[0];
            tensor.dtype = dtype;
            let elements: usize = tensor.shape.iter().product();
            tensor.bytes = vec![0; elements * dtype.bitsize() / 8];
        });
        assert!(
            matches!(&error, Error::Checkpoint(CheckpointError::Dtype { given, .. })
                if *given == dtype.to_string()),
            "{error}"
        );
    }
}

#[test]
fn a_name_given_twice_and_a_head_that_is_missing() {
    let (folder, mut tensors) = tiny();
    let again = Stored { name: "model.norm.weight".to_string(), ..tensors[0].clone() };
    tensors.push(again);
    let error = Checkpoint::from_bytes(serialize(&tensors)).unwrap_err();
    assert!(
        matches!(&error, CheckpointError::Duplicate { tensor, .. } if tensor == "norm.weight"),
        "{error}"
    );
    let mut config = folder.config.clone();
    config.tie_word_embeddings = false;
    let error = folder.checkpoint.verify(&config).unwrap_err();
    assert!(matches!(error, Error::Input(InputError::NoHead)), "{error}");
    let error = folder.checkpoint.layer(&folder.config, 2).unwrap_err();
    assert!(matches!(error, Error::Input(InputError::Layer { layer: 2, layers: 2 })), "{error}");
}

fn open_with_index(dir: &Path, index: &str) -> CheckpointError {
    std::fs::write(dir.join("model.safetensors.index.json"), index).unwrap();
    Checkpoint::open(dir).unwrap_err()
}

#[test]
fn indexes() {
    let (_, tensors) = tiny();
    let outside = tempfile::tempdir().unwrap();
    let dir = outside.path().join("model");
    std::fs::create_dir(&dir).unwrap();
    let index = write_shards(&dir, &tensors);
    // What a traversal would reach is a readable checkpoint, so that only the name can stop it.
    std::fs::write(outside.path().join("evil.safetensors"), serialize(&tensors)).unwrap();
    let absolute = outside.path().join("evil.safetensors").display().to_string();
    let inside = dir.join("sub");
    std::fs::create_dir(&inside).unwrap();
    std::fs::write(inside.join("evil.safetensors"), serialize(&tensors)).unwrap();
    for shard in [
        json!("../evil.safetensors"),
        json!(absolute),
        json!("sub/evil.safetensors"),
        json!("sub\\evil.safetensors"),
        json!("C:evil.safetensors"),
        json!("./evil.safetensors"),
        json!("..safetensors"),
        json!(".."),
        json!(""),
        json!("model.bin"),
        json!("a\u{0}.safetensors"),
        json!(format!("{}.safetensors", "a".repeat(300))),
        json!(1),
        Value::Null,
        json!(["model.safetensors"]),
    ] {
        let mut index = index.clone();
        index["weight_map"]["norm.weight"] = shard.clone();
        match open_with_index(&dir, &index.to_string()) {
            CheckpointError::Index { key, .. } => assert_eq!(key, "norm.weight", "{shard}"),
            other => panic!("{shard}: {other}"),
        }
    }
    for text in
        ["", "[]", "{}", r#"{"weight_map": []}"#, r#"{"weight_map": {}}"#, "{\"weight_map\""]
    {
        let error = open_with_index(&dir, text);
        assert!(matches!(error, CheckpointError::Index { .. }), "{text}: {error}");
    }
    let mut absent = index.clone();
    absent["weight_map"]["norm.weight"] = json!("none.safetensors");
    let error = open_with_index(&dir, &absent.to_string());
    assert!(matches!(error, CheckpointError::Io { .. }), "{error}");
    let mut extra = index.clone();
    extra["weight_map"]["no.such.tensor"] = extra["weight_map"]["norm.weight"].clone();
    let error = open_with_index(&dir, &extra.to_string());
    assert!(matches!(&error, CheckpointError::Index { key, .. } if key == "no.such.tensor"));
}

#[test]
fn folders() {
    let dir = tempfile::tempdir().unwrap();
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(matches!(&error, CheckpointError::NoWeights { found, .. } if found == "none"));
    let error = Checkpoint::open(&dir.path().join("absent")).unwrap_err();
    assert!(matches!(error, CheckpointError::Io { .. }), "{error}");
    for name in ["a.safetensors", "b.safetensors"] {
        std::fs::write(dir.path().join(name), file("{}", 0)).unwrap();
    }
    let error = Checkpoint::open(dir.path()).unwrap_err();
    let names = "a.safetensors, b.safetensors";
    assert!(matches!(&error, CheckpointError::NoWeights { found, .. } if found == names));
    std::fs::write(dir.path().join("model.safetensors"), b"").unwrap();
    assert!(matches!(Checkpoint::open(dir.path()), Err(CheckpointError::Malformed { .. })));
}

#[test]
fn manifests() {
    let text = std::fs::read(vectors("full_minicpm3_h40").join("config.json")).unwrap();
    let root: Value = serde_json::from_slice(&text).unwrap();
    let name = "full_minicpm3_h40.kv_a_layernorm.weight";
    let generate = |entry: Value| {
        let mut root = root.clone();
        root["weights"][name] = entry;
        let config = VectorConfig::from_json(root.to_string().as_bytes()).unwrap();
        config.generate(name).map(|(shape, _)| shape)
    };
    let good = root["weights"][name].clone();
    assert_eq!(generate(good.clone()).unwrap(), [256]);
    let with = |key: &str, value: Value| {
        let mut entry = good.clone();
        entry[key] = value;
        entry
    };
    for entry in [
        Value::Null,
        json!([]),
        with("shape", Value::Null),
        with("shape", json!([-1])),
        with("shape", json!([u64::MAX, 2])),
        with("shape", json!([1_u64 << 40])),
        with("shape", json!([1, 1, 1, 256])),
        with("kind", json!("hash")),
        with("kind", Value::Null),
        json!({"shape": [2], "kind": "uniform", "exp": 1000}),
        json!({"shape": [2], "kind": "uniform"}),
    ] {
        let error = generate(entry.clone()).unwrap_err();
        assert!(matches!(error, CheckpointError::Index { .. }), "{entry}: {error}");
    }
    let error = generate(with("shape", json!([255]))).unwrap_err();
    assert!(matches!(error, CheckpointError::Hash { .. }), "{error}");
}
