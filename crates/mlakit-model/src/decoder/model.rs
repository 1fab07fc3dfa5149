//! The decoder: embedding, layers, head; one function from ids to logits, for a stream and for a recorder.

use half::bf16;
use mlakit::op::embed::{Embed, EmbedArgs, EmbedFields, EmbedSpec};
use mlakit::op::layer::{Float, FloatInput, FloatOutput};
use mlakit::op::linear::{Linear, LinearArgs, LinearFields, LinearSpec};
use mlakit::op::norm::{Norm, NormArgs, NormFields, NormSpec};
use mlakit::op::sample::Sample;
use mlakit::op::spec::Scalar;
use mlakit::{
    Buffer, Category, Error, Input, Lane, Lease, Name, Output, PageGeometry, Prepared, Runner, Runs,
};
use mlakit_serve::layer::prepare;
use mlakit_serve::{KeyRule, LayerCache, MlaDevice, MlaLayer, StepInputs, StepKeys, Workspace};

use super::attention::{Deployment, attention_layer};
use super::error::DecodeError;
use super::mlp::{Mlp, MlpDevice, MlpInputs, MlpWork};
use super::upload::Upload;
use crate::{Checkpoint, ModelConfig};

/// A device that runs a whole decoder.
pub trait DecoderDevice: MlaDevice + MlpDevice + Runs<Embed> + Runs<Sample> {}

impl<D: MlaDevice + MlpDevice + Runs<Embed> + Runs<Sample>> DecoderDevice for D {}

/// What changes from step to step, and where it lies.
pub struct StepOperands<D> {
    /// `[rows]`: token ids; -1 is padding.
    pub ids: Input<'static, i32, D>,
    /// `[rows]`: rotary positions.
    pub positions: Input<'static, i32, D>,
    /// `[rows]`: where each row's record goes; -1 is nowhere.
    pub slots: Input<'static, i64, D>,
    /// `[batch, width]`.
    pub page_table: Input<'static, i32, D>,
    /// `[batch]`, this step's tokens included.
    pub kv_lens: Input<'static, i32, D>,
    /// `[batch + 1]`.
    pub q_offsets: Input<'static, i32, D>,
    /// What sparse layers need beside.
    pub keys: StepKeys<D>,
    /// The rows whose logits are wanted.
    pub wanted_rows: Input<'static, i32, D>,
}

struct Layer<D: DecoderDevice> {
    attention_norm: Buffer<f32, D>,
    attention: MlaLayer<D>,
    mlp_norm: Buffer<f32, D>,
    mlp: Mlp<D>,
}

/// The tensors between the layers.
struct Tensors<D: DecoderDevice> {
    residual: Buffer<f32, D>,
    hidden: Buffer<f32, D>,
    wanted: Buffer<f32, D>,
    wanted_hidden: Buffer<f32, D>,
}

/// Where the cache of each layer is: a closure from the runner and the layer's number.
pub trait Caches<R, D> {
    /// The cache of a layer.
    ///
    /// # Errors
    /// A view of another graph.
    fn layer(&self, runner: &R, layer: usize) -> Result<LayerCache<D>, Error>;
}

impl<R, D, F: Fn(&R, usize) -> Result<LayerCache<D>, Error>> Caches<R, D> for F {
    fn layer(&self, runner: &R, layer: usize) -> Result<LayerCache<D>, Error> {
        self(runner, layer)
    }
}

/// A checkpoint on a device. It owns weights, code and the tensors of a step; the cache is somebody else's.
pub struct Decoder<D: DecoderDevice> {
    hidden: usize,
    vocab: usize,
    embedding: Buffer<bf16, D>,
    layers: Vec<Layer<D>>,
    final_norm: Buffer<f32, D>,
    head: Option<Buffer<bf16, D>>,
    kv_scale: Option<Buffer<f32, D>>,
    embed: Prepared<Embed, D>,
    pick: Prepared<Embed, D>,
    norm: Prepared<Norm, D>,
    wanted_norm: Prepared<Norm, D>,
    project: Prepared<Linear, D>,
    tensors: Tensors<D>,
    workspace: Workspace<D>,
    mlp_work: MlpWork<D>,
    lane: Lane<D>,
}

