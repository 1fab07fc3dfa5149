//! What the cache of a model takes, and how many tokens fit beside its weights.

use std::fmt;
use std::path::Path;

use mlakit::{Error, PageGeometry, RecordFormat, RecordLayout};
use mlakit_model::ModelConfig;
use mlakit_model::config::{AssumedKey, AttentionConfig, AttentionKind, Quantization};
use serde::Serialize;
use serde_json::{Map, Value};

use super::weights::{self, Weights};
use crate::args::PlanArgs;
use crate::failure::Failure;
use crate::report::{self, Report};

/// What is asked of a model.
#[derive(Clone, Debug)]
pub struct Question {
    /// Query heads, instead of the config's.
    pub heads: Option<usize>,
    /// Devices that share the weights.
    pub tp: usize,
    /// Memory of each.
    pub memory_gib: Option<f64>,
    /// Bits of every weight, instead of what the config says.
    pub weight_bits: Option<usize>,
    /// The record format that is counted with.
    pub record: RecordFormat,
    /// That of index keys.
    pub index_record: RecordFormat,
    /// Tokens of a page.
    pub page_size: usize,
}

impl From<&PlanArgs> for Question {
    fn from(args: &PlanArgs) -> Self {
        Self {
            heads: args.heads,
            tp: args.tp.unwrap_or(1),
            memory_gib: args.memory_gib,
            weight_bits: args.weight_bits,
            record: args.record.unwrap_or_default(),
            index_record: args.index_record.unwrap_or(RecordFormat::IndexBf16_256),
            page_size: args.page_size.unwrap_or(64),
        }
    }
}

/// What a model needs.
#[derive(Clone, Debug, Serialize)]
pub struct ModelReport {
    model_type: &'static str,
    layers: usize,
    /// Query heads of the first layer, on each device.
    heads: usize,
    tp: usize,
    /// Elements of the first layer's records.
    record_width: usize,
    /// For each record format that the model can have.
    cache: Vec<CacheBytes>,
    /// For each format of index keys, where layers have indexers; by layer with one of its own.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    index_keys: Vec<CacheBytes>,
    /// How weights are stored.
    stored: String,
    weights: Vec<WeightBytes>,
    /// On each device.
    weight_bytes: u128,
    #[serde(skip_serializing_if = "Option::is_none")]
    fit: Option<Fit>,
    counted: &'static str,
    not_counted: &'static str,
    /// Keys that the config leaves out, and what stands for them.
    #[serde(skip_serializing_if = "Map::is_empty")]
    assumed: Map<String, Value>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
}

/// What a token takes in one record format.
#[derive(Clone, Debug, Serialize)]
struct CacheBytes {
    record: &'static str,
    /// In each layer that has as wide a record as the first.
    layer_bytes_per_token: usize,
    /// In all layers.
    bytes_per_token: usize,
}

/// The weights of one kind, on each device.
#[derive(Clone, Debug, Serialize)]
struct WeightBytes {
    what: &'static str,
    elements: u128,
    bytes: u128,
}

/// How many tokens fit.
#[derive(Clone, Debug, Serialize)]
struct Fit {
    memory_bytes: u128,
    record: &'static str,
    page_size: usize,
    /// Of all layers.
    page_bytes: u128,
    cache_bytes: u128,
    pages: u128,
    tokens: u128,
}

const COUNTED: &str =
    "every weight of the decoder layers, embedding and head; latent records and index keys";
const NOT_COUNTED: &str = "draft layers, activations, scratch, page tables";

/// Reads a config and answers.
///
/// # Errors
/// A config that cannot be read; heads that the devices cannot share; a page size that is none;
/// weights that do not fit.
pub fn plan(path: &Path, question: &Question) -> Result<ModelReport, Failure> {
    let path = if path.is_dir() { path.join("config.json") } else { path.to_path_buf() };
    let config =
        ModelConfig::from_file(&path).map_err(|error| Failure::from(error).within("--config"))?;
    answer(config, question)
}

