//! Attention layers of the tiny models against transformers' fp32 results.

use mlakit_model::config::{LayerIndexer, ModelConfig, Rotary};
use mlakit_model::vectors::VectorConfig;
use mlakit_model::{
    AttentionConfig, AttentionOutput, AttentionReference, Checkpoint, Form, Keys, LatentCache,
    Selected, Sequence,
};

use crate::common::{Bound, Expected, LAYER, attention, close, equal_selections, vectors};

const HIDDEN: usize = 64;

/// One layer of a tiny model and its expected values.
struct Case {
    model: &'static str,
    layer: Layer,
    /// The layer whose selection it shares, where it does.
    source: Option<Layer>,
    expected: Expected,
}

struct Layer {
    label: String,
    reference: AttentionReference,
}

/// Runs `check` on every layer of every tiny model that this crate's attention covers.
fn for_cases(check: impl Fn(&Case)) {
    for (model, layers) in [
        ("deepseek_v2", 2),
        ("deepseek_v2_lite", 2),
        ("deepseek_v3", 2),
        ("deepseek_v32", 2),
        ("glm4_moe_lite", 2),
        ("glm_moe_dsa", 3),
        ("glm5_next", 3),
        ("minicpm3", 2),
        ("kimi_linear_nope", 2),
    ] {
        let description = VectorConfig::from_dir(&vectors(model)).unwrap();
        let checkpoint = Checkpoint::open(&vectors(model)).unwrap();
        let load = |layer: usize| {
            let label = format!("L{layer}");
            let config = description.attention(&label).unwrap();
            Layer { reference: attention(&checkpoint, &config, layer, HIDDEN), label }
        };
        for index in 0..layers {
            let layer = load(index);
            let shares = layer.reference.config().indexer == Some(LayerIndexer::Shared);
            let source = shares.then(|| load(index - 1));
            check(&Case { model, layer, source, expected: Expected::fp32(model) });
        }
    }
}

/// The rows of one step: tensor `prefix`, these rows of it, behind these caches.
struct Step<'s> {
    prefix: &'s str,
    rows: std::ops::Range<usize>,
    first_position: usize,
}

/// The cache of the layer, and of the one whose selection it shares.
#[derive(Clone, Default)]
struct Caches {
    own: LatentCache,
    source: LatentCache,
}

impl Layer {
    fn input(&self, expected: &Expected, step: &Step<'_>) -> Vec<f64> {
        let all = expected.f64(&format!("{}.{}.attn_in", step.prefix, self.label));
        all[step.rows.start * HIDDEN..step.rows.end * HIDDEN].to_vec()
    }

