//! Whole tiny models against transformers' fp32 results.

use mlakit_model::{ForwardOptions, ModelFolder, Reference, Selection};

use crate::common::{Bound, Expected, close, vectors};

const MODELS: [&str; 6] =
    ["deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "minicpm3"];
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
        let topk: Vec<Option<(Vec<i32>, usize)>> = (0..2)
            .map(|layer| {
                let topk = format!("prefill.L{layer}.topk");
                expected.has(&topk).then(|| (expected.i32(&topk), expected.width(&topk)))
            })
            .collect();
        let selections: Vec<_> = topk
            .iter()
            .map(|topk| topk.as_ref().map(|(keys, width)| Selection { keys, width: *width }))
            .collect();
        let options = ForwardOptions { selections: &selections, ..ForwardOptions::default() };
        let ids = expected.ids("prefill.input_ids");
        let forward = model.forward(&ids, &mut model.cache(0), options).unwrap();
        let hidden = expected.f64("prefill.last_hidden");
        let what = format!("{name} last hidden");
        close(&what, &forward.last_hidden, &hidden, HIDDEN, HIDDEN_BOUND);
        for (index, trace) in forward.layers.iter().enumerate() {
            let tensor = |part: &str| expected.f64(&format!("prefill.L{index}.{part}"));
            let what = |part: &str| format!("{name} L{index} {part}");
            let bound = HIDDEN_BOUND;
            close(&what("input"), &trace.attention_input, &tensor("attn_in"), HIDDEN, bound);
            close(&what("output"), &trace.attention_output, &tensor("attn_out"), HIDDEN, bound);
        }
    }
}

/// A sparse model needs its own selection for these.
const DENSE_MODELS: [&str; 5] =
    ["deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "glm4_moe_lite", "minicpm3"];

#[test]
fn sequences_alone_give_the_packed_results() {
    for name in DENSE_MODELS {
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
    for name in DENSE_MODELS {
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
