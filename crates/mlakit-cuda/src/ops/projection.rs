//! `projection`: a matrix a head, on tensor cores.

use mlakit::op::layer::Float;
use mlakit::op::projection::{Projection, ProjectionRegions, ProjectionSpec};
use mlakit::{Choice, Error, Plan, Refusal, Runs};

use super::{Compiles, layer};
use crate::device::Cuda;
use crate::facts::Facts;
use crate::module::{Kernel, Source};
use crate::stream::Queue;

/// Threads of a block.
const THREADS: u32 = 128;

/// Outputs of a block (`OUTS` of the kernel).
const OUTS: usize = 64;

/// The kernel for few rows and, where the `Spec` allows more, that for many. Both give a row the
/// same bits.
pub struct Kernels {
    few: Kernel,
    many: Option<Kernel>,
}

/// A tile of rows.
#[derive(Clone, Copy)]
enum Tile {
    Few,
    Many,
}

impl Tile {
    fn rows(self) -> usize {
        match self {
            Self::Few => 8,
            Self::Many => 64,
        }
    }

    /// Stages of shared memory.
    fn stages(self) -> u32 {
        match self {
            Self::Few => 4,
            Self::Many => 3,
        }
    }
}

/// As `ProjectionParams` of the kernel.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    x: u64,
    weight: u64,
    y: u64,
    rows: i64,
    heads: i64,
    in_width: i64,
    out_width: i64,
    in_stride: i64,
    out_stride: i64,
    row_tiles: u32,
    out_tiles: u32,
    y_f32: u32,
}

const _: () = assert!(size_of::<Params>() == 88, "the kernel mirrors this");

impl Runs<Projection> for Cuda {
    type Code = Kernels;

    fn choose(_: &Facts, _: &ProjectionSpec) -> Result<Choice, Refusal> {
        Ok(Choice::of("portable_projection"))
    }

    fn prepare(&self, plan: &Plan<Projection>) -> Result<Kernels, Error> {
        let many = plan.spec().max_rows > Tile::Few.rows();
        Ok(Kernels {
            few: self.kernel(&source(Tile::Few))?,
            many: many.then(|| self.kernel(&source(Tile::Many))).transpose()?,
        })
    }

    fn launch(
        &self,
        code: &Kernels,
        plan: &Plan<Projection>,
        regions: &ProjectionRegions,
        queue: &mut Queue,
    ) -> Result<(), Error> {
        if regions.rows == 0 {
            return Ok(());
        }
        let spec = plan.spec();
        let (kernel, tile) = match &code.many {
            Some(many) if regions.rows > Tile::Few.rows() => (many, Tile::Many),
            _ => (&code.few, Tile::Few),
        };
        let row_tiles = regions.rows.div_ceil(tile.rows());
        let out_tiles = spec.out_width.div_ceil(OUTS);
        let params = Params {
            x: regions.x.address(),
            weight: regions.weight.address(),
            y: regions.y.address(),
            rows: layer::wide(regions.rows),
            heads: layer::wide(spec.heads),
            in_width: layer::wide(spec.in_width),
            out_width: layer::wide(spec.out_width),
            in_stride: layer::wide(spec.in_stride()),
            out_stride: layer::wide(spec.out_stride()),
            row_tiles: row_tiles as u32,
            out_tiles: out_tiles as u32,
            y_f32: u32::from(spec.output == Float::F32),
        };
        let grid = layer::grid(self, row_tiles * out_tiles * spec.heads)?;
        // SAFETY: the entry takes these parameters; every address is a region of this launch, bound
        // at the sizes that rows, heads and strides say.
        unsafe { queue.launch(kernel, grid, &params) }
    }
}

impl Compiles<Projection> for Cuda {
    fn sources(plan: &Plan<Projection>) -> Vec<Source> {
        let many = (plan.spec().max_rows > Tile::Few.rows()).then_some(Tile::Many);
        [Tile::Few].into_iter().chain(many).map(source).collect()
    }
}

fn source(tile: Tile) -> Source {
    let row_tiles = (tile.rows() / 8) as u32;
    let stages = tile.stages();
    let defines = vec![("ROW_TILES", row_tiles.to_string()), ("STAGES", stages.to_string())];
    let source = layer::source(
        ("portable_projection", "portable_projection"),
        &[layer::COMMON, include_str!("../../kernels/portable_projection.cu")],
        defines,
        (THREADS, if row_tiles >= 8 { 168 } else { 128 }),
    );
    Source { dynamic_shared_bytes: stages * (8192 + 1024 * row_tiles), ..source }
}

/// Every specialisation.
pub(crate) fn manifest() -> Vec<Source> {
    vec![source(Tile::Few), source(Tile::Many)]
}