fn answer(mut config: ModelConfig, question: &Question) -> Result<ModelReport, Failure> {
    if let Some(heads) = question.heads {
        config.layers.iter_mut().for_each(|layer| layer.attention.heads = heads);
    }
    let first = config.layers[0].attention.clone();
    if !first.heads.is_multiple_of(question.tp) {
        return Err(Failure::input(
            format!("--tp: needed a divisor of {} heads, given {}", first.heads, question.tp),
            "choose --tp so that every device has as many heads",
        ));
    }
    let counts = weights::count(&config);
    let stored = Stored::of(&config, question);
    let weights: Vec<WeightBytes> = counts
        .iter()
        .map(|weights| {
            let elements = weights.elements().each(question.tp);
            WeightBytes { what: weights.what, elements, bytes: stored.bytes(weights, question.tp) }
        })
        .filter(|weight| weight.elements > 0)
        .collect();
    let notes = [stored.note(&config), uneven(&counts, question.tp)];
    let weight_bytes = weights.iter().map(|weight| weight.bytes).sum();
    let fit = question.memory_gib.map(|gib| Fit::of(&config, question, (gib, weight_bytes)));
    Ok(ModelReport {
        model_type: config.family.model_type,
        layers: config.layers.len(),
        heads: first.heads / question.tp,
        tp: question.tp,
        record_width: first.cache_width(),
        cache: cache_bytes(&config),
        index_keys: index_cache_bytes(&config),
        stored: stored.to_string(),
        weights,
        weight_bytes,
        fit: fit.transpose()?,
        counted: COUNTED,
        not_counted: NOT_COUNTED,
        assumed: assumed(&config.assumed),
        notes: notes.into_iter().flatten().collect(),
    })
}

/// How weights are stored.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stored {
    /// Each in so many bits.
    Bits(usize),
    /// Matrices in FP8 with F32 scales of blocks, the rest in BF16.
    Fp8 { block: Option<[usize; 2]> },
}

impl Stored {
    fn of(config: &ModelConfig, question: &Question) -> Self {
        match (question.weight_bits, &config.quantization) {
            (Some(bits), _) => Self::Bits(bits),
            (None, Some(form)) if form.is_fp8() => Self::Fp8 { block: form.block },
            (None, _) => Self::Bits(16),
        }
    }

    /// On each of `devices`.
    fn bytes(self, weights: &Weights, devices: usize) -> u128 {
        let elements = weights.elements().each(devices);
        match self {
            Self::Bits(bits) => bytes_of(elements, bits),
            Self::Fp8 { block } => {
                let matrices = weights.quantised().each(devices);
                let scales = weights.scales(block).each(devices);
                matrices + 4 * scales + 2 * (elements - matrices)
            }
        }
    }

    /// What of the config's `quantization_config` is not in the numbers.
    fn note(self, config: &ModelConfig) -> Option<String> {
        let Quantization { method, plain_modules, .. } = config.quantization.as_ref()?;
        let plain: Vec<_> = plain_modules.iter().filter(|module| *module != "lm_head").collect();
        match self {
            Self::Bits(bits) => Some(format!(
                "`quantization_config` says `{method}`; each weight is counted as {bits} bits, \
                 which --weight-bits sets"
            )),
            Self::Fp8 { .. } if plain.is_empty() => None,
            Self::Fp8 { .. } => {
                Some(format!("counted in FP8, though `modules_to_not_convert` names {plain:?}"))
            }
        }
    }
}

impl fmt::Display for Stored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bits(bits) => write!(f, "{bits} bits each"),
            Self::Fp8 { block: Some([rows, columns]) } => {
                write!(f, "matrices fp8, an F32 scale for each {rows} x {columns}; the rest BF16")
            }
            Self::Fp8 { block: None } => {
                f.write_str("matrices fp8, an F32 scale each; the rest BF16")
            }
        }
    }
}

/// What devices cannot share evenly is counted as on the one that has the most.
fn uneven(counts: &[Weights], devices: usize) -> Option<String> {
    let odd: Vec<_> = counts.iter().filter(|w| !w.elements().is_even(devices)).collect();
    let names: Vec<_> = odd.iter().map(|weights| weights.what).collect();
    (!names.is_empty())
        .then(|| format!("{devices} devices cannot share evenly: {}; rounded up", names.join(", ")))
}

