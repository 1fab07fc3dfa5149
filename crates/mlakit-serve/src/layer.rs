//! One layer of latent attention: its owners, and the way of the data through it.

use std::sync::Arc;

use half::bf16;
use mlakit::op::dense::{Dense, DenseArgs, DenseFields, DenseSpec, QueryDtype, QueryInput};
use mlakit::op::layer::{Float, FloatInput, FloatOutput};
use mlakit::op::linear::{Linear, LinearArgs, LinearFields, LinearSpec};
use mlakit::op::merge::{LseOutput, Partial};
use mlakit::op::norm::{Norm, NormArgs, NormFields, NormSpec};
use mlakit::op::projection::{Projection, ProjectionArgs, ProjectionFields, ProjectionSpec};
use mlakit::op::rotary::{Rotary, RotaryArgs, RotaryFields, RotarySpec, RotaryStyle};
use mlakit::op::spec::Scalar;
use mlakit::op::writer::{Writer, WriterArgs, WriterFields, WriterInput, WriterSpec};
use mlakit::paging::CacheMut;
use mlakit::splits::{Budget, Splits};
use mlakit::{
    Buffer, Cache, Device, Error, Input, Lane, LseBase, Op, Output, PageGeometry, Plan, Prepared,
    RecordFormat, RecordLayout, Runner, Runs,
};

use crate::absorbed::AbsorbedProjection;
use crate::workspace::{Tensors, Workspace};

/// A device that runs every operation of a layer.
pub trait MlaDevice:
    Runs<Dense> + Runs<Linear> + Runs<Norm> + Runs<Projection> + Runs<Rotary> + Runs<Writer>
{
}

impl<D> MlaDevice for D where
    D: Runs<Dense> + Runs<Linear> + Runs<Norm> + Runs<Projection> + Runs<Rotary> + Runs<Writer>
{
}

/// What a layer of latent attention is. Widths in elements.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    /// Width of the hidden state.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// The part of a query head without position.
    pub nope: usize,
    /// The part with position, which the key shares; 0 where there is none.
    pub rope: usize,
    /// A value head.
    pub value: usize,
    /// The cached latent.
    pub rank: usize,
    /// The query's latent, if it has one.
    pub query_rank: Option<usize>,
    /// Epsilon of the query latent's norm.
    pub query_eps: f32,
    /// Epsilon of the cached latent's norm.
    pub kv_eps: f32,
    /// Multiplies the scores.
    pub softmax_scale: f32,
    /// How the rope part rotates; `None` leaves it as it is.
    pub rotary: Option<RotaryStyle>,
    /// Multiplies cosine and sine.
    pub attention_factor: f32,
    /// The newest keys that a row sees, if not all.
    pub window: Option<usize>,
    /// How the cache stores a token, and the choices that a deployment makes.
    pub cache: CacheSpec,
    /// How much there may be of what.
    pub capacity: Capacity,
}

/// How the cache stores a token, and how attention over it is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheSpec {
    /// The record format.
    pub record: RecordFormat,
    /// Tokens of a page.
    pub page_size: usize,
    /// The dtype in which split results are stored.
    pub partial: Partial,
    /// How a row's keys are divided.
    pub splits: Splits,
}

/// How much there may be of what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Rows of one step.
    pub rows: usize,
    /// Requests of one step.
    pub batch: usize,
    /// Cached tokens of a request.
    pub kv_tokens: usize,
    /// Page table width.
    pub table_width: usize,
}

impl LayerSpec {
    /// Elements of a cached token.
    pub fn cache_width(&self) -> usize {
        self.rank + self.rope
    }

    /// Elements of the fused projection of the hidden state: query latent, if there is one, cached latent, rope key.
    pub fn down_width(&self) -> usize {
        self.query_rank.unwrap_or(0) + self.cache_width()
    }

