//! A checkpoint on a device: uploaded once, prepared once, then prompts in chunks and decode steps as replays of one graph.

mod attention;
mod error;
mod generate;
mod graph;
mod layer_device;
mod layer_run;
mod limits;
mod mlp;
mod model;
mod prompt;
mod upload;

pub use attention::{Deployment, Lists, attention_layer, layer_spec};
pub use error::DecodeError;
pub use generate::{Attention, Generation, Generator, GeneratorOptions, Sampling};
pub use layer_device::run_layer;
pub use layer_run::{LayerInput, LayerOptions, LayerOutput, run_layer_f64};
pub use limits::TextLimits;
pub use mlp::MlpDevice;
pub use model::{Caches, Decoder, DecoderDevice, StepOperands};