    fn run(
        &self,
        (expected, step): (&Expected, &Step<'_>),
        cache: &mut LatentCache,
        (keys, form): (Keys<'_>, Form),
    ) -> AttentionOutput {
        let hidden = self.input(expected, step);
        let (rows, first_position) = (step.rows.len(), step.first_position);
        let mut sequences = [Sequence { rows, first_position, cache }];
        self.reference.run(&hidden, &mut sequences, keys, form).unwrap()
    }
}

impl Case {
    fn name(&self) -> String {
        format!("{} {}", self.model, self.layer.label)
    }

    fn config(&self) -> &AttentionConfig {
        self.layer.reference.config()
    }

    fn tensor(&self, prefix: &str, suffix: &str) -> Vec<f64> {
        self.expected.f64(&format!("{prefix}.{}.{suffix}", self.layer.label))
    }

    /// Expected output of these rows.
    fn output(&self, step: &Step<'_>) -> Vec<f64> {
        let all = self.tensor(step.prefix, "attn_out");
        all[step.rows.start * HIDDEN..step.rows.end * HIDDEN].to_vec()
    }

    fn run(&self, step: &Step<'_>, caches: &mut Caches, form: Form) -> AttentionOutput {
        let on = (&self.expected, step);
        let shared: Option<Selected> = self
            .source
            .as_ref()
            .map(|source| source.run(on, &mut caches.source, (Keys::Own, form)).selected.unwrap());
        let keys = shared.as_ref().map_or(Keys::Own, |shared| Keys::Given(shared.view()));
        self.layer.run(on, &mut caches.own, (keys, form))
    }
}

/// The rows of the prefill.
fn prefill(rows: std::ops::Range<usize>) -> Step<'static> {
    Step { prefix: "prefill", rows, first_position: 0 }
}

#[test]
fn prefill_and_caches() {
    for_cases(|case| {
        let mut caches = Caches::default();
        let given = case.run(&prefill(0..300), &mut caches, Form::Naive);
        let name = case.name();
        let expected = case.tensor("prefill", "attn_out");
        close(&format!("{name} prefill"), &given.hidden, &expected, HIDDEN, LAYER);

        let config = case.config();
        let latent = case.tensor("cache", "latent");
        let what = format!("{name} latent");
        close(&what, &caches.own.latent, &latent, config.kv_lora_rank, LAYER);
        let width = config.qk_rope_head_dim;
        if width > 0 {
            let in_place = case.model.starts_with("deepseek_v2");
            let keys = match config.rotary {
                Rotary::Pair if config.rope.is_some() && !in_place => {
                    deinterleaved(&caches.own.rope_key, (width, width))
                }
                _ => caches.own.rope_key.clone(),
            };
            let what = format!("{name} rope key");
            close(&what, &keys, &case.tensor("cache", "k_pe_hf"), width, LAYER);
        }
        // The file has no keys of pools.
        if let Some(indexer) = config.own_indexer().filter(|indexer| indexer.pool.is_none()) {
            let keys = match indexer.rotary {
                Rotary::Pair => deinterleaved(&caches.own.index_key, (indexer.head_dim, width)),
                Rotary::Half => caches.own.index_key.clone(),
            };
            let wanted = case.tensor("cache", "index_k_hf");
            close(&format!("{name} index key"), &keys, &wanted, indexer.head_dim, LAYER);
        }
    });
}

/// Every row of every indexer, those with near ties left out: there are none.
#[test]
fn selections_are_those_of_transformers() {
    let compared = std::cell::Cell::new(0);
    for_cases(|case| {
        let Some(indexer) = case.config().own_indexer() else { return };
        let given = case.run(&prefill(0..300), &mut Caches::default(), Form::Naive);
        let given = given.selected.unwrap();
        let topk = format!("prefill.{}.topk", case.layer.label);
        assert_eq!(
            (given.width, given.width),
            (indexer.selected_width(), case.expected.width(&topk))
        );
        let gaps = case.tensor("prefill", "topk_gap");
        let near = gaps.iter().filter(|gap| **gap <= 1e-5).count();
        assert!(near < 3, "{}: {near} near ties", case.name());
        equal_selections(&case.name(), &given, &case.expected.i32(&topk), &gaps);
        compared.set(compared.get() + 1);
    });
    assert_eq!(compared.get(), 6);
}

/// transformers returns rotated pairs with the first elements of all pairs before the second ones,
/// except in deepseek_v2 and where nothing is rotated. The first `rope` elements of a key are pairs.
fn deinterleaved(keys: &[f64], (width, rope): (usize, usize)) -> Vec<f64> {
    let order = (0..rope).step_by(2).chain((1..rope).step_by(2)).chain(rope..width);
    keys.chunks_exact(width).flat_map(|key| order.clone().map(|i| key[i])).collect()
}

#[test]
fn decode_through_the_cache() {
    for_cases(|case| {
        let mut caches = Caches::default();
        let prompt = prefill(0..292);
        let fill = |layer: &Layer, cache: &mut LatentCache| {
            let hidden = layer.input(&case.expected, &prompt);
            let mut sequence = Sequence { rows: 292, first_position: 0, cache };
            layer.reference.fill(&hidden, &mut sequence).unwrap();
        };
        fill(&case.layer, &mut caches.own);
        if let Some(source) = &case.source {
            fill(source, &mut caches.source);
        }
        let mut out = Vec::new();
        for row in 0..8 {
            let step = Step { prefix: "decode", rows: row..row + 1, first_position: 0 };
            out.extend(case.run(&step, &mut caches, Form::Naive).hidden);
        }
        let expected = case.tensor("decode", "attn_out");
        close(&format!("{} decode", case.name()), &out, &expected, HIDDEN, LAYER);
    });
}

#[test]
fn packed_sequences_of_several_lengths() {
    for_cases(|case| {
        let bounds = case.expected.i32("varlen.cu_seqlens");
        assert_eq!(bounds.len(), 6);
        for span in bounds.windows(2) {
            let rows = span[0] as usize..span[1] as usize;
            let step = Step { prefix: "varlen", rows, first_position: 0 };
            let out = case.run(&step, &mut Caches::default(), Form::Naive).hidden;
            let what = format!("{} varlen {:?}", case.name(), step.rows);
            close(&what, &out, &case.output(&step), HIDDEN, LAYER);
        }
    });
}

/// Sequences side by side in one call have the results that each has alone.
#[test]
fn company_changes_no_bit() {
    for_cases(|case| {
        let bounds = case.expected.i32("varlen.cu_seqlens");
        let spans = || bounds.windows(2).map(|span| span[0] as usize..span[1] as usize);
        let step = |rows| Step { prefix: "varlen", rows, first_position: 0 };
        let run = |layer: &Layer, keys: Keys<'_>| {
            let hidden = layer.input(&case.expected, &step(0..bounds[5] as usize));
            let mut caches = vec![LatentCache::default(); 5];
            let mut sequences: Vec<Sequence<'_>> = caches
                .iter_mut()
                .zip(spans())
                .map(|(cache, rows)| Sequence { rows: rows.len(), first_position: 0, cache })
                .collect();
            layer.reference.run(&hidden, &mut sequences, keys, Form::Naive).unwrap()
        };
        let shared = case.source.as_ref().map(|source| run(source, Keys::Own).selected.unwrap());
        let keys = shared.as_ref().map_or(Keys::Own, |shared| Keys::Given(shared.view()));
        let packed = run(&case.layer, keys);
        let mut alone = Vec::new();
        for rows in spans() {
            alone.extend(case.run(&step(rows), &mut Caches::default(), Form::Naive).hidden);
        }
        assert!(packed.hidden == alone, "{}: packed rows differ", case.name());
    });
}

