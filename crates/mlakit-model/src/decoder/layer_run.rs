//! One attention layer of a checkpoint on rows from outside: what goes in, and the run in f64.

use mlakit::RecordLayout;
use mlakit_serve::CacheSpec;

use super::error::DecodeError;
use crate::config::AttentionConfig;
use crate::{
    AttentionReference, AttentionWeights, Form, Keys, LatentCache, Selected, Selection, Sequence,
};

/// How a layer is run.
#[derive(Clone, Copy, Debug)]
pub struct LayerOptions {
    /// How the cache stores a token, and how attention over it is divided.
    pub cache: CacheSpec,
    /// Tokens of each sequence in one step; all if absent.
    pub chunk: Option<usize>,
}

/// The rows of several sequences, packed; each sequence alone, its cache empty at first.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerInput {
    /// `[rows, hidden]`.
    pub hidden: Vec<f32>,
    /// `[sequences + 1]`.
    pub q_offsets: Vec<i32>,
    /// `[sequences]`: rotary positions of the first rows; zeros if absent.
    pub first_position: Option<Vec<i32>>,
    /// `[rows, width]`: the keys that each row attends to, by index in its sequence; negative ones are unused.
    pub topk: Option<Vec<i32>>,
}

/// What a layer computes.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerOutput {
    /// `[rows, hidden]`, after the output projection.
    pub attn_out: Vec<f32>,
    /// The keys that each row attended to, where the layer is sparse or they were given.
    pub topk: Option<Selected>,
}

/// The rows of one step of one sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) sequence: usize,
    /// The first row among all.
    pub(super) row: usize,
    /// Tokens that the sequence has cached before.
    pub(super) cached: usize,
    pub(super) rows: usize,
}

impl LayerInput {
    /// Rows.
    pub fn rows(&self) -> usize {
        self.q_offsets.last().map_or(0, |rows| *rows as usize)
    }

    /// Entries of a row of `topk`.
    pub fn topk_width(&self) -> Option<usize> {
        self.topk.as_ref().map(|topk| topk.len() / self.rows().max(1))
    }

    /// `topk`, ascending in each row, each key once, those that a window of `window` keys hides left out, -1 after the last.
    pub(super) fn selected(&self, window: Option<usize>) -> Option<Selected> {
        let width = self.topk_width()?.max(1);
        let mut keys = self.topk.clone()?;
        let own = self.lengths().flat_map(|length| 0..length as i32);
        for (row, own) in keys.chunks_exact_mut(width).zip(own) {
            let oldest = window.map_or(0, |window| (own + 1 - window as i32).max(0));
            let mut used: Vec<i32> = row.iter().copied().filter(|key| *key >= oldest).collect();
            used.sort_unstable();
            used.dedup();
            row.fill(-1);
            row[..used.len()].copy_from_slice(&used);
        }
        Some(Selected { keys, width })
    }

    /// Checks offsets, shapes, positions, and that each selected key is one that the row sees.
    ///
    /// # Errors
    /// [`DecodeError::Input`].
    pub fn check(&self, hidden: usize) -> Result<(), DecodeError> {
        let fail =
            |what, needed: String, given: String| Err(DecodeError::Input { what, needed, given });
        let ordered = self.q_offsets.first() == Some(&0)
            && self.q_offsets.windows(2).all(|pair| pair[0] <= pair[1]);
        if !ordered {
            let needed = "offsets that begin at 0 and do not decrease".to_string();
            return fail("q_offsets", needed, format!("{:?}", self.q_offsets));
        }
        let (rows, given) = (self.rows(), self.hidden.len());
        if rows == 0 || given != rows * hidden {
            let needed = format!("at least one row, [{rows}, {hidden}] by q_offsets");
            return fail("hidden", needed, format!("{given} elements"));
        }
        let sequences = self.q_offsets.len() - 1;
        if let Some(first) = &self.first_position {
            let longest = i32::MAX - rows as i32;
            if first.len() != sequences || first.iter().any(|at| !(0..=longest).contains(at)) {
                let needed = format!("[{sequences}], from 0 to {longest}");
                return fail("first_position", needed, format!("{first:?}"));
            }
        }
        let Some(topk) = &self.topk else { return Ok(()) };
        let width = topk.len() / rows;
        if width == 0 || width * rows != topk.len() {
            let needed = format!("[{rows}, T], T at least 1");
            return fail("topk", needed, format!("{} elements", topk.len()));
        }
        for (sequence, bounds) in self.q_offsets.windows(2).enumerate() {
            for row in bounds[0] as usize..bounds[1] as usize {
                let own = row as i32 - bounds[0];
                let unseen = |key: &&i32| **key > own;
                if let Some(key) = topk[row * width..][..width].iter().find(unseen) {
                    let needed = format!("keys up to {own} in row {row} of sequence {sequence}");
                    return fail("topk", needed, key.to_string());
                }
            }
        }
        Ok(())
    }

