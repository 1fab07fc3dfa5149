//! One attention layer on a device, its rows from outside, through paged caches that begin empty.

use mlakit::{Buffer, Category, Element, Error, Lane, PoolView, Stream};
use mlakit_serve::{
    Capacity, IndexCache, KeyRule, KvPool, LayerCache, Listed, MlaDevice, MlaLayer, PooledInputs,
    StepInputs, StepKeys, Workspace,
};

use super::attention::{Deployment, Lists, attention_layer};
use super::error::DecodeError;
use super::layer_run::{LayerInput, LayerOptions, LayerOutput, Piece};
use crate::config::{AttentionConfig, IndexerConfig};
use crate::{AttentionWeights, Selected};

/// Runs the layer on a device: BF16 weights and latents, F32 rows and F32 in between.
///
/// # Errors
/// As [`LayerInput::check`] and [`MlaLayer::new`]; no selection for a layer that shares one; no memory.
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
    Ok(LayerOutput { attn_out, topk: run.selected })
}

struct Running<'r, D: MlaDevice> {
    input: &'r LayerInput,
    hidden: usize,
    table_width: usize,
    /// What rows attend to: given from outside, or made step by step by the layer's indexer.
    selected: Option<Selected>,
    indexer: Option<IndexerConfig>,
    sequences: Vec<Vec<i32>>,
    layer: MlaLayer<D>,
    workspace: Workspace<D>,
    lane: Lane<D>,
    view: PoolView<D>,
    index_view: Option<PoolView<D>>,
    /// The last index keys and gates of each sequence, where keys are pooled.
    ring: Option<Buffer<f32, D>>,
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
        let config = pair.0;
        let given = input.selected(config.window);
        let layer = layer(&device, pair, (input, given.as_ref()), (steps, options))?;
        let cache = options.cache;
        let page_tokens = |length: usize| length.div_ceil(cache.page_size);
        let pages: usize = input.lengths().map(page_tokens).sum();
        let geometry = layer.spec().pages();
        let index_pages = layer.spec().index_pages();
        let mut pool =
            KvPool::new(&device, 1, geometry, pages + 1)?.with_index(&device, [index_pages])?;
        let mut sequences = vec![Vec::new(); input.q_offsets.len() - 1];
        for (sequence, length) in sequences.iter_mut().zip(input.lengths()) {
            pool.grow(sequence, length)?;
        }
        let mut view = PoolView::new(&device, "view", geometry)?;
        view.bind(stream, pool.layer(0))?;
        let mut index_view = index_pages
            .map(|pages| PoolView::new(&device, "view of index keys", pages))
            .transpose()?;
        if let (Some(view), Some(pages)) = (&mut index_view, pool.index(0)) {
            view.bind(stream, pages)?;
        }
        let indexer = layer.indexer().and(config.own_indexer());
        let width = indexer.map(|indexer| indexer.selected_width());
        let ring = indexer.filter(|indexer| indexer.pool.is_some()).map(|indexer| {
            let elements = sequences.len() * indexer.pool_size() * 2 * indexer.head_dim;
            Buffer::zeroed(&device, (Category::Cache, "ring of index keys"), elements)
        });
        let scale = cache.record.is_scaled();
        let scale = scale.then(|| Buffer::new(&device, (Category::Weights, "kv_scale"), &[1.0]));
        let none = |width| Selected { keys: vec![-1; input.rows() * width], width };
        Ok(Self {
            input,
            hidden,
            table_width: layer.spec().capacity.table_width,
            selected: given.or(width.map(none)),
            indexer,
            sequences,
            workspace: Workspace::new(&device, layer.spec())?,
            lane: Lane::new(&device, "lane", &[layer.scratch_bytes()])?,
            layer,
            view,
            index_view,
            ring: ring.transpose()?,
            pool,
            kv_scale: scale.transpose()?,
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
        let index = self.index_view.as_ref().map(|view| IndexCache {
            read: view.lease(),
            write: view.lease_mut(),
            ring: self.ring.as_ref().map(Buffer::lease),
        });
        self.layer.step(
            stream,
            LayerCache { read: self.view.lease(), write: self.view.lease_mut(), index },
            tensors.inputs(scale),
            (&self.workspace, &self.lane),
            (&out.lease()).into(),
        )?;
        stream.wait()?;
        self.keep_selection(pieces, rows)?;
        Ok(out.read()?)
    }

    /// What the layer's indexer selected in a step.
    fn keep_selection(&mut self, pieces: &[Piece], rows: usize) -> Result<(), DecodeError> {
        let (Some(indexer), Some(selected)) = (&self.indexer, &mut self.selected) else {
            return Ok(());
        };
        let keys = self.workspace.selected(rows)?;
        let (topk, width) = (keys.len() / rows.max(1), selected.width);
        let of_row = pieces
            .iter()
            .flat_map(|piece| (0..piece.rows).map(|row| (piece.row + row, piece.cached + row + 1)));
        for ((row, seen), keys) in of_row.zip(keys.chunks_exact(topk)) {
            let tokens = tokens(indexer, keys, seen);
            let entries = &mut selected.keys[row * width..(row + 1) * width];
            entries.iter_mut().zip(tokens).for_each(|(entry, token)| *entry = token);
        }
        Ok(())
    }

    fn host(&self, pieces: &[Piece]) -> StepHost {
        let mut host = StepHost { q_offsets: vec![0], ..StepHost::default() };
        for (request, piece) in pieces.iter().enumerate() {
            let pages = &self.sequences[piece.sequence];
            let first = self.input.first_position(piece.sequence);
            let rows = piece.row * self.hidden..(piece.row + piece.rows) * self.hidden;
            host.hidden.extend(&self.input.hidden[rows]);
            for at in piece.cached..piece.cached + piece.rows {
                host.positions.push(first + at as i32);
                host.slots.push(self.pool.slot(pages, at));
                host.request.push(request as i32);
                host.last_position.push(at as i64);
            }
            let end = piece.cached + piece.rows;
            let begin = host.page_table.len();
            host.page_table.extend_from_slice(pages);
            host.page_table.resize(begin + self.table_width, -1);
            host.kv_lens.push(end as i32);
            host.q_offsets.push(host.positions.len() as i32);
            host.states.push(piece.sequence as i32);
            let size = self.indexer.map_or(1, |indexer| indexer.pool_size());
            host.pools.push((end / size) as i32);
            self.list(&mut host, piece);
        }
        host
    }

    /// The keys that are given for the rows of a piece.
    fn list(&self, host: &mut StepHost, piece: &Piece) {
        let (None, Some(Selected { keys, width })) = (&self.indexer, &self.selected) else {
            return;
        };
        for row in piece.row..piece.row + piece.rows {
            let keys = &keys[row * width..(row + 1) * width];
            host.listed.extend(keys);
            host.counts.push(keys.iter().filter(|key| **key >= 0).count() as i32);
        }
    }
}

