//! Attention layers of the tiny models against transformers' fp32 results.

use mlakit_model::config::{ModelConfig, Rotary};
use mlakit_model::vectors::VectorConfig;
use mlakit_model::{
    AttentionConfig, AttentionReference, Checkpoint, Form, LatentCache, Selection, Sequence,
};

use crate::common::{Bound, Expected, LAYER, attention, close, vectors};

const HIDDEN: usize = 64;

/// One layer of a tiny model, its expected values and, where it is sparse, its selection.
struct Case {
    label: String,
    /// The cache of expected values keeps rotary pairs where they are.
    pairs_in_place: bool,
    layer: AttentionReference,
    expected: Expected,
}

/// Runs `check` on every layer of every tiny model that this crate's attention covers.
fn for_cases(check: impl Fn(&Case)) {
    for model in [
        "deepseek_v2",
        "deepseek_v2_lite",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe_lite",
        "minicpm3",
        "kimi_linear_nope",
    ] {
        let description = VectorConfig::from_dir(&vectors(model)).unwrap();
        let checkpoint = Checkpoint::open(&vectors(model)).unwrap();
        for layer in 0..2 {
            let label = format!("L{layer}");
            let config = description.attention(&label).unwrap();
            check(&Case {
                label: format!("{model} {label}"),
                pairs_in_place: model.starts_with("deepseek_v2"),
                layer: attention(&checkpoint, &config, layer, HIDDEN),
                expected: Expected::fp32(model),
            });
        }
    }
}

impl Case {
    fn name(&self, prefix: &str, suffix: &str) -> String {
        let label = self.label.split(' ').nth(1).unwrap();
        format!("{prefix}.{label}.{suffix}")
    }

    fn tensor(&self, prefix: &str, suffix: &str) -> Vec<f64> {
        self.expected.f64(&self.name(prefix, suffix))
    }

    /// The stored selection of the 300 rows of the prefill.
    fn topk(&self) -> Option<(Vec<i32>, usize)> {
        let name = self.name("prefill", "topk");
        self.expected.has(&name).then(|| (self.expected.i32(&name), self.expected.width(&name)))
    }

    /// Keys that a row selects; for dense layers more than there are.
    fn index_topk(&self) -> usize {
        self.layer.config().indexer.map_or(usize::MAX, |indexer| indexer.topk)
    }

    fn run(
        &self,
        hidden: &[f64],
        cache: &mut LatentCache,
        rows: std::ops::Range<usize>,
    ) -> Vec<f64> {
        let topk = self.topk();
        let selection = topk.as_ref().map(|(keys, width)| Selection {
            keys: &keys[rows.start * width..rows.end * width],
            width: *width,
        });
        let mut sequences = [Sequence { rows: rows.len(), first_position: 0, cache }];
        self.layer.run(hidden, &mut sequences, selection, Form::Naive).unwrap().hidden
    }
}

#[test]
fn prefill_and_caches() {
    for_cases(|case| {
        let mut cache = LatentCache::default();
        let out = case.run(&case.tensor("prefill", "attn_in"), &mut cache, 0..300);
        let expected = case.tensor("prefill", "attn_out");
        close(&format!("{} prefill", case.label), &out, &expected, HIDDEN, LAYER);

        let config = case.layer.config();
        let latent = case.tensor("cache", "latent");
        let what = format!("{} latent", case.label);
        close(&what, &cache.latent, &latent, config.kv_lora_rank, LAYER);
        let width = config.qk_rope_head_dim;
        let keys = cached_keys(&cache.rope_key, config, case.pairs_in_place);
        let what = format!("{} rope key", case.label);
        close(&what, &keys, &case.tensor("cache", "k_pe_hf"), width, LAYER);
    });
}

/// transformers returns rotated pairs with the first elements of all pairs before the second ones,
/// except in deepseek_v2 and where nothing is rotated.
fn cached_keys(keys: &[f64], config: &AttentionConfig, pairs_in_place: bool) -> Vec<f64> {
    if pairs_in_place || config.rope.is_none() || config.rotary == Rotary::Half {
        return keys.to_vec();
    }
    let width = config.qk_rope_head_dim;
    let order = (0..width).step_by(2).chain((1..width).step_by(2));
    keys.chunks_exact(width).flat_map(|key| order.clone().map(|i| key[i])).collect()
}

#[test]
fn decode_through_the_cache() {
    for_cases(|case| {
        let prompt = &case.tensor("prefill", "attn_in")[..292 * HIDDEN];
        let mut cache = LatentCache::default();
        let mut sequence = Sequence { rows: 292, first_position: 0, cache: &mut cache };
        case.layer.fill(prompt, &mut sequence).unwrap();
        let input = case.tensor("decode", "attn_in");
        let mut out = Vec::new();
        for (step, row) in input.chunks_exact(HIDDEN).enumerate() {
            out.extend(case.run(row, &mut cache, 292 + step..293 + step));
        }
        let expected = case.tensor("decode", "attn_out");
        close(&format!("{} decode", case.label), &out, &expected, HIDDEN, LAYER);
    });
}

