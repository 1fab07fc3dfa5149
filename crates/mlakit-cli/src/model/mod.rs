//! The commands on a checkpoint: `run`, `layer`, `eval`.

use std::io::{self, Write};
use std::path::Path;

use mlakit::op::merge::Partial;
use mlakit::{RecordFormat, Splits};
use mlakit_model::decoder::{self, DecodeError};
use mlakit_model::{ModelConfig, ModelFolder, embedded};
use mlakit_serve::CacheSpec;
use serde::Serialize;

use crate::args::{Attention, Format};
use crate::failure::Failure;
use crate::{machine, plan, report};

pub mod eval;
pub mod layer;
pub mod run;

/// Tokens of a page of the caches that these commands make.
const PAGE_SIZE: usize = 64;

/// Rows of a chunk of a prompt.
const PROMPT_ROWS: usize = 128;

/// The checkpoint in a folder, or the one that the program carries. What its config leaves out is
/// said.
fn open(path: Option<&Path>, format: Format) -> Result<ModelFolder, Failure> {
    let model = read(path)?;
    note_assumed(&model.config, format);
    Ok(model)
}

fn read(path: Option<&Path>) -> Result<ModelFolder, Failure> {
    match path {
        // Without the feature the program is small and stands beside the repository's data.
        None if cfg!(not(feature = "embedded")) => {
            ModelFolder::open(Path::new("models/tiny-dsa")).map_err(Failure::from)
        }
        None => ModelFolder::from_static(embedded::tiny_dsa()).map_err(Failure::from),
        Some(path) => {
            // Who names the config.json means the folder that it is in.
            let is_config = path.is_file() && path.file_name() == Some("config.json".as_ref());
            let dir = if is_config { path.parent().unwrap_or(path) } else { path };
            let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
            if !dir.is_dir() {
                return Err(Failure::input(
                    format!("--model {}: needed a folder", path.display()),
                    "give a folder with config.json, safetensors and tokenizer.json",
                ));
            }
            ModelFolder::open(dir)
                .map_err(|error| Failure::from(error).within(format!("--model {}", path.display())))
        }
    }
}

/// Says on standard error what a config.json leaves out that decides what is computed, before
/// anything is computed. In JSON it is part of the result.
fn note_assumed(config: &ModelConfig, format: Format) {
    let line = plan::model::assumed_line(&plan::model::assumed(&config.assumed));
    if let (Some(line), Format::Table) = (line, format) {
        // Nobody reads a closed stderr.
        let _ = writeln!(io::stderr(), "note: {line}");
    }
}

/// Refuses caches that this machine has no memory for.
fn ensure_cache(
    config: &ModelConfig,
    (record, index_record): (RecordFormat, RecordFormat),
    (batch, tokens): (usize, usize),
) -> Result<(), Failure> {
    let tokens = tokens.next_multiple_of(PAGE_SIZE).saturating_mul(batch);
    let latents = plan::model::token_bytes(config, (record, PAGE_SIZE))?.saturating_mul(tokens);
    let keys = plan::model::index_bytes(config, (index_record, PAGE_SIZE), tokens)?;
    let bytes = latents.saturating_add(keys);
    machine::ensure_memory(&format!("the cache of {tokens} tokens"), bytes)
}

/// Records of attention and of index keys.
fn cache(
    (record, index_record): (RecordFormat, RecordFormat),
    partial: Partial,
    splits: Splits,
) -> CacheSpec {
    CacheSpec { record, index_record, page_size: PAGE_SIZE, partial, splits }
}

fn attention(attention: Attention) -> decoder::Attention {
    match attention {
        Attention::Auto => decoder::Attention::Auto,
        Attention::Dense => decoder::Attention::Dense,
    }
}

impl From<DecodeError> for Failure {
    fn from(error: DecodeError) -> Self {
        match error {
            DecodeError::Checkpoint(error) => error.into(),
            DecodeError::Device(error) => error.into(),
            DecodeError::Unsupported { what, because, instead } => {
                Self::input(format!("{what}: {because}"), instead)
            }
            DecodeError::Input { what: "prompt and new tokens", .. } => {
                Self::input(error.to_string(), "lower --tokens, or give a shorter prompt")
            }
            DecodeError::Input { .. } => Self::input(error.to_string(), "change the named input"),
            other => Self::input(other.to_string(), "use fewer prompts or tokens"),
        }
    }
}

/// A line of the ledger, as it is printed.
#[derive(Debug, Serialize)]
pub struct Owned {
    /// What it is for.
    pub category: String,
    /// Who owns it.
    pub owner: String,
    /// Live bytes.
    pub bytes: usize,
}

/// The ledger by category and owner; the layers of a model are summed up, so that a deep one is not a long table.
fn ledger(census: &mlakit::Census) -> Vec<Owned> {
    let mut lines: Vec<Owned> = Vec::new();
    for line in census.lines() {
        let (category, owner) = (line.category.to_string(), kind_of(line.owner.as_str()));
        match lines.iter_mut().find(|l| l.category == category && l.owner == owner) {
            Some(known) => known.bytes += line.bytes,
            None => lines.push(Owned { category, owner, bytes: line.bytes }),
        }
    }
    // Buffers of no elements stand for operands that this model does not have.
    lines.retain(|line| line.bytes > 0);
    lines
}

/// `layer 12 kv_a_norm` is of the kind `layers kv_a_norm`.
fn kind_of(owner: &str) -> String {
    let Some(rest) = owner.strip_prefix("layer ") else { return owner.to_owned() };
    let part = rest.trim_start_matches(|c: char| c.is_ascii_digit()).trim_start();
    if part.is_empty() { "layers".to_owned() } else { format!("layers: {part}") }
}

/// The ledger as a table, and the sum of what is live.
fn ledger_lines(ledger: &[Owned]) -> Vec<String> {
    let row =
        |line: &Owned| vec![line.category.clone(), line.owner.clone(), report::bytes(line.bytes)];
    let total: usize = ledger.iter().map(|line| line.bytes).sum();
    vec![
        report::table(&["category", "owner", "bytes"], &[2], ledger.iter().map(row).collect()),
        format!("total {}", report::bytes(total)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_of_layers_are_summed_up() {
        assert_eq!(kind_of("layer 12 kv_a_norm"), "layers: kv_a_norm");
        assert_eq!(kind_of("layer 3"), "layers");
        assert_eq!(kind_of("lane"), "lane");
    }
}