/// Keys and values as an object.
pub fn assumed(keys: &[AssumedKey]) -> Map<String, Value> {
    keys.iter().map(|AssumedKey { key, value }| (key.clone(), value.clone())).collect()
}

/// Keys and values as a line; `None` where there are none.
pub fn assumed_line(keys: &Map<String, Value>) -> Option<String> {
    let pairs: Vec<_> = keys.iter().map(|(key, value)| format!("{key} = {value}")).collect();
    (!pairs.is_empty()).then(|| {
        format!("config.json leaves out keys; assumed, as in transformers: {}", pairs.join(", "))
    })
}

impl ModelReport {
    /// With more notes.
    pub fn noting(mut self, notes: impl IntoIterator<Item = String>) -> Self {
        self.notes.extend(notes);
        self
    }
}

fn bytes_of(elements: u128, bits: usize) -> u128 {
    (elements * bits as u128).div_ceil(8)
}

fn record_bytes(
    attention: &AttentionConfig,
    (format, page_size): (RecordFormat, usize),
) -> Result<usize, Error> {
    let (latent, rope) = (attention.kv_lora_rank, attention.qk_rope_head_dim);
    format.check_parts(latent, rope)?;
    let record = RecordLayout::of(format, latent, rope);
    PageGeometry { record, page_size }.check()?;
    Ok(record.bytes())
}

/// Bytes of a token in the latent caches of all layers.
///
/// # Errors
/// A format that cannot store the tokens of some layer.
pub fn token_bytes(config: &ModelConfig, record: (RecordFormat, usize)) -> Result<usize, Error> {
    latent_layers(config).map(|attention| record_bytes(attention, record)).sum()
}

/// Bytes of the index keys of `tokens` tokens in all layers; 0 where none has an indexer.
///
/// # Errors
/// A format that cannot store the keys of some layer.
pub fn index_bytes(
    config: &ModelConfig,
    (format, page_size): (RecordFormat, usize),
    tokens: usize,
) -> Result<usize, Error> {
    let indexers = latent_layers(config).filter_map(AttentionConfig::own_indexer);
    let bytes = indexers.map(|indexer| {
        let record = RecordLayout::of(format, indexer.head_dim, 0);
        PageGeometry { record, page_size }.check()?;
        Ok(record.bytes().saturating_mul(tokens.div_ceil(indexer.pool_size())))
    });
    bytes.sum()
}

fn latent_layers(config: &ModelConfig) -> impl Iterator<Item = &AttentionConfig> {
    let latent = config.layers.iter().filter(|layer| layer.kind == AttentionKind::Latent);
    latent.map(|layer| &layer.attention)
}

/// For each format of index keys that the model can have, by layer of its own indexer.
fn index_cache_bytes(config: &ModelConfig) -> Vec<CacheBytes> {
    let indexers = latent_layers(config).filter_map(AttentionConfig::own_indexer);
    let indexers: Vec<_> = indexers.collect();
    let Some(first) = indexers.first() else { return Vec::new() };
    let formats = RecordFormat::ALL.into_iter().filter(|format| format.is_index());
    let bytes = |format: RecordFormat| {
        let all = index_bytes(config, (format, 1), first.pool_size()).ok()?;
        let bytes_per_token = all.div_ceil(first.pool_size());
        let layer_bytes_per_token = bytes_per_token / indexers.len();
        Some(CacheBytes { record: format.name(), layer_bytes_per_token, bytes_per_token })
    };
    formats.filter_map(bytes).collect()
}

/// For each format of attention that the model can have.
fn cache_bytes(config: &ModelConfig) -> Vec<CacheBytes> {
    let formats = RecordFormat::ALL.into_iter().filter(|format| !format.is_index());
    formats.filter_map(|format| CacheBytes::of(config, format)).collect()
}

impl CacheBytes {
    /// Nothing where the format is not for this model.
    fn of(config: &ModelConfig, format: RecordFormat) -> Option<Self> {
        let record = (format, 1);
        Some(Self {
            record: format.name(),
            layer_bytes_per_token: record_bytes(&config.layers[0].attention, record).ok()?,
            bytes_per_token: token_bytes(config, record).ok()?,
        })
    }
}

