//! `linear`: tensor core products, on tiles of 8, 32 or 64 rows that all give a row the same bits.
//!
//! With experts a launch is two kernels or three: rows are sorted by expert, multiplied, and where
//! they are combined summed with their gates.

use mlakit::op::layer::Float;
use mlakit::op::linear::{Linear, LinearRegions, LinearSpec};
use mlakit::scratch::RegionSpec;
use mlakit::{Choice, Error, Plan, Refusal, Region, Runs};

use super::layer;
use crate::device::Cuda;
use crate::facts::Facts;
use crate::module::{Kernel, Source};
use crate::stream::Queue;

/// The region of rows in the order of their experts.
const ORDER: &str = "order";
/// The region of the tiles into which rows are cut.
const TILES: &str = "tiles";
/// The region of results that gates still have to be applied to.
const SUMS: &str = "sums";

/// The most experts of a layer, where the `Spec` does not say.
const MAX_EXPERTS: usize = mlakit::op::layer::MAX_EXPERTS;

/// Threads that sort rows, and threads of a block that combines.
const GROUP_THREADS: u32 = 1024;
const COMBINE_THREADS: u32 = 256;

/// Rows that share the weights that a block reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tile {
    Rows8,
    Rows32,
    Rows64,
}

const TILES_BY_SIZE: [Tile; 3] = [Tile::Rows8, Tile::Rows32, Tile::Rows64];

impl Tile {
    /// The one for so many rows of one matrix. Two tiles of 32 rows are faster than one of 64,
    /// which has few blocks; their weights are read once from memory, because they run side by side.
    fn of(rows: usize) -> Self {
        match rows {
            0..=8 => Self::Rows8,
            9..=64 => Self::Rows32,
            _ => Self::Rows64,
        }
    }

    fn rows(self) -> usize {
        match self {
            Self::Rows8 => 8,
            Self::Rows32 => 32,
            Self::Rows64 => 64,
        }
    }

    /// Outputs of a block.
    fn outs(self) -> usize {
        match self {
            Self::Rows8 => 16,
            Self::Rows32 => 32,
            Self::Rows64 => 64,
        }
    }
}

/// The kernels of a layer.
pub struct Kernels {
    /// By tile; those that the capacity of the `Spec` never takes are absent.
    products: [Option<Kernel>; 3],
    group: Option<Kernel>,
    combine: Option<Kernel>,
}

/// As `LinearParams` of the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    x: u64,
    weight: u64,
    bias: u64,
    y: u64,
    order: u64,
    tiles: u64,
    rows: i64,
    in_width: i64,
    out_width: i64,
    row_tiles: u32,
    rows_per_x: u32,
    experts: u32,
    y_f32: u32,
    accumulate: u32,
}

const _: () = assert!(size_of::<Params>() == 96, "the kernel mirrors this");

/// As `GroupParams` of the kernel.
#[repr(C)]
#[derive(Clone, Copy)]
struct GroupParams {
    ids: u64,
    order: u64,
    tiles: u64,
    faults: u64,
    rows: i64,
    experts: u32,
    tile_rows: u32,
}

const _: () = assert!(size_of::<GroupParams>() == 48, "the kernel mirrors this");

/// As `CombineParams` of the kernel.
#[repr(C)]
#[derive(Clone, Copy)]
struct CombineParams {
    ids: u64,
    gates: u64,
    sums: u64,
    y: u64,
    rows: i64,
    out_width: i64,
    used: u32,
    experts: u32,
    y_f32: u32,
    accumulate: u32,
}

const _: () = assert!(size_of::<CombineParams>() == 64, "the kernel mirrors this");

impl Runs<Linear> for Cuda {
    type Code = Kernels;

    fn choose(_: &Facts, spec: &LinearSpec) -> Result<Choice, Refusal> {
        let rows = spec.max_rows.saturating_mul(spec.used());
        let mut work = Vec::new();
        if let Some(experts) = spec.experts {
            let tiles = most_tiles(rows, experts.count.unwrap_or(MAX_EXPERTS), Tile::Rows8);
            work.push(RegionSpec::new(ORDER, rows.saturating_mul(4)));
            work.push(RegionSpec::new(TILES, tiles.saturating_mul(12).saturating_add(4)));
        }
        if spec.combines() {
            work.push(RegionSpec::new(SUMS, rows.saturating_mul(spec.out_width * 4)));
        }
        Ok(Choice { work, ..Choice::of("portable_linear") })
    }

