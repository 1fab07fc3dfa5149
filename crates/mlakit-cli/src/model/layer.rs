//! `mlakit layer`: one attention layer of a checkpoint, from a file.

use mlakit::{Device, Dtype, Splits};
use mlakit_model::config::LayerIndexer;
use mlakit_model::decoder::{LayerInput, LayerOptions, LayerOutput, run_layer, run_layer_f64};
use mlakit_model::{AttentionConfig, AttentionWeights, CheckpointError, InputError, ModelConfig};
use mlakit_serve::MlaDevice;
use serde::Serialize;

use super::{cache, open};
use crate::args::{Format, LayerArgs, Precision};
use crate::case::write::{check_path, keep_input};
use crate::case::{Axis, Dims, Table, Tensor, TensorRule, Tensors, read_file, write_file};
use crate::device::{self, AnyDevice, Environment};
use crate::failure::Failure;
use crate::plan::model::assumed;
use crate::report::{self, Report};

/// What `layer` did.
#[derive(Debug, Serialize)]
pub struct LayerReport {
    layer: usize,
    computed_by: String,
    rows: usize,
    sequences: usize,
    out: String,
    #[serde(skip_serializing_if = "serde_json::Map::is_empty")]
    assumed: serde_json::Map<String, serde_json::Value>,
}

const TABLE: Table = Table {
    inputs: &[
        TensorRule::needed(
            "hidden",
            &[Dtype::Bf16, Dtype::F32],
            &[Axis::Of("R"), Axis::Of("hidden_size")],
        ),
        TensorRule::needed("q_offsets", &[Dtype::I32], &[Axis::OneMore("B")]),
        TensorRule::optional("first_position", &[Dtype::I32], &[Axis::Of("B")]),
        TensorRule::optional("topk", &[Dtype::I32], &[Axis::Of("R"), Axis::Of("T")]),
    ],
    equal: &[("hidden_size", "hidden_size")],
    capacity: &[],
};

/// Runs the command.
///
/// # Errors
/// Files that cannot be read, tensors that do not fit the layer, a layer that is not there or that the device path does not run.
pub fn command(
    args: &LayerArgs,
    environment: &Environment,
    format: Format,
) -> Result<LayerReport, Failure> {
    check_path(&args.out)?;
    keep_input(&args.out, ("--input", &args.input))?;
    let device = match args.precision {
        Precision::Bf16 => Some(device::open(&args.device, environment)?),
        // What it is told of a device must be right, though it needs none.
        Precision::F64 => {
            device::check_names(&args.device, None, environment)?;
            None
        }
    };
    let model = open(Some(&args.model), format)?;
    let layers = model.config.layers.len();
    let layer = model.config.layer(args.layer).ok_or_else(|| {
        Failure::from(mlakit_model::Error::from(InputError::Layer { layer: args.layer, layers }))
    })?;
    let hidden = model.config.hidden_size;
    let input = read(args, &model.config)?;
    let broken = |error: CheckpointError| Failure::from(mlakit_model::Error::from(error));
    let attention = layer.latent(args.layer).map_err(broken)?;
    refuse_selection(args, attention, &input)?;
    let weights = model.checkpoint.attention(args.layer, hidden, attention).map_err(broken)?;
    let pair = (attention, &weights);
    let (output, computed_by) = match &device {
        None => {
            let by = format!("f64 oracle, {} cache", args.record.name());
            (run_layer_f64(pair, &input, options(args))?, by)
        }
        Some(AnyDevice::Cpu(device)) => {
            (on_device(device, pair, &input, args)?, device.facts().to_string())
        }
        Some(AnyDevice::Cuda(device)) => {
            (on_device(device, pair, &input, args)?, device.facts().to_string())
        }
    };
    let shape = vec![input.rows(), hidden];
    let attn_out = Tensor::new(Dtype::F32, shape, &output.attn_out);
    let topk = output.topk.filter(|_| attention.indexer.is_some());
    let topk = topk.map(|topk| Tensor::new(Dtype::I32, vec![input.rows(), topk.width], &topk.keys));
    let mut tensors = vec![("attn_out", &attn_out)];
    tensors.extend(topk.as_ref().map(|topk| ("topk", topk)));
    write_file(&args.out, &std::collections::BTreeMap::new(), &tensors)?;
    Ok(LayerReport {
        layer: args.layer,
        computed_by,
        rows: input.rows(),
        sequences: input.q_offsets.len() - 1,
        out: args.out.display().to_string(),
        assumed: assumed(&model.config.assumed),
    })
}