impl<D: DecoderDevice> Decoder<D> {
    /// Uploads the weights and prepares every operation. Logits are computed for at most `wanted_rows` rows of a step.
    ///
    /// # Errors
    /// [`DecodeError::Unsupported`] for a part of the architecture that is not run; what the device refuses; memory.
    pub fn new(
        device: &D,
        (config, checkpoint): (&ModelConfig, &Checkpoint),
        deployment: &Deployment,
        wanted_rows: usize,
    ) -> Result<Self, DecodeError> {
        config.check_whole().map_err(crate::Error::from)?;
        refuse_scaled_streams(config)?;
        device.census().enter("load");
        let weights = checkpoint.model(config)?;
        let up = Upload { device, owner: "model".to_string() };
        let (hidden, vocab) = (config.hidden_size, config.vocab_size);
        let rows = deployment.capacity.rows;
        let mut layers: Vec<Layer<D>> = Vec::with_capacity(config.layers.len());
        for index in 0..config.layers.len() {
            let before = layers.last().map(|layer| layer.attention.spec().keys.shared());
            let rules = (deployment, before.unwrap_or(KeyRule::All));
            layers.push(layer(device, (config, checkpoint, index), rules)?);
        }
        let tied = config.tie_word_embeddings
            && weights.head.bytes().as_ptr() == weights.embedding.bytes().as_ptr();
        let head = (!tied).then(|| up.matrices("head", &[weights.head])).transpose()?;
        device.census().enter("prepare");
        let ops = Ops { device, hidden, vocab, eps: config.rms_norm_eps as f32 };
        let (embed, pick) = (ops.embed(rows)?, ops.pick(wanted_rows)?);
        let norm = ops.norm(rows)?;
        let wanted_norm = ops.norm(wanted_rows)?;
        let project = ops.project(wanted_rows)?;
        let scratch = layers
            .iter()
            .map(|layer| layer.attention.scratch_bytes().max(layer.mlp.scratch_bytes()))
            .chain([&embed, &pick].map(|op| op.plan().scratch_bytes()))
            .chain([&norm, &wanted_norm].map(|op| op.plan().scratch_bytes()))
            .chain([project.plan().scratch_bytes()])
            .collect::<Vec<_>>();
        let scaled = deployment.cache.record.is_scaled();
        // The tensors of a layer with an indexer are enough for one without.
        let indexed = layers.iter().find(|layer| layer.attention.indexer().is_some());
        let shape = indexed.or(layers.first()).map(|layer| layer.attention.spec().clone());
        let shape = shape.ok_or_else(|| Error::contract("layers", "at least one", "none"))?;
        let mlps = config.layers.iter().map(|layer| &layer.mlp);
        Ok(Self {
            hidden,
            vocab,
            embedding: up.matrices("embedding", &[weights.embedding])?,
            final_norm: up.vector("norm", &weights.final_norm)?,
            head,
            kv_scale: scaled
                .then(|| Buffer::new(device, (Category::Weights, "kv_scale"), &[1.0]))
                .transpose()?,
            embed,
            pick,
            norm,
            wanted_norm,
            project,
            tensors: Tensors::new(device, hidden, (rows, wanted_rows))?,
            workspace: Workspace::new(device, &shape)?,
            mlp_work: MlpWork::new(device, rows, mlps)?,
            lane: Lane::new(device, "lane", &scratch)?,
            layers,
        })
    }

