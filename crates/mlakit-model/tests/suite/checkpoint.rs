//! What is read from well-formed checkpoints: layouts of files, names, dtypes and biases.

use std::path::Path;

use half::{bf16, f16};
use mlakit_model::checkpoint::QueryWeights;
use mlakit_model::config::{AttentionConfig, GateKind, MlpConfig, QueryRank};
use mlakit_model::{
    AttentionReference, Checkpoint, Dtype, Form, ForwardOptions, Keys, LatentCache, MlpWeights,
    ModelFolder, Reference, Sequence, embedded,
};
use safetensors::tensor::TensorView;
use serde_json::json;

use crate::common::{attention, tiny_dsa, vectors};

/// A tensor of a file that a test writes.
#[derive(Clone)]
pub struct Stored {
    pub name: String,
    pub dtype: safetensors::Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

pub fn stored(checkpoint: &Checkpoint) -> Vec<Stored> {
    let tensor = |name: &&str| {
        let weight = checkpoint.tensor(name).unwrap();
        let dtype = match weight.dtype() {
            Dtype::F32 => safetensors::Dtype::F32,
            Dtype::Bf16 => safetensors::Dtype::BF16,
            Dtype::F16 => safetensors::Dtype::F16,
        };
        let (shape, bytes) = (weight.shape().to_vec(), weight.bytes().to_vec());
        Stored { name: name.to_string(), dtype, shape, bytes }
    };
    checkpoint.names().iter().map(tensor).collect()
}

pub fn serialize(tensors: &[Stored]) -> Vec<u8> {
    let views = tensors.iter().map(|tensor| {
        let view = TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes).unwrap();
        (tensor.name.as_str(), view)
    });
    safetensors::serialize(views, None).unwrap()
}

pub fn tiny_v3() -> (ModelFolder, Vec<Stored>) {
    let folder = ModelFolder::open(&vectors("deepseek_v3")).unwrap();
    let tensors = stored(&folder.checkpoint);
    (folder, tensors)
}

fn last_hidden(folder: &ModelFolder, checkpoint: &Checkpoint) -> Vec<f64> {
    let model = Reference::new(&folder.config, checkpoint).unwrap();
    let options = ForwardOptions::default();
    model.forward(&[3, 1, 4, 1, 5], &mut model.cache(0), options).unwrap().last_hidden
}

#[test]
fn prefixes_and_dtypes_change_no_bit() {
    let (folder, tensors) = tiny_v3();
    let expected = last_hidden(&folder, &folder.checkpoint);
    for dtype in [safetensors::Dtype::F32, safetensors::Dtype::F16, safetensors::Dtype::BF16] {
        let mut changed = tensors.clone();
        for tensor in &mut changed {
            tensor.name = format!("model.{}", tensor.name);
            let values = tensor.bytes.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b));
            tensor.bytes = match dtype {
                safetensors::Dtype::F32 => values.flat_map(|v| v.to_f32().to_le_bytes()).collect(),
                safetensors::Dtype::F16 => {
                    values.flat_map(|v| f16::from_f32(v.to_f32()).to_le_bytes()).collect()
                }
                _ => values.flat_map(bf16::to_le_bytes).collect(),
            };
            tensor.dtype = dtype;
        }
        let checkpoint = Checkpoint::from_bytes(serialize(&changed)).unwrap();
        assert!(last_hidden(&folder, &checkpoint) == expected, "{dtype}");
    }
}

/// One expert a tensor and all experts in two tensors are the same layer.
#[test]
fn packed_and_separate_experts_are_the_same() {
    let (folder, mut tensors) = tiny_v3();
    let expected = last_hidden(&folder, &folder.checkpoint);
    let MlpConfig::Experts(experts) = &folder.config.layers[1].mlp else { panic!("experts") };
    let (width, hidden) = (experts.expert_width, folder.config.hidden_size);
    let prefix = "layers.1.mlp.experts";
    let mut separate = Vec::new();
    for tensor in tensors.extract_if(.., |tensor| tensor.name.starts_with(prefix)) {
        for (expert, bytes) in tensor.bytes.chunks_exact(2 * width * hidden * 2).enumerate() {
            let gate_up = tensor.name.ends_with("gate_up_proj");
            let parts = if gate_up { vec!["gate_proj", "up_proj"] } else { vec!["down_proj"; 2] };
            let part_bytes = bytes.len() / 2;
            for (part, bytes) in parts.iter().zip(bytes.chunks_exact(part_bytes)) {
                // A chunk of the down projections holds two experts.
                let expert = if gate_up { expert } else { 2 * expert };
                let shape = if gate_up { vec![width, hidden] } else { vec![hidden, width] };
                let name = format!("{prefix}.{expert}.{part}.weight");
                let again = separate.iter().any(|s: &Stored| s.name == name);
                let name =
                    if again { format!("{prefix}.{}.{part}.weight", expert + 1) } else { name };
                separate.push(Stored { name, dtype: tensor.dtype, shape, bytes: bytes.to_vec() });
            }
        }
    }
    assert_eq!(separate.len(), 12);
    tensors.extend(separate);
    let checkpoint = Checkpoint::from_bytes(serialize(&tensors)).unwrap();
    assert!(last_hidden(&folder, &checkpoint) == expected);
}