/// The files hold no selection of packed sequences: of sparse layers the rows are compared that see
/// no more keys than are selected, and run alone, because causal rows do not depend on later ones.
#[test]
fn packed_sequences_of_several_lengths() {
    for_cases(|case| {
        let input = case.tensor("varlen", "attn_in");
        let expected = case.tensor("varlen", "attn_out");
        let (mut hidden, mut wanted, mut lengths) = (Vec::new(), Vec::new(), Vec::new());
        for span in case.expected.i32("varlen.cu_seqlens").windows(2) {
            let begin = span[0] as usize;
            let rows = ((span[1] - span[0]) as usize).min(case.index_topk());
            let range = begin * HIDDEN..(begin + rows) * HIDDEN;
            hidden.extend_from_slice(&input[range.clone()]);
            wanted.extend_from_slice(&expected[range]);
            lengths.push(rows);
        }
        assert_eq!(lengths.len(), 5);
        let mut caches = vec![LatentCache::default(); lengths.len()];
        let mut sequences: Vec<Sequence<'_>> = caches
            .iter_mut()
            .zip(&lengths)
            .map(|(cache, &rows)| Sequence { rows, first_position: 0, cache })
            .collect();
        let out = case.layer.run(&hidden, &mut sequences, None, Form::Naive).unwrap().hidden;
        close(&format!("{} varlen", case.label), &out, &wanted, HIDDEN, LAYER);
    });
}

#[test]
fn positions_that_do_not_begin_at_zero() {
    for_cases(|case| {
        if !case.expected.has("offset.first_position") {
            assert!(case.layer.config().rope.is_none(), "{}: only NoPE has none", case.label);
            return;
        }
        let first_position = case.expected.i32("offset.first_position")[0] as usize;
        assert_eq!(first_position, 5000);
        let rows = 48.min(case.index_topk());
        let hidden = &case.tensor("offset", "attn_in")[..rows * HIDDEN];
        let mut cache = LatentCache::default();
        let mut sequences = [Sequence { rows, first_position, cache: &mut cache }];
        let out = case.layer.run(hidden, &mut sequences, None, Form::Naive).unwrap().hidden;
        let expected = &case.tensor("offset", "attn_out")[..rows * HIDDEN];
        close(&format!("{} offset", case.label), &out, expected, HIDDEN, LAYER);
    });
}

#[test]
fn absorbed_equals_naive() {
    const EQUAL: Bound = Bound { relative: 1e-13, absolute: 1e-13 };
    for_cases(|case| {
        let hidden = case.tensor("prefill", "attn_in");
        let topk = case.topk();
        let selection = topk.as_ref().map(|(keys, width)| Selection { keys, width: *width });
        let run = |form| {
            let mut cache = LatentCache::default();
            let mut sequences = [Sequence { rows: 300, first_position: 0, cache: &mut cache }];
            case.layer.run(&hidden, &mut sequences, selection, form).unwrap()
        };
        let (naive, absorbed) = (run(Form::Naive), run(Form::Absorbed));
        let what = |part: &str| format!("{} absorbed-naive {part}", case.label);
        close(&what("out"), &absorbed.hidden, &naive.hidden, HIDDEN, EQUAL);
        close(&what("heads"), &absorbed.heads, &naive.heads, case.layer.config().v_head_dim, EQUAL);
        close(&what("lse"), &absorbed.lse, &naive.lse, case.layer.config().heads, EQUAL);
    });
}

/// A row's result depends on nothing but its own sequence: fed in pieces of any size, or packed
/// with others, it has the same bits.
#[test]
fn pieces_and_company_change_no_bit() {
    for_cases(|case| {
        let hidden = case.tensor("prefill", "attn_in");
        let whole = case.run(&hidden, &mut LatentCache::default(), 0..300);
        let mut cache = LatentCache::default();
        let mut pieces = Vec::new();
        let mut begin = 0;
        for rows in [1, 7, 64, 100, 128] {
            let end = begin + rows;
            pieces.extend(case.run(&hidden[begin * HIDDEN..end * HIDDEN], &mut cache, begin..end));
            begin = end;
        }
        assert_eq!(begin, 300);
        assert!(pieces == whole, "{}: pieces differ", case.label);
    });
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
        "minicpm3",
        "full_v3_h16",
        "full_v32_h16",
        "full_glm4_lite_h20",
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
