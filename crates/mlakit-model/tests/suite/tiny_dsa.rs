//! The real checkpoint: transformers' fp32 results on text.

use mlakit_model::{
    Error, Form, ForwardOptions, Keys, LatentCache, ModelConfig, ModelFolder, Reference, Selection,
    Sequence, embedded,
};

use crate::common::{Bound, Expected, attention, close, equal_selections, tiny_dsa};

const HIDDEN: usize = 256;
const VOCABULARY: usize = 258;
fn expected() -> Expected {
    Expected::open(&tiny_dsa().join("reference.safetensors"))
}

/// All 512 tokens, each layer selecting 128 keys by itself.
#[test]
fn logits_and_selections() {
    let folder = ModelFolder::open(&tiny_dsa()).unwrap();
    folder.checkpoint.verify(&folder.config).unwrap();
    let model = Reference::new(&folder.config, &folder.checkpoint).unwrap();
    let expected = expected();
    let ids = expected.ids("input_ids");
    let forward = model.forward(&ids, &mut model.cache(0), ForwardOptions::default()).unwrap();
    let logits = model.logits(&forward.last_hidden).unwrap();
    let bound = Bound { relative: 1e-4, absolute: 1e-3 };
    close("logits", &logits, &expected.f64("logits"), VOCABULARY, bound);
    for (layer, trace) in forward.layers.iter().enumerate() {
        let wanted = |part: &str| expected.f64(&format!("L{layer}.{part}"));
        let (input, output) = (wanted("attn_in"), wanted("attn_out"));
        close(&format!("L{layer} input"), &trace.attention_input, &input, HIDDEN, bound);
        close(&format!("L{layer} output"), &trace.attention_output, &output, HIDDEN, bound);
        let topk = expected.i32(&format!("L{layer}.topk"));
        let selected = trace.selected.as_ref().unwrap();
        equal_selections(&format!("L{layer} topk"), selected, &topk, &[1.0; 512]);
    }
}

/// The same tokens in pieces through the cache.
#[test]
fn pieces_change_no_number() {
    let folder = ModelFolder::open(&tiny_dsa()).unwrap();
    let model = Reference::new(&folder.config, &folder.checkpoint).unwrap();
    let ids = &expected().ids("input_ids")[..200];
    let whole = model.forward(ids, &mut model.cache(0), ForwardOptions::default()).unwrap();
    let (mut cache, mut pieces) = (model.cache(0), Vec::new());
    for piece in ids.chunks(67) {
        let forward = model.forward(piece, &mut cache, ForwardOptions::default()).unwrap();
        pieces.extend(forward.last_hidden);
    }
    assert!(pieces == whole.last_hidden);
    let dense = ForwardOptions { dense: true, ..ForwardOptions::default() };
    let dense = model.forward(ids, &mut model.cache(0), dense).unwrap();
    assert!(dense.last_hidden[..128 * HIDDEN] == whole.last_hidden[..128 * HIDDEN]);
    assert!(dense.last_hidden[128 * HIDDEN..] != whole.last_hidden[128 * HIDDEN..]);
}

/// All 512 rows, those beyond the first 128 with the stored selection.
#[test]
fn attention_layers_with_their_selection() {
    let folder = ModelFolder::open(&tiny_dsa()).unwrap();
    let expected = expected();
    for layer in 0..3 {
        let config = &folder.config.layers[layer].attention;
        let reference = attention(&folder.checkpoint, config, layer, HIDDEN);
        let input = expected.f64(&format!("L{layer}.attn_in"));
        let keys = expected.i32(&format!("L{layer}.topk"));
        let selection = Keys::Given(Selection { keys: &keys, width: 128 });
        let mut cache = LatentCache::default();
        let mut sequences = [Sequence { rows: 512, first_position: 0, cache: &mut cache }];
        let out = reference.run(&input, &mut sequences, selection, Form::Absorbed).unwrap();
        let wanted = expected.f64(&format!("L{layer}.attn_out"));
        let bound = Bound { relative: 1e-5, absolute: 1e-4 };
        close(&format!("L{layer} sparse"), &out.hidden, &wanted, HIDDEN, bound);
    }
}

/// Greedy text, as long as transformers made it.
#[test]
fn greedy_ids_of_the_embedded_model() {
    let folder = ModelFolder::from_static(embedded::tiny_dsa()).unwrap();
    let tokenizer = folder.tokenizer.as_ref().unwrap();
    let model = Reference::new(&folder.config, &folder.checkpoint).unwrap();
    let wanted = expected().ids("greedy.0");
    let mut ids = tokenizer.encode("MACBETH.\n").unwrap();
    assert_eq!(ids[..], wanted[..ids.len()]);
    let mut cache = model.cache(0);
    let mut all = ids.clone();
    while all.len() < wanted.len() {
        let forward = model.forward(&ids, &mut cache, ForwardOptions::default()).unwrap();
        let last = &forward.last_hidden[(ids.len() - 1) * HIDDEN..];
        let logits = model.logits(last).unwrap();
        let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
        ids = vec![best as u32];
        all.extend(&ids);
    }
    assert_eq!(all, wanted, "{}", tokenizer.decode(&all).unwrap());
}

/// The same weights presented as a dense model: its YaRN of factor 1 moves a frequency by no more
/// than a rounding.
#[test]
fn the_dense_presentation_changes_no_number() {
    let folder = ModelFolder::open(&tiny_dsa()).unwrap();
    let path = tiny_dsa().join("config.deepseek_v3.json");
    let dense = ModelConfig::from_file(&path).unwrap();
    assert!(dense.layers.iter().all(|layer| layer.attention.indexer.is_none()));
    let ids: Vec<u32> = (0..40).map(|i| i * 5 % 256).collect();
    let run = |config: &ModelConfig| -> Result<Vec<f64>, Error> {
        let model = Reference::new(config, &folder.checkpoint)?;
        Ok(model.forward(&ids, &mut model.cache(7), ForwardOptions::default())?.last_hidden)
    };
    let bound = Bound { relative: 1e-5, absolute: 1e-4 };
    close("dense", &run(&dense).unwrap(), &run(&folder.config).unwrap(), HIDDEN, bound);
}
