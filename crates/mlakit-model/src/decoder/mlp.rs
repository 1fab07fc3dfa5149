//! The MLP of a layer on a device: one gated MLP, or routed experts with shared ones beside them.

use half::bf16;
use mlakit::op::activation::{
    Activation, ActivationArgs, ActivationFields, ActivationKind, ActivationSpec,
};
use mlakit::op::layer::{Float, FloatInput, FloatOutput};
use mlakit::op::linear::{Experts, Linear, LinearArgs, LinearFields, LinearSpec};
use mlakit::op::route::{self, Route, RouteArgs, RouteFields, RouteSpec};
use mlakit::op::spec::Scalar;
use mlakit::{Buffer, Device, Error, Input, Lane, Lease, Prepared, Runner, Runs};
use mlakit_serve::layer::prepare;

use super::upload::Upload;
use crate::checkpoint::{ExpertsWeights, GatedMlpWeights, MlpWeights};
use crate::config::{ExpertsConfig, GroupScore, MlpConfig, RouterConfig, Scoring};

/// A device that runs an MLP.
pub trait MlpDevice: Runs<Activation> + Runs<Linear> + Runs<Route> {}

impl<D: Runs<Activation> + Runs<Linear> + Runs<Route>> MlpDevice for D {}

/// The tensors between the operations of an MLP, for all layers one after the other.
pub(super) struct MlpWork<D: Device> {
    rows: usize,
    wide: Buffer<f32, D>,
    active: Buffer<f32, D>,
    ids: Buffer<i32, D>,
    gates: Buffer<f32, D>,
}

impl<D: Device> MlpWork<D> {
    /// Large enough for each of these MLPs.
    pub(super) fn new<'c>(
        device: &D,
        rows: usize,
        mlps: impl Iterator<Item = &'c MlpConfig>,
    ) -> Result<Self, Error> {
        let (mut width, mut used) = (0, 0);
        for mlp in mlps {
            match mlp {
                MlpConfig::Dense { width: w } => width = width.max(*w),
                MlpConfig::Experts(e) => {
                    let routed = e.router.experts_per_token * e.expert_width;
                    width = width.max(routed).max(e.shared_width);
                    used = used.max(e.router.experts_per_token);
                }
            }
        }
        let kind = |name: &'static str| (mlakit::Category::Tensors, name);
        Ok(Self {
            rows,
            wide: Buffer::uninit(device, kind("mlp gate and up"), rows * 2 * width)?,
            active: Buffer::uninit(device, kind("mlp activation"), rows * width)?,
            ids: Buffer::uninit(device, kind("expert ids"), rows * used)?,
            gates: Buffer::uninit(device, kind("expert gates"), rows * used)?,
        })
    }
}

/// An MLP: weights and prepared operations.
pub(super) enum Mlp<D: MlpDevice> {
    Dense(Box<Gated<D>>),
    Experts(Box<Routed<D>>),
}

/// `down(silu(gate x) * up x)`, added to the residual.
pub(super) struct Gated<D: MlpDevice> {
    width: usize,
    gate_up: Buffer<bf16, D>,
    gate_up_bias: Option<Buffer<f32, D>>,
    down: Buffer<bf16, D>,
    down_bias: Option<Buffer<f32, D>>,
    expand: Prepared<Linear, D>,
    activate: Prepared<Activation, D>,
    reduce: Prepared<Linear, D>,
}

/// Routed experts: gates, then the same three steps an expert, and the shared experts.
pub(super) struct Routed<D: MlpDevice> {
    width: usize,
    used: usize,
    router: Buffer<f32, D>,
    bias: Option<Buffer<f32, D>>,
    gate_up: Buffer<bf16, D>,
    down: Buffer<bf16, D>,
    route: Prepared<Route, D>,
    expand: Prepared<Linear, D>,
    activate: Prepared<Activation, D>,
    reduce: Prepared<Linear, D>,
    shared: Option<Gated<D>>,
}

/// The operands of one MLP step: the normalised rows.
pub(super) struct MlpInputs<D> {
    /// F32 `[rows, hidden]`.
    pub(super) x: Input<'static, f32, D>,
    /// Rows.
    pub(super) rows: usize,
}

