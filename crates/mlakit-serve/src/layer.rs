//! One layer of latent attention: its owners, and the way of the data through it.

use std::sync::Arc;

use half::bf16;
use mlakit::op::activation::{Activation, ActivationArgs};
use mlakit::op::dense::{Dense, DenseArgs, QueryInput};
use mlakit::op::indexer::Indexer;
use mlakit::op::layer::{Float, FloatInput, FloatOutput};
use mlakit::op::linear::{Linear, LinearArgs};
use mlakit::op::merge::LseOutput;
use mlakit::op::norm::{Norm, NormArgs};
use mlakit::op::pool::Pool;
use mlakit::op::projection::{Projection, ProjectionArgs};
use mlakit::op::rotary::{Rotary, RotaryArgs};
use mlakit::op::selection::Selection;
use mlakit::op::sparse::{self, SelectionInput, Sparse, SparseArgs};
use mlakit::op::writer::{Writer, WriterArgs, WriterInput};
use mlakit::{Buffer, Cache, Device, Error, Input, Lane, Op, Output, Plan, Prepared, Runner, Runs};

use crate::absorbed::AbsorbedProjection;
use crate::indexer::{IndexStep, IndexWeights, LayerIndexer};
use crate::preparing::{Direction, Gate, Preparing, Which};
use crate::spec::{KeyRule, LayerSpec};
use crate::step::{IndexCache, LayerCache, StepInputs};
use crate::workspace::{Tensors, Workspace};

/// A device that runs every operation of a layer. One that has no kernels for some of them refuses the layers that need them.
pub trait MlaDevice:
    Runs<Activation>
    + Runs<Dense>
    + Runs<Indexer>
    + Runs<Linear>
    + Runs<Norm>
    + Runs<Pool>
    + Runs<Projection>
    + Runs<Rotary>
    + Runs<Selection>
    + Runs<Sparse>
    + Runs<Writer>
{
}

