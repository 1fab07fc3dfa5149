//! `norm`: a block a row.

use mlakit::op::layer::Float;
use mlakit::op::norm::{Norm, NormRegions, NormSpec};
use mlakit::{Choice, Error, Plan, Refusal, Runs};

use super::layer;
use crate::device::Cuda;
use crate::facts::Facts;
use crate::module::{Kernel, Source};
use crate::stream::Queue;

/// Threads of a block.
const THREADS: u32 = 256;

/// As `NormParams` of the kernel.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    x: u64,
    weight: u64,
    narrow: u64,
    wide: u64,
    width: i64,
    in_stride: i64,
    out_stride: i64,
    eps: f32,
}

const _: () = assert!(size_of::<Params>() == 64, "the kernel mirrors this");

impl Runs<Norm> for Cuda {
    type Code = Kernel;

    fn choose(_: &Facts, spec: &NormSpec) -> Result<Choice, Refusal> {
        if spec.center || spec.bias {
            return Err(Refusal {
                what: "layer normalisation (a mean that is subtracted, or a bias)".into(),
                because: "the kernel normalises by the root mean square alone".into(),
                instead: "`center` and `bias` false, or the CPU".into(),
            });
        }
        Ok(Choice::of("portable_norm"))
    }

    fn prepare(&self, plan: &Plan<Norm>) -> Result<Kernel, Error> {
        self.kernel(&source(plan.spec().input))
    }

    fn launch(
        &self,
        code: &Kernel,
        plan: &Plan<Norm>,
        regions: &NormRegions,
        queue: &mut Queue,
    ) -> Result<(), Error> {
        if regions.rows == 0 {
            return Ok(());
        }
        let spec = plan.spec();
        let params = Params {
            x: regions.x.address(),
            weight: regions.weight.address(),
            narrow: regions.y.address(),
            wide: regions.y_wide.address(),
            width: layer::wide(spec.width),
            in_stride: layer::wide(spec.in_stride()),
            out_stride: layer::wide(spec.out_stride()),
            eps: spec.eps.value(),
        };
        // SAFETY: the entry takes these parameters; every address is a region of this launch, bound
        // at the sizes that the widths and rows say.
        unsafe { queue.launch(code, layer::grid(self, regions.rows)?, &params) }
    }
}

fn source(input: Float) -> Source {
    layer::source(
        ("portable_norm", "portable_norm"),
        &[layer::COMMON, include_str!("../../kernels/portable_norm.cu")],
        vec![("X_F32", layer::is_f32(input))],
        (THREADS, 64),
    )
}

/// Every specialisation.
pub(crate) fn manifest() -> Vec<Source> {
    vec![source(Float::Bf16), source(Float::F32)]
}
