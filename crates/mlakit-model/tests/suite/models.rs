//! Whole tiny models against transformers' fp32 results.

use mlakit_model::{Error, ForwardOptions, InputError, ModelFolder, Reference};

use crate::common::{Bound, Expected, close, equal_selections, vectors};

const MODELS: [&str; 7] = [
    "deepseek_v2",
    "deepseek_v2_lite",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "minicpm3",
];
const HIDDEN: usize = 64;
const HIDDEN_BOUND: Bound = Bound { relative: 1e-5, absolute: 1e-4 };

const MARGIN: Bound = Bound { relative: 1e-3, absolute: 1e-4 };

fn reference(name: &str) -> (Reference, Expected) {
    let folder = ModelFolder::open(&vectors(name)).unwrap();
    folder.checkpoint.verify(&folder.config).unwrap();
    (Reference::new(&folder.config, &folder.checkpoint).unwrap(), Expected::fp32(name))
}

#[test]
fn prefill_gives_the_last_hidden_states() {
    for name in MODELS {
        let (model, expected) = reference(name);
        let ids = expected.ids("prefill.input_ids");
        let forward = model.forward(&ids, &mut model.cache(0), ForwardOptions::default()).unwrap();
        let hidden = expected.f64("prefill.last_hidden");
        let what = format!("{name} last hidden");
        close(&what, &forward.last_hidden, &hidden, HIDDEN, HIDDEN_BOUND);
        for (index, trace) in forward.layers.iter().enumerate() {
            let tensor = |part: &str| expected.f64(&format!("prefill.L{index}.{part}"));
            let what = |part: &str| format!("{name} L{index} {part}");
            let bound = HIDDEN_BOUND;
            close(&what("input"), &trace.attention_input, &tensor("attn_in"), HIDDEN, bound);
            close(&what("output"), &trace.attention_output, &tensor("attn_out"), HIDDEN, bound);
            let topk = format!("prefill.L{index}.topk");
            if expected.has(&topk) {
                let selected = trace.selected.as_ref().unwrap();
                equal_selections(
                    &what("topk"),
                    selected,
                    &expected.i32(&topk),
                    &tensor("topk_gap"),
                );
            }
        }
    }
}

#[test]
fn sequences_alone_give_the_packed_results() {
    for name in MODELS {
        let (model, expected) = reference(name);
        let ids = expected.ids("varlen.input_ids");
        let mut last = Vec::new();
        for span in expected.i32("varlen.cu_seqlens").windows(2) {
            let ids = &ids[span[0] as usize..span[1] as usize];
            let forward =
                model.forward(ids, &mut model.cache(0), ForwardOptions::default()).unwrap();
            last.extend_from_slice(&forward.last_hidden[(ids.len() - 1) * HIDDEN..]);
        }
        let hidden = expected.f64("varlen.last_hidden");
        close(&format!("{name} varlen"), &last, &hidden, HIDDEN, HIDDEN_BOUND);
    }
}

#[test]
fn cached_decode_gives_the_greedy_ids() {
    for name in MODELS {
        let (model, expected) = reference(name);
        let mut ids = expected.ids("greedy.input_ids");
        let margins = expected.f64("greedy.margin");
        let mut cache = model.cache(0);
        let mut given = Vec::new();
        for margin in &margins {
            let forward = model.forward(&ids, &mut cache, ForwardOptions::default()).unwrap();
            let last = &forward.last_hidden[(ids.len() - 1) * HIDDEN..];
            let logits = model.logits(last).unwrap();
            let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
            let mut sorted = logits.clone();
            sorted.sort_by(f64::total_cmp);
            let [.., second, first] = sorted[..] else { panic!("two logits at least") };
            // minicpm3 divides its logits; the stored margins are of the plain products.
            if name != "minicpm3" {
                close("margin", &[first - second], &[*margin], 1, MARGIN);
            }
            given.push(best as u32);
            ids = vec![best as u32];
        }
        assert_eq!(given, expected.ids("greedy.new_ids"), "{name}");
        assert_eq!(given.len(), 12);
    }
}

/// What cannot be run as a whole says so, and what of it can be run.
#[test]
fn models_of_other_layers_are_refused() {
    for name in ["glm5_next", "kimi_linear_nope"] {
        let folder = ModelFolder::open(&vectors(name)).unwrap();
        let error = Reference::new(&folder.config, &folder.checkpoint).unwrap_err();
        assert!(matches!(error, Error::Input(InputError::LayersOnly { .. })), "{name}: {error}");
        assert!(error.to_string().contains("alone"), "{error}");
    }
}