impl<D> MlaDevice for D where
    D: Runs<Activation>
        + Runs<Dense>
        + Runs<Indexer>
        + Runs<Linear>
        + Runs<Norm>
        + Runs<Pool>
        + Runs<Projection>
        + Runs<Rotary>
        + Runs<Selection>
        + Runs<Sparse>
        + Runs<Writer>
{
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
    /// BF16 `[heads * value / gate span, hidden]`, where there is a gate.
    pub gate: Option<Buffer<bf16, D>>,
    /// Of the layer's own indexer.
    pub indexer: Option<IndexWeights<D>>,
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
    indexer: Option<LayerIndexer<D>>,
    /// By row capacity, ascending. Of a sparse layer: for steps in which every key is selected, if any.
    dense: Vec<Prepared<Dense, D>>,
    /// Likewise; none where rows attend to all keys.
    sparse: Vec<Prepared<Sparse, D>>,
    lift: Prepared<Projection, D>,
    gate: Option<Gate<D>>,
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
        mut weights: LayerWeights<D>,
        row_capacities: &[usize],
    ) -> Result<Self, Error> {
        let ops = Preparing { device, spec: &spec };
        let mut capacities: Vec<usize> = row_capacities.to_vec();
        capacities.push(spec.capacity.rows);
        capacities.sort_unstable();
        capacities.dedup();
        let (mut dense, mut sparse) = (Vec::new(), Vec::new());
        for rows in capacities {
            let selected = spec.sparse(rows)?;
            if selected.is_none() || spec.dense_rows == Some(rows) {
                dense.push(prepare(device, spec.dense(rows)?)?);
            }
            if let Some(selected) = selected {
                sparse.push(prepare(device, selected)?);
            }
        }
        let indexer = match (spec.keys, weights.indexer.take()) {
            (KeyRule::Indexed(index), Some(weights)) => {
                Some(LayerIndexer::new(device, &spec, index, weights)?)
            }
            (KeyRule::Indexed(_), None) => {
                return Err(Error::contract("weights", "those of the indexer", "none"));
            }
            (KeyRule::All | KeyRule::Listed { .. }, _) => None,
        };
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
            indexer,
            dense,
            sparse,
            lift: ops.projection(Direction::Lift)?,
            gate: ops.gate()?,
            output: ops.output(output_bias)?,
            weights,
            spec,
        })
    }

    /// One layer, one step: `out` (F32 `[rows, hidden]`) gains the attention's result.
    ///
    /// hidden -> latent and query projections -> rotary -> this step's records into the pool -> (sparse layers) index keys, selection ->
    /// absorbed query -> attention over pages -> values -> output projection.
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
        let t = work.rows(inputs.positions.len())?;
        self.project(runner, &inputs, &t, lane)?;
        self.rotate_key(runner, &inputs, &t, lane)?;
        let write = WriterArgs {
            tokens: WriterInput::Latent {
                latent: (&t.latent).into(),
                rope: (self.spec.rope > 0).then(|| (&t.rope).into()),
            },
            slots: inputs.slots.clone(),
            cache: cache.write,
            kv_scale: inputs.kv_scale.clone(),
            scratch: lane.lease(),
        };
        self.writer.bind(write)?.run(runner)?;
        let all = inputs.keys.all_selected && !self.dense.is_empty() || self.sparse.is_empty();
        self.index(runner, (&inputs, cache.index), (&t, !all), lane)?;
        self.absorb_query(runner, &inputs.positions, &t, lane)?;
        if all {
            self.attend(runner, (&inputs, cache.read), &t, lane)?;
        } else {
            self.attend_selected(runner, (&inputs, cache.read), &t, lane)?;
        }
        self.lift_values(runner, &inputs, &t, lane, out)
    }

    /// Index keys of this step's tokens, and the selection of its rows, if it `selects`.
    fn index<R: Runner<'static, D>>(
        &self,
        runner: &mut R,
        (inputs, cache): (&StepInputs<D>, Option<IndexCache<D>>),
        (t, selects): (&Tensors<D>, bool),
        lane: &Lane<D>,
    ) -> Result<(), Error> {
        let Some(indexer) = &self.indexer else { return Ok(()) };
        let absent = |what| Error::contract(what, "one for a layer with an indexer", "none");
        let cache = cache.ok_or_else(|| absent("index cache"))?;
        let query = match self.spec.query_rank {
            Some(_) => (&t.query_latent).into(),
            None => inputs.hidden.clone(),
        };
        let step = IndexStep {
            inputs,
            query,
            keys: cache.read,
            ring: cache.ring,
            inv_freq: self.weights.inv_freq.as_ref().map(|tensor| (&tensor.lease()).into()),
            tensors: t.selection.as_ref().ok_or_else(|| absent("selection"))?,
        };
        indexer.write_keys(runner, (&step, cache.write), lane)?;
        if selects { indexer.select(runner, step, lane) } else { Ok(()) }
    }

    /// Attention to every key.
    fn attend<R: Runner<'static, D>>(
        &self,
        runner: &mut R,
        (inputs, cache): (&StepInputs<D>, Cache<'static, D>),
        t: &Tensors<D>,
        lane: &Lane<D>,
    ) -> Result<(), Error> {
        let args = DenseArgs {
            q: QueryInput::Bf16((&t.query).into()),
            cache,
            page_table: inputs.page_table.clone(),
            kv_lens: inputs.kv_lens.clone(),
            q_offsets: inputs.q_offsets.clone(),
            row_kv_lens: None,
            kv_scale: inputs.kv_scale.clone(),
            q_scale: None,
            out: (&t.attended).into(),
            lse: LseOutput::Natural((&t.lse).into()),
            scratch: lane.lease(),
        };
        self.attention(inputs.positions.len())?.bind(args)?.run(runner).map(drop)
    }

    /// Attention to the selected keys.
    fn attend_selected<R: Runner<'static, D>>(
        &self,
        runner: &mut R,
        (inputs, cache): (&StepInputs<D>, Cache<'static, D>),
        t: &Tensors<D>,
        lane: &Lane<D>,
    ) -> Result<(), Error> {
        let args = SparseArgs {
            q: QueryInput::Bf16((&t.query).into()),
            cache,
            selection: self.selected(inputs, t)?,
            extra: None,
            sink: None,
            kv_scale: inputs.kv_scale.clone(),
            q_scale: None,
            out: (&t.attended).into(),
            lse: LseOutput::Natural((&t.lse).into()),
            scratch: lane.lease(),
        };
        let rows = inputs.positions.len();
        fitting(&self.sparse, rows, |sparse| sparse.plan().spec().max_rows)?
            .bind(args)?
            .run(runner)
            .map(drop)
    }

    /// The keys of each row: a list from outside, else what the last indexer selected.
    fn selected(
        &self,
        inputs: &StepInputs<D>,
        t: &Tensors<D>,
    ) -> Result<SelectionInput<'static, D>, Error> {
        let absent = || Error::contract("selection", "one for a sparse layer", "none");
        let positions = |positions, counts| -> Result<_, Error> {
            Ok(SelectionInput::Positions {
                positions,
                counts,
                request: inputs.request()?,
                page_table: inputs.page_table.clone(),
                table_width: inputs.table_width(),
            })
        };
        if let (KeyRule::Listed { .. }, Some(listed)) = (self.spec.keys, &inputs.keys.listed) {
            return positions(listed.positions.clone(), listed.counts.clone());
        }
        let set = t.selection.as_ref().ok_or_else(absent)?;
        match self.spec.keys.selected().map(|(_, entries)| entries) {
            Some(sparse::Selection::Positions) => {
                positions((&set.positions).into(), (&set.counts).into())
            }
            Some(sparse::Selection::Slots) => Ok(SelectionInput::Slots {
                slots: (&set.slots).into(),
                counts: (&set.slot_counts).into(),
            }),
            None => Err(absent()),
        }
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

    /// Latent results to values, gated where there is a gate, and their projection into `out`.
    fn lift_values<R: Runner<'static, D>>(
        &self,
        runner: &mut R,
        inputs: &StepInputs<D>,
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
        let mut values = &t.values;
        if let (Some(gate), Some(weight)) = (&self.gate, &self.weights.gate) {
            gate_values(runner, (gate, weight), (inputs, t), lane)?;
            values = &t.gated;
        }
        let bias = self.weights.output_bias.as_ref();
        let args = LinearArgs {
            x: FloatInput::F32(values.into()),
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

    /// The attention over all keys that runs this many rows.
    ///
    /// # Errors
    /// More rows than the `Spec` has capacity for.
    pub fn attention(&self, rows: usize) -> Result<&Prepared<Dense, D>, Error> {
        fitting(&self.dense, rows, |dense| dense.plan().spec().max_rows)
    }

    /// The layer's own indexer.
    pub fn indexer(&self) -> Option<&LayerIndexer<D>> {
        self.indexer.as_ref()
    }

    /// The scratch of each operation, for the size of a lane.
    pub fn scratch_bytes(&self) -> usize {
        let dense = self.dense.iter().map(|dense| dense.plan().scratch_bytes());
        let norms = self.query_norm.iter().chain([&self.kv_norm]);
        let rotaries = self.key_rotary.iter().chain(&self.query_rotary);
        let sparse = self.sparse.iter().map(|sparse| sparse.plan().scratch_bytes());
        let gate = self.gate.iter().flat_map(|gate| {
            [gate.project.plan().scratch_bytes(), gate.apply.plan().scratch_bytes()]
        });
        dense
            .chain(sparse)
            .chain(gate)
            .chain(self.indexer.iter().map(LayerIndexer::scratch_bytes))
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

/// The first of several, ascending by row capacity, that has room for so many rows.
fn fitting<T>(all: &[T], rows: usize, capacity: impl Fn(&T) -> usize) -> Result<&T, Error> {
    let most = all.last().map_or(0, &capacity);
    let fits = all.iter().find(|one| capacity(one) >= rows);
    fits.ok_or_else(|| Error::contract("rows", format!("at most {most}"), rows))
}

/// `t.gated`: the values, each times the sigmoid of its gate.
fn gate_values<D: MlaDevice, R: Runner<'static, D>>(
    runner: &mut R,
    (gate, weight): (&Gate<D>, &Buffer<bf16, D>),
    (inputs, t): (&StepInputs<D>, &Tensors<D>),
    lane: &Lane<D>,
) -> Result<(), Error> {
    let project = LinearArgs {
        x: FloatInput::F32(inputs.hidden.clone()),
        weight: (&weight.lease()).into(),
        bias: None,
        ids: None,
        gates: None,
        y: FloatOutput::F32((&t.gates).into()),
        scratch: lane.lease(),
    };
    gate.project.bind(project)?.run(runner)?;
    let apply = ActivationArgs {
        x: FloatInput::F32((&t.values).into()),
        gate: Some(FloatInput::F32((&t.gates).into())),
        y: FloatOutput::F32((&t.gated).into()),
        scratch: lane.lease(),
    };
    gate.apply.bind(apply)?.run(runner).map(drop)
}

/// Plans an operation for a device and prepares it.
///
/// # Errors
/// What the device refuses, and what fails in preparation.
pub fn prepare<O: Op, D: Runs<O>>(device: &D, spec: O::Spec) -> Result<Prepared<O, D>, Error> {
    Plan::<O>::for_device::<D>(&spec, device.facts())?.prepare(device)
}
