//! `embed`: a thread a group of eight elements.

use mlakit::op::embed::{Embed, EmbedRegions, EmbedSpec};
use mlakit::op::layer::Float;
use mlakit::{Choice, Error, Plan, Refusal, Runs};

use super::layer::{self, GROUP};
use crate::device::Cuda;
use crate::facts::Facts;
use crate::module::{Kernel, Source};
use crate::stream::Queue;

/// Threads of a block.
const THREADS: u32 = 256;

/// As `EmbedParams` of the kernel.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    table: u64,
    ids: u64,
    y: u64,
    faults: u64,
    rows: i64,
    width: i64,
    vocab: i64,
    scale: f32,
}

const _: () = assert!(size_of::<Params>() == 64, "the kernel mirrors this");

impl Runs<Embed> for Cuda {
    type Code = Kernel;

    fn choose(_: &Facts, _: &EmbedSpec) -> Result<Choice, Refusal> {
        Ok(Choice::of("portable_embed"))
    }

    fn prepare(&self, plan: &Plan<Embed>) -> Result<Kernel, Error> {
        self.kernel(&source(plan.spec().table, plan.spec().output))
    }

    fn launch(
        &self,
        code: &Kernel,
        plan: &Plan<Embed>,
        regions: &EmbedRegions,
        queue: &mut Queue,
    ) -> Result<(), Error> {
        if regions.rows == 0 {
            return Ok(());
        }
        let spec = plan.spec();
        let params = Params {
            table: regions.table.address(),
            ids: regions.ids.address(),
            y: regions.y.address(),
            faults: regions.scratch.address(),
            rows: layer::wide(regions.rows),
            width: layer::wide(spec.width),
            vocab: layer::wide(regions.vocab),
            scale: spec.scale.value(),
        };
        let groups = regions.rows * spec.width.div_ceil(GROUP);
        let grid = layer::grid(self, groups.div_ceil(THREADS as usize))?;
        // SAFETY: the entry takes these parameters; every address is a region of this launch, bound
        // at the sizes that width, rows and vocabulary say, and ids are compared with the latter.
        unsafe { queue.launch(code, grid, &params) }
    }
}

fn source(table: Float, output: Float) -> Source {
    layer::source(
        ("portable_embed", "portable_embed"),
        &[layer::COMMON, include_str!("../../kernels/portable_embed.cu")],
        vec![("X_F32", layer::is_f32(table)), ("Y_F32", layer::is_f32(output))],
        (THREADS, 64),
    )
}

/// Both dtypes on both sides.
pub(crate) fn manifest() -> Vec<Source> {
    let both = [Float::Bf16, Float::F32];
    both.into_iter().flat_map(|table| both.map(|output| source(table, output))).collect()
}
