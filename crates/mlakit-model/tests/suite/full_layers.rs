//! Single attention layers at real head geometry: generated weights, transformers' fp32 results.

use half::bf16;
use mlakit_model::vectors::VectorConfig;
use mlakit_model::{Form, Keys, LatentCache, ModelFolder, Sequence};

use crate::common::{Bound, Expected, LAYER, attention, close, equal_selections, vectors};

/// Every value of the manifests has the hash they state: names, layout and byte order are right.
#[test]
fn generated_weights_have_the_stated_hashes() {
    let mut checked = 0;
    for model in [
        "full_v3_h16",
        "full_v32_h16",
        "full_glm4_lite_h20",
        "full_glm_dsa_h8",
        "full_glm5_next_h8",
        "full_minicpm3_h40",
    ] {
        let text = std::fs::read(vectors(model).join("config.json")).unwrap();
        let root: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let description = VectorConfig::from_dir(&vectors(model)).unwrap();
        for (name, entry) in root["weights"].as_object().unwrap() {
            assert!(entry["bf16_sha256_16"].is_string(), "{name}: no hash to check against");
            let (_, values) = description.generate(name).unwrap();
            if let Some(first) = entry["first8"].as_array() {
                let given: Vec<f64> = values[..8].iter().copied().map(f64::from).collect();
                assert_eq!(given, first.iter().map(|v| v.as_f64().unwrap()).collect::<Vec<_>>());
            }
            checked += 1;
        }
    }
    assert_eq!(checked, 6 * 8 + 5 + 5 + 7);
}

/// The stored weights of a tiny model are the ones its manifest generates.
#[test]
fn generated_weights_equal_stored_ones() {
    let description = VectorConfig::from_dir(&vectors("deepseek_v3")).unwrap();
    let generated = description.checkpoint().unwrap();
    let stored = mlakit_model::Checkpoint::open(&vectors("deepseek_v3")).unwrap();
    assert_eq!(generated.names(), stored.names());
    for name in stored.names() {
        let (a, b) = (generated.tensor(name).unwrap(), stored.tensor(name).unwrap());
        assert_eq!((a.shape(), a.to_f64()), (b.shape(), b.to_f64()), "{name}");
    }
}

/// YaRN's frequencies come from the same roundings as transformers', which gave `out` and `o_last`;
/// `lse` and the edges of the caches come from numpy, whose power differs in the last bit.
const NUMPY: Bound = Bound { relative: 3e-6, absolute: 1e-4 };

/// Such a bit of a frequency is 1e-4 of an angle at position 2,300.
const EDGE: Bound = Bound { relative: 1e-4, absolute: 1e-3 };

/// The last rows of the layer, whose input is cached without being attended from.
fn check(name: &str, bound: Bound) {
    let folder = ModelFolder::open(&vectors(name)).unwrap();
    let description = VectorConfig::from_dir(&vectors(name)).unwrap();
    let (shape, input) = description.input().unwrap();
    let hidden = shape[1];
    let config = &folder.config.layers[0].attention;
    let layer = attention(&folder.checkpoint, config, 0, hidden);
    let expected = Expected::fp32(name);
    let rows = expected.i32("rows");
    let (begin, end) = (rows[0] as usize, rows[1] as usize);
    assert_eq!(end, shape[0]);

    let input: Vec<f64> = input.into_iter().map(bf16::to_f64).collect();
    let mut cache = LatentCache::default();
    let mut sequence = Sequence { rows: begin, first_position: 0, cache: &mut cache };
    layer.fill(&input[..begin * hidden], &mut sequence).unwrap();
    let run = |form| {
        let mut cache = cache.clone();
        let mut sequences = [Sequence { rows: end - begin, first_position: 0, cache: &mut cache }];
        let out = layer.run(&input[begin * hidden..], &mut sequences, Keys::Own, form).unwrap();
        (out, cache)
    };
    let (naive, filled) = run(Form::Naive);
    let absorbed = run(Form::Absorbed).0;
    assert_eq!(naive.selected.is_some(), expected.has("topk"));
    if let Some(selected) = &naive.selected {
        equal_selections(name, selected, &expected.i32("topk"), &expected.f64("topk_gap"));
    }

    close(&format!("{name} out"), &naive.hidden, &expected.f64("out"), hidden, bound);
    let v = config.v_head_dim;
    let o_last = expected.f64("o_last");
    let tail = &naive.heads[naive.heads.len() - o_last.len()..];
    close(&format!("{name} o_last"), tail, &o_last, v, bound);
    close(&format!("{name} lse"), &naive.lse, &expected.f64("lse"), config.heads, NUMPY);
    let edge = |values: &[f64], width: usize| {
        [&values[..2 * width], &values[values.len() - 2 * width..]].concat()
    };
    let (rank, rope) = (config.kv_lora_rank, config.qk_rope_head_dim);
    let latent = edge(&filled.latent, rank);
    close(&format!("{name} latent"), &latent, &expected.f64("latent_edge"), rank, NUMPY);
    if expected.has("k_pe_edge_pairlayout") && rope > 0 {
        let keys = edge(&filled.rope_key, rope);
        let wanted = expected.f64("k_pe_edge_pairlayout");
        close(&format!("{name} rope key"), &keys, &wanted, rope, EDGE);
    }
    let equal = Bound { relative: 1e-13, absolute: 1e-13 };
    close(&format!("{name} absorbed-naive"), &absorbed.hidden, &naive.hidden, hidden, equal);
}

#[test]
fn v3_with_16_heads() {
    check("full_v3_h16", Bound { relative: 3e-5, absolute: 1e-4 });
}

/// 2,048 of 2,304 keys are selected.
#[test]
fn v32_with_16_heads() {
    check("full_v32_h16", Bound { relative: 3e-5, absolute: 1e-4 });
}

#[test]
fn glm_dsa_with_8_heads() {
    check("full_glm_dsa_h8", LAYER);
}

/// 128 of up to 150 pools of 16, and the tail.
#[test]
fn glm5_next_with_8_heads() {
    check("full_glm5_next_h8", LAYER);
}

#[test]
fn glm4_lite_with_20_heads() {
    check("full_glm4_lite_h20", LAYER);
}

#[test]
fn minicpm3_with_40_heads() {
    check("full_minicpm3_h40", LAYER);
}
