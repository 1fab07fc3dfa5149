//! One attention layer of a checkpoint on rows from outside: on a device through the paged cache, or in f64.

use mlakit::{Buffer, Category, Element, Error, Lane, PoolView, RecordFormat, Stream};
use mlakit_serve::{
    CacheSpec, Capacity, KvPool, LayerCache, MlaDevice, MlaLayer, StepInputs, Workspace,
};

use super::attention::{Deployment, attention_layer};
use super::error::DecodeError;
use crate::config::AttentionConfig;
use crate::{AttentionReference, AttentionWeights, Form, LatentCache, Selection, Sequence};

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
}

/// The rows of one step of one sequence.
#[derive(Clone, Copy, Debug)]
struct Piece {
    sequence: usize,
    /// The first row among all.
    row: usize,
    /// Tokens that the sequence has cached before.
    cached: usize,
    rows: usize,
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
    fn steps(&self, chunk: Option<usize>) -> Vec<Vec<Piece>> {
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

    fn first_position(&self, sequence: usize) -> i32 {
        self.first_position.as_ref().map_or(0, |first| first[sequence])
    }

    fn lengths(&self) -> impl Iterator<Item = usize> + '_ {
        self.q_offsets.windows(2).map(|bounds| (bounds[1] - bounds[0]) as usize)
    }
}