    /// The bytes of a token and the size of a page.
    pub fn pages(&self) -> PageGeometry {
        let record = RecordLayout::of(self.cache.record, self.rank, self.rope);
        PageGeometry { record, page_size: self.cache.page_size }
    }

    /// The attention at a row capacity.
    pub fn dense(&self, rows: usize) -> Result<DenseSpec, Error> {
        DenseSpec::new(DenseFields {
            heads: self.heads,
            qk_width: self.cache_width(),
            value_width: self.rank,
            record: self.cache.record,
            record_width: None,
            page_size: self.cache.page_size,
            softmax_scale: Scalar::try_from(self.softmax_scale)?,
            lse: LseBase::Natural,
            sink_in_lse: false,
            query: QueryDtype::Bf16,
            quantize_query: false,
            partial: self.cache.partial,
            splits: self.cache.splits,
            budget: Budget::default(),
            window: self.window,
            row_lengths: false,
            max_rows: rows,
            max_batch: self.capacity.batch.min(rows),
            max_kv_tokens: self.capacity.kv_tokens,
            max_table_width: self.capacity.table_width,
        })
    }
}

/// The weights of a layer, on the device.
pub struct LayerWeights<D: Device> {
    /// BF16 `[down_width, hidden]`: `q_a_proj` (if there is one), then `kv_a_proj_with_mqa`.
    pub down: Buffer<bf16, D>,
    /// F32 `[down_width]`.
    pub down_bias: Option<Buffer<f32, D>>,
    /// F32 `[query_rank]`: the query latent's norm.
    pub query_norm: Option<Buffer<f32, D>>,
    /// BF16 `[heads * (nope + rope), query_rank]`, or `[.., hidden]` where the query has no latent.
    pub query: Buffer<bf16, D>,
    /// F32 `[rank]`: the cached latent's norm.
    pub kv_norm: Buffer<f32, D>,
    /// W_UK^T and W_UV.
    pub absorbed: AbsorbedProjection<D>,
    /// BF16 `[hidden, heads * value]`.
    pub output: Buffer<bf16, D>,
    /// F32 `[hidden]`.
    pub output_bias: Option<Buffer<f32, D>>,
    /// F32 `[rope / 2]`, where the rope part rotates; shared by all layers.
    pub inv_freq: Option<Arc<Buffer<f32, D>>>,
}

/// What changes from step to step, and where it lies.
pub struct StepInputs<D> {
    /// F32 `[rows, hidden]`, normalised.
    pub hidden: Input<'static, f32, D>,
    /// `[rows]`: rotary positions.
    pub positions: Input<'static, i32, D>,
    /// `[rows]`: where each row's record goes.
    pub slots: Input<'static, i64, D>,
    /// `[batch, width]`.
    pub page_table: Input<'static, i32, D>,
    /// `[batch]`, this step's tokens included.
    pub kv_lens: Input<'static, i32, D>,
    /// `[batch + 1]`.
    pub q_offsets: Input<'static, i32, D>,
    /// `[1]`, where the record is scaled.
    pub kv_scale: Option<Input<'static, f32, D>>,
}

impl<D> Clone for StepInputs<D> {
    fn clone(&self) -> Self {
        Self {
            hidden: self.hidden.clone(),
            positions: self.positions.clone(),
            slots: self.slots.clone(),
            page_table: self.page_table.clone(),
            kv_lens: self.kv_lens.clone(),
            q_offsets: self.q_offsets.clone(),
            kv_scale: self.kv_scale.clone(),
        }
    }
}

/// The cache of one layer, as the operations of a step take it: bound, or whatever a graph's view will be bound to.
pub struct LayerCache<D> {
    /// For attention.
    pub read: Cache<'static, D>,
    /// For the writer.
    pub write: CacheMut<'static, D>,
}

