//! What the cache of a model takes, and how many tokens fit beside its weights.

use std::path::Path;

use mlakit::{PageGeometry, RecordFormat, RecordLayout};
use mlakit_model::ModelConfig;
use serde::Serialize;

use super::weights;
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
    /// Bits of a weight.
    pub weight_bits: usize,
    /// The record format that is counted with.
    pub record: RecordFormat,
    /// Tokens of a page.
    pub page_size: usize,
}

impl From<&PlanArgs> for Question {
    fn from(args: &PlanArgs) -> Self {
        Self {
            heads: args.heads,
            tp: args.tp.unwrap_or(1),
            memory_gib: args.memory_gib,
            weight_bits: args.weight_bits.unwrap_or(16),
            record: args.record.unwrap_or_default(),
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
    /// For each record format.
    cache: Vec<CacheBytes>,
    weight_bits: usize,
    weights: Vec<WeightBytes>,
    /// On each device.
    weight_bytes: u128,
    #[serde(skip_serializing_if = "Option::is_none")]
    fit: Option<Fit>,
    counted: &'static str,
    not_counted: &'static str,
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

const COUNTED: &str = "every weight of the decoder layers, embedding and head; latent records";
const NOT_COUNTED: &str =
    "draft layers, activations, scratch, page tables, index keys of sparse layers";

/// Reads a config and answers.
///
/// # Errors
/// A config that cannot be read; heads that the devices cannot share; a page size that is none;
/// weights that do not fit.
pub fn plan(path: &Path, question: &Question) -> Result<ModelReport, Failure> {
    let path = if path.is_dir() { path.join("config.json") } else { path.to_path_buf() };
    let config = ModelConfig::from_file(&path)?;
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
    let weights: Vec<WeightBytes> = weights::count(&config)
        .into_iter()
        .map(|(what, count)| {
            let elements = count.each(question.tp);
            WeightBytes { what, elements, bytes: bytes_of(elements, question.weight_bits) }
        })
        .filter(|weight| weight.elements > 0)
        .collect();
    let weight_bytes = weights.iter().map(|weight| weight.bytes).sum();
    let fit = question.memory_gib.map(|gib| Fit::of(&config, question, (gib, weight_bytes)));
    Ok(ModelReport {
        model_type: config.family.model_type,
        layers: config.layers.len(),
        heads: first.heads / question.tp,
        tp: question.tp,
        record_width: first.cache_width(),
        cache: RecordFormat::ALL.map(|record| CacheBytes::of(&config, record)).into(),
        weight_bits: question.weight_bits,
        weights,
        weight_bytes,
        fit: fit.transpose()?,
        counted: COUNTED,
        not_counted: NOT_COUNTED,
    })
}

fn bytes_of(elements: u128, bits: usize) -> u128 {
    (elements * bits as u128).div_ceil(8)
}

fn record_bytes(format: RecordFormat, width: usize) -> usize {
    RecordLayout { format, width }.bytes()
}

/// Bytes of a token in the caches of all layers.
pub fn token_bytes(config: &ModelConfig, format: RecordFormat) -> usize {
    config.layers.iter().map(|layer| record_bytes(format, layer.attention.cache_width())).sum()
}

impl CacheBytes {
    fn of(config: &ModelConfig, format: RecordFormat) -> Self {
        let width = config.layers[0].attention.cache_width();
        Self {
            record: format.name(),
            layer_bytes_per_token: record_bytes(format, width),
            bytes_per_token: token_bytes(config, format),
        }
    }
}

impl Fit {
    fn of(
        config: &ModelConfig,
        question: &Question,
        (gib, weight_bytes): (f64, u128),
    ) -> Result<Self, Failure> {
        let Question { record, page_size, .. } = *question;
        let width = config.layers[0].attention.cache_width();
        PageGeometry { record: RecordLayout { format: record, width }, page_size }.check()?;
        let memory_bytes = (gib * f64::from(1 << 30)) as u128;
        let Some(cache_bytes) = memory_bytes.checked_sub(weight_bytes) else {
            return Err(Failure::input(
                format!(
                    "--memory-gib: the weights need {weight_bytes} bytes, given {memory_bytes}"
                ),
                "raise --memory-gib or --tp, or lower --weight-bits",
            ));
        };
        let page_bytes = token_bytes(config, record) as u128 * page_size as u128;
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
        ]);
        let cache = self.cache.iter().map(|cache| {
            let [layer, all] = [cache.layer_bytes_per_token, cache.bytes_per_token];
            vec![cache.record.to_owned(), layer.to_string(), all.to_string()]
        });
        let header = ["record", "bytes a token and layer", "bytes a token"];
        let cache = report::table(&header, &[1, 2], cache.collect());
        let row = |what: &str, elements: String, bytes: u128| {
            vec![what.to_owned(), elements, bytes.to_string(), short(bytes)]
        };
        let mut weights: Vec<_> =
            self.weights.iter().map(|w| row(w.what, w.elements.to_string(), w.bytes)).collect();
        weights.push(row("total", String::new(), self.weight_bytes));
        let header = ["weights a device", "elements", "bytes", ""];
        let mut lines = vec![head, cache, report::table(&header, &[1, 2], weights)];
        lines.extend(self.fit.as_ref().map(Fit::lines));
        lines.push(format!("counted: {}", self.counted));
        lines.push(format!("not counted: {}", self.not_counted));
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
            weight_bits: 16,
            record: RecordFormat::Bf16,
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
        assert_eq!(fit.pages, fit.cache_bytes / (64 * 3 * 576 * 2));
        let half = answer(tiny(), &Question { record: RecordFormat::E4m3, ..question() });
        let half = half.unwrap().fit.unwrap();
        assert!(half.tokens >= 2 * fit.tokens && half.tokens < 2 * fit.tokens + 128);
    }

    #[test]
    fn more_devices_leave_more_room() {
        let one = answer(tiny(), &question()).unwrap();
        let two = answer(tiny(), &Question { tp: 2, ..question() }).unwrap();
        assert_eq!(two.heads, one.heads / 2);
        assert!(two.weight_bytes < one.weight_bytes && two.weight_bytes > one.weight_bytes / 2);
        assert!(two.fit.unwrap().tokens > one.fit.unwrap().tokens);
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