fn on_device<D: MlaDevice>(
    device: &D,
    pair: (&AttentionConfig, &AttentionWeights<'_>),
    input: &LayerInput,
    args: &LayerArgs,
) -> Result<LayerOutput, Failure> {
    let caller = device.own_stream()?;
    let mut stream = device.stream(&caller)?;
    Ok(run_layer(&mut stream, pair, input, options(args))?)
}

fn options(args: &LayerArgs) -> LayerOptions {
    let cache = cache((args.record, args.index_record), args.partial, Splits::Auto);
    LayerOptions { cache, chunk: args.chunk }
}

/// A layer without an indexer of its own cannot select.
fn refuse_selection(
    args: &LayerArgs,
    config: &AttentionConfig,
    input: &LayerInput,
) -> Result<(), Failure> {
    match config.indexer {
        Some(LayerIndexer::Shared) if input.topk.is_none() => Err(Failure::input(
            format!(
                "tensor `topk`: needed [R, T], given nothing: layer {} attends to what the last \
                 layer before it with an indexer selects",
                args.layer
            ),
            "run that layer on its own input, and give its tensor `topk` to this one",
        )),
        _ => Ok(()),
    }
}

fn read(args: &LayerArgs, config: &ModelConfig) -> Result<LayerInput, Failure> {
    let bytes = read_file(&args.input)?;
    let place = format!("--input {}", args.input.display());
    let input = parse(&bytes, config.hidden_size).and_then(|input| {
        check_keys(&input)?;
        check_positions(&input, config.max_position_embeddings)?;
        Ok(input)
    });
    input.map_err(|failure| failure.within(place))
}

/// -1 is the one mark for an unused entry.
fn check_keys(input: &LayerInput) -> Result<(), Failure> {
    let Some(topk) = &input.topk else { return Ok(()) };
    let Some(at) = topk.iter().position(|key| *key < -1) else { return Ok(()) };
    let row = at / input.topk_width().unwrap_or(1).max(1);
    Err(Failure::input(
        format!(
            "tensor `topk`: needed keys from 0, or -1 for none, given {} in row {row}",
            topk[at]
        ),
        "write -1 into entries that are not used",
    ))
}

/// A model is not made for positions beyond its own.
fn check_positions(input: &LayerInput, most: Option<usize>) -> Result<(), Failure> {
    let Some(most) = most else { return Ok(()) };
    for (sequence, bounds) in input.q_offsets.windows(2).enumerate() {
        let first = input.first_position.as_ref().map_or(0, |first| i64::from(first[sequence]));
        let end = first + i64::from(bounds[1]) - i64::from(bounds[0]);
        if end > most as i64 {
            return Err(Failure::input(
                format!(
                    "sequence {sequence}: needed positions below {most}, the model's \
                     `max_position_embeddings`, given {first} to {}",
                    end - 1
                ),
                "give shorter sequences, or lower `first_position`",
            ));
        }
    }
    Ok(())
}

/// The input in the bytes of a file.
///
/// # Errors
/// Bytes that are no safetensors file; a tensor that is unknown, absent or does not fit.
pub fn parse(bytes: &[u8], hidden: usize) -> Result<LayerInput, Failure> {
    let tensors = Tensors::read(bytes)?;
    let mut sizes = serde_json::Map::new();
    sizes.insert("hidden_size".into(), hidden.into());
    let dims: Dims = TABLE.check_against("model", &mut sizes, &tensors)?;
    let wide = tensors.find("hidden").is_some_and(|t| t.dtype == safetensors::Dtype::F32);
    let ints = |name: &str| tensors.find(name).map(|_| tensors.values::<i32>(name).into_owned());
    let input = LayerInput {
        hidden: match wide {
            true => tensors.values::<f32>("hidden").into_owned(),
            false => tensors.values::<half::bf16>("hidden").iter().map(|v| v.to_f32()).collect(),
        },
        q_offsets: tensors.values::<i32>("q_offsets").into_owned(),
        first_position: ints("first_position"),
        topk: ints("topk"),
    };
    if input.rows() != dims.of("R") {
        let (needed, given) = (dims.of("R"), input.rows());
        return Err(Failure::input(
            format!("tensor `q_offsets`: needed {needed} as its last entry, given {given}"),
            "the last offset is the number of rows of `hidden`",
        ));
    }
    input.check(hidden)?;
    Ok(input)
}

impl Report for LayerReport {
    fn lines(&self) -> Vec<String> {
        vec![report::pairs(&[
            ("layer", self.layer.to_string()),
            ("computed by", self.computed_by.clone()),
            ("rows", self.rows.to_string()),
            ("sequences", self.sequences.to_string()),
            ("attn_out", self.out.clone()),
        ])]
    }
}