/// A layer: prepared operations and weights. It holds no cache, so it may exist before a pool does and outlive several.
pub struct MlaLayer<D: MlaDevice> {
    spec: LayerSpec,
    weights: LayerWeights<D>,
    down: Prepared<Linear, D>,
    query_norm: Option<Prepared<Norm, D>>,
    query: Prepared<Linear, D>,
    kv_norm: Prepared<Norm, D>,
    key_rotary: Option<Prepared<Rotary, D>>,
    query_rotary: Option<Prepared<Rotary, D>>,
    writer: Prepared<Writer, D>,
    absorb: Prepared<Projection, D>,
    /// By row capacity, ascending.
    dense: Vec<Prepared<Dense, D>>,
    lift: Prepared<Projection, D>,
    output: Prepared<Linear, D>,
}

impl<D: MlaDevice> MlaLayer<D> {
    /// Prepares every operation. `row_capacities`, ascending, are those for which attention gets a plan of its own (a decode step divides
    /// differently from a prompt); the largest is that of the `Spec`.
    ///
    /// # Errors
    /// What the device refuses, and memory.
    pub fn new(
        device: &D,
        spec: LayerSpec,
        weights: LayerWeights<D>,
        row_capacities: &[usize],
    ) -> Result<Self, Error> {
        let ops = Preparing { device, spec: &spec };
        let mut capacities: Vec<usize> = row_capacities.to_vec();
        capacities.push(spec.capacity.rows);
        capacities.sort_unstable();
        capacities.dedup();
        let dense = |rows: usize| prepare(device, spec.dense(rows)?);
        let (heads, hidden) = (spec.heads, spec.hidden);
        let query_in = spec.query_rank.unwrap_or(hidden);
        let query_width = heads * (spec.nope + spec.rope);
        let (down_bias, output_bias) = (weights.down_bias.is_some(), weights.output_bias.is_some());
        Ok(Self {
            down: ops.linear((hidden, spec.down_width()), (Float::F32, Float::F32), down_bias)?,
            query_norm: spec
                .query_rank
                .map(|rank| ops.norm((rank, Float::F32), spec.query_eps))
                .transpose()?,
            query: ops.linear((query_in, query_width), (Float::F32, Float::Bf16), false)?,
            kv_norm: ops.norm((spec.rank, Float::Bf16), spec.kv_eps)?,
            key_rotary: ops.rotary(Which::Key)?,
            query_rotary: ops.rotary(Which::Query)?,
            writer: ops.writer()?,
            absorb: ops.projection(Direction::Absorb)?,
            dense: capacities.into_iter().map(dense).collect::<Result<_, _>>()?,
            lift: ops.projection(Direction::Lift)?,
            output: ops.output(output_bias)?,
            weights,
            spec,
        })
    }

