//! Layers that select their keys, on a device.

use half::bf16;
use mlakit::RecordFormat;
use mlakit_model::config::{GateKind, LayerIndexer};
use mlakit_model::decoder::{DecoderDevice, LayerInput, LayerOptions, run_layer, run_layer_f64};
use mlakit_model::vectors::VectorConfig;
use mlakit_model::{AttentionConfig, Checkpoint, ModelFolder, Selected};
use mlakit_serve::CacheSpec;

use crate::checkpoint::{Stored, serialize, tiny_v3};
use crate::common::{Bound, Expected, close, overlap, tiny_dsa, vectors};
use crate::device_layers::{CACHES, Case, LAYER, greedy_ids, options};

const HIDDEN: usize = 64;
const CHUNKS: [Option<usize>; 3] = [None, Some(7), Some(64)];

fn cases() -> Vec<Case> {
    [("deepseek_v32", 2), ("glm_moe_dsa", 3), ("glm5_next", 3)]
        .into_iter()
        .flat_map(|(model, layers)| (0..layers).map(move |layer| Case::new(model, layer)))
        .collect()
}

/// The stored selection of the layer, or of the one before it, which it shares.
fn stored(case: &Case) -> Selected {
    let topk = |layer: &str| format!("prefill.{layer}.topk");
    let name = match case.config.indexer {
        Some(LayerIndexer::Own(_)) => topk(case.label()),
        _ => topk("L0"),
    };
    Selected { keys: case.expected.i32(&name), width: case.expected.width(&name) }
}

fn bf16_options(cache: usize, chunk: Option<usize>) -> LayerOptions {
    LayerOptions { chunk, ..options(RecordFormat::Bf16, CACHES[cache]) }
}

/// `models.md` 9.1: the outputs, with the selection of transformers given.
pub fn sparse_layers_with_their_selection<D: DecoderDevice>(device: &D) {
    for case in cases() {
        let topk = Some(stored(&case).keys);
        let (hidden, q_offsets) = (case.hidden("prefill"), vec![0, 300]);
        let input = LayerInput { hidden, q_offsets, topk, ..LayerInput::default() };
        let expected = case.tensor("prefill", "attn_out");
        for cache in 0..CACHES.len() {
            for chunk in CHUNKS {
                let out = case.run(device, &input, bf16_options(cache, chunk));
                let what = format!("{} cache {cache} chunk {chunk:?}", case.name);
                close(&what, &out, &expected, HIDDEN, LAYER);
            }
        }
    }
}

/// The layer's own indexer: its keys are those of transformers but for near ties, whatever the
/// chunks; the output is that of its selection.
pub fn sparse_layers_select_for_themselves<D: DecoderDevice>(device: &D) {
    for case in cases() {
        let Some(indexer) = case.config.own_indexer() else { continue };
        let (hidden, q_offsets) = (case.hidden("prefill"), vec![0, 300]);
        let input = LayerInput { hidden, q_offsets, ..LayerInput::default() };
        let whole = case.output(device, &input, bf16_options(0, None));
        let selected = whole.topk.clone().unwrap();
        assert_eq!(selected.width, indexer.selected_width());
        let found = overlap(&selected, &stored(&case).keys, indexer.topk);
        println!("{}: overlap {found:.4}", case.name);
        assert!(found >= 0.99, "{}: {found}", case.name);
        let given = LayerInput { topk: Some(selected.keys.clone()), ..input.clone() };
        let given = case.output(device, &given, bf16_options(0, None));
        assert_eq!(given.topk.as_ref(), Some(&selected));
        let wide = |values: &[f32]| -> Vec<f64> { values.iter().copied().map(f64::from).collect() };
        let (own, given) = (wide(&whole.attn_out), wide(&given.attn_out));
        let equal = Bound { relative: 1e-5, absolute: 1e-4 };
        close(&format!("{} given its own selection", case.name), &own, &given, HIDDEN, equal);
        for chunk in [Some(1), Some(7), Some(64)] {
            let pieces = case.output(device, &input, bf16_options(0, chunk));
            let same = overlap(pieces.topk.as_ref().unwrap(), &selected.keys, indexer.topk);
            assert!(same >= 0.999, "{} chunk {chunk:?}: {same}", case.name);
        }
    }
}

