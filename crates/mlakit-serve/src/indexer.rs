//! The indexer of a layer: its owners, and the way from the hidden state to a selection.

use half::bf16;
use mlakit::op::indexer::{Indexer, IndexerArgs, IndexerFields, IndexerSpec};
use mlakit::op::layer::{Float, FloatInput, FloatOutput};
use mlakit::op::linear::{Linear, LinearArgs};
use mlakit::op::norm::{Norm, NormArgs, NormFields, NormSpec};
use mlakit::op::pool::{Pool, PoolArgs, PoolFields, PoolSpec};
use mlakit::op::rotary::{Rotary, RotaryArgs, RotaryFields, RotarySpec};
use mlakit::op::selection::{Selection, SelectionArgs, SelectionFields, SelectionSpec};
use mlakit::op::spec::Scalar;
use mlakit::op::writer::{Writer, WriterArgs, WriterFields, WriterInput, WriterSpec};
use mlakit::{
    Buffer, Cache, CacheMut, Device, Error, Input, Lane, Lease, Output, Prepared, Runner,
};

use crate::layer::{MlaDevice, prepare};
use crate::preparing::Preparing;
use crate::selection::IndexTensors;
use crate::spec::{IndexSpec, LayerSpec, PooledKeys};
use crate::step::{PooledInputs, StepInputs};

/// Bytes of scratch of an indexer at most.
const BUDGET_BYTES: usize = 16 << 20;

/// The weights of an indexer, on the device. The factors that scores have in common (`width^-0.5`, `heads^-0.5`) are left out: they
/// change no order.
pub struct IndexWeights<D: Device> {
    /// BF16 `[heads * width, query_rank]`, or `[.., hidden]` where the query has no latent.
    pub query: Buffer<bf16, D>,
    /// BF16 `[width, hidden]`.
    pub key: Buffer<bf16, D>,
    /// F32 `[width]`: the gain of the key's norm.
    pub key_norm: Buffer<f32, D>,
    /// F32 `[width]`: its bias.
    pub key_norm_bias: Buffer<f32, D>,
    /// BF16 `[heads, hidden]`: what the heads count for.
    pub head_weights: Buffer<bf16, D>,
    /// Where keys are pooled.
    pub pool: Option<PoolWeights<D>>,
}

/// The weights of pooled index keys.
pub struct PoolWeights<D: Device> {
    /// BF16 `[width, hidden]`.
    pub gate: Buffer<bf16, D>,
    /// F32 `[pool size, width]`: what is added to a gate by its place in the pool.
    pub ape: Buffer<f32, D>,
}

/// An indexer: prepared operations and weights. It holds no keys.
pub struct LayerIndexer<D: MlaDevice> {
    spec: IndexSpec,
    weights: IndexWeights<D>,
    query: Prepared<Linear, D>,
    key: Prepared<Linear, D>,
    key_norm: Prepared<Norm, D>,
    head_weights: Prepared<Linear, D>,
    rotary: Option<Rotaries<D>>,
    pool: Option<Pooling<D>>,
    writer: Prepared<Writer, D>,
    indexer: Prepared<Indexer, D>,
}

struct Rotaries<D: MlaDevice> {
    query: Prepared<Rotary, D>,
    key: Prepared<Rotary, D>,
}

struct Pooling<D: MlaDevice> {
    gate: Prepared<Linear, D>,
    pool: Prepared<Pool, D>,
    selection: Prepared<Selection, D>,
}

/// What an indexer works on in one step.
pub(crate) struct IndexStep<'s, D> {
    pub(crate) inputs: &'s StepInputs<D>,
    /// What index queries are projected from.
    pub(crate) query: Input<'static, f32, D>,
    /// The keys, to read.
    pub(crate) keys: Cache<'static, D>,
    /// Where keys are pooled.
    pub(crate) ring: Option<Lease<f32, D>>,
    /// Frequencies, where something rotates.
    pub(crate) inv_freq: Option<Input<'static, f32, D>>,
    pub(crate) tensors: &'s IndexTensors<D>,
}