    /// One layer, one step: `out` (F32 `[rows, hidden]`) gains the attention's result.
    ///
    /// hidden -> latent and query projections -> rotary -> this step's records into the pool -> absorbed query -> attention over pages ->
    /// values -> output projection.
    ///
    /// # Errors
    /// As each operation's `bind` and `run`.
    pub fn step<R: Runner<'static, D>>(
        &self,
        runner: &mut R,
        cache: LayerCache<D>,
        inputs: StepInputs<D>,
        (work, lane): (&Workspace<D>, &Lane<D>),
        out: Output<'static, f32, D>,
    ) -> Result<(), Error> {
        let rows = inputs.positions.len();
        let t = work.rows(rows)?;
        self.project(runner, &inputs, &t, lane)?;
        self.rotate_key(runner, &inputs, &t, lane)?;
        let write = WriterArgs {
            tokens: WriterInput::Latent {
                latent: (&t.latent).into(),
                rope: (self.spec.rope > 0).then(|| (&t.rope).into()),
            },
            slots: inputs.slots,
            cache: cache.write,
            kv_scale: inputs.kv_scale.clone(),
            scratch: lane.lease(),
        };
        self.writer.bind(write)?.run(runner)?;
        self.absorb_query(runner, &inputs.positions, &t, lane)?;
        let attend = DenseArgs {
            q: QueryInput::Bf16((&t.query).into()),
            cache: cache.read,
            page_table: inputs.page_table,
            kv_lens: inputs.kv_lens,
            q_offsets: inputs.q_offsets,
            row_kv_lens: None,
            kv_scale: inputs.kv_scale,
            q_scale: None,
            out: (&t.attended).into(),
            lse: LseOutput::Natural((&t.lse).into()),
            scratch: lane.lease(),
        };
        self.attention(rows)?.bind(attend)?.run(runner)?;
        self.lift_values(runner, &t, lane, out)
    }

    /// The hidden state's projections: `t.down`, the query heads `t.q`, and the normalised latent `t.latent`.
    ///
    /// # Errors
    /// As each operation's `bind` and `run`.
    pub fn project<R: Runner<'static, D>>(
        &self,
        runner: &mut R,
        inputs: &StepInputs<D>,
        t: &Tensors<D>,
        lane: &Lane<D>,
    ) -> Result<(), Error> {
        let (w, rank) = (&self.weights, self.spec.query_rank.unwrap_or(0));
        let down = LinearArgs {
            x: FloatInput::F32(inputs.hidden.clone()),
            weight: (&w.down.lease()).into(),
            bias: w.down_bias.as_ref().map(|bias| (&bias.lease()).into()),
            ids: None,
            gates: None,
            y: FloatOutput::F32((&t.down).into()),
            scratch: lane.lease(),
        };
        self.down.bind(down)?.run(runner)?;
        let mut query_input = FloatInput::F32(inputs.hidden.clone());
        if let (Some(norm), Some(weight)) = (&self.query_norm, &w.query_norm) {
            let args = NormArgs {
                x: FloatInput::F32((&t.down).into()),
                weight: (&weight.lease()).into(),
                bias: None,
                y: None,
                y_wide: Some((&t.query_latent).into()),
                scratch: lane.lease(),
            };
            norm.bind(args)?.run(runner)?;
            query_input = FloatInput::F32((&t.query_latent).into());
        }
        let query = LinearArgs {
            x: query_input,
            weight: (&w.query.lease()).into(),
            bias: None,
            ids: None,
            gates: None,
            y: FloatOutput::Bf16((&t.q).into()),
            scratch: lane.lease(),
        };
        self.query.bind(query)?.run(runner)?;
        let latent = NormArgs {
            x: FloatInput::F32((&t.down.part(rank..t.down.len())?).into()),
            weight: (&w.kv_norm.lease()).into(),
            bias: None,
            y: Some((&t.latent).into()),
            y_wide: None,
            scratch: lane.lease(),
        };
        self.kv_norm.bind(latent)?.run(runner).map(drop)
    }

    /// The rotated key `t.rope`.
    fn rotate_key<R: Runner<'static, D>>(
        &self,
        runner: &mut R,
        inputs: &StepInputs<D>,
        t: &Tensors<D>,
        lane: &Lane<D>,
    ) -> Result<(), Error> {
        let Some(rotary) = &self.key_rotary else { return Ok(()) };
        let first = self.spec.query_rank.unwrap_or(0) + self.spec.rank;
        let args = RotaryArgs {
            x: FloatInput::F32((&t.down.part(first..t.down.len())?).into()),
            positions: inputs.positions.clone(),
            inv_freq: self.inv_freq()?,
            y: (&t.rope).into(),
            scratch: lane.lease(),
        };
        rotary.bind(args)?.run(runner).map(drop)
    }

    /// The query as attention reads it: its part without position becomes a latent, the rest rotates.
    fn absorb_query<R: Runner<'static, D>>(
        &self,
        runner: &mut R,
        positions: &Input<'static, i32, D>,
        t: &Tensors<D>,
        lane: &Lane<D>,
    ) -> Result<(), Error> {
        let spec = &self.spec;
        let args = ProjectionArgs {
            x: (&t.q).into(),
            weight: (&self.weights.absorbed.query()).into(),
            y: FloatOutput::Bf16((&t.query.part(0..t.query.len() - spec.rope)?).into()),
            scratch: lane.lease(),
        };
        self.absorb.bind(args)?.run(runner)?;
        let Some(rotary) = &self.query_rotary else { return Ok(()) };
        let args = RotaryArgs {
            x: FloatInput::Bf16((&t.q.part(spec.nope..t.q.len())?).into()),
            positions: positions.clone(),
            inv_freq: self.inv_freq()?,
            y: (&t.query.part(spec.rank..t.query.len())?).into(),
            scratch: lane.lease(),
        };
        rotary.bind(args)?.run(runner).map(drop)
    }

    /// Latent results to values, and their projection into `out`.
    fn lift_values<R: Runner<'static, D>>(
        &self,
        runner: &mut R,
        t: &Tensors<D>,
        lane: &Lane<D>,
        out: Output<'static, f32, D>,
    ) -> Result<(), Error> {
        let args = ProjectionArgs {
            x: (&t.attended).into(),
            weight: (&self.weights.absorbed.value()).into(),
            y: FloatOutput::F32((&t.values).into()),
            scratch: lane.lease(),
        };
        self.lift.bind(args)?.run(runner)?;
        let bias = self.weights.output_bias.as_ref();
        let args = LinearArgs {
            x: FloatInput::F32((&t.values).into()),
            weight: (&self.weights.output.lease()).into(),
            bias: bias.map(|bias| (&bias.lease()).into()),
            ids: None,
            gates: None,
            y: FloatOutput::F32(out),
            scratch: lane.lease(),
        };
        self.output.bind(args)?.run(runner).map(drop)
    }

    /// What the layer is.
    pub fn spec(&self) -> &LayerSpec {
        &self.spec
    }

    /// The weights, to reload in place.
    pub fn weights_mut(&mut self) -> &mut LayerWeights<D> {
        &mut self.weights
    }

    /// The attention that runs this many rows.
    ///
    /// # Errors
    /// More rows than the `Spec` has capacity for.
    pub fn attention(&self, rows: usize) -> Result<&Prepared<Dense, D>, Error> {
        let fits = self.dense.iter().find(|dense| dense.plan().spec().max_rows >= rows);
        let needed = || format!("at most {}", self.spec.capacity.rows);
        fits.ok_or_else(|| Error::contract("rows", needed(), rows))
    }

    /// The scratch of each operation, for the size of a lane.
    pub fn scratch_bytes(&self) -> usize {
        let dense = self.dense.iter().map(|dense| dense.plan().scratch_bytes());
        let norms = self.query_norm.iter().chain([&self.kv_norm]);
        let rotaries = self.key_rotary.iter().chain(&self.query_rotary);
        dense
            .chain(norms.map(|norm| norm.plan().scratch_bytes()))
            .chain(rotaries.map(|rotary| rotary.plan().scratch_bytes()))
            .chain([&self.down, &self.query, &self.output].map(|l| l.plan().scratch_bytes()))
            .chain([&self.absorb, &self.lift].map(|p| p.plan().scratch_bytes()))
            .chain([self.writer.plan().scratch_bytes()])
            .max()
            .unwrap_or(0)
    }

    fn inv_freq(&self) -> Result<Input<'static, f32, D>, Error> {
        let tensor = self.weights.inv_freq.as_ref();
        let tensor = tensor.ok_or_else(|| Error::contract("inv_freq", "one", "none"))?;
        Ok((&tensor.lease()).into())
    }
}