pub fn write_shards(dir: &Path, tensors: &[Stored]) -> serde_json::Value {
    let mut map = serde_json::Map::new();
    for (index, shard) in tensors.chunks(tensors.len().div_ceil(3)).enumerate() {
        let file = format!("model-0000{}-of-00003.safetensors", index + 1);
        std::fs::write(dir.join(&file), serialize(shard)).unwrap();
        map.extend(shard.iter().map(|tensor| (tensor.name.clone(), json!(file))));
    }
    json!({"metadata": {"total_size": 0}, "weight_map": map})
}

#[test]
fn shards_are_read_through_their_index() {
    let (folder, tensors) = tiny_v3();
    let dir = tempfile::tempdir().unwrap();
    let index = write_shards(dir.path(), &tensors);
    let path = dir.path().join("model.safetensors.index.json");
    std::fs::write(path, index.to_string()).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    checkpoint.verify(&folder.config).unwrap();
    assert_eq!(checkpoint.names().len(), tensors.len());
    assert!(last_hidden(&folder, &checkpoint) == last_hidden(&folder, &folder.checkpoint));
}

#[test]
fn a_file_of_any_name_is_found_where_it_is_the_only_one() {
    let (_, tensors) = tiny_v3();
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("some.safetensors"), serialize(&tensors)).unwrap();
    assert_eq!(Checkpoint::open(dir.path()).unwrap().names().len(), tensors.len());
}

#[test]
fn the_embedded_model_is_the_one_in_the_folder_and_is_not_copied() {
    let files = embedded::tiny_dsa();
    let folder = ModelFolder::from_static(files).unwrap();
    folder.checkpoint.verify(&folder.config).unwrap();
    let mapped = ModelFolder::open(&tiny_dsa()).unwrap();
    assert_eq!(folder.config, mapped.config);
    assert_eq!(folder.checkpoint.names(), mapped.checkpoint.names());
    for layer in 0..folder.config.layers.len() {
        let weights = folder.checkpoint.layer(&folder.config, layer).unwrap();
        let matrix = weights.attention.kv_up;
        assert!(files.weights.as_ptr_range().contains(&matrix.bytes().as_ptr()));
        assert_eq!(matrix.as_bf16().unwrap().len(), matrix.elements());
        let other = mapped.checkpoint.layer(&mapped.config, layer).unwrap();
        assert_eq!(other.attention.kv_up.bytes(), matrix.bytes());
        assert!(matches!(weights.attention.query, QueryWeights::LowRank { .. }));
        assert_eq!(weights.attention.indexer.unwrap().key.shape(), [128, 256]);
        match weights.mlp {
            MlpWeights::Dense(_) => assert_eq!(layer, 0),
            MlpWeights::Experts(experts) => {
                assert_eq!(experts.experts.len(), 8);
                assert_eq!(experts.router.dtype(), Dtype::F32);
            }
        }
    }
    let stored: usize = files.weights.len();
    assert!(folder.checkpoint.tensor_bytes() < stored);
}

/// The weights of a tiny layer, with `extra` tensors, as a layer of `config`.
fn layer_with(config: &AttentionConfig, extra: &[(&str, Vec<usize>, f32)]) -> AttentionReference {
    let (_, mut tensors) = tiny_v3();
    for (name, shape, value) in extra {
        let count: usize = shape.iter().product();
        tensors.push(Stored {
            name: format!("layers.0.self_attn.{name}"),
            dtype: safetensors::Dtype::F32,
            shape: shape.clone(),
            bytes: value.to_le_bytes().repeat(count),
        });
    }
    let checkpoint = Checkpoint::from_bytes(serialize(&tensors)).unwrap();
    attention(&checkpoint, config, 0, 64)
}