impl<D: MlaDevice> LayerIndexer<D> {
    /// Prepares every operation of the layer's indexer.
    ///
    /// # Errors
    /// What the device refuses, and memory.
    pub(crate) fn new(
        device: &D,
        layer: &LayerSpec,
        spec: IndexSpec,
        weights: IndexWeights<D>,
    ) -> Result<Self, Error> {
        let ops = Preparing { device, spec: layer };
        let index = PreparingIndex { device, layer, spec: &spec };
        let query_in = layer.query_rank.unwrap_or(layer.hidden);
        let query_out = if spec.rope > 0 { Float::F32 } else { Float::Bf16 };
        let wide = (Float::F32, Float::F32);
        Ok(Self {
            query: ops.linear(
                (query_in, spec.heads * spec.width),
                (Float::F32, query_out),
                false,
            )?,
            key: ops.linear((layer.hidden, spec.width), wide, false)?,
            key_norm: index.key_norm()?,
            head_weights: ops.linear((layer.hidden, spec.heads), wide, false)?,
            rotary: index.rotaries()?,
            pool: match spec.pool {
                Some(pool) => Some(Pooling {
                    gate: ops.linear((layer.hidden, spec.width), wide, false)?,
                    pool: index.pool(pool)?,
                    selection: index.selection(pool)?,
                }),
                None => None,
            },
            writer: index.writer()?,
            indexer: index.indexer()?,
            weights,
            spec,
        })
    }