impl Fit {
    fn of(
        config: &ModelConfig,
        question: &Question,
        (gib, weight_bytes): (f64, u128),
    ) -> Result<Self, Failure> {
        let Question { record, page_size, .. } = *question;
        let token_bytes = token_bytes(config, (record, page_size))?;
        let memory_bytes = (gib * f64::from(1 << 30)) as u128;
        let Some(cache_bytes) = memory_bytes.checked_sub(weight_bytes) else {
            return Err(Failure::input(
                format!(
                    "--memory-gib: the weights need {weight_bytes} bytes, given {memory_bytes}"
                ),
                "raise --memory-gib or --tp, or lower --weight-bits",
            ));
        };
        let index = index_bytes(config, (question.index_record, page_size), page_size)?;
        let page_bytes = token_bytes as u128 * page_size as u128 + index as u128;
        let pages = cache_bytes / page_bytes;
        let tokens = pages * page_size as u128;
        let record = record.name();
        Ok(Self { memory_bytes, record, page_size, page_bytes, cache_bytes, pages, tokens })
    }
}

/// For people; beyond what a `usize` holds, nobody reads the digits.
fn short(bytes: u128) -> String {
    report::bytes(usize::try_from(bytes).unwrap_or(usize::MAX))
}

impl Report for ModelReport {
    fn lines(&self) -> Vec<String> {
        let head = report::pairs(&[
            ("model", self.model_type.to_owned()),
            ("layers", self.layers.to_string()),
            ("heads a device", format!("{} (tp {})", self.heads, self.tp)),
            ("record width", format!("{} elements", self.record_width)),
            ("weights", self.stored.clone()),
        ]);
        let cache = self.cache.iter().map(|cache| {
            let [layer, all] = [cache.layer_bytes_per_token, cache.bytes_per_token];
            vec![cache.record.to_owned(), layer.to_string(), all.to_string()]
        });
        let header = ["record", "bytes a token and layer", "bytes a token"];
        let cache = report::table(&header, &[1, 2], cache.collect());
        let index = self.index_keys.iter().map(|keys| {
            let [layer, all] = [keys.layer_bytes_per_token, keys.bytes_per_token];
            vec![keys.record.to_owned(), layer.to_string(), all.to_string()]
        });
        let header = ["index keys", "bytes a token and layer", "bytes a token"];
        let index = report::table(&header, &[1, 2], index.collect());
        let row = |what: &str, elements: String, bytes: u128| {
            vec![what.to_owned(), elements, bytes.to_string(), short(bytes)]
        };
        let mut weights: Vec<_> =
            self.weights.iter().map(|w| row(w.what, w.elements.to_string(), w.bytes)).collect();
        weights.push(row("total", String::new(), self.weight_bytes));
        let header = ["weights a device", "elements", "bytes", ""];
        let mut lines = vec![head, cache];
        lines.extend((!self.index_keys.is_empty()).then_some(index));
        lines.push(report::table(&header, &[1, 2], weights));
        lines.extend(self.fit.as_ref().map(Fit::lines));
        lines.push(format!("counted: {}", self.counted));
        lines.push(format!("not counted: {}", self.not_counted));
        lines.extend(assumed_line(&self.assumed).map(|line| format!("note: {line}")));
        lines.extend(self.notes.iter().map(|note| format!("note: {note}")));
        lines
    }
}

