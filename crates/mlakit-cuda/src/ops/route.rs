//! `route`: logits, then a warp a row that chooses.

use mlakit::op::route::{GroupScore, Route, RouteRegions, RouteSpec, Scoring};
use mlakit::scratch::RegionSpec;
use mlakit::{Choice, Error, Plan, Refusal, Runs};

use super::layer;
use crate::device::Cuda;
use crate::facts::Facts;
use crate::module::{Kernel, Source};
use crate::stream::Queue;

/// The region of logits, which become scores.
const SCORES: &str = "scores";

/// Threads of a block that makes logits, and of one that chooses.
const THREADS: u32 = 128;
const WARP: u32 = 32;

/// Rows of a block that makes logits (`TILE_ROWS` of the kernel).
const TILE_ROWS: usize = 4;

/// Experts of a block where rows are many.
const BLOCK_EXPERTS: usize = 16;

/// Above this many rows a warp takes several experts.
const FEW_ROWS: usize = 16;

/// What keys of experts and groups may take of shared memory.
const MAX_KEYS: usize = 96 * 1024 / 4;

/// The kernels. `few` and `many` give a row the same bits.
pub struct Kernels {
    few: Kernel,
    many: Option<Kernel>,
    select: Kernel,
}

/// As `RouteParams` of the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    x: u64,
    weight: u64,
    bias: u64,
    scores: u64,
    ids: u64,
    gates: u64,
    rows: i64,
    hidden: i64,
    experts: u32,
    used: u32,
    groups: u32,
    used_groups: u32,
    normalize: u32,
    scale: f32,
}

const _: () = assert!(size_of::<Params>() == 88, "the kernel mirrors this");

impl Runs<Route> for Cuda {
    type Code = Kernels;

    fn choose(_: &Facts, spec: &RouteSpec) -> Result<Choice, Refusal> {
        if spec.experts + spec.groups > MAX_KEYS {
            return Err(Refusal {
                what: format!("route over {} experts in {} groups", spec.experts, spec.groups),
                because: format!("experts and groups together are more than {MAX_KEYS}"),
                instead: "fewer groups, or the CPU device".to_owned(),
            });
        }
        let scores = spec.max_rows.saturating_mul(spec.experts).saturating_mul(4);
        Ok(Choice { work: vec![RegionSpec::new(SCORES, scores)], ..Choice::of("portable_route") })
    }

    fn prepare(&self, plan: &Plan<Route>) -> Result<Kernels, Error> {
        let spec = plan.spec();
        let many = spec.max_rows > FEW_ROWS;
        Ok(Kernels {
            few: self.kernel(&logits(true))?,
            many: many.then(|| self.kernel(&logits(false))).transpose()?,
            select: self.kernel(&select(
                spec.scoring,
                spec.group_score,
                spec.experts + spec.groups,
            ))?,
        })
    }

    fn launch(
        &self,
        code: &Kernels,
        plan: &Plan<Route>,
        regions: &RouteRegions,
        queue: &mut Queue,
    ) -> Result<(), Error> {
        if regions.rows == 0 {
            return Ok(());
        }
        let spec = plan.spec();
        let params = params(plan, regions);
        let (kernel, experts) = match &code.many {
            Some(many) if regions.rows > FEW_ROWS => (many, BLOCK_EXPERTS),
            _ => (&code.few, 1),
        };
        let blocks = regions.rows.div_ceil(TILE_ROWS) * spec.experts.div_ceil(experts);
        // SAFETY: the entry takes these parameters; every address is a region of this launch, bound
        // at the sizes that rows, experts and widths say.
        unsafe { queue.launch(kernel, layer::grid(self, blocks)?, &params)? };
        // SAFETY: as above.
        unsafe { queue.launch(&code.select, layer::grid(self, regions.rows)?, &params) }
    }
}

fn params(plan: &Plan<Route>, regions: &RouteRegions) -> Params {
    let spec = plan.spec();
    Params {
        x: regions.x.address(),
        weight: regions.weight.address(),
        bias: if spec.bias { regions.bias.address() } else { 0 },
        scores: plan.region(regions.scratch, SCORES).address(),
        ids: regions.ids.address(),
        gates: regions.gates.address(),
        rows: layer::wide(regions.rows),
        hidden: layer::wide(spec.hidden),
        experts: spec.experts as u32,
        used: spec.used as u32,
        groups: spec.groups as u32,
        used_groups: spec.used_groups() as u32,
        normalize: u32::from(spec.normalize),
        scale: spec.scale.value(),
    }
}

const COMMON: &str = include_str!("../../kernels/portable_route_common.cuh");

const LOGITS: &[&str] =
    &[layer::COMMON, COMMON, include_str!("../../kernels/portable_route_logits.cu")];

const SELECT: &[&str] =
    &[layer::COMMON, COMMON, include_str!("../../kernels/portable_route_select.cu")];

/// The logits; `sliced`: of few rows.
fn logits(sliced: bool) -> Source {
    let defines = vec![("SLICED", layer::switch(sliced))];
    let entry = ("portable_route_logits", "portable_route_logits");
    layer::source(entry, LOGITS, defines, (THREADS, 128))
}

/// What chooses among so many experts and groups.
fn select(scoring: Scoring, score: GroupScore, keys: usize) -> Source {
    let defines = vec![
        ("SOFTMAX", layer::switch(scoring == Scoring::Softmax)),
        ("TOP_TWO", layer::switch(score == GroupScore::TopTwoSum)),
    ];
    let entry = ("portable_route_select", "portable_route_select");
    let source = layer::source(entry, SELECT, defines, (WARP, 80));
    Source { dynamic_shared_bytes: (keys * 4) as u32, ..source }
}

/// Every specialisation, those that choose for 256 experts in 8 groups.
pub(crate) fn manifest() -> Vec<Source> {
    let mut sources = vec![logits(true), logits(false)];
    for scoring in [Scoring::Sigmoid, Scoring::Softmax] {
        sources.extend([GroupScore::TopTwoSum, GroupScore::Max].map(|s| select(scoring, s, 264)));
    }
    sources
}