    /// The keys of this step's tokens, into the cache: projection -> norm -> rotary, or pools -> records.
    pub(crate) fn write_keys<R: Runner<'static, D>>(
        &self,
        runner: &mut R,
        (step, write): (&IndexStep<'_, D>, CacheMut<'static, D>),
        lane: &Lane<D>,
    ) -> Result<(), Error> {
        let (t, hidden) = (step.tensors, &step.inputs.hidden);
        let raw = FloatOutput::F32((&t.key_raw).into());
        project(runner, (&self.key, &self.weights.key), hidden, raw, lane)?;
        let narrow = self.rotary.is_none() && self.pool.is_none();
        let norm = NormArgs {
            x: FloatInput::F32((&t.key_raw).into()),
            weight: (&self.weights.key_norm.lease()).into(),
            bias: Some((&self.weights.key_norm_bias.lease()).into()),
            y: narrow.then(|| (&t.key).into()),
            y_wide: (!narrow).then(|| (&t.key_wide).into()),
            scratch: lane.lease(),
        };
        self.key_norm.bind(norm)?.run(runner)?;
        if let Some(rotary) = &self.rotary {
            let args = rotate((&t.key_wide).into(), step, (&t.key).into(), lane)?;
            rotary.key.bind(args)?.run(runner)?;
        }
        let slots = match &self.pool {
            Some(pooling) => {
                self.pool_keys(runner, (pooling, step), lane)?;
                (&t.pool_slots).into()
            }
            None => step.inputs.slots.clone(),
        };
        let write = WriterArgs {
            tokens: WriterInput::Key((&t.key).into()),
            slots,
            cache: write,
            kv_scale: None,
            scratch: lane.lease(),
        };
        self.writer.bind(write)?.run(runner).map(drop)
    }

    /// The keys of the pools that this step's tokens complete, and their slots.
    fn pool_keys<R: Runner<'static, D>>(
        &self,
        runner: &mut R,
        (pooling, step): (&Pooling<D>, &IndexStep<'_, D>),
        lane: &Lane<D>,
    ) -> Result<(), Error> {
        let (t, inputs, pooled) = (step.tensors, step.inputs, pooled(step.inputs)?);
        let weights = self.weights.pool.as_ref().ok_or_else(|| absent("pool weights"))?;
        let ring = step.ring.as_ref().ok_or_else(|| absent("ring"))?;
        let gate = FloatOutput::F32((&t.gate).into());
        project(runner, (&pooling.gate, &weights.gate), &inputs.hidden, gate, lane)?;
        let args = PoolArgs {
            key: FloatInput::F32((&t.key_wide).into()),
            gate: FloatInput::F32((&t.gate).into()),
            ape: (&weights.ape.lease()).into(),
            kv_lens: inputs.kv_lens.clone(),
            q_offsets: inputs.q_offsets.clone(),
            states: pooled.states.clone(),
            page_table: inputs.page_table.clone(),
            state: ring.into(),
            pooled: (&t.key).into(),
            slots: (&t.pool_slots).into(),
            scratch: lane.lease(),
        };
        pooling.pool.bind(args)?.run(runner).map(drop)
    }

    /// The selection of this step's rows: queries and weights of heads -> scores and the best keys -> of pools their tokens.
    pub(crate) fn select<R: Runner<'static, D>>(
        &self,
        runner: &mut R,
        step: IndexStep<'_, D>,
        lane: &Lane<D>,
    ) -> Result<(), Error> {
        let (t, inputs) = (step.tensors, step.inputs);
        let query = match &t.query_wide {
            Some(wide) => FloatOutput::F32(wide.into()),
            None => FloatOutput::Bf16((&t.query).into()),
        };
        project(runner, (&self.query, &self.weights.query), &step.query, query, lane)?;
        if let (Some(rotary), Some(wide)) = (&self.rotary, &t.query_wide) {
            let args = rotate(wide.into(), &step, (&t.query).into(), lane)?;
            rotary.query.bind(args)?.run(runner)?;
        }
        let weights = FloatOutput::F32((&t.head_weights).into());
        let heads = (&self.head_weights, &self.weights.head_weights);
        project(runner, heads, &inputs.hidden, weights, lane)?;
        let pooled = match self.pool {
            Some(_) => Some(pooled(inputs)?),
            None => None,
        };
        let args = IndexerArgs {
            q: (&t.query).into(),
            weights: (&t.head_weights).into(),
            cache: step.keys,
            page_table: inputs.page_table.clone(),
            kv_lens: pooled.map_or(&inputs.kv_lens, |pooled| &pooled.pools).clone(),
            q_offsets: inputs.q_offsets.clone(),
            last_position: pooled.map(|pooled| pooled.last_position.clone()),
            positions: (&t.positions).into(),
            counts: (&t.counts).into(),
            scores: None,
            scratch: lane.lease(),
        };
        self.indexer.bind(args)?.run(runner)?;
        let (Some(pooling), Some(pooled)) = (&self.pool, pooled) else { return Ok(()) };
        let args = SelectionArgs {
            positions: (&t.positions).into(),
            request: inputs.request()?,
            page_table: inputs.page_table.clone(),
            table_width: inputs.table_width(),
            last_position: Some(pooled.last_position.clone()),
            slots: (&t.slots).into(),
            slot_counts: (&t.slot_counts).into(),
            scratch: lane.lease(),
        };
        pooling.selection.bind(args)?.run(runner).map(drop)
    }

    /// What it is.
    pub fn spec(&self) -> &IndexSpec {
        &self.spec
    }

    /// The scratch that any of its operations needs.
    pub(crate) fn scratch_bytes(&self) -> usize {
        let linears =
            [&self.query, &self.key, &self.head_weights].map(|op| op.plan().scratch_bytes());
        let pool = self.pool.iter().flat_map(|pooling| {
            let ops = (pooling.pool.plan(), pooling.selection.plan());
            [pooling.gate.plan().scratch_bytes(), ops.0.scratch_bytes(), ops.1.scratch_bytes()]
        });
        let rotaries = self.rotary.iter().flat_map(|r| [&r.query, &r.key]);
        linears
            .into_iter()
            .chain(pool)
            .chain(rotaries.map(|op| op.plan().scratch_bytes()))
            .chain([self.key_norm.plan().scratch_bytes(), self.writer.plan().scratch_bytes()])
            .chain([self.indexer.plan().scratch_bytes()])
            .max()
            .unwrap_or(0)
    }
}

/// A linear layer.
fn project<D: MlaDevice, R: Runner<'static, D>>(
    runner: &mut R,
    (op, weight): (&Prepared<Linear, D>, &Buffer<bf16, D>),
    x: &Input<'static, f32, D>,
    y: FloatOutput<'static, D>,
    lane: &Lane<D>,
) -> Result<(), Error> {
    let args = LinearArgs {
        x: FloatInput::F32(x.clone()),
        weight: (&weight.lease()).into(),
        bias: None,
        ids: None,
        gates: None,
        y,
        scratch: lane.lease(),
    };
    op.bind(args)?.run(runner).map(drop)
}

fn pooled<D>(inputs: &StepInputs<D>) -> Result<&PooledInputs<D>, Error> {
    inputs.keys.pooled.as_ref().ok_or_else(|| absent("pooled"))
}

fn absent(what: &'static str) -> Error {
    Error::contract(what, "one for a layer with pooled index keys", "none")
}