impl Fit {
    fn lines(&self) -> String {
        report::pairs(&[
            ("memory", short(self.memory_bytes)),
            ("left for the cache", short(self.cache_bytes)),
            (
                "page",
                format!("{} tokens of {}, {}", self.page_size, self.record, short(self.page_bytes)),
            ),
            ("pages that fit", self.pages.to_string()),
            ("tokens that fit", self.tokens.to_string()),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question() -> Question {
        Question {
            heads: None,
            tp: 1,
            memory_gib: Some(1.0),
            weight_bits: None,
            record: RecordFormat::Bf16,
            index_record: RecordFormat::IndexBf16_256,
            page_size: 64,
        }
    }

    fn tiny() -> ModelConfig {
        ModelConfig::from_json(mlakit_model::embedded::tiny_dsa().config).unwrap()
    }

    #[test]
    fn tokens_fill_what_the_weights_leave() {
        let report = answer(tiny(), &question()).unwrap();
        assert_eq!(report.cache[0].layer_bytes_per_token, 576 * 2);
        assert_eq!(report.cache[0].bytes_per_token, 3 * 576 * 2);
        assert_eq!(report.cache[1].bytes_per_token, 3 * 576);
        let fit = report.fit.unwrap();
        assert_eq!(fit.cache_bytes + report.weight_bytes, 1 << 30);
        assert_eq!(fit.pages, fit.cache_bytes / (64 * 3 * (576 * 2 + 256)));
        let index_record = RecordFormat::IndexFp8_132;
        let small = Question { record: RecordFormat::E4m3, index_record, ..question() };
        let small = answer(tiny(), &small).unwrap();
        assert_eq!(small.index_keys[1].bytes_per_token, 3 * 132);
        let small = small.fit.unwrap();
        assert_eq!(small.pages, small.cache_bytes / (64 * 3 * (576 + 132)));
    }

    #[test]
    fn more_devices_leave_more_room() {
        let one = answer(tiny(), &question()).unwrap();
        let two = answer(tiny(), &Question { tp: 2, ..question() }).unwrap();
        assert_eq!(two.heads, one.heads / 2);
        assert!(two.weight_bytes < one.weight_bytes && two.weight_bytes > one.weight_bytes / 2);
        assert!(two.fit.unwrap().tokens > one.fit.unwrap().tokens);
    }

    /// tiny-dsa as FP8: what is no matrix of a layer stays BF16.
    #[test]
    fn a_quantised_checkpoint_is_counted_as_it_is() {
        let quantised = |form: &str| {
            let text = String::from_utf8(mlakit_model::embedded::tiny_dsa().config.into()).unwrap();
            let text = text.replacen('{', &format!("{{\"quantization_config\":{form},"), 1);
            ModelConfig::from_json(text.as_bytes()).unwrap()
        };
        let fp8 = r#"{"quant_method":"fp8","weight_block_size":[128,128]}"#;
        let plain = answer(tiny(), &question()).unwrap();
        let report = answer(quantised(fp8), &question()).unwrap();
        let bytes = |report: &ModelReport, what: &str| {
            report.weights.iter().find(|w| w.what == what).map(|w| (w.elements, w.bytes)).unwrap()
        };
        for what in ["embedding", "router", "norms", "output head"] {
            assert_eq!(bytes(&report, what), bytes(&plain, what), "{what}");
        }
        // Three matrices of 512 x 256: 8 blocks each.
        assert_eq!(bytes(&report, "dense MLP"), (3 * 512 * 256, 3 * (512 * 256 + 8 * 4)));
        assert!(report.notes.is_empty() && report.stored.contains("128 x 128"));
        let fixed = Question { weight_bits: Some(16), ..question() };
        assert_eq!(answer(quantised(fp8), &fixed).unwrap().weight_bytes, plain.weight_bytes);
        let other = answer(quantised(r#"{"quant_method":"awq","bits":4}"#), &question()).unwrap();
        assert_eq!(other.weight_bytes, plain.weight_bytes);
        assert!(other.notes[0].contains("`awq`; each weight is counted as 16 bits"));
    }

    #[test]
    fn what_devices_cannot_share_is_noted() {
        let shared = |tp| answer(tiny(), &Question { tp, ..question() }).unwrap().notes;
        assert_eq!(shared(8), Vec::<String>::new());
        let notes = answer(tiny(), &Question { tp: 7, heads: Some(7), ..question() });
        let notes = notes.unwrap().notes;
        assert!(notes[0].starts_with("7 devices cannot share evenly: embedding, dense MLP"));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for (question, name) in [
            (Question { tp: 3, ..question() }, "--tp"),
            (Question { memory_gib: Some(1e-3), ..question() }, "--memory-gib"),
            (Question { page_size: 17, ..question() }, "page_size"),
        ] {
            let failure = answer(tiny(), &question).unwrap_err();
            assert_eq!(failure.status(), 2);
            assert!(failure.message().starts_with(name), "{}", failure.message());
        }
    }
}
