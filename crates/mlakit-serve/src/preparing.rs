//! The operations of a layer, prepared.

use mlakit::op::activation::{Activation, ActivationFields, ActivationKind, ActivationSpec};
use mlakit::op::layer::Float;
use mlakit::op::linear::{Linear, LinearFields, LinearSpec};
use mlakit::op::norm::{Norm, NormFields, NormSpec};
use mlakit::op::projection::{Projection, ProjectionFields, ProjectionSpec};
use mlakit::op::rotary::{Rotary, RotaryFields, RotarySpec, RotaryStyle};
use mlakit::op::spec::Scalar;
use mlakit::op::writer::{Writer, WriterFields, WriterSpec};
use mlakit::{Error, Prepared};

use crate::layer::{MlaDevice, prepare};
use crate::spec::LayerSpec;

/// The rope part of what.
pub(crate) enum Which {
    Key,
    Query,
}

/// Into the latent space, or out of it.
pub(crate) enum Direction {
    Absorb,
    Lift,
}

/// Prepares the operations of a layer.
pub(crate) struct Preparing<'p, D> {
    pub(crate) device: &'p D,
    pub(crate) spec: &'p LayerSpec,
}

impl<D: MlaDevice> Preparing<'_, D> {
    pub(crate) fn linear(
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

    pub(crate) fn output(&self, bias: bool) -> Result<Prepared<Linear, D>, Error> {
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

    pub(crate) fn norm(
        &self,
        (width, output): (usize, Float),
        eps: f32,
    ) -> Result<Prepared<Norm, D>, Error> {
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

    pub(crate) fn rotary(&self, which: Which) -> Result<Option<Prepared<Rotary, D>>, Error> {
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

    pub(crate) fn writer(&self) -> Result<Prepared<Writer, D>, Error> {
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

    pub(crate) fn projection(
        &self,
        direction: Direction,
    ) -> Result<Prepared<Projection, D>, Error> {
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

    /// The gate's projection, and the gate itself.
    pub(crate) fn gate(&self) -> Result<Option<Gate<D>>, Error> {
        let spec = self.spec;
        let width = spec.heads * spec.value;
        let Some(span) = spec.gate_span else { return Ok(None) };
        let fields = ActivationFields {
            width,
            gate_span: Some(span),
            max_rows: spec.capacity.rows,
            input: Float::F32,
            output: Float::F32,
            kind: ActivationKind::Sigmoid,
        };
        Ok(Some(Gate {
            project: self.linear((spec.hidden, width / span), (Float::F32, Float::F32), false)?,
            apply: prepare(self.device, ActivationSpec::new(fields)?)?,
        }))
    }
}

/// The operations of a gate.
pub(crate) struct Gate<D: MlaDevice> {
    pub(crate) project: Prepared<Linear, D>,
    pub(crate) apply: Prepared<Activation, D>,
}