/// Rows 292 to 299 after 292 cached ones: at once, and one at a time. With the stored selection.
pub fn sparse_decode_through_the_paged_cache<D: DecoderDevice>(device: &D) {
    for case in cases() {
        let mut hidden = case.hidden("prefill");
        hidden.truncate(292 * HIDDEN);
        hidden.extend(case.hidden("decode"));
        let (q_offsets, topk) = (vec![0, 300], Some(stored(&case).keys));
        let input = LayerInput { hidden, q_offsets, topk, ..LayerInput::default() };
        let expected = case.tensor("decode", "attn_out");
        for cache in 0..CACHES.len() {
            for chunk in [Some(292), Some(1)] {
                let out = case.run(device, &input, bf16_options(cache, chunk));
                let what = format!("{} decode {cache} chunk {chunk:?}", case.name);
                close(&what, &out[292 * HIDDEN..], &expected, HIDDEN, LAYER);
            }
        }
    }
}

/// Several sequences side by side: each selects what it selects alone.
pub fn packed_sparse_sequences<D: DecoderDevice>(device: &D) {
    for case in cases() {
        let Some(indexer) = case.config.own_indexer() else { continue };
        let (hidden, q_offsets) = (case.hidden("varlen"), case.expected.i32("varlen.cu_seqlens"));
        let input = LayerInput { hidden, q_offsets, ..LayerInput::default() };
        for chunk in CHUNKS {
            let packed = case.output(device, &input, bf16_options(0, chunk)).topk.unwrap();
            let mut alone = Vec::new();
            for span in input.q_offsets.windows(2) {
                let rows = span[0] as usize * HIDDEN..span[1] as usize * HIDDEN;
                let hidden = input.hidden[rows].to_vec();
                let q_offsets = vec![0, span[1] - span[0]];
                let input = LayerInput { hidden, q_offsets, ..LayerInput::default() };
                alone.extend(case.output(device, &input, bf16_options(0, None)).topk.unwrap().keys);
            }
            let same = overlap(&packed, &alone, indexer.topk);
            assert!(same >= 0.999, "{} chunk {chunk:?}: {same}", case.name);
        }
    }
}

/// Layers at real head geometry: own selections, and the outputs with the stored ones.
pub fn sparse_layers_of_real_widths<D: DecoderDevice>(device: &D) {
    for name in ["full_v32_h16", "full_glm_dsa_h8", "full_glm5_next_h8"] {
        let folder = ModelFolder::open(&vectors(name)).unwrap();
        let (shape, input) = VectorConfig::from_dir(&vectors(name)).unwrap().input().unwrap();
        let (rows, hidden) = (shape[0], shape[1]);
        let config = &folder.config.layers[0].attention;
        let weights = folder.checkpoint.attention(0, hidden, config).unwrap();
        let expected = Expected::fp32(name);
        let begin = expected.i32("rows")[0] as usize;
        let (stored, width) = (expected.i32("topk"), expected.width("topk"));
        let mut input = LayerInput {
            hidden: input.into_iter().map(bf16::to_f32).collect(),
            q_offsets: vec![0, rows as i32],
            ..LayerInput::default()
        };
        let caller = device.own_stream().unwrap();
        let mut stream = device.stream(&caller).unwrap();
        let options = bf16_options(0, Some(256));
        let own = run_layer(&mut stream, (config, &weights), &input, options).unwrap();
        let own = own.topk.unwrap();
        let last = Selected { keys: own.keys[begin * width..].to_vec(), width };
        let found = overlap(&last, &stored, 1);
        println!("{name}: overlap {found:.5}");
        assert!(found >= 0.99, "{name}: {found}");
        // The rows before have what they selected themselves.
        input.topk = Some([&own.keys[..begin * width], &stored[..]].concat());
        let out = run_layer(&mut stream, (config, &weights), &input, options).unwrap();
        let out: Vec<f64> = out.attn_out[begin * hidden..].iter().map(|v| f64::from(*v)).collect();
        let bound = Bound { absolute: 1.0, ..LAYER };
        close(name, &out, &expected.f64("out"), hidden, bound);
    }
}