    /// The steps, each with the sequences that still have rows.
    pub(super) fn steps(&self, chunk: Option<usize>) -> Vec<Vec<Piece>> {
        let chunk = chunk.unwrap_or(usize::MAX).max(1);
        let mut steps: Vec<Vec<Piece>> = Vec::new();
        for (sequence, bounds) in self.q_offsets.windows(2).enumerate() {
            let (begin, end) = (bounds[0] as usize, bounds[1] as usize);
            let mut row = begin;
            for step in 0.. {
                if row >= end {
                    break;
                }
                let rows = chunk.min(end - row);
                if steps.len() <= step {
                    steps.push(Vec::new());
                }
                steps[step].push(Piece { sequence, row, cached: row - begin, rows });
                row += rows;
            }
        }
        steps
    }

    pub(super) fn first_position(&self, sequence: usize) -> i32 {
        self.first_position.as_ref().map_or(0, |first| first[sequence])
    }

    pub(super) fn lengths(&self) -> impl Iterator<Item = usize> + '_ {
        self.q_offsets.windows(2).map(|bounds| (bounds[1] - bounds[0]) as usize)
    }
}

/// Runs the layer in f64, over what caches of the options' formats hold of each token
/// ([`AttentionReference::storing`]).
///
/// # Errors
/// As [`LayerInput::check`]; formats that cannot store such a token; no selection for a layer that shares one.
pub fn run_layer_f64(
    (config, weights): (&AttentionConfig, &AttentionWeights<'_>),
    input: &LayerInput,
    options: LayerOptions,
) -> Result<LayerOutput, DecodeError> {
    let LayerOptions { cache, chunk } = options;
    check_records(config, cache)?;
    let reference =
        AttentionReference::new(config, weights).storing(cache.record, cache.index_record);
    let hidden = reference.hidden_size();
    input.check(hidden)?;
    let given = input.selected(config.window);
    let mut caches = vec![LatentCache::default(); input.q_offsets.len() - 1];
    let mut attn_out = vec![0.0; input.rows() * hidden];
    let mut topk = given.clone();
    for piece in input.steps(chunk).into_iter().flatten() {
        let rows = piece.row..piece.row + piece.rows;
        let x: Vec<f64> = input.hidden[rows.start * hidden..rows.end * hidden]
            .iter()
            .map(|value| f64::from(*value))
            .collect();
        let first_position = input.first_position(piece.sequence) as usize;
        let cache = &mut caches[piece.sequence];
        let mut sequence = [Sequence { rows: piece.rows, first_position, cache }];
        let keys = match &given {
            Some(Selected { keys, width }) => Keys::Given(Selection {
                keys: &keys[rows.start * width..rows.end * width],
                width: *width,
            }),
            None => Keys::Own,
        };
        let output =
            reference.run(&x, &mut sequence, keys, Form::Naive).map_err(crate::Error::from)?;
        let to = &mut attn_out[rows.start * hidden..rows.end * hidden];
        to.iter_mut().zip(&output.hidden).for_each(|(to, value)| *to = *value as f32);
        if let Some(selected) = output.selected {
            let width = selected.width;
            let all = topk
                .get_or_insert_with(|| Selected { keys: vec![-1; input.rows() * width], width });
            all.keys[rows.start * width..rows.end * width].copy_from_slice(&selected.keys);
        }
    }
    Ok(LayerOutput { attn_out, topk })
}

/// Checks that the cache formats can store the layer's tokens.
fn check_records(config: &AttentionConfig, cache: CacheSpec) -> Result<(), DecodeError> {
    let (latent, rope) = (config.kv_lora_rank, config.qk_rope_head_dim);
    cache.record.check_parts(latent, rope)?;
    RecordLayout::of(cache.record, latent, rope).check(cache.page_size)?;
    if let Some(indexer) = config.own_indexer() {
        RecordLayout::of(cache.index_record, indexer.head_dim, 0).check(cache.page_size)?;
    }
    Ok(())
}