    /// From ids to the logits (F32 `[wanted, vocab]`) of the wanted rows; every layer writes its records into its pages.
    ///
    /// # Errors
    /// As each operation's `bind` and `run`.
    pub fn step<R: Runner<'static, D>>(
        &self,
        runner: &mut R,
        inputs: &StepOperands<D>,
        caches: &impl Caches<R, D>,
        logits: Output<'static, f32, D>,
    ) -> Result<(), Error> {
        let rows = inputs.ids.len();
        let t = &self.tensors;
        let residual = t.residual.lease().part(0..rows * self.hidden)?;
        let hidden = t.hidden.lease().part(0..rows * self.hidden)?;
        let embed = EmbedArgs {
            ids: inputs.ids.clone(),
            table: FloatInput::Bf16((&self.embedding.lease()).into()),
            y: FloatOutput::F32((&residual).into()),
            scratch: self.lane.lease(),
        };
        self.embed.bind(embed)?.run(runner)?;
        for (index, layer) in self.layers.iter().enumerate() {
            self.normalise(runner, (&residual, &layer.attention_norm), &hidden)?;
            let caches = caches.layer(runner, index)?;
            let step = self.layer_inputs(inputs, &hidden);
            let room = (&self.workspace, &self.lane);
            layer.attention.step(runner, caches, step, room, (&residual).into())?;
            self.normalise(runner, (&residual, &layer.mlp_norm), &hidden)?;
            let mlp = MlpInputs { x: (&hidden).into(), rows };
            layer.mlp.step(runner, &mlp, (&self.mlp_work, &self.lane), &residual)?;
        }
        self.logits(runner, &inputs.wanted_rows, &residual, logits)
    }

    /// The pages of its cache.
    pub fn pages(&self) -> PageGeometry {
        self.layers[0].attention.spec().pages()
    }

    /// The pages of its index keys, layer by layer; nothing for a layer without an indexer.
    pub fn index_pages(&self) -> impl Iterator<Item = Option<PageGeometry>> + '_ {
        self.layers.iter().map(|layer| layer.attention.spec().index_pages())
    }

    /// Keys that every indexer selects for a row at least, where it sees as many; nothing without an indexer.
    pub fn topk(&self) -> Option<usize> {
        let indexers = self.layers.iter().filter_map(|layer| layer.attention.indexer());
        indexers.map(|indexer| indexer.spec().topk).min()
    }

    /// Layers.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Elements of a row of logits.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// The lane of its operations.
    pub fn lane(&self) -> &Lane<D> {
        &self.lane
    }

    fn layer_inputs(&self, inputs: &StepOperands<D>, hidden: &Lease<f32, D>) -> StepInputs<D> {
        StepInputs {
            hidden: hidden.into(),
            positions: inputs.positions.clone(),
            slots: inputs.slots.clone(),
            page_table: inputs.page_table.clone(),
            kv_lens: inputs.kv_lens.clone(),
            q_offsets: inputs.q_offsets.clone(),
            kv_scale: self.kv_scale.as_ref().map(|scale| (&scale.lease()).into()),
            keys: inputs.keys.clone(),
        }
    }

    fn normalise<R: Runner<'static, D>>(
        &self,
        runner: &mut R,
        (x, weight): (&Lease<f32, D>, &Buffer<f32, D>),
        y: &Lease<f32, D>,
    ) -> Result<(), Error> {
        let args = NormArgs {
            x: FloatInput::F32(x.into()),
            weight: (&weight.lease()).into(),
            bias: None,
            y: None,
            y_wide: Some(y.into()),
            scratch: self.lane.lease(),
        };
        self.norm.bind(args)?.run(runner).map(drop)
    }

    fn logits<R: Runner<'static, D>>(
        &self,
        runner: &mut R,
        wanted_rows: &Input<'static, i32, D>,
        residual: &Lease<f32, D>,
        logits: Output<'static, f32, D>,
    ) -> Result<(), Error> {
        let elements = wanted_rows.len() * self.hidden;
        let wanted = self.tensors.wanted.lease().part(0..elements)?;
        let hidden = self.tensors.wanted_hidden.lease().part(0..elements)?;
        let pick = EmbedArgs {
            ids: wanted_rows.clone(),
            table: FloatInput::F32(residual.into()),
            y: FloatOutput::F32((&wanted).into()),
            scratch: self.lane.lease(),
        };
        self.pick.bind(pick)?.run(runner)?;
        let norm = NormArgs {
            x: FloatInput::F32((&wanted).into()),
            weight: (&self.final_norm.lease()).into(),
            bias: None,
            y: None,
            y_wide: Some((&hidden).into()),
            scratch: self.lane.lease(),
        };
        self.wanted_norm.bind(norm)?.run(runner)?;
        let head = self.head.as_ref().unwrap_or(&self.embedding);
        let project = LinearArgs {
            x: FloatInput::F32((&hidden).into()),
            weight: (&head.lease()).into(),
            bias: None,
            ids: None,
            gates: None,
            y: FloatOutput::F32(logits),
            scratch: self.lane.lease(),
        };
        self.project.bind(project)?.run(runner).map(drop)
    }
}

