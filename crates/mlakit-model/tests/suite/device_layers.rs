//! Attention layers and whole tiny models on a device, against transformers' fp32 results.

use half::bf16;
use mlakit::op::merge::Partial;
use mlakit::{E4m3, RecordFormat, Splits};
use mlakit_model::decoder::{
    Attention, DecoderDevice, Generator, GeneratorOptions, LayerInput, LayerOptions, LayerOutput,
    Sampling, run_layer, run_layer_f64,
};
use mlakit_model::vectors::VectorConfig;
use mlakit_model::{
    AttentionConfig, AttentionReference, Checkpoint, Form, ForwardOptions, Keys, LatentCache,
    ModelFolder, Reference, Selection, Sequence,
};
use mlakit_serve::CacheSpec;

use crate::common::{Bound, Expected, attention, close, vectors};

const HIDDEN: usize = 64;
const MODELS: [&str; 5] =
    ["deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "glm4_moe_lite", "kimi_linear_nope"];
const CHUNKS: [Option<usize>; 4] = [None, Some(1), Some(7), Some(64)];

/// `models.md` 9.1: a BF16 kernel, whole layer, against the fp32 vectors.
pub const LAYER: Bound = Bound { relative: 1.5e-2, absolute: 5e-2 };

/// How the cache stores a token and how attention is divided, one after the other.
pub const CACHES: [(Partial, Splits); 3] = [
    (Partial::Bf16, Splits::Auto),
    (Partial::Bf16, Splits::FixedTokens(64)),
    (Partial::F32, Splits::Count(3)),
];

pub fn options(record: RecordFormat, (partial, splits): (Partial, Splits)) -> LayerOptions {
    let index_record = RecordFormat::IndexBf16_256;
    let cache = CacheSpec { record, index_record, page_size: 16, partial, splits };
    LayerOptions { cache, chunk: None }
}

/// One layer of a tiny model and its expected values.
pub struct Case {
    pub name: String,
    label: String,
    pub config: AttentionConfig,
    checkpoint: Checkpoint,
    layer: usize,
    pub expected: Expected,
}

fn cases() -> Vec<Case> {
    MODELS.into_iter().flat_map(|model| (0..2).map(move |layer| Case::new(model, layer))).collect()
}

impl Case {
    pub fn new(model: &str, layer: usize) -> Self {
        let label = format!("L{layer}");
        let description = VectorConfig::from_dir(&vectors(model)).unwrap();
        Self {
            name: format!("{model} {label}"),
            config: description.attention(&label).unwrap(),
            checkpoint: Checkpoint::open(&vectors(model)).unwrap(),
            layer,
            expected: Expected::fp32(model),
            label,
        }
    }

    pub fn tensor(&self, prefix: &str, suffix: &str) -> Vec<f64> {
        self.expected.f64(&format!("{prefix}.{}.{suffix}", self.label()))
    }

    pub fn hidden(&self, prefix: &str) -> Vec<f32> {
        self.tensor(prefix, "attn_in").into_iter().map(|v| v as f32).collect()
    }

    pub fn label(&self) -> &str {
        &self.label
    }

    pub fn output<D: DecoderDevice>(
        &self,
        device: &D,
        input: &LayerInput,
        options: LayerOptions,
    ) -> LayerOutput {
        let weights = self.checkpoint.attention(self.layer, HIDDEN, &self.config).unwrap();
        let caller = device.own_stream().unwrap();
        let mut stream = device.stream(&caller).unwrap();
        run_layer(&mut stream, (&self.config, &weights), input, options).unwrap()
    }

    pub fn run<D: DecoderDevice>(
        &self,
        device: &D,
        input: &LayerInput,
        options: LayerOptions,
    ) -> Vec<f64> {
        let output = self.output(device, input, options);
        output.attn_out.into_iter().map(f64::from).collect()
    }
}

/// Prefill by extend and decode through the paged cache: whole, one row at a time, in pieces.
pub fn prefill_in_chunks<D: DecoderDevice>(device: &D) {
    for case in cases() {
        let q_offsets = vec![0, 300];
        let hidden = case.hidden("prefill");
        let input = LayerInput { hidden, q_offsets, ..LayerInput::default() };
        let expected = case.tensor("prefill", "attn_out");
        for cache in CACHES {
            for chunk in CHUNKS {
                let out = case.run(device, &input, LayerOptions { chunk, ..options_bf16(cache) });
                let what = format!("{} prefill {cache:?} chunk {chunk:?}", case.name);
                close(&what, &out, &expected, HIDDEN, LAYER);
            }
        }
    }
}

fn options_bf16(cache: (Partial, Splits)) -> LayerOptions {
    options(RecordFormat::Bf16, cache)
}

/// Rows 292 to 299 after 292 cached ones: at once, and one at a time.
pub fn decode_through_the_paged_cache<D: DecoderDevice>(device: &D) {
    for case in cases() {
        let mut hidden = case.hidden("prefill");
        hidden.truncate(292 * HIDDEN);
        hidden.extend(case.hidden("decode"));
        let q_offsets = vec![0, 300];
        let input = LayerInput { hidden, q_offsets, ..LayerInput::default() };
        let expected = case.tensor("decode", "attn_out");
        for cache in CACHES {
            for chunk in [Some(292), Some(1)] {
                let out = case.run(device, &input, LayerOptions { chunk, ..options_bf16(cache) });
                let what = format!("{} decode {cache:?} chunk {chunk:?}", case.name);
                close(&what, &out[292 * HIDDEN..], &expected, HIDDEN, LAYER);
            }
        }
    }
}

/// Several sequences side by side.
pub fn packed_sequences_of_several_lengths<D: DecoderDevice>(device: &D) {
    for case in cases() {
        let q_offsets = case.expected.i32("varlen.cu_seqlens");
        let hidden = case.hidden("varlen");
        let input = LayerInput { hidden, q_offsets, ..LayerInput::default() };
        let wanted = case.tensor("varlen", "attn_out");
        for cache in CACHES {
            for chunk in CHUNKS {
                let out = case.run(device, &input, LayerOptions { chunk, ..options_bf16(cache) });
                let what = format!("{} varlen {cache:?} chunk {chunk:?}", case.name);
                close(&what, &out, &wanted, HIDDEN, LAYER);
            }
        }
    }
}

/// Rotary positions that begin at 5,000, in a cache that begins empty.
pub fn positions_that_do_not_begin_at_zero<D: DecoderDevice>(device: &D) {
    for case in cases().into_iter().filter(|case| case.config.rope.is_some()) {
        let first = case.expected.i32("offset.first_position")[0];
        assert_eq!(first, 5000);
        let (q_offsets, first_position) = (vec![0, 48], Some(vec![first]));
        let hidden = case.hidden("offset");
        let input = LayerInput { hidden, q_offsets, first_position, topk: None };
        let expected = case.tensor("offset", "attn_out");
        for chunk in CHUNKS {
            let out = case.run(device, &input, LayerOptions { chunk, ..options_bf16(CACHES[0]) });
            let what = format!("{} offset chunk {chunk:?}", case.name);
            close(&what, &out, &expected, HIDDEN, LAYER);
        }
    }
}

/// What an E4M3 cache of scale 1 holds of a number.
fn stored(value: f64) -> f64 {
    f64::from(E4m3::decode(E4m3::encode(bf16::from_f64(value).to_f32())))
}

/// The f64 layer over the dequantised cache, for row `row`. Every key lies one position further
/// than its index, so that the row that `run` appends behind them stands where the last of them
/// does; it is not among the selected keys.
fn over_stored_cache(
    layer: &AttentionReference,
    cache: &LatentCache,
    (row, hidden): (usize, &[f64]),
    keys: &[i32],
) -> Vec<f64> {
    let (rank, rope) = (layer.config().kv_lora_rank, layer.config().qk_rope_head_dim);
    let tokens = row + 1;
    let mut seen = LatentCache {
        latent: cache.latent[..tokens * rank].to_vec(),
        rope_key: cache.rope_key[..tokens * rope].to_vec(),
        len_tokens: tokens,
        ..LatentCache::default()
    };
    let mut sequence = [Sequence { rows: 1, first_position: 0, cache: &mut seen }];
    let keys = Keys::Given(Selection { keys, width: keys.len() });
    layer.run(hidden, &mut sequence, keys, Form::Absorbed).unwrap().hidden
}

/// An FP8 cache: the device's layer against the f64 layer on what the cache holds.
pub fn e4m3_caches_against_the_dequantised_cache<D: DecoderDevice>(device: &D) {
    for case in cases() {
        let hidden = case.hidden("prefill");
        let wide: Vec<f64> = hidden.iter().copied().map(f64::from).collect();
        let layer = attention(&case.checkpoint, &case.config, case.layer, HIDDEN);
        let mut cache = LatentCache::default();
        let mut sequence = Sequence { rows: 300, first_position: 1, cache: &mut cache };
        layer.fill(&wide, &mut sequence).unwrap();
        let exact = cache.clone();
        let numbers = cache.latent.iter_mut().chain(&mut cache.rope_key);
        numbers.for_each(|value| *value = stored(*value));
        assert!(cache != exact, "the cache was rounded");

        let rows: Vec<usize> = (0..300).step_by(13).chain(290..300).collect();
        let mut wanted = Vec::new();
        for &row in &rows {
            let keys: Vec<i32> = (0..=row as i32).collect();
            let x = &wide[row * HIDDEN..(row + 1) * HIDDEN];
            wanted.extend(over_stored_cache(&layer, &cache, (row, x), &keys));
        }
        let (q_offsets, first_position) = (vec![0, 300], Some(vec![1]));
        let input = LayerInput { hidden, q_offsets, first_position, topk: None };
        for cache in CACHES {
            for chunk in [None, Some(7)] {
                let options = LayerOptions { chunk, ..options(RecordFormat::E4m3, cache) };
                let out = case.run(device, &input, options);
                let given: Vec<f64> =
                    rows.iter().flat_map(|row| &out[row * HIDDEN..][..HIDDEN]).copied().collect();
                let what = format!("{} e4m3 {cache:?} chunk {chunk:?}", case.name);
                close(&what, &given, &wanted, HIDDEN, LAYER);
            }
        }
    }
}

/// The f64 layer with an E4M3 cache is the device's with one, and not the exact one.
pub fn the_oracle_honours_the_record<D: DecoderDevice>(device: &D) {
    for case in cases() {
        let mut hidden = case.hidden("prefill");
        hidden.truncate(100 * HIDDEN);
        let q_offsets = vec![0, 100];
        let input = LayerInput { hidden, q_offsets, ..LayerInput::default() };
        let weights = case.checkpoint.attention(case.layer, HIDDEN, &case.config).unwrap();
        let oracle = |record, chunk| -> Vec<f64> {
            let options = LayerOptions { chunk, ..options(record, CACHES[0]) };
            let made = run_layer_f64((&case.config, &weights), &input, options).unwrap();
            made.attn_out.into_iter().map(f64::from).collect()
        };
        let narrow = oracle(RecordFormat::E4m3, None);
        assert_eq!(narrow, oracle(RecordFormat::E4m3, Some(7)), "{}", case.name);
        let given = case.run(device, &input, options(RecordFormat::E4m3, CACHES[0]));
        close(&format!("{} e4m3 oracle", case.name), &given, &narrow, HIDDEN, LAYER);
        let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
        let exact = oracle(RecordFormat::Bf16, None);
        let moved = square(&mut narrow.iter().zip(&exact).map(|(n, e)| n - e));
        let relative = (moved / square(&mut exact.iter().copied())).sqrt();
        assert!(relative > 5e-3, "{}: an E4M3 cache moves the result by {relative:e}", case.name);
    }
}

/// Sixteen heads of DeepSeek-V3's real widths over 1,100 tokens.
pub fn a_layer_of_real_widths<D: DecoderDevice>(device: &D) {
    let name = "full_v3_h16";
    let folder = ModelFolder::open(&vectors(name)).unwrap();
    let (shape, input) = VectorConfig::from_dir(&vectors(name)).unwrap().input().unwrap();
    let (rows, hidden) = (shape[0], shape[1]);
    let config = &folder.config.layers[0].attention;
    let weights = folder.checkpoint.attention(0, hidden, config).unwrap();
    let expected = Expected::fp32(name);
    let begin = expected.i32("rows")[0] as usize;
    let wanted = expected.f64("out");
    let input = LayerInput {
        hidden: input.into_iter().map(bf16::to_f32).collect(),
        q_offsets: vec![0, rows as i32],
        ..LayerInput::default()
    };
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    // The file has the last rows alone, which see everything that the smaller chunks before them put
    // into the cache.
    let runs =
        [(None, CACHES[0]), (Some(64), CACHES[2]), (Some(7), CACHES[1]), (Some(1), CACHES[0])];
    for (chunk, cache) in runs {
        let options = LayerOptions { chunk, ..options_bf16(cache) };
        let out = run_layer(&mut stream, (config, &weights), &input, options).unwrap();
        let out: Vec<f64> = out.attn_out[begin * hidden..].iter().map(|v| f64::from(*v)).collect();
        let bound = Bound { absolute: 1.0, ..LAYER };
        close(&format!("{name} {cache:?} chunk {chunk:?}"), &out, &wanted, hidden, bound);
    }
}

/// Whole tiny models, greedily: the ids of transformers, whose smallest margin is far above what
/// the BF16 path does to a logit.
pub fn greedy_ids_of_whole_models<D: DecoderDevice>(device: &D) {
    for name in ["deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "glm4_moe_lite"] {
        for cache in CACHES {
            greedy_ids(device, name, options_bf16(cache).cache);
        }
    }
}

/// Checks that a whole model continues the stored prompt as transformers does.
pub fn greedy_ids<D: DecoderDevice>(device: &D, name: &str, cache: CacheSpec) {
    let folder = ModelFolder::open(&vectors(name)).unwrap();
    let expected = Expected::fp32(name);
    let prompt = expected.ids("greedy.input_ids");
    let needed = expected.ids("greedy.new_ids");
    assert!(expected.f64("greedy.margin").into_iter().all(|margin| margin > 1.0));
    let given = greedy(device, &folder, &prompt, (needed.len(), Attention::Auto, cache));
    assert_eq!(given, needed, "{name} {cache:?}");
}

/// The most likely ids that the device continues a prompt with.
fn greedy<D: DecoderDevice>(
    device: &D,
    folder: &ModelFolder,
    prompt: &[u32],
    (tokens, attention, cache): (usize, Attention, CacheSpec),
) -> Vec<u32> {
    let options = GeneratorOptions {
        cache,
        attention,
        batch: 1,
        max_tokens: prompt.len() + tokens,
        prompt_rows: 32,
        prompt_logits: false,
    };
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let pair = (&folder.config, &folder.checkpoint);
    let mut generator = Generator::new(&mut stream, pair, options).unwrap();
    let wanted = (tokens, Sampling::default());
    let made = generator.generate(&mut stream, &[prompt.to_vec()], wanted, &mut |_, _| Ok(()));
    made.unwrap().ids.remove(0)
}

/// The same of the f64 model attending to every key, with the smallest distance between the best
/// logit and the next.
fn greedy_f64(folder: &ModelFolder, prompt: &[u32], tokens: usize) -> (Vec<u32>, f64) {
    let model = Reference::new(&folder.config, &folder.checkpoint).unwrap();
    let (mut cache, mut ids) = (model.cache(0), prompt.to_vec());
    let (mut made, mut margin) = (Vec::new(), f64::INFINITY);
    for _ in 0..tokens {
        let options = ForwardOptions { dense: true, ..ForwardOptions::default() };
        let hidden = model.forward(&ids, &mut cache, options).unwrap().last_hidden;
        let logits = model.logits(&hidden[hidden.len() - HIDDEN..]).unwrap();
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
        margin = margin.min(logits[order[0]] - logits[order[1]]);
        made.push(order[0] as u32);
        ids = vec![order[0] as u32];
    }
    (made, margin)
}

/// DeepSeek-V3.2 and GLM-5 attending to every key, against the f64 model doing so.
pub fn models_with_indexers_attending_to_every_key<D: DecoderDevice>(device: &D) {
    for name in ["deepseek_v32", "glm_moe_dsa"] {
        let folder = ModelFolder::open(&vectors(name)).unwrap();
        let prompt = Expected::fp32(name).ids("greedy.input_ids");
        let (needed, margin) = greedy_f64(&folder, &prompt, 12);
        println!("{name}: smallest margin {margin:.3}");
        assert!(margin > 0.5);
        for cache in CACHES {
            let wanted = (12, Attention::Dense, options_bf16(cache).cache);
            assert_eq!(greedy(device, &folder, &prompt, wanted), needed, "{name} {cache:?}");
        }
    }
}