/// The tiny checkpoint's layers over every record that has their widths, and over every index
/// record, against the f64 layer on what such a cache holds.
pub fn every_record_against_the_dequantised_cache<D: DecoderDevice>(device: &D) {
    let model = ModelFolder::open(&tiny_dsa()).unwrap();
    let expected = Expected::open(&tiny_dsa().join("reference.safetensors"));
    let config = &model.config.layers[1].attention;
    let weights = model.checkpoint.attention(1, 256, config).unwrap();
    let rows = 200;
    let hidden = expected.f64("L1.attn_in")[..rows * 256].iter().map(|v| *v as f32).collect();
    let topk = Some(expected.i32("L1.topk")[..rows * 128].to_vec());
    let input =
        LayerInput { hidden, q_offsets: vec![0, rows as i32], topk, ..LayerInput::default() };
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let mut records = 0;
    for record in RecordFormat::ALL.into_iter().filter(|record| !record.is_index()) {
        if record.check_parts(512, 64).is_err() {
            continue;
        }
        let options = options(record, CACHES[0]);
        let given = run_layer(&mut stream, (config, &weights), &input, options).unwrap();
        let needed = run_layer_f64((config, &weights), &input, options).unwrap();
        let wide = |values: &[f32]| -> Vec<f64> { values.iter().copied().map(f64::from).collect() };
        let (given, needed) = (wide(&given.attn_out), wide(&needed.attn_out));
        close(record.name(), &given, &needed, 256, LAYER);
        records += 1;
    }
    assert!(records >= 7, "{records} records");
    let input = LayerInput { topk: None, ..input };
    for (index_record, bound) in [
        (RecordFormat::IndexBf16_256, 0.995),
        (RecordFormat::IndexFp8_132, 0.99),
        (RecordFormat::IndexMxfp4_68, 0.99),
    ] {
        let cache = CacheSpec { index_record, ..options(RecordFormat::Bf16, CACHES[0]).cache };
        let options = LayerOptions { cache, chunk: Some(64) };
        let given = run_layer(&mut stream, (config, &weights), &input, options).unwrap();
        let needed = run_layer_f64((config, &weights), &input, options).unwrap();
        let found = overlap(&given.topk.unwrap(), &needed.topk.unwrap().keys, 128);
        println!("{}: overlap {found:.4}", index_record.name());
        assert!(found >= bound, "{}: {found}", index_record.name());
    }
}

/// While a row sees no more keys than it selects, the sparse layer has the numbers of the dense one.
pub fn selecting_every_key_is_dense_attention<D: DecoderDevice>(device: &D) {
    let model = ModelFolder::open(&tiny_dsa()).unwrap();
    let expected = Expected::open(&tiny_dsa().join("reference.safetensors"));
    let sparse = &model.config.layers[0].attention;
    let dense = sparse.clone().dense();
    let hidden = expected.f64("L0.attn_in")[..128 * 256].iter().map(|v| *v as f32).collect();
    let input = LayerInput { hidden, q_offsets: vec![0, 128], ..LayerInput::default() };
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let mut run = |config: &AttentionConfig, options| -> Vec<f64> {
        let weights = model.checkpoint.attention(0, 256, config).unwrap();
        let made = run_layer(&mut stream, (config, &weights), &input, options).unwrap();
        made.attn_out.into_iter().map(f64::from).collect()
    };
    for record in [RecordFormat::Bf16, RecordFormat::E4m3] {
        for cache in CACHES {
            let options = LayerOptions { chunk: Some(50), ..options(record, cache) };
            let (given, needed) = (run(sparse, options), run(&dense, options));
            let bound = Bound { relative: 3e-3, absolute: 1e-2 };
            close(&format!("{} {cache:?}", record.name()), &given, &needed, 256, bound);
        }
    }
}

/// Gates of a head and of an element, and 96 heads without positions (Kimi K3), against f64.
pub fn gated_layers<D: DecoderDevice>(device: &D) {
    let (folder, tensors) = tiny_v3();
    let plain = folder.config.layers[0].attention.clone();
    for gates in [4, 64] {
        let mut tensors = tensors.clone();
        let value = |i: usize| bf16::from_f64((i as f64 * 0.37).sin()).to_f32();
        tensors.push(Stored {
            name: "layers.0.self_attn.g_proj.weight".to_string(),
            dtype: safetensors::Dtype::F32,
            shape: vec![gates, HIDDEN],
            bytes: (0..gates * HIDDEN).flat_map(|i| value(i).to_le_bytes()).collect(),
        });
        let checkpoint = Checkpoint::from_bytes(serialize(&tensors)).unwrap();
        let unrotated = AttentionConfig { rope: None, ..plain.clone() };
        for gate in [None, Some(GateKind::ByTensor)] {
            let config = AttentionConfig { gate, ..unrotated.clone() };
            gated(device, (&config, &checkpoint), HIDDEN);
        }
    }
    let (config, checkpoint) = kimi_k3();
    gated(device, (&config, &checkpoint), 128);
}