/// The layer, with room for the largest of the steps.
fn layer<D: MlaDevice>(
    device: &D,
    pair: (&AttentionConfig, &AttentionWeights<'_>),
    (input, given): (&LayerInput, Option<&Selected>),
    (steps, options): (&[Vec<Piece>], LayerOptions),
) -> Result<MlaLayer<D>, DecodeError> {
    let rows_of = |pieces: &Vec<Piece>| pieces.iter().map(|piece| piece.rows).sum();
    let rows: usize = steps.iter().map(rows_of).max().unwrap_or(1);
    let kv_tokens = input.lengths().max().unwrap_or(1).max(1);
    let table_width = kv_tokens.div_ceil(options.cache.page_size);
    let batch = steps.iter().map(Vec::len).max().unwrap_or(1);
    let deployment = Deployment {
        cache: options.cache,
        capacity: Capacity { rows, batch, kv_tokens, table_width },
        decode_rows: rows,
        dense_prompts: false,
        lists: given.map_or(Lists::Shared, |given| Lists::Outside { width: given.width }),
    };
    attention_layer(device, "layer", pair, (&deployment, KeyRule::All))
}

/// The tokens of the keys that a row selects which sees `seen` tokens.
fn tokens(indexer: &IndexerConfig, keys: &[i32], seen: usize) -> Vec<i32> {
    let used = keys.iter().copied().filter(|key| *key >= 0);
    let Some(pool) = indexer.pool else { return used.collect() };
    let (size, seen) = (pool.size as i32, seen as i32);
    let tail = if pool.always_tail { seen - seen % size..seen } else { 0..0 };
    used.flat_map(|key| key * size..(key + 1) * size).chain(tail).collect()
}

#[derive(Default)]
struct StepHost {
    hidden: Vec<f32>,
    positions: Vec<i32>,
    slots: Vec<i64>,
    page_table: Vec<i32>,
    kv_lens: Vec<i32>,
    q_offsets: Vec<i32>,
    request: Vec<i32>,
    /// Keys that are given, and how many for each row.
    listed: Vec<i32>,
    counts: Vec<i32>,
    last_position: Vec<i64>,
    pools: Vec<i32>,
    states: Vec<i32>,
}

struct StepTensors<D: MlaDevice> {
    hidden: Buffer<f32, D>,
    positions: Buffer<i32, D>,
    slots: Buffer<i64, D>,
    page_table: Buffer<i32, D>,
    kv_lens: Buffer<i32, D>,
    q_offsets: Buffer<i32, D>,
    request: Buffer<i32, D>,
    listed: Buffer<i32, D>,
    counts: Buffer<i32, D>,
    last_position: Buffer<i64, D>,
    pools: Buffer<i32, D>,
    states: Buffer<i32, D>,
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
            request: tensor(device, &host.request)?,
            listed: tensor(device, &host.listed)?,
            counts: tensor(device, &host.counts)?,
            last_position: tensor(device, &host.last_position)?,
            pools: tensor(device, &host.pools)?,
            states: tensor(device, &host.states)?,
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
            keys: StepKeys {
                all_selected: false,
                request: Some((&self.request.lease()).into()),
                listed: (!self.counts.is_empty()).then(|| Listed {
                    positions: (&self.listed.lease()).into(),
                    counts: (&self.counts.lease()).into(),
                }),
                pooled: Some(PooledInputs {
                    last_position: (&self.last_position.lease()).into(),
                    pools: (&self.pools.lease()).into(),
                    states: (&self.states.lease()).into(),
                }),
            },
        }
    }
}

fn tensor<T: Element, D: MlaDevice>(device: &D, values: &[T::Raw]) -> Result<Buffer<T, D>, Error> {
    Buffer::new(device, (Category::Tensors, "layer inputs"), values)
}