/// Plans an operation for a device and prepares it.
///
/// # Errors
/// What the device refuses, and what fails in preparation.
pub fn prepare<O: Op, D: Runs<O>>(device: &D, spec: O::Spec) -> Result<Prepared<O, D>, Error> {
    Plan::<O>::for_device::<D>(&spec, device.facts())?.prepare(device)
}

enum Which {
    Key,
    Query,
}

enum Direction {
    Absorb,
    Lift,
}

struct Preparing<'p, D> {
    device: &'p D,
    spec: &'p LayerSpec,
}

impl<D: MlaDevice> Preparing<'_, D> {
    fn linear(
        &self,
        (in_width, out_width): (usize, usize),
        (input, output): (Float, Float),
        bias: bool,
    ) -> Result<Prepared<Linear, D>, Error> {
        let fields = LinearFields {
            in_width,
            out_width,
            max_rows: self.spec.capacity.rows,
            input,
            output,
            accumulate: false,
            bias,
            experts: None,
        };
        prepare(self.device, LinearSpec::new(fields)?)
    }

    fn output(&self, bias: bool) -> Result<Prepared<Linear, D>, Error> {
        let fields = LinearFields {
            in_width: self.spec.heads * self.spec.value,
            out_width: self.spec.hidden,
            max_rows: self.spec.capacity.rows,
            input: Float::F32,
            output: Float::F32,
            accumulate: true,
            bias,
            experts: None,
        };
        prepare(self.device, LinearSpec::new(fields)?)
    }

    fn norm(&self, (width, output): (usize, Float), eps: f32) -> Result<Prepared<Norm, D>, Error> {
        let fields = NormFields {
            width,
            eps: Scalar::try_from(eps)?,
            center: false,
            bias: false,
            max_rows: self.spec.capacity.rows,
            input: Float::F32,
            in_stride: Some(self.spec.down_width()),
            out_stride: None,
            narrow: output == Float::Bf16,
            wide: output == Float::F32,
        };
        prepare(self.device, NormSpec::new(fields)?)
    }

    fn rotary(&self, which: Which) -> Result<Option<Prepared<Rotary, D>>, Error> {
        let spec = self.spec;
        if spec.rope == 0 {
            return Ok(None);
        }
        let (heads, input, in_stride, out_stride) = match which {
            Which::Key => (1, Float::F32, spec.down_width(), spec.rope),
            Which::Query => (spec.heads, Float::Bf16, spec.nope + spec.rope, spec.cache_width()),
        };
        let fields = RotaryFields {
            heads,
            width: spec.rope,
            style: spec.rotary.unwrap_or(RotaryStyle::Pair),
            input,
            before: 0,
            after: 0,
            in_stride: Some(in_stride),
            out_stride: Some(out_stride),
            attention_factor: Scalar::try_from(spec.attention_factor)?,
            max_rows: spec.capacity.rows,
        };
        prepare(self.device, RotarySpec::new(fields)?).map(Some)
    }

    fn writer(&self) -> Result<Prepared<Writer, D>, Error> {
        let fields = WriterFields {
            record: self.spec.cache.record,
            record_width: None,
            page_size: self.spec.cache.page_size,
            latent_width: self.spec.rank,
            rope_width: self.spec.rope,
            key_width: 0,
            max_rows: self.spec.capacity.rows,
        };
        prepare(self.device, WriterSpec::new(fields)?)
    }

    fn projection(&self, direction: Direction) -> Result<Prepared<Projection, D>, Error> {
        let spec = self.spec;
        let fields = match direction {
            Direction::Absorb => ProjectionFields {
                heads: spec.heads,
                in_width: spec.nope,
                out_width: spec.rank,
                in_stride: Some(spec.nope + spec.rope),
                out_stride: Some(spec.cache_width()),
                output: Float::Bf16,
                max_rows: spec.capacity.rows,
            },
            Direction::Lift => ProjectionFields {
                heads: spec.heads,
                in_width: spec.rank,
                out_width: spec.value,
                in_stride: None,
                out_stride: None,
                output: Float::F32,
                max_rows: spec.capacity.rows,
            },
        };
        prepare(self.device, ProjectionSpec::new(fields)?)
    }
}