fn rotate<D: MlaDevice>(
    x: Input<'static, f32, D>,
    step: &IndexStep<'_, D>,
    y: Output<'static, bf16, D>,
    lane: &Lane<D>,
) -> Result<RotaryArgs<'static, D>, Error> {
    let inv_freq = step.inv_freq.clone();
    Ok(RotaryArgs {
        x: FloatInput::F32(x),
        positions: step.inputs.positions.clone(),
        inv_freq: inv_freq.ok_or_else(|| Error::contract("inv_freq", "one", "none"))?,
        y,
        scratch: lane.lease(),
    })
}

struct PreparingIndex<'p, D> {
    device: &'p D,
    layer: &'p LayerSpec,
    spec: &'p IndexSpec,
}

impl<D: MlaDevice> PreparingIndex<'_, D> {
    fn key_norm(&self) -> Result<Prepared<Norm, D>, Error> {
        let narrow = self.spec.rope == 0 && self.spec.pool.is_none();
        let fields = NormFields {
            width: self.spec.width,
            eps: Scalar::try_from(self.spec.key_eps)?,
            center: true,
            bias: true,
            max_rows: self.layer.capacity.rows,
            input: Float::F32,
            in_stride: None,
            out_stride: None,
            narrow,
            wide: !narrow,
        };
        prepare(self.device, NormSpec::new(fields)?)
    }

    fn rotaries(&self) -> Result<Option<Rotaries<D>>, Error> {
        let rotary = |heads: usize| {
            let fields = RotaryFields {
                heads,
                width: self.spec.rope,
                style: self.spec.rotary,
                input: Float::F32,
                before: 0,
                after: self.spec.width - self.spec.rope,
                in_stride: None,
                out_stride: None,
                attention_factor: Scalar::try_from(self.layer.attention_factor)?,
                max_rows: self.layer.capacity.rows,
            };
            prepare(self.device, RotarySpec::new(fields)?)
        };
        if self.spec.rope == 0 {
            return Ok(None);
        }
        Ok(Some(Rotaries { query: rotary(self.spec.heads)?, key: rotary(1)? }))
    }

    fn pool(&self, pool: PooledKeys) -> Result<Prepared<Pool, D>, Error> {
        let capacity = self.layer.capacity;
        let fields = PoolFields {
            width: self.spec.width,
            pool_size: pool.size,
            max_draft_tokens: 0,
            input: Float::F32,
            page_size: self.layer.cache.page_size,
            max_rows: capacity.rows,
            max_batch: capacity.batch,
            max_table_width: capacity.table_width,
        };
        prepare(self.device, PoolSpec::new(fields)?)
    }

    fn selection(&self, pool: PooledKeys) -> Result<Prepared<Selection, D>, Error> {
        let capacity = self.layer.capacity;
        let fields = SelectionFields {
            page_size: self.layer.cache.page_size,
            topk: self.spec.selected_keys(),
            pool_size: pool.size,
            tail: pool.tail,
            pages: None,
            max_rows: capacity.rows,
            max_batch: capacity.batch,
            max_table_width: capacity.table_width,
        };
        prepare(self.device, SelectionSpec::new(fields)?)
    }

    fn writer(&self) -> Result<Prepared<Writer, D>, Error> {
        let fields = WriterFields {
            record: self.layer.cache.index_record,
            record_width: None,
            page_size: self.layer.cache.page_size,
            latent_width: 0,
            rope_width: 0,
            key_width: self.spec.width,
            max_rows: self.layer.capacity.rows,
        };
        prepare(self.device, WriterSpec::new(fields)?)
    }

    fn indexer(&self) -> Result<Prepared<Indexer, D>, Error> {
        let capacity = self.layer.capacity;
        let fields = IndexerFields {
            heads: self.spec.heads,
            width: self.spec.width,
            record: self.layer.cache.index_record,
            page_size: self.layer.cache.page_size,
            topk: self.spec.selected_keys(),
            scores: false,
            pool_size: self.spec.pool_size(),
            budget_bytes: BUDGET_BYTES,
            max_rows: capacity.rows,
            max_batch: capacity.batch.min(capacity.rows),
            max_kv_tokens: capacity.kv_tokens.div_ceil(self.spec.pool_size()),
            max_table_width: capacity.table_width,
        };
        prepare(self.device, IndexerSpec::new(fields)?)
    }
}
