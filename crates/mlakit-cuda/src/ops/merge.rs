//! `merge`: one block of threads a pair (row, head), and the same kernel behind dense attention.

use mlakit::op::merge::{Merge, MergeRegions, MergeSpec, Partial};
use mlakit::{Choice, Error, LseBase, Plan, Refusal, Region, Runs};

use super::{Compiles, attention, layer};
use crate::device::Cuda;
use crate::facts::Facts;
use crate::module::{Kernel, Source};
use crate::stream::Queue;

/// Threads of a block.
const THREADS: u32 = 256;

/// Blocks of a launch at most; a block takes several pairs where there are more.
const MOST_BLOCKS: usize = 1 << 20;

/// As `MergeParams` of the kernel.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    outs: u64,
    lses: u64,
    sink: u64,
    out: u64,
    lse: u64,
    results: i64,
    splits: i32,
    heads: i32,
    width: i32,
    nan_spreads: i32,
    sink_in_lse: i32,
    whole_vectors: i32,
    log2_of_base: f32,
    sink_scale: f32,
    lse_scale: f32,
    reserved: i32,
}

const _: () = assert!(size_of::<Params>() == 88, "the kernel mirrors this");

impl Runs<Merge> for Cuda {
    type Code = Kernel;

    fn choose(_: &Facts, _: &MergeSpec) -> Result<Choice, Refusal> {
        Ok(Choice::of("portable_merge"))
    }

    fn prepare(&self, plan: &Plan<Merge>) -> Result<Kernel, Error> {
        self.kernel(&source(plan.spec().partial))
    }

    fn launch(
        &self,
        code: &Kernel,
        plan: &Plan<Merge>,
        r: &MergeRegions,
        queue: &mut Queue,
    ) -> Result<(), Error> {
        let spec = plan.spec();
        let parts = Parts {
            splits: spec.splits,
            heads: spec.heads,
            width: spec.value_width,
            sink_in_lse: spec.sink_in_lse,
            nan_spreads: false,
            base: spec.lse,
            out_base: spec.lse,
        };
        let operands = Operands {
            rows: r.rows,
            outs: r.outs,
            lses: r.lses,
            sink: r.sink,
            out: r.out,
            lse: r.lse,
        };
        run(self, code, (&parts, &operands), queue)
    }
}

/// What is merged.
pub(super) struct Parts {
    pub(super) splits: usize,
    pub(super) heads: usize,
    pub(super) width: usize,
    pub(super) sink_in_lse: bool,
    /// A NaN log-sum-exp makes the result NaN: it comes from a visible key of this very row.
    pub(super) nan_spreads: bool,
    /// The base of the parts' log-sum-exps.
    pub(super) base: LseBase,
    /// That of the result.
    pub(super) out_base: LseBase,
}

/// What a merge reads and writes, in live sizes.
pub(super) struct Operands {
    pub(super) rows: usize,
    pub(super) outs: Region,
    pub(super) lses: Region,
    /// Empty where there is none.
    pub(super) sink: Region,
    pub(super) out: Region,
    pub(super) lse: Region,
}

/// Enqueues a merge of every pair (row, head).
pub(super) fn run(
    device: &Cuda,
    code: &Kernel,
    (parts, r): (&Parts, &Operands),
    queue: &mut Queue,
) -> Result<(), Error> {
    let results = r.rows * parts.heads;
    if results == 0 {
        return Ok(());
    }
    let aligned = [r.outs, r.out].iter().all(|region| region.address().is_multiple_of(16));
    let params = Params {
        outs: r.outs.address(),
        lses: r.lses.address(),
        sink: attention::scale(r.sink.bytes() > 0, r.sink),
        out: r.out.address(),
        lse: r.lse.address(),
        results: layer::wide(results),
        splits: attention::int(parts.splits),
        heads: attention::int(parts.heads),
        width: attention::int(parts.width),
        nan_spreads: i32::from(parts.nan_spreads),
        sink_in_lse: i32::from(parts.sink_in_lse),
        whole_vectors: i32::from(aligned && parts.width.is_multiple_of(8)),
        log2_of_base: attention::log2_of(parts.base),
        sink_scale: from_natural(parts.base),
        lse_scale: if parts.base == parts.out_base {
            1.0
        } else {
            attention::from_base_2(parts.out_base)
        },
        reserved: 0,
    };
    let grid = layer::grid(device, results.min(MOST_BLOCKS))?;
    // SAFETY: the entry takes these parameters; every address is a region of this launch, bound at
    // the sizes that splits, rows, heads and width say.
    unsafe { queue.launch(code, grid, &params) }
}

/// The factor that brings a natural logarithm to a base.
fn from_natural(base: LseBase) -> f32 {
    match base {
        LseBase::Natural => 1.0,
        LseBase::Base2 => std::f32::consts::LOG2_E,
    }
}

/// The kernel for partial outputs of a dtype.
impl Compiles<Merge> for Cuda {
    fn sources(plan: &Plan<Merge>) -> Vec<Source> {
        vec![source(plan.spec().partial)]
    }
}

pub(super) fn source(partial: Partial) -> Source {
    Source {
        family: "portable_merge",
        entry: "portable_merge",
        text: &[attention::COMMON, include_str!("../../kernels/portable_merge.cu")],
        defines: vec![("PARTS_F32", layer::switch(partial == Partial::F32))],
        threads: THREADS,
        dynamic_shared_bytes: 0,
        registers: 80,
    }
}

/// Every specialisation.
pub(crate) fn manifest() -> Vec<Source> {
    [Partial::Bf16, Partial::F32].map(source).to_vec()
}
