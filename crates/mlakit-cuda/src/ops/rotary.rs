//! `rotary`: a thread a pair of up to eight heads.

use mlakit::op::layer::Float;
use mlakit::op::rotary::{Rotary, RotaryRegions, RotarySpec, RotaryStyle};
use mlakit::{Choice, Error, Plan, Refusal, Runs};

use super::layer;
use crate::device::Cuda;
use crate::facts::Facts;
use crate::module::{Kernel, Source};
use crate::stream::Queue;

/// Threads of a block.
const THREADS: u32 = 128;

/// Heads of a thread (`HEADS` of the kernel).
const HEADS: usize = 8;

/// As `RotaryParams` of the kernel.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    x: u64,
    positions: u64,
    inv_freq: u64,
    y: u64,
    rows: i64,
    heads: i64,
    pairs: i64,
    in_stride: i64,
    out_stride: i64,
    step: i64,
    gap: i64,
    factor: f32,
}

const _: () = assert!(size_of::<Params>() == 96, "the kernel mirrors this");

impl Runs<Rotary> for Cuda {
    type Code = Kernel;

    fn choose(_: &Facts, spec: &RotarySpec) -> Result<Choice, Refusal> {
        if spec.before + spec.after > 0 {
            return Err(Refusal {
                what: format!("copying {} elements of a head", spec.before + spec.after),
                because: "the kernel writes the rotated elements alone".into(),
                instead: "strides and the part of the buffer that is rotated, or the CPU".into(),
            });
        }
        Ok(Choice::of("portable_rotary"))
    }

    fn prepare(&self, plan: &Plan<Rotary>) -> Result<Kernel, Error> {
        self.kernel(&source(plan.spec().input))
    }

    fn launch(
        &self,
        code: &Kernel,
        plan: &Plan<Rotary>,
        regions: &RotaryRegions,
        queue: &mut Queue,
    ) -> Result<(), Error> {
        if regions.rows == 0 {
            return Ok(());
        }
        let spec = plan.spec();
        let pairs = spec.width / 2;
        let (step, gap) = match spec.style {
            RotaryStyle::Pair => (2, 1),
            RotaryStyle::Half => (1, pairs),
        };
        let params = Params {
            x: regions.x.address(),
            positions: regions.positions.address(),
            inv_freq: regions.inv_freq.address(),
            y: regions.y.address(),
            rows: layer::wide(regions.rows),
            heads: layer::wide(spec.heads),
            pairs: layer::wide(pairs),
            in_stride: layer::wide(spec.in_stride()),
            out_stride: layer::wide(spec.out_stride()),
            step,
            gap: layer::wide(gap),
            factor: spec.attention_factor.value(),
        };
        let threads = regions.rows * spec.heads.div_ceil(HEADS) * pairs;
        let grid = layer::grid(self, threads.div_ceil(THREADS as usize))?;
        // SAFETY: the entry takes these parameters; every address is a region of this launch, bound
        // at the sizes that rows, heads and strides say.
        unsafe { queue.launch(code, grid, &params) }
    }
}

fn source(input: Float) -> Source {
    layer::source(
        ("portable_rotary", "portable_rotary"),
        &[layer::COMMON, include_str!("../../kernels/portable_rotary.cu")],
        vec![("X_F32", layer::is_f32(input))],
        (THREADS, 64),
    )
}

/// Every specialisation.
pub(crate) fn manifest() -> Vec<Source> {
    vec![source(Float::Bf16), source(Float::F32)]
}
