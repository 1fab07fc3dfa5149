//! `activation`: a thread a group of eight elements.

use mlakit::op::activation::{Activation, ActivationKind, ActivationRegions, ActivationSpec};
use mlakit::op::layer::Float;
use mlakit::{Choice, Error, Plan, Refusal, Runs};

use super::layer::{self, GROUP};
use crate::device::Cuda;
use crate::facts::Facts;
use crate::module::{Kernel, Source};
use crate::stream::Queue;

/// Threads of a block.
const THREADS: u32 = 256;

/// As `ActivationParams` of the kernel.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    x: u64,
    y: u64,
    rows: i64,
    width: i64,
}

const _: () = assert!(size_of::<Params>() == 32, "the kernel mirrors this");

impl Runs<Activation> for Cuda {
    type Code = Kernel;

    fn choose(_: &Facts, spec: &ActivationSpec) -> Result<Choice, Refusal> {
        match (spec.kind, spec.gate_span) {
            (ActivationKind::Silu, None) => Ok(Choice::of("portable_activation")),
            _ => Err(Refusal {
                what: "an activation with a sigmoid or with a gate apart".into(),
                because: "there is no CUDA kernel for it".into(),
                instead: "the CPU".into(),
            }),
        }
    }

    fn prepare(&self, plan: &Plan<Activation>) -> Result<Kernel, Error> {
        self.kernel(&source(plan.spec().input, plan.spec().output))
    }

    fn launch(
        &self,
        code: &Kernel,
        plan: &Plan<Activation>,
        regions: &ActivationRegions,
        queue: &mut Queue,
    ) -> Result<(), Error> {
        if regions.rows == 0 {
            return Ok(());
        }
        let width = plan.spec().width;
        let params = Params {
            x: regions.x.address(),
            y: regions.y.address(),
            rows: layer::wide(regions.rows),
            width: layer::wide(width),
        };
        let groups = regions.rows * width.div_ceil(GROUP);
        let grid = layer::grid(self, groups.div_ceil(THREADS as usize))?;
        // SAFETY: the entry takes these parameters; every address is a region of this launch, bound
        // at the sizes that width and rows say.
        unsafe { queue.launch(code, grid, &params) }
    }
}

fn source(input: Float, output: Float) -> Source {
    layer::source(
        ("portable_activation", "portable_activation"),
        &[layer::COMMON, include_str!("../../kernels/portable_activation.cu")],
        vec![("X_F32", layer::is_f32(input)), ("Y_F32", layer::is_f32(output))],
        (THREADS, 64),
    )
}

/// Both dtypes on both sides.
pub(crate) fn manifest() -> Vec<Source> {
    let both = [Float::Bf16, Float::F32];
    both.into_iter().flat_map(|input| both.map(|output| source(input, output))).collect()
}