fn gated<D: DecoderDevice>(
    device: &D,
    (config, checkpoint): (&AttentionConfig, &Checkpoint),
    hidden: usize,
) {
    let weights = checkpoint.attention(0, hidden, config).unwrap();
    assert!(weights.gate.is_some());
    let rows = 40;
    let input = LayerInput {
        hidden: (0..rows * hidden).map(|i| (i as f32 * 0.61).sin()).collect(),
        q_offsets: vec![0, 3, rows as i32],
        ..LayerInput::default()
    };
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let options = bf16_options(0, Some(9));
    let given = run_layer(&mut stream, (config, &weights), &input, options).unwrap().attn_out;
    let needed = run_layer_f64((config, &weights), &input, options).unwrap().attn_out;
    let wide = |values: &[f32]| -> Vec<f64> { values.iter().copied().map(f64::from).collect() };
    let bound = Bound { absolute: 1.0, ..LAYER };
    let what = format!("{} heads, gate {:?}", config.heads, weights.gate.unwrap().shape());
    close(&what, &wide(&given), &wide(&needed), hidden, bound);
}

/// An attention layer of Kimi K3's form and head geometry, on a narrow residual stream.
fn kimi_k3() -> (AttentionConfig, Checkpoint) {
    const WIDTH: usize = 128;
    let text = serde_json::json!({
        "model_type": "kimi_k3",
        "text_config": {
            "model_type": "kimi_linear", "hidden_size": WIDTH, "intermediate_size": 64,
            "num_hidden_layers": 4, "num_attention_heads": 96, "vocab_size": 64,
            "q_lora_rank": 96, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": true,
            "mla_use_output_gate": true, "rms_norm_eps": 1e-5, "num_experts": null,
            "linear_attn_config": {"full_attn_layers": [1, 4], "kda_layers": [2, 3]}
        }
    });
    let config = mlakit_model::ModelConfig::from_json(text.to_string().as_bytes()).unwrap();
    let config = config.layers[0].latent(0).unwrap().clone();
    assert_eq!((config.heads, config.kv_eps), (96, 1e-5));
    assert!(config.rope.is_none() && config.gate == Some(GateKind::ByTensor));
    let mut state = 7_u32;
    let mut tensor = |name: &str, shape: Vec<usize>, offset: f32| {
        let scale = 1.7 / (*shape.last().unwrap() as f32).sqrt();
        let mut value = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            bf16::from_f32(offset + ((state >> 8) as f32 / (1 << 23) as f32 - 1.0) * scale).to_f32()
        };
        let count: usize = shape.iter().product();
        Stored {
            name: format!("language_model.model.layers.0.self_attn.{name}.weight"),
            dtype: safetensors::Dtype::F32,
            bytes: (0..count).flat_map(|_| value().to_le_bytes()).collect(),
            shape,
        }
    };
    let tensors = [
        tensor("q_a_proj", vec![96, WIDTH], 0.0),
        tensor("q_a_layernorm", vec![96], 1.0),
        tensor("q_b_proj", vec![96 * 192, 96], 0.0),
        tensor("kv_a_proj_with_mqa", vec![576, WIDTH], 0.0),
        tensor("kv_a_layernorm", vec![512], 1.0),
        tensor("kv_b_proj", vec![96 * 256, 512], 0.0),
        tensor("o_proj", vec![WIDTH, 96 * 128], 0.0),
        tensor("g_proj", vec![96 * 128, WIDTH], 0.0),
    ];
    (config, Checkpoint::from_bytes(serialize(&tensors)).unwrap())
}

/// Whole tiny models, each layer selecting for itself or sharing a selection, in one replay a step.
pub fn greedy_ids_of_sparse_models<D: DecoderDevice>(device: &D) {
    for name in ["deepseek_v32", "glm_moe_dsa"] {
        for cache in CACHES {
            greedy_ids(device, name, options(RecordFormat::Bf16, cache).cache);
        }
    }
}