#[test]
fn positions_that_do_not_begin_at_zero() {
    for_cases(|case| {
        if !case.expected.has("offset.first_position") {
            assert!(case.config().rope.is_none(), "{}: only NoPE has none", case.name());
            return;
        }
        let first_position = case.expected.i32("offset.first_position")[0] as usize;
        assert_eq!(first_position, 5000);
        let step = Step { prefix: "offset", rows: 0..48, first_position };
        let out = case.run(&step, &mut Caches::default(), Form::Naive).hidden;
        let what = format!("{} offset", case.name());
        close(&what, &out, &case.output(&step), HIDDEN, LAYER);
    });
}

#[test]
fn absorbed_equals_naive() {
    const EQUAL: Bound = Bound { relative: 1e-13, absolute: 1e-13 };
    for_cases(|case| {
        let run = |form| case.run(&prefill(0..300), &mut Caches::default(), form);
        let (naive, absorbed) = (run(Form::Naive), run(Form::Absorbed));
        let what = |part: &str| format!("{} absorbed-naive {part}", case.name());
        close(&what("out"), &absorbed.hidden, &naive.hidden, HIDDEN, EQUAL);
        close(&what("heads"), &absorbed.heads, &naive.heads, case.config().v_head_dim, EQUAL);
        close(&what("lse"), &absorbed.lse, &naive.lse, case.config().heads, EQUAL);
        assert_eq!(absorbed.selected, naive.selected);
    });
}

/// A row's result depends on nothing but its own sequence: fed in pieces of any size it has the
/// same bits.
#[test]
fn pieces_change_no_bit() {
    for_cases(|case| {
        let whole = case.run(&prefill(0..300), &mut Caches::default(), Form::Naive).hidden;
        let mut caches = Caches::default();
        let mut pieces = Vec::new();
        let mut begin = 0;
        for rows in [1, 7, 64, 100, 128] {
            let step = prefill(begin..begin + rows);
            pieces.extend(case.run(&step, &mut caches, Form::Naive).hidden);
            begin += rows;
        }
        assert_eq!(begin, 300);
        assert!(pieces == whole, "{}: pieces differ", case.name());
    });
}

/// Without a selection there is nothing to share.
#[test]
fn a_layer_that_shares_a_selection_must_be_given_one() {
    let description = VectorConfig::from_dir(&vectors("glm_moe_dsa")).unwrap();
    let checkpoint = Checkpoint::open(&vectors("glm_moe_dsa")).unwrap();
    let layer = attention(&checkpoint, &description.attention("L1").unwrap(), 1, HIDDEN);
    let run = |keys: Keys<'_>| {
        let mut cache = LatentCache::default();
        let mut sequences = [Sequence { rows: 2, first_position: 0, cache: &mut cache }];
        layer.run(&[0.5; 2 * HIDDEN], &mut sequences, keys, Form::Naive)
    };
    assert!(matches!(run(Keys::Own), Err(mlakit_model::InputError::SharedSelection)));
    let given = Selected { keys: vec![0, -1, 0, 1], width: 2 };
    assert_eq!(run(Keys::Given(given.view())).unwrap().hidden, run(Keys::All).unwrap().hidden);
}

/// What `config.json` says through a family's rules is what the vectors' own description says.
#[test]
fn families_agree_with_the_vectors_descriptions() {
    for model in [
        "deepseek_v2",
        "deepseek_v2_lite",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "glm5_next",
        "kimi_linear_nope",
        "minicpm3",
        "full_v3_h16",
        "full_v32_h16",
        "full_glm4_lite_h20",
        "full_glm_dsa_h8",
        "full_glm5_next_h8",
        "full_minicpm3_h40",
    ] {
        let config = ModelConfig::from_file(&vectors(model).join("config.json")).unwrap();
        let description = VectorConfig::from_dir(&vectors(model)).unwrap();
        for (index, layer) in config.layers.iter().enumerate() {
            let mut expected = description.attention(&format!("L{index}")).unwrap();
            let difference = expected.softmax_scale - layer.attention.softmax_scale;
            assert!(difference.abs() < 1e-15, "{model}: scale differs by {difference:e}");
            expected.softmax_scale = layer.attention.softmax_scale;
            assert_eq!(layer.attention, expected, "{model} layer {index}");
        }
    }
}