    fn prepare(&self, plan: &Plan<Linear>) -> Result<Kernels, Error> {
        let spec = plan.spec();
        let largest = Tile::of(spec.max_rows.saturating_mul(spec.used())).rows();
        let mut products = [None, None, None];
        for (kernel, tile) in products.iter_mut().zip(TILES_BY_SIZE) {
            if tile.rows() <= largest {
                *kernel = Some(self.kernel(&product(tile, spec.input, spec.experts.is_some()))?);
            }
        }
        let group = spec.experts.map(|e| group(e.count.unwrap_or(MAX_EXPERTS)));
        let combine = spec.combines().then(combine);
        Ok(Kernels {
            products,
            group: group.map(|source| self.kernel(&source)).transpose()?,
            combine: combine.map(|source| self.kernel(&source)).transpose()?,
        })
    }

    fn launch(
        &self,
        code: &Kernels,
        plan: &Plan<Linear>,
        regions: &LinearRegions,
        queue: &mut Queue,
    ) -> Result<(), Error> {
        if regions.rows == 0 {
            return Ok(());
        }
        let launch = Launch { device: self, code, plan, regions };
        launch.group(queue)?;
        launch.multiply(queue)?;
        launch.combine(queue)
    }
}

/// The most tiles that so many rows of so many experts, and of ids that are none, make.
fn most_tiles(rows: usize, experts: usize, tile: Tile) -> usize {
    (rows / tile.rows()).saturating_add(rows.min(experts + 1))
}

struct Launch<'l> {
    device: &'l Cuda,
    code: &'l Kernels,
    plan: &'l Plan<Linear>,
    regions: &'l LinearRegions,
}

impl Launch<'_> {
    fn spec(&self) -> &LinearSpec {
        self.plan.spec()
    }

    fn scratch(&self, name: &str) -> Region {
        self.plan.region(self.regions.scratch, name)
    }

    /// Uses of a matrix: rows, times experts of a row.
    fn uses(&self) -> usize {
        self.regions.rows * self.spec().used()
    }

    fn tile(&self) -> Tile {
        Tile::of(self.uses().div_ceil(self.regions.experts))
    }

    fn group(&self, queue: &mut Queue) -> Result<(), Error> {
        let Some(kernel) = &self.code.group else { return Ok(()) };
        let params = GroupParams {
            ids: self.regions.ids.address(),
            order: self.scratch(ORDER).address(),
            tiles: self.scratch(TILES).address(),
            faults: self.regions.scratch.address(),
            rows: layer::wide(self.uses()),
            experts: self.regions.experts as u32,
            tile_rows: self.tile().rows() as u32,
        };
        // SAFETY: the entry takes these parameters; every address is a region of this launch, and
        // the scratch has room for the rows and for the most tiles that they make.
        unsafe { queue.launch(kernel, layer::grid(self.device, 1)?, &params) }
    }

    fn multiply(&self, queue: &mut Queue) -> Result<(), Error> {
        let (spec, r, tile) = (self.spec(), self.regions, self.tile());
        let grouped = spec.experts.is_some();
        let row_tiles = match grouped {
            true => most_tiles(self.uses(), r.experts, tile),
            false => self.uses().div_ceil(tile.rows()),
        };
        let combines = spec.combines();
        let params = Params {
            x: r.x.address(),
            weight: r.weight.address(),
            bias: if spec.bias { r.bias.address() } else { 0 },
            y: if combines { self.scratch(SUMS).address() } else { r.y.address() },
            order: self.scratch(ORDER).address(),
            tiles: self.scratch(TILES).address(),
            rows: layer::wide(self.uses()),
            in_width: layer::wide(spec.in_width),
            out_width: layer::wide(spec.out_width),
            row_tiles: row_tiles as u32,
            rows_per_x: if combines { 1 } else { spec.used() as u32 },
            experts: r.experts as u32,
            y_f32: u32::from(combines || spec.output == Float::F32),
            accumulate: u32::from(spec.accumulate && !combines),
        };
        let kernel = self.code.products[tile as usize].as_ref();
        let kernel = kernel.expect("prepared for every tile that the row capacity allows");
        let blocks = row_tiles * spec.out_width.div_ceil(tile.outs());
        // SAFETY: the entry takes these parameters; every address is a region of this launch, bound
        // at the sizes that rows, experts and widths say.
        unsafe { queue.launch(kernel, layer::grid(self.device, blocks)?, &params) }
    }

    fn combine(&self, queue: &mut Queue) -> Result<(), Error> {
        let Some(kernel) = &self.code.combine else { return Ok(()) };
        let (spec, r) = (self.spec(), self.regions);
        let params = CombineParams {
            ids: r.ids.address(),
            gates: r.gates.address(),
            sums: self.scratch(SUMS).address(),
            y: r.y.address(),
            rows: layer::wide(r.rows),
            out_width: layer::wide(spec.out_width),
            used: spec.used() as u32,
            experts: r.experts as u32,
            y_f32: u32::from(spec.output == Float::F32),
            accumulate: u32::from(spec.accumulate),
        };
        let blocks = (r.rows * spec.out_width).div_ceil(COMBINE_THREADS as usize);
        // SAFETY: as for the products.
        unsafe { queue.launch(kernel, layer::grid(self.device, blocks)?, &params) }
    }
}