/// Runs the layer in f64, over what a cache of `record` holds of each token
/// ([`AttentionReference::storing`]).
///
/// # Errors
/// As [`LayerInput::check`].
pub fn run_layer_f64(
    (config, weights): (&AttentionConfig, &AttentionWeights<'_>),
    input: &LayerInput,
    (record, chunk): (RecordFormat, Option<usize>),
) -> Result<LayerOutput, DecodeError> {
    let reference = AttentionReference::new(config, weights).storing(record);
    let hidden = reference.hidden_size();
    input.check(hidden)?;
    let mut caches = vec![LatentCache::default(); input.q_offsets.len() - 1];
    let mut attn_out = vec![0.0; input.rows() * hidden];
    for piece in input.steps(chunk).into_iter().flatten() {
        let rows = piece.row..piece.row + piece.rows;
        let x: Vec<f64> = input.hidden[rows.start * hidden..rows.end * hidden]
            .iter()
            .map(|value| f64::from(*value))
            .collect();
        let first_position = input.first_position(piece.sequence) as usize;
        let cache = &mut caches[piece.sequence];
        let mut sequence = [Sequence { rows: piece.rows, first_position, cache }];
        let selection = input.topk.as_ref().map(|topk| {
            let width = topk.len() / input.rows();
            Selection { keys: &topk[rows.start * width..rows.end * width], width }
        });
        let output =
            reference.run(&x, &mut sequence, selection, Form::Naive).map_err(crate::Error::from)?;
        let to = &mut attn_out[rows.start * hidden..rows.end * hidden];
        to.iter_mut().zip(&output.hidden).for_each(|(to, value)| *to = *value as f32);
    }
    Ok(LayerOutput { attn_out })
}

/// Runs the layer on a device: BF16 weights and latents, F32 rows and F32 in between.
///
/// With `topk` every row is a request of its own over pages of one token, so that dense attention reads the selected keys and no others.
///
/// # Errors
/// As [`LayerInput::check`] and [`MlaLayer::new`]; no memory.
pub fn run_layer<D: MlaDevice>(
    stream: &mut Stream<'_, D>,
    (config, weights): (&AttentionConfig, &AttentionWeights<'_>),
    input: &LayerInput,
    options: LayerOptions,
) -> Result<LayerOutput, DecodeError> {
    let hidden = weights.kv_down.weight.shape()[1];
    input.check(hidden)?;
    let steps = input.steps(options.chunk);
    let mut run = Running::new(stream, (config, weights), (input, hidden), &steps, options)?;
    let mut attn_out = vec![0.0; input.rows() * hidden];
    for pieces in &steps {
        let out = run.step(stream, pieces)?;
        let mut taken = 0;
        for piece in pieces {
            let elements = piece.rows * hidden;
            attn_out[piece.row * hidden..][..elements].copy_from_slice(&out[taken..][..elements]);
            taken += elements;
        }
    }
    Ok(LayerOutput { attn_out })
}

struct Running<'r, D: MlaDevice> {
    input: &'r LayerInput,
    hidden: usize,
    table_width: usize,
    sequences: Vec<Vec<i32>>,
    layer: MlaLayer<D>,
    workspace: Workspace<D>,
    lane: Lane<D>,
    view: PoolView<D>,
    pool: KvPool<D>,
    kv_scale: Option<Buffer<f32, D>>,
}

impl<'r, D: MlaDevice> Running<'r, D> {
    fn new(
        stream: &mut Stream<'_, D>,
        pair: (&AttentionConfig, &AttentionWeights<'_>),
        (input, hidden): (&'r LayerInput, usize),
        steps: &[Vec<Piece>],
        options: LayerOptions,
    ) -> Result<Self, DecodeError> {
        let device = stream.device().clone();
        let selected = input.topk_width();
        let mut cache = options.cache;
        if selected.is_some() {
            cache.page_size = 1;
        }
        let rows_of = |pieces: &Vec<Piece>| pieces.iter().map(|piece| piece.rows).sum();
        let rows: usize = steps.iter().map(rows_of).max().unwrap_or(1);
        let longest = input.lengths().max().unwrap_or(1).max(1);
        let table_width = selected.unwrap_or(longest.div_ceil(cache.page_size));
        let batch = if selected.is_some() { rows } else { steps[0].len() };
        let kv_tokens = selected.unwrap_or(longest);
        let capacity = Capacity { rows, batch, kv_tokens, table_width };
        let deployment = Deployment { cache, capacity, decode_rows: rows };
        let layer = attention_layer(&device, "layer", pair, &deployment)?;
        let pages: usize = input.lengths().map(|length| length.div_ceil(cache.page_size)).sum();
        let geometry = layer.spec().pages();
        let mut pool = KvPool::new(&device, 1, geometry, pages + 1)?;
        let mut sequences = vec![Vec::new(); input.q_offsets.len() - 1];
        for (sequence, length) in sequences.iter_mut().zip(input.lengths()) {
            pool.grow(sequence, length)?;
        }
        let mut view = PoolView::new(&device, "view", geometry)?;
        view.bind(stream, pool.layer(0))?;
        let scale = cache
            .record
            .is_scaled()
            .then(|| Buffer::new(&device, (Category::Weights, "kv_scale"), &[1.0]))
            .transpose()?;
        Ok(Self {
            input,
            hidden,
            table_width,
            sequences,
            workspace: Workspace::new(&device, layer.spec())?,
            lane: Lane::new(&device, "lane", &[layer.scratch_bytes()])?,
            layer,
            view,
            pool,
            kv_scale: scale,
        })
    }

    fn step(
        &mut self,
        stream: &mut Stream<'_, D>,
        pieces: &[Piece],
    ) -> Result<Vec<f32>, DecodeError> {
        let device = stream.device().clone();
        let host = self.host(pieces);
        let rows = host.positions.len();
        let tensors = StepTensors::new(&device, &host)?;
        let out = tensor::<f32, D>(&device, &vec![0.0; rows * self.hidden])?;
        let scale = self.kv_scale.as_ref().map(|scale| (&scale.lease()).into());
        self.layer.step(
            stream,
            LayerCache { read: self.view.lease(), write: self.view.lease_mut() },
            tensors.inputs(scale),
            (&self.workspace, &self.lane),
            (&out.lease()).into(),
        )?;
        stream.wait()?;
        Ok(out.read()?)
    }

    fn host(&self, pieces: &[Piece]) -> StepHost {
        let mut host = StepHost { q_offsets: vec![0], ..StepHost::default() };
        for piece in pieces {
            let pages = &self.sequences[piece.sequence];
            let first = self.input.first_position(piece.sequence);
            let rows = piece.row * self.hidden..(piece.row + piece.rows) * self.hidden;
            host.hidden.extend(&self.input.hidden[rows]);
            for at in piece.cached..piece.cached + piece.rows {
                host.positions.push(first + at as i32);
                host.slots.push(self.pool.slot(pages, at));
            }
            match &self.input.topk {
                None => self.push_request(&mut host, pages, piece),
                Some(topk) => self.push_selected(&mut host, pages, (piece, topk)),
            }
        }
        host
    }

    fn push_request(&self, host: &mut StepHost, pages: &[i32], piece: &Piece) {
        let begin = host.page_table.len();
        host.page_table.extend_from_slice(pages);
        host.page_table.resize(begin + self.table_width, -1);
        host.kv_lens.push((piece.cached + piece.rows) as i32);
        host.q_offsets.push(host.positions.len() as i32);
    }

    /// A row's page table is its selection: pages of one token, in ascending order.
    fn push_selected(&self, host: &mut StepHost, pages: &[i32], (piece, topk): (&Piece, &[i32])) {
        let width = self.table_width;
        for row in piece.row..piece.row + piece.rows {
            let mut keys: Vec<i32> =
                topk[row * width..][..width].iter().copied().filter(|key| *key >= 0).collect();
            keys.sort_unstable();
            keys.dedup();
            let begin = host.page_table.len();
            host.page_table.extend(keys.iter().map(|key| pages[*key as usize]));
            host.page_table.resize(begin + width, -1);
            host.kv_lens.push(keys.len() as i32);
            host.q_offsets.push(host.q_offsets.len() as i32);
        }
    }
}

#[derive(Default)]
struct StepHost {
    hidden: Vec<f32>,
    positions: Vec<i32>,
    slots: Vec<i64>,
    page_table: Vec<i32>,
    kv_lens: Vec<i32>,
    q_offsets: Vec<i32>,
}

struct StepTensors<D: MlaDevice> {
    hidden: Buffer<f32, D>,
    positions: Buffer<i32, D>,
    slots: Buffer<i64, D>,
    page_table: Buffer<i32, D>,
    kv_lens: Buffer<i32, D>,
    q_offsets: Buffer<i32, D>,
}

impl<D: MlaDevice> StepTensors<D> {
    fn new(device: &D, host: &StepHost) -> Result<Self, Error> {
        Ok(Self {
            hidden: tensor(device, &host.hidden)?,
            positions: tensor(device, &host.positions)?,
            slots: tensor(device, &host.slots)?,
            page_table: tensor(device, &host.page_table)?,
            kv_lens: tensor(device, &host.kv_lens)?,
            q_offsets: tensor(device, &host.q_offsets)?,
        })
    }

    fn inputs(&self, kv_scale: Option<mlakit::Input<'static, f32, D>>) -> StepInputs<D> {
        StepInputs {
            hidden: (&self.hidden.lease()).into(),
            positions: (&self.positions.lease()).into(),
            slots: (&self.slots.lease()).into(),
            page_table: (&self.page_table.lease()).into(),
            kv_lens: (&self.kv_lens.lease()).into(),
            q_offsets: (&self.q_offsets.lease()).into(),
            kv_scale,
        }
    }
}

fn tensor<T: Element, D: MlaDevice>(device: &D, values: &[T::Raw]) -> Result<Buffer<T, D>, Error> {
    Buffer::new(device, (Category::Tensors, "layer inputs"), values)
}