impl<D: MlpDevice> Mlp<D> {
    pub(super) fn new(
        up: &Upload<'_, D>,
        (config, weights): (&MlpConfig, &MlpWeights<'_>),
        (hidden, rows): (usize, usize),
    ) -> Result<Self, Error> {
        match (config, weights) {
            (MlpConfig::Experts(config), MlpWeights::Experts(weights)) => {
                let routed = Routed::new(up, (config, weights), (hidden, rows))?;
                Ok(Self::Experts(Box::new(routed)))
            }
            (MlpConfig::Dense { .. }, MlpWeights::Dense(weights)) => {
                let gated = Gated::new(up, "mlp", weights, rows)?;
                Ok(Self::Dense(Box::new(gated)))
            }
            _ => Err(Error::contract("mlp weights", "those that the config describes", "others")),
        }
    }

    pub(super) fn scratch_bytes(&self) -> usize {
        match self {
            Self::Dense(gated) => gated.scratch_bytes(),
            Self::Experts(routed) => {
                let shared = routed.shared.as_ref().map_or(0, Gated::scratch_bytes);
                [&routed.expand, &routed.reduce]
                    .map(|linear| linear.plan().scratch_bytes())
                    .into_iter()
                    .chain([routed.route.plan().scratch_bytes()])
                    .chain([routed.activate.plan().scratch_bytes(), shared])
                    .max()
                    .unwrap_or(0)
            }
        }
    }

    /// `residual` (F32 `[rows, hidden]`) gains the MLP of the inputs.
    pub(super) fn step<R: Runner<'static, D>>(
        &self,
        runner: &mut R,
        inputs: &MlpInputs<D>,
        (work, lane): (&MlpWork<D>, &Lane<D>),
        residual: &Lease<f32, D>,
    ) -> Result<(), Error> {
        match self {
            Self::Dense(gated) => gated.step(runner, inputs, (work, lane), residual),
            Self::Experts(routed) => routed.step(runner, inputs, (work, lane), residual),
        }
    }
}

impl<D: MlpDevice> Gated<D> {
    fn new(
        up: &Upload<'_, D>,
        part: &str,
        weights: &GatedMlpWeights<'_>,
        rows: usize,
    ) -> Result<Self, Error> {
        let (width, hidden) = (weights.gate.weight.shape()[0], weights.gate.weight.shape()[1]);
        let name = |tensor: &str| format!("{part} {tensor}");
        let gate_up_bias = up.biases(&name("gate and up bias"), &[weights.gate, weights.up])?;
        let down_bias = up.biases(&name("down bias"), &[weights.down])?;
        let linear = |widths: (usize, usize), bias: bool, accumulate: bool| {
            linear_op(up.device, (widths, rows), LinearFlags { bias, accumulate, experts: None })
        };
        Ok(Self {
            width,
            gate_up: up
                .matrices(&name("gate and up"), &[weights.gate.weight, weights.up.weight])?,
            down: up.matrices(&name("down"), &[weights.down.weight])?,
            expand: linear((hidden, 2 * width), gate_up_bias.is_some(), false)?,
            activate: activation(up.device, width, rows)?,
            reduce: linear((width, hidden), down_bias.is_some(), true)?,
            gate_up_bias,
            down_bias,
        })
    }

    fn scratch_bytes(&self) -> usize {
        let linears = [&self.expand, &self.reduce].map(|linear| linear.plan().scratch_bytes());
        linears[0].max(linears[1]).max(self.activate.plan().scratch_bytes())
    }

    fn step<R: Runner<'static, D>>(
        &self,
        runner: &mut R,
        inputs: &MlpInputs<D>,
        (work, lane): (&MlpWork<D>, &Lane<D>),
        residual: &Lease<f32, D>,
    ) -> Result<(), Error> {
        let wide = work.wide.lease().part(0..inputs.rows * 2 * self.width)?;
        let active = work.active.lease().part(0..inputs.rows * self.width)?;
        let expand = LinearArgs {
            x: FloatInput::F32(inputs.x.clone()),
            weight: (&self.gate_up.lease()).into(),
            bias: self.gate_up_bias.as_ref().map(|bias| (&bias.lease()).into()),
            ids: None,
            gates: None,
            y: FloatOutput::F32((&wide).into()),
            scratch: lane.lease(),
        };
        self.expand.bind(expand)?.run(runner)?;
        activate(&self.activate, runner, (&wide, &active), lane)?;
        let reduce = LinearArgs {
            x: FloatInput::F32((&active).into()),
            weight: (&self.down.lease()).into(),
            bias: self.down_bias.as_ref().map(|bias| (&bias.lease()).into()),
            ids: None,
            gates: None,
            y: FloatOutput::F32(residual.into()),
            scratch: lane.lease(),
        };
        self.reduce.bind(reduce)?.run(runner).map(drop)
    }
}