impl<D: DecoderDevice> Tensors<D> {
    fn new(device: &D, hidden: usize, (rows, wanted): (usize, usize)) -> Result<Self, Error> {
        let kind = |name: &'static str| (Category::Tensors, Name::from(name));
        Ok(Self {
            residual: Buffer::uninit(device, kind("residual"), rows * hidden)?,
            hidden: Buffer::uninit(device, kind("hidden"), rows * hidden)?,
            wanted: Buffer::uninit(device, kind("wanted rows"), wanted * hidden)?,
            wanted_hidden: Buffer::uninit(device, kind("wanted rows"), wanted * hidden)?,
        })
    }
}

fn layer<D: DecoderDevice>(
    device: &D,
    (config, checkpoint, index): (&ModelConfig, &Checkpoint, usize),
    (deployment, sharing): (&Deployment, KeyRule),
) -> Result<Layer<D>, DecodeError> {
    let weights = checkpoint.layer(config, index)?;
    let shape = &config.layers[index];
    let owner = format!("layer {index}");
    let up = Upload { device, owner: owner.clone() };
    let pair = (&shape.attention, &weights.attention);
    let sizes = (config.hidden_size, deployment.capacity.rows);
    Ok(Layer {
        attention_norm: up.vector("attention norm", &weights.attention_norm)?,
        attention: attention_layer(device, &owner, pair, (deployment, sharing))?,
        mlp_norm: up.vector("mlp norm", &weights.mlp_norm)?,
        mlp: Mlp::new(&up, (&shape.mlp, &weights.mlp), sizes)?,
    })
}

fn refuse_scaled_streams(config: &ModelConfig) -> Result<(), DecodeError> {
    let scales = [config.embedding_scale, config.residual_scale, config.logit_scale];
    if scales.iter().all(|scale| *scale == 1.0) {
        return Ok(());
    }
    Err(DecodeError::Unsupported {
        what: "scaled embeddings, residuals or logits".to_string(),
        because: "the device path runs unscaled streams".to_string(),
        instead: "use a model of the deepseek families".to_string(),
    })
}

struct Ops<'o, D> {
    device: &'o D,
    hidden: usize,
    vocab: usize,
    eps: f32,
}

impl<D: DecoderDevice> Ops<'_, D> {
    fn embed(&self, max_rows: usize) -> Result<Prepared<Embed, D>, Error> {
        self.gather(Float::Bf16, max_rows)
    }

    /// Picks rows of the residual.
    fn pick(&self, wanted: usize) -> Result<Prepared<Embed, D>, Error> {
        self.gather(Float::F32, wanted)
    }

    /// The table is as long as the operand.
    fn gather(&self, table: Float, max_rows: usize) -> Result<Prepared<Embed, D>, Error> {
        let (width, output, scale) = (self.hidden, Float::F32, Scalar::try_from(1.0)?);
        let fields = EmbedFields { width, vocab: None, table, output, scale, max_rows };
        prepare(self.device, EmbedSpec::new(fields)?)
    }

    fn norm(&self, max_rows: usize) -> Result<Prepared<Norm, D>, Error> {
        let fields = NormFields {
            width: self.hidden,
            eps: Scalar::try_from(self.eps)?,
            center: false,
            bias: false,
            max_rows,
            input: Float::F32,
            in_stride: None,
            out_stride: None,
            narrow: false,
            wide: true,
        };
        prepare(self.device, NormSpec::new(fields)?)
    }

    fn project(&self, max_rows: usize) -> Result<Prepared<Linear, D>, Error> {
        let fields = LinearFields {
            in_width: self.hidden,
            out_width: self.vocab,
            max_rows,
            input: Float::F32,
            output: Float::F32,
            accumulate: false,
            bias: false,
            experts: None,
        };
        prepare(self.device, LinearSpec::new(fields)?)
    }
}