fn out(layer: &AttentionReference, hidden: &[f64]) -> Vec<f64> {
    let mut cache = LatentCache::default();
    let mut sequences = [Sequence { rows: 8, first_position: 3, cache: &mut cache }];
    layer.run(hidden, &mut sequences, Keys::Own, Form::Naive).unwrap().hidden
}

#[test]
fn query_factors_are_found_by_their_tensors() {
    let (folder, _) = tiny_v3();
    let hidden: Vec<f64> = (0..8 * 64).map(|i| (i as f64 * 0.37).sin()).collect();
    let stated = folder.config.layers[0].attention.clone();
    let found = AttentionConfig { query_rank: QueryRank::ByTensor, ..stated.clone() };
    assert!(out(&layer_with(&stated, &[]), &hidden) == out(&layer_with(&found, &[]), &hidden));
}

/// Gates of weight zero are one half; biases of zero change nothing and others do.
#[test]
fn gates_and_biases() {
    let (folder, _) = tiny_v3();
    let hidden: Vec<f64> = (0..8 * 64).map(|i| (i as f64 * 0.37).sin()).collect();
    let plain = folder.config.layers[0].attention.clone();
    let expected = out(&layer_with(&plain, &[]), &hidden);
    for (kind, rows) in [(GateKind::PerHead, 4), (GateKind::PerElement, 64)] {
        let config = AttentionConfig { gate: Some(kind), ..plain.clone() };
        let half = out(&layer_with(&config, &[("g_proj.weight", vec![rows, 64], 0.0)]), &hidden);
        for (gated, whole) in half.iter().zip(&expected) {
            assert!((gated - 0.5 * whole).abs() < 1e-14, "{kind:?}: {gated} of {whole}");
        }
        // Whether the config names it, or not, or leaves its kind to the tensor.
        for gate in [None, Some(GateKind::ByTensor)] {
            let config = AttentionConfig { gate, ..plain.clone() };
            let found = layer_with(&config, &[("g_proj.weight", vec![rows, 64], 0.0)]);
            assert!(out(&found, &hidden) == half, "{kind:?} by tensor");
        }
        let shut = [("g_proj.weight", vec![rows, 64], -1.0)];
        let shut = out(&layer_with(&config, &shut), &vec![100.0; 8 * 64]);
        assert!(shut.iter().all(|value| value.abs() < 1e-12), "{kind:?}");
    }
    let config = AttentionConfig { bias: true, ..plain };
    let biases = |value: f32| {
        [
            ("q_a_proj.bias", vec![48], value),
            ("kv_a_proj_with_mqa.bias", vec![72], value),
            ("o_proj.bias", vec![64], value),
        ]
    };
    assert!(out(&layer_with(&config, &biases(0.0)), &hidden) == expected);
    let mut only_output = biases(0.0);
    only_output[2].2 = 0.25;
    let shifted = out(&layer_with(&config, &only_output), &hidden);
    assert!(shifted.iter().zip(&expected).all(|(s, e)| (s - e - 0.25).abs() < 1e-14));
    assert!(out(&layer_with(&config, &biases(0.25)), &hidden) != shifted);
}

/// A window equals the selection of the same keys; rows whose selection is empty give 0 and -inf.
#[test]
fn windows_and_empty_selections() {
    use mlakit_model::Selection;
    let (folder, _) = tiny_v3();
    let hidden: Vec<f64> = (0..8 * 64).map(|i| (i as f64 * 0.37).sin()).collect();
    let plain = folder.config.layers[0].attention.clone();
    let windowed = AttentionConfig { window: Some(3), ..plain.clone() };
    let keys: Vec<i32> = (0..8_i32).flat_map(|t| [t, t - 1, t - 2, t, 99, t + 1]).collect();
    let layer = layer_with(&plain, &[]);
    let run = |keys: &[i32], width| {
        let mut cache = LatentCache::default();
        let mut sequences = [Sequence { rows: 8, first_position: 3, cache: &mut cache }];
        let keys = Keys::Given(Selection { keys, width });
        layer.run(&hidden, &mut sequences, keys, Form::Naive).unwrap()
    };
    assert!(run(&keys, 6).hidden == out(&layer_with(&windowed, &[]), &hidden));
    let empty = run(&[-1; 8], 1);
    assert!(empty.lse.iter().all(|lse| *lse == f64::NEG_INFINITY));
    assert!(empty.heads.iter().chain(&empty.hidden).all(|value| *value == 0.0));
}