impl<D: MlpDevice> Routed<D> {
    fn new(
        up: &Upload<'_, D>,
        (config, weights): (&ExpertsConfig, &ExpertsWeights<'_>),
        (hidden, rows): (usize, usize),
    ) -> Result<Self, Error> {
        let width = config.expert_width;
        let used = config.router.experts_per_token;
        let gate_up: Vec<_> =
            weights.experts.iter().flat_map(|e| [e.gate.weight, e.up.weight]).collect();
        let down: Vec<_> = weights.experts.iter().map(|e| e.down.weight).collect();
        let linear = |widths: (usize, usize), combine: bool| {
            let experts = Some(Experts { count: None, used, combine });
            let flags = LinearFlags { bias: false, accumulate: combine, experts };
            linear_op(up.device, (widths, rows), flags)
        };
        let bias = weights.correction_bias.as_ref();
        Ok(Self {
            width,
            used,
            router: up.vector("router", &weights.router)?,
            bias: bias.map(|bias| up.vector("router bias", bias)).transpose()?,
            gate_up: up.matrices("experts gate and up", &gate_up)?,
            down: up.matrices("experts down", &down)?,
            route: prepare(up.device, route_spec(&config.router, (hidden, rows))?)?,
            expand: linear((hidden, 2 * width), false)?,
            activate: activation(up.device, width, rows * used)?,
            reduce: linear((width, hidden), true)?,
            shared: weights
                .shared
                .as_ref()
                .map(|shared| Gated::new(up, "shared experts", shared, rows))
                .transpose()?,
        })
    }

    fn step<R: Runner<'static, D>>(
        &self,
        runner: &mut R,
        inputs: &MlpInputs<D>,
        (work, lane): (&MlpWork<D>, &Lane<D>),
        residual: &Lease<f32, D>,
    ) -> Result<(), Error> {
        let pairs = inputs.rows * self.used;
        let ids = work.ids.lease().part(0..pairs)?;
        let gates = work.gates.lease().part(0..pairs)?;
        let wide = work.wide.lease().part(0..pairs * 2 * self.width)?;
        let active = work.active.lease().part(0..pairs * self.width)?;
        debug_assert!(inputs.rows <= work.rows);
        let route = RouteArgs {
            x: inputs.x.clone(),
            weight: (&self.router.lease()).into(),
            bias: self.bias.as_ref().map(|bias| (&bias.lease()).into()),
            ids: (&ids).into(),
            gates: (&gates).into(),
            scratch: lane.lease(),
        };
        self.route.bind(route)?.run(runner)?;
        let expand = LinearArgs {
            x: FloatInput::F32(inputs.x.clone()),
            weight: (&self.gate_up.lease()).into(),
            bias: None,
            ids: Some((&ids).into()),
            gates: None,
            y: FloatOutput::F32((&wide).into()),
            scratch: lane.lease(),
        };
        self.expand.bind(expand)?.run(runner)?;
        activate(&self.activate, runner, (&wide, &active), lane)?;
        let reduce = LinearArgs {
            x: FloatInput::F32((&active).into()),
            weight: (&self.down.lease()).into(),
            bias: None,
            ids: Some((&ids).into()),
            gates: Some((&gates).into()),
            y: FloatOutput::F32(residual.into()),
            scratch: lane.lease(),
        };
        self.reduce.bind(reduce)?.run(runner)?;
        match &self.shared {
            Some(shared) => shared.step(runner, inputs, (work, lane), residual),
            None => Ok(()),
        }
    }
}

fn activation<D: MlpDevice>(
    device: &D,
    width: usize,
    rows: usize,
) -> Result<Prepared<Activation, D>, Error> {
    let (input, output, kind) = (Float::F32, Float::F32, ActivationKind::Silu);
    let fields = ActivationFields { width, gate_span: None, max_rows: rows, input, output, kind };
    prepare(device, ActivationSpec::new(fields)?)
}

struct LinearFlags {
    bias: bool,
    accumulate: bool,
    experts: Option<Experts>,
}

fn linear_op<D: MlpDevice>(
    device: &D,
    ((in_width, out_width), max_rows): ((usize, usize), usize),
    flags: LinearFlags,
) -> Result<Prepared<Linear, D>, Error> {
    let LinearFlags { bias, accumulate, experts } = flags;
    let (input, output) = (Float::F32, Float::F32);
    let fields =
        LinearFields { in_width, out_width, max_rows, input, output, accumulate, bias, experts };
    prepare(device, LinearSpec::new(fields)?)
}

fn activate<D: MlpDevice, R: Runner<'static, D>>(
    prepared: &Prepared<Activation, D>,
    runner: &mut R,
    (wide, active): (&Lease<f32, D>, &Lease<f32, D>),
    lane: &Lane<D>,
) -> Result<(), Error> {
    let args = ActivationArgs {
        x: FloatInput::F32(wide.into()),
        gate: None,
        y: FloatOutput::F32(active.into()),
        scratch: lane.lease(),
    };
    prepared.bind(args)?.run(runner).map(drop)
}

fn route_spec(
    router: &RouterConfig,
    (hidden, max_rows): (usize, usize),
) -> Result<RouteSpec, Error> {
    RouteSpec::new(RouteFields {
        hidden,
        experts: router.experts,
        used: router.experts_per_token,
        groups: router.groups,
        used_groups: Some(router.groups_kept),
        scoring: match router.scoring {
            Scoring::Sigmoid => route::Scoring::Sigmoid,
            Scoring::Softmax => route::Scoring::Softmax,
        },
        group_score: match router.group_score {
            GroupScore::Max => route::GroupScore::Max,
            GroupScore::TopTwoSum => route::GroupScore::TopTwoSum,
        },
        bias: router.correction_bias,
        normalize: router.normalize,
        scale: Scalar::try_from(router.scaling_factor as f32)?,
        max_rows,
    })
}
