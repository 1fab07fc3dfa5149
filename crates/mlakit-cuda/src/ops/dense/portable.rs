//! The portable kernel: a block of threads for each tile of pairs (row, head) and each split of its
//! keys, then, where there are several splits, a merge. `docs/kernels/dense-portable.md` has the
//! design.

use mlakit::op::dense::{Dense, DenseRegions, DenseSpec, QueryDtype};
use mlakit::op::merge::Partial;
use mlakit::splits::Division;
use mlakit::{Choice, Error, LseBase, Plan, RecordFormat, Refusal, Region};

use super::tiling::{self, Tiling};
use crate::device::Cuda;
use crate::facts::Facts;
use crate::module::{Kernel, Source};
use crate::ops::merge::{self, Operands, Parts};
use crate::ops::{attention, layer};
use crate::stream::Queue;

/// The oldest compute capability with the instructions of the kernel.
const OLDEST: (u32, u32) = (8, 0);

/// Code of dense attention: what computes the splits, and what merges them where there are several.
pub struct Kernels {
    attend: Kernel,
    merge: Option<Kernel>,
    tiling: Tiling,
}

/// As `DenseParams` of the kernel.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    q: u64,
    view: u64,
    page_table: u64,
    kv_lens: u64,
    q_offsets: u64,
    row_kv_lens: u64,
    kv_scale: u64,
    q_scale: u64,
    out: u64,
    lse: u64,
    faults: u64,
    softmax_scale: f64,
    tiles: u32,
    splits: i32,
    rows: i32,
    batch: i32,
    heads: i32,
    table_width: i32,
    page_size: i32,
    step_pages: i32,
    step_tokens: i32,
    record_bytes: i32,
    covered: i32,
    window: i32,
    fixed_tokens: i32,
    rows_apart: i32,
    out_f32: i32,
    lse_scale: f32,
}

const _: () = assert!(size_of::<Params>() == 160, "the kernel mirrors this");

pub(super) fn choose(facts: &Facts, spec: &DenseSpec) -> Result<Choice, Refusal> {
    let what = || {
        let (qk, value, record) = (spec.qk_width, spec.value_width, spec.record.name());
        format!("dense attention with widths {qk}/{value}, {record} records, on {facts}")
    };
    let refuse = |because: String, instead: &str| Refusal {
        what: what(),
        because,
        instead: instead.to_string(),
    };
    if !spec.record.is_plain() {
        let because = "its kernel reads bf16 and e4m3".to_string();
        return Err(refuse(because, "record bf16 or e4m3, or sparse attention"));
    }
    if facts.capability < OLDEST {
        let because = "compute capability 8.0 is the first with its instructions".to_string();
        return Err(refuse(because, "the CPU device"));
    }
    let tiling = Tiling::new(spec)
        .filter(|tiling| tiling.shared_bytes() <= facts.shared_bytes_per_block)
        .ok_or_else(|| {
            let because = "queries, outputs and two steps of keys do not fit a block".to_string();
            refuse(because, "widths of at most 1152, or the CPU device")
        })?;
    let splits = spec
        .capacity()
        .resolve(tiling.wanted_splits(facts, spec))
        .map_err(|e| refuse(e.to_string(), "larger splits, or a larger budget"))?;
    if tiling.blocks(spec, (spec.max_rows, spec.max_batch), splits).is_none() {
        let because = "the blocks of a launch at capacity do not fit a grid".to_string();
        return Err(refuse(because, "a smaller row capacity, or fewer splits"));
    }
    Ok(Choice { splits, ..Choice::of("portable_dense") })
}

pub(super) fn prepare(device: &Cuda, plan: &Plan<Dense>) -> Result<Kernels, Error> {
    let spec = plan.spec();
    let tiling = Tiling::new(spec)
        .ok_or_else(|| Error::contract("widths", "what the plan was made for", "others"))?;
    let merge = (plan.choice().splits > 1).then(|| device.kernel(&merge::source(spec.partial)));
    Ok(Kernels { attend: device.kernel(&source(spec, tiling))?, merge: merge.transpose()?, tiling })
}

/// Launches for calls without rows too: their lengths and offsets are counted like all others.
pub(super) fn launch(
    device: &Cuda,
    code: &Kernels,
    (plan, r): (&Plan<Dense>, &DenseRegions),
    queue: &mut Queue,
) -> Result<(), Error> {
    let Division { splits, fixed_tokens } = plan.division();
    let live = (r.rows, r.batch);
    let (tiles, blocks) = code
        .tiling
        .blocks(plan.spec(), live, splits)
        .ok_or_else(|| Error::contract("rows", "as many as planned for", r.rows))?;
    let grid = layer::grid(device, blocks as usize)?;
    let page_size = plan.spec().page_size;
    let params = Params {
        tiles,
        step_pages: attention::int(code.tiling.keys() / page_size),
        step_tokens: attention::int(code.tiling.keys() % page_size),
        fixed_tokens: attention::int(fixed_tokens.unwrap_or(0)),
        ..params(plan, r)
    };
    // SAFETY: the entry takes these parameters; every address is a region of this launch, bound
    // at the sizes that rows, batch, table width and the `Spec` say. What is read through the
    // page table is checked against the view.
    unsafe { queue.launch(&code.attend, grid, &params) }?;
    match &code.merge {
        Some(kernel) => merge_splits(device, kernel, (plan, r), queue),
        None => Ok(()),
    }
}