const SKINNY: &[&str] = &[
    layer::COMMON,
    include_str!("../../kernels/portable_linear_common.cuh"),
    include_str!("../../kernels/portable_linear_skinny.cu"),
];

const TILED: &[&str] = &[
    layer::COMMON,
    include_str!("../../kernels/portable_linear_common.cuh"),
    include_str!("../../kernels/portable_linear_tiled.cu"),
];

const GROUP: &[&str] = &[layer::COMMON, include_str!("../../kernels/portable_linear_group.cu")];

const COMBINE: &[&str] = &[layer::COMMON, include_str!("../../kernels/portable_linear_combine.cu")];

/// The products of a tile.
fn product(tile: Tile, input: Float, grouped: bool) -> Source {
    let wide = input == Float::F32;
    let mut defines = vec![("X_F32", layer::is_f32(input)), ("GROUPED", layer::switch(grouped))];
    if tile == Tile::Rows64 {
        let stages = 3;
        defines.push(("STAGES", stages.to_string()));
        let entry = ("portable_linear_tiled", "portable_linear_tiled");
        let source = layer::source(entry, TILED, defines, (128, 168));
        return Source {
            dynamic_shared_bytes: stages * if wide { 24576 } else { 16384 },
            ..source
        };
    }
    let (outs, rows, stages) = match (tile, wide) {
        (Tile::Rows8, false) => (1, 1, 6),
        (Tile::Rows8, true) => (1, 1, 4),
        (_, false) => (2, 4, 3),
        (_, true) => (2, 4, 2),
    };
    let slots = 2 * outs + rows * if wide { 2 } else { 1 };
    defines.push(("OUT_TILES", outs.to_string()));
    defines.push(("ROW_TILES", rows.to_string()));
    defines.push(("STAGES", stages.to_string()));
    let registers = if wide && grouped && rows > 1 { 255 } else { 128 };
    let entry = ("portable_linear_skinny", "portable_linear_skinny");
    let source = layer::source(entry, SKINNY, defines, (256, registers));
    Source { dynamic_shared_bytes: stages * slots * 4096, ..source }
}

/// What sorts rows by so many experts.
fn group(experts: usize) -> Source {
    let entry = ("portable_linear_group", "portable_linear_group");
    let source = layer::source(entry, GROUP, Vec::new(), (GROUP_THREADS, 64));
    Source { dynamic_shared_bytes: (experts as u32 + 1) * 4, ..source }
}

fn combine() -> Source {
    let entry = ("portable_linear_combine", "portable_linear_combine");
    layer::source(entry, COMBINE, Vec::new(), (COMBINE_THREADS, 64))
}

/// Every specialisation, the one that sorts for the most experts.
pub(crate) fn manifest() -> Vec<Source> {
    let mut sources = vec![group(MAX_EXPERTS), combine()];
    for tile in TILES_BY_SIZE {
        for input in [Float::Bf16, Float::F32] {
            sources.extend([false, true].map(|grouped| product(tile, input, grouped)));
        }
    }
    sources
}
