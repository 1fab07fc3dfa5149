//! `mlakit eval`: bits per byte of a text.
//!
//! The text is cut into windows of at most 1,023 bytes; each window alone, behind the id that begins a text, is scored: the cross-entropy, to base 2, of
//! every byte given the ones before it in its window. Only models whose ids 0 to 255 are bytes can be scored so.

use mlakit::Splits;
use mlakit_model::ModelFolder;
use mlakit_model::decoder::{DecoderDevice, Generator, GeneratorOptions, TextLimits};
use serde::Serialize;

use super::{PROMPT_ROWS, attention, cache, open};
use crate::args::{EvalArgs, Format};
use crate::case::read_file;
use crate::device::{self, AnyDevice, Environment};
use crate::failure::Failure;
use crate::plan::model::assumed;
use crate::progress::Progress;
use crate::report::{self, Report};

/// Bytes of a window.
const WINDOW: usize = 1023;

/// The id before a window.
const BEGIN: u32 = 256;

/// What `eval` found.
#[derive(Debug, Serialize)]
pub struct EvalReport {
    device: String,
    bytes: usize,
    windows: usize,
    bits_per_byte: f64,
    seconds: f64,
    #[serde(skip_serializing_if = "serde_json::Map::is_empty")]
    assumed: serde_json::Map<String, serde_json::Value>,
}

/// Runs the command.
///
/// # Errors
/// A text or a checkpoint that cannot be read; a vocabulary that is not made of bytes.
pub fn command(
    args: &EvalArgs,
    environment: &Environment,
    format: Format,
) -> Result<EvalReport, Failure> {
    let mut text = read_file(&args.file)?;
    text.truncate(args.tokens.unwrap_or(usize::MAX));
    if text.is_empty() {
        let message = format!("{}: needed at least one byte, given none", args.file.display());
        return Err(Failure::input(message, "give a text"));
    }
    // What would run it comes first: without it nothing else matters.
    let device = device::open(&args.device, environment)?;
    let model = open(args.model.as_deref(), format)?;
    let vocab = model.config.vocab_size;
    if model.config.bos_token_id != Some(BEGIN) || vocab <= BEGIN as usize {
        return Err(Failure::input(
            format!("the model's vocabulary: needed bytes as ids 0 to 255 and a beginning {BEGIN}"),
            "use a byte-level checkpoint, such as the embedded one",
        ));
    }
    let limits = TextLimits::new(&model.config);
    limits.check(text.len().min(WINDOW), 0)?;
    match device {
        AnyDevice::Cpu(device) => score(&device, &model, (&text, args)),
        AnyDevice::Cuda(device) => score(&device, &model, (&text, args)),
    }
}

fn score<D: DecoderDevice>(
    device: &D,
    model: &ModelFolder,
    (text, args): (&[u8], &EvalArgs),
) -> Result<EvalReport, Failure> {
    let longest = text.len().min(WINDOW);
    let options = GeneratorOptions {
        cache: cache((args.record, args.index_record), args.partial, Splits::Auto),
        attention: attention(args.attention),
        batch: 1,
        max_tokens: longest,
        prompt_rows: PROMPT_ROWS.min(longest),
        prompt_logits: true,
    };
    let caller = device.own_stream()?;
    let mut stream = device.stream(&caller)?;
    let pair = (&model.config, &model.checkpoint);
    let windows: Vec<&[u8]> = text.chunks(WINDOW).collect();
    let mut progress = Progress::new("eval", windows.len());
    progress.step("loading and preparing");
    let mut generator = Generator::new(&mut stream, pair, options)?;
    let begin = std::time::Instant::now();
    let mut bits = 0.0;
    for window in &windows {
        progress.step("");
        // The last byte is predicted, not read.
        let ids: Vec<u32> = std::iter::once(BEGIN)
            .chain(window[..window.len() - 1].iter().map(|byte| u32::from(*byte)))
            .collect();
        let logits = generator.logits(&mut stream, &ids)?;
        let rows = logits.chunks_exact(model.config.vocab_size);
        bits += rows.zip(*window).map(|(row, byte)| cross_entropy(row, *byte)).sum::<f64>();
        progress.done();
    }
    Ok(EvalReport {
        device: device.facts().to_string(),
        bytes: text.len(),
        windows: windows.len(),
        bits_per_byte: bits / text.len() as f64,
        seconds: begin.elapsed().as_secs_f64(),
        assumed: assumed(&model.config.assumed),
    })
}

/// -log2 of the probability of an id.
fn cross_entropy(logits: &[f32], id: u8) -> f64 {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - top).exp()).sum();
    (sum.ln() - f64::from(logits[usize::from(id)] - top)) / std::f64::consts::LN_2
}

impl Report for EvalReport {
    fn lines(&self) -> Vec<String> {
        vec![report::pairs(&[
            ("device", self.device.clone()),
            ("bytes", self.bytes.to_string()),
            ("windows", self.windows.to_string()),
            ("bits per byte", format!("{:.4}", self.bits_per_byte)),
            ("seconds", format!("{:.2}", self.seconds)),
        ])]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_logits_are_eight_bits() {
        assert!((cross_entropy(&[0.5; 256], 7) - 8.0).abs() < 1e-12);
        assert!(cross_entropy(&[0.0, 200.0], 1) < 1e-12);
    }
}