/// Where the kernel puts outputs and log-sum-exps: the result, or the partial results.
fn results(plan: &Plan<Dense>, r: &DenseRegions) -> (Region, Region) {
    if plan.division().splits == 1 {
        return (r.out, r.lse);
    }
    let scratch = |name| plan.region(r.scratch, name);
    (scratch(Dense::PARTIAL_OUT), scratch(Dense::PARTIAL_LSE))
}

/// All but what depends on the tiling and the division.
fn params(plan: &Plan<Dense>, r: &DenseRegions) -> Params {
    let spec = plan.spec();
    let (one, (out, lse)) = (plan.division().splits == 1, results(plan, r));
    let int = attention::int;
    Params {
        q: r.q.address(),
        view: r.view.address(),
        page_table: r.page_table.address(),
        kv_lens: r.kv_lens.address(),
        q_offsets: r.q_offsets.address(),
        row_kv_lens: if spec.row_lengths { r.row_kv_lens.address() } else { 0 },
        kv_scale: attention::scale(spec.record.is_scaled(), r.kv_scale),
        q_scale: attention::scale(spec.has_query_scale(), r.q_scale),
        out: out.address(),
        lse: lse.address(),
        faults: r.scratch.address(),
        softmax_scale: f64::from(spec.softmax_scale.value()),
        tiles: 0,
        splits: int(plan.division().splits),
        rows: int(r.rows),
        batch: int(r.batch),
        heads: int(spec.heads),
        table_width: int(r.table_width),
        page_size: int(spec.page_size),
        step_pages: 0,
        step_tokens: 0,
        record_bytes: int(spec.pages().record.bytes()),
        covered: int(r.table_width.saturating_mul(spec.page_size).min(spec.max_kv_tokens)),
        window: int(spec.window.unwrap_or(0)),
        fixed_tokens: 0,
        rows_apart: i32::from(tiling::rows_apart(spec)),
        out_f32: i32::from(!one && spec.partial == Partial::F32),
        lse_scale: if one { attention::from_base_2(spec.lse) } else { 1.0 },
    }
}

fn merge_splits(
    device: &Cuda,
    kernel: &Kernel,
    (plan, r): (&Plan<Dense>, &DenseRegions),
    queue: &mut Queue,
) -> Result<(), Error> {
    let spec = plan.spec();
    let (outs, lses) = results(plan, r);
    let parts = Parts {
        splits: plan.division().splits,
        heads: spec.heads,
        width: spec.value_width,
        sink_in_lse: false,
        nan_spreads: true,
        base: LseBase::Base2,
        out_base: spec.lse,
    };
    let operands =
        Operands { rows: r.rows, outs, lses, sink: Region::EMPTY, out: r.out, lse: r.lse };
    merge::run(device, kernel, (&parts, &operands), queue)
}

/// How queries arrive, as the kernel calls it.
fn query(spec: &DenseSpec) -> u32 {
    match (spec.query, spec.quantize_query) {
        (QueryDtype::Bf16, false) => 0,
        (QueryDtype::E4m3, _) => 1,
        (QueryDtype::Bf16, true) => 2,
    }
}

/// What `prepare` compiles.
pub(super) fn sources(plan: &Plan<Dense>) -> Vec<Source> {
    let spec = plan.spec();
    let attend = Tiling::new(spec).map(|tiling| source(spec, tiling));
    let merge = (plan.choice().splits > 1).then(|| merge::source(spec.partial));
    attend.into_iter().chain(merge).collect()
}

fn source(spec: &DenseSpec, tiling: Tiling) -> Source {
    let record = (spec.record == RecordFormat::E4m3, query(spec));
    specialised((spec.qk_width, spec.value_width), record, tiling)
}

fn specialised(
    (qk_width, value_width): (usize, usize),
    (e4m3, query): (bool, u32),
    tiling: Tiling,
) -> Source {
    let mut defines = vec![
        ("QK_WIDTH", qk_width.to_string()),
        ("VALUE_WIDTH", value_width.to_string()),
        ("RECORD_E4M3", layer::switch(e4m3)),
        ("QUERY", query.to_string()),
    ];
    defines.extend(tiling.defines());
    Source {
        family: "portable_dense",
        entry: "portable_dense",
        text: &[
            attention::COMMON,
            include_str!("../../../kernels/portable_dense_work.cuh"),
            include_str!("../../../kernels/portable_dense.cu"),
        ],
        defines,
        threads: tiling::THREADS,
        dynamic_shared_bytes: tiling.shared_bytes(),
        registers: if tiling.blocks_per_multiprocessor() > 1 { 168 } else { 255 },
    }
}

/// The widths in use with both records and all queries, one and two matrices of pairs a tile.
pub(super) fn manifest() -> Vec<Source> {
    let mut sources = Vec::new();
    for widths in [(576, 512), (512, 512), (320, 256), (288, 256), (160, 128), (1088, 1024)] {
        for record in [(false, 0), (true, 0), (true, 1), (true, 2)] {
            let tilings = [1, 2].into_iter().filter_map(|m| Tiling::of(widths, record.0, m));
            sources.extend(tilings.map(|tiling| specialised(widths, record, tiling)));
        }
    }
    sources
}
