//! The kernel for Hopper (sm_90a): one launch that divides the work, attends and merges.
//! `docs/kernels/dense-hopper.md` has the design.

use mlakit::op::dense::{Dense, DenseRegions, DenseSpec};
use mlakit::op::merge::Partial;
use mlakit::splits::BLOCK;
use mlakit::{Choice, Error, Plan, RecordFormat, Splits};

use crate::device::Cuda;
use crate::facts::Facts;
use crate::module::{Kernel, Source};
use crate::ops::{attention, layer};
use crate::stream::{Grid, Queue};
use crate::view;

const NARROW: &str = "hopper_dense_narrow";
const WIDE: &str = "hopper_dense_wide";

/// Query width and value width of the kernels that are compiled.
const WIDTHS: [(usize, usize); 2] = [(576, 512), (512, 512)];

/// The most splits of a row: weights of a merge lie in shared memory.
const MOST_SPLITS: usize = 16_384;

/// Blocks of a grid at most: a fault block has as many counters (`dense_merge.cuh`).
const MOST_BLOCKS: usize =
    3 * (mlakit::scratch::FAULT_BYTES / 4 - mlakit::scratch::FAULT_NAMES.len());

/// Tiles of a request at most that columns of blocks share among themselves, so that the keys are
/// read at the same time.
const MOST_COLUMNS: i32 = 8;

/// Code, and what of the plan a launch needs.
pub struct Kernels {
    attend: Kernel,
    design: Design,
}

/// Whether a GPU has the instructions.
pub(super) fn is_hopper(facts: &Facts) -> bool {
    facts.capability == (9, 0)
}

/// Whether a choice is one of this file.
pub(super) fn is_chosen(choice: &Choice) -> bool {
    [NARROW, WIDE].contains(&choice.kernel)
}

/// The choice, or why this kernel does not run the `Spec`.
pub(super) fn choose(facts: &Facts, spec: &DenseSpec) -> Result<Choice, String> {
    let design = Design::new(facts, spec)?;
    Ok(Choice {
        splits: design.splits,
        partial_rows: design.slot_rows.map(|rows| 2 * design.blocks * rows),
        ..Choice::of(if design.narrow { NARROW } else { WIDE })
    })
}

pub(super) fn prepare(device: &Cuda, plan: &Plan<Dense>) -> Result<Kernels, Error> {
    let facts = mlakit::Device::facts(device);
    let design = Design::new(facts, plan.spec())
        .map_err(|because| Error::contract("plan", "one for this device", because))?;
    let attend = device.kernel(&source(design.code, design.narrow))?;
    if attend.blocks_per_multiprocessor() == 0 {
        let needed = "a kernel of which a multiprocessor holds a block";
        return Err(Error::contract("kernel", needed, attend.title()));
    }
    Ok(Kernels { attend, design })
}

/// One cooperative launch, since blocks wait for one another. It may begin before its predecessor
/// has ended: it waits before it reads anything.
pub(super) fn launch(
    code: &Kernels,
    (plan, r): (&Plan<Dense>, &DenseRegions),
    queue: &mut Queue,
) -> Result<(), Error> {
    let blocks = [attention::count(code.design.blocks), 1, 1];
    let grid = Grid { blocks, cluster: 1, cooperative: true, programmatic: true };
    let params = code.design.params(plan, r);
    // SAFETY: the entry takes these parameters; every address is a region of this launch, bound at
    // the sizes that rows, batch, table width and the `Spec` say. What is read through the page
    // table is checked against the view, and the device wrote the tensor map in the view.
    unsafe { queue.launch(&code.attend, grid, &params) }
}

/// As `DenseParams` of the kernel.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    q: u64,
    out: u64,
    lse: u64,
    page_table: u64,
    kv_lens: u64,
    q_offsets: u64,
    row_kv_lens: u64,
    view: u64,
    partials: u64,
    partial_lse: u64,
    faults: u64,
    rows: i32,
    batch: i32,
    heads: i32,
    table_width: i32,
    covered: i32,
    partial_rows: i32,
    slots: i32,
    fixed_blocks: i32,
    page_size: i32,
    box_tokens: i32,
    token_stride_bytes: i32,
    most_columns: i32,
    scale_log2: f32,
    lse_scale: f32,
}

const _: () = assert!(size_of::<Params>() == 144, "the kernel mirrors this");

/// What decides the code of a kernel, beside the height of its tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Code {
    widths: (usize, usize),
    partial: Partial,
    /// Page sizes of a multiple of 16; else keys are copied one by one.
    tensor_map: bool,
}

/// What follows from a `Spec` and the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Design {
    code: Code,
    /// Tiles of 16 pairs (row, head), not of 64.
    narrow: bool,
    /// Of the grid: one for each multiprocessor, as far as there are counters.
    blocks: usize,
    /// The most that there may be of a row.
    splits: usize,
    /// Rows of a slot of partial results where slots are of blocks; nothing where they are of splits.
    slot_rows: Option<usize>,
}

impl Design {
    fn new(facts: &Facts, spec: &DenseSpec) -> Result<Self, String> {
        let code = Self::code(facts, spec)?;
        let narrow = is_narrow(spec);
        if shared_bytes(code.widths, narrow) > facts.shared_bytes_per_block {
            return Err("its blocks need more shared memory".to_string());
        }
        let blocks = (facts.multiprocessors as usize).clamp(1, MOST_BLOCKS);
        let splits = splits(spec, blocks)?;
        let pairs = spec.max_rows.saturating_mul(spec.heads);
        let tiles = pairs / tile_rows(narrow) + spec.max_batch + 2;
        let units = tiles.saturating_mul(spec.capacity().blocks());
        if units.max(pairs) > i32::MAX as usize {
            return Err("it counts rows, and blocks of keys, in 31 bits".to_string());
        }
        // Slots of splits have a place for each row; slots of blocks are as many as the GPU says.
        let slot_rows = tile_rows(narrow).min(pairs);
        let fixed = matches!(spec.splits, Splits::FixedTokens(_));
        let is_by_split = fixed || splits * pairs <= 2 * blocks * slot_rows;
        let slot_rows = (!is_by_split).then_some(slot_rows);
        Ok(Self { code, narrow, blocks, splits, slot_rows })
    }

    fn code(facts: &Facts, spec: &DenseSpec) -> Result<Code, String> {
        let widths = (spec.qk_width, spec.value_width);
        let reason = if !is_hopper(facts) {
            "its instructions are those of compute capability 9.0"
        } else if spec.record != RecordFormat::Bf16 {
            "it reads bf16 records"
        } else if !WIDTHS.contains(&widths) {
            "it has the widths 576/512 and 512/512"
        } else if spec.window.is_some() {
            "it has no window"
        } else if !spec.pages().record.bytes().is_multiple_of(16) {
            "it needs records of a multiple of 16 bytes"
        } else {
            let tensor_map = view::box_tokens(spec.page_size).is_some();
            return Ok(Code { widths, partial: spec.partial, tensor_map });
        };
        Err(reason.to_string())
    }

    fn params(&self, plan: &Plan<Dense>, r: &DenseRegions) -> Params {
        let (spec, int) = (plan.spec(), attention::int);
        let fixed_tokens = plan.division().fixed_tokens.unwrap_or(0);
        let scratch = |name| plan.region(r.scratch, name).address();
        Params {
            q: r.q.address(),
            out: r.out.address(),
            lse: r.lse.address(),
            page_table: r.page_table.address(),
            kv_lens: r.kv_lens.address(),
            q_offsets: r.q_offsets.address(),
            row_kv_lens: if spec.row_lengths { r.row_kv_lens.address() } else { 0 },
            view: r.view.address(),
            partials: scratch(Dense::PARTIAL_OUT),
            partial_lse: scratch(Dense::PARTIAL_LSE),
            faults: r.scratch.address(),
            rows: int(r.rows),
            batch: int(r.batch),
            heads: int(spec.heads),
            table_width: int(r.table_width),
            covered: int(r.table_width.saturating_mul(spec.page_size).min(spec.max_kv_tokens)),
            partial_rows: int(self.slot_rows.unwrap_or(0)),
            slots: int(if self.slot_rows.is_some() { 2 * self.blocks } else { self.splits }),
            fixed_blocks: int(fixed_tokens / BLOCK),
            page_size: int(spec.page_size),
            box_tokens: int(view::box_tokens(spec.page_size).unwrap_or(1)),
            token_stride_bytes: int(spec.pages().record.bytes()),
            most_columns: MOST_COLUMNS,
            scale_log2: spec.softmax_scale.value() * std::f32::consts::LOG2_E,
            lse_scale: attention::from_base_2(spec.lse),
        }
    }
}

/// Narrow tiles where they take a request: with fixed splits, where bits may not depend on the
/// capacities, where they take a row.
fn is_narrow(spec: &DenseSpec) -> bool {
    let rows = match spec.splits {
        Splits::FixedTokens(_) => 1,
        _ => spec.max_rows.div_ceil(spec.max_batch),
    };
    rows.saturating_mul(spec.heads) <= tile_rows(true)
}

fn splits(spec: &DenseSpec, blocks: usize) -> Result<usize, String> {
    let wanted = blocks.min(spec.capacity().blocks());
    let splits = spec.capacity().resolve(wanted).map_err(|error| error.to_string())?;
    match spec.splits {
        Splits::Count(_) => Err("it has no number of splits: it divides all work evenly".into()),
        Splits::Auto if splits < wanted => Err("it keeps no budget of splits".to_string()),
        _ if splits > MOST_SPLITS => Err(format!("it has at most {MOST_SPLITS} splits")),
        _ => Ok(splits),
    }
}

const fn tile_rows(narrow: bool) -> usize {
    if narrow { 16 } else { 64 }
}

/// `SHARED_BYTES` of the kernel, which asserts it: alignment, queries, two to four blocks of keys,
/// state.
fn shared_bytes((qk, value): (usize, usize), narrow: bool) -> u32 {
    const MOST: usize = 232_448;
    const STATE: usize = 6144;
    let (boxes, values) = (qk.div_ceil(64), value / 64);
    let queries = boxes * tile_rows(narrow) * 128;
    let stage = boxes.max(values + 1) * BLOCK * 128;
    let stages = ((MOST - 1024 - STATE - queries) / stage).min(4);
    (1024 + queries + stages * stage + STATE) as u32
}

const NARROW_TEXT: &[&str] = &[
    include_str!("../../../kernels/hopper_ptx.cuh"),
    include_str!("../../../kernels/dense_work.cuh"),
    include_str!("../../../kernels/dense_merge.cuh"),
    include_str!("../../../kernels/hopper_dense_keys.cuh"),
    include_str!("../../../kernels/hopper_dense_narrow.cu"),
    include_str!("../../../kernels/hopper_dense_main.cuh"),
];

const WIDE_TEXT: &[&str] = &[
    NARROW_TEXT[0],
    NARROW_TEXT[1],
    NARROW_TEXT[2],
    NARROW_TEXT[3],
    include_str!("../../../kernels/hopper_dense_wide.cu"),
    NARROW_TEXT[5],
];

fn source(code: Code, narrow: bool) -> Source {
    let dynamic_shared_bytes = shared_bytes(code.widths, narrow);
    Source {
        family: if narrow { NARROW } else { WIDE },
        entry: "mlakit_dense_decode",
        text: if narrow { NARROW_TEXT } else { WIDE_TEXT },
        defines: vec![
            ("QK_WIDTH", code.widths.0.to_string()),
            ("VALUE_WIDTH", code.widths.1.to_string()),
            ("PARTIAL_F32", layer::switch(code.partial == Partial::F32)),
            ("USE_TENSOR_MAP", layer::switch(code.tensor_map)),
            ("NARROW", layer::switch(narrow)),
            ("HOST_SHARED_BYTES", dynamic_shared_bytes.to_string()),
        ],
        threads: if narrow { 512 } else { 384 },
        dynamic_shared_bytes,
        registers: if narrow { 128 } else { 168 },
    }
}

/// What `prepare` compiles.
pub(super) fn sources(plan: &Plan<Dense>) -> Vec<Source> {
    let spec = plan.spec();
    let tensor_map = view::box_tokens(spec.page_size).is_some();
    let widths = (spec.qk_width, spec.value_width);
    let code = Code { widths, partial: spec.partial, tensor_map };
    vec![source(code, plan.choice().kernel == NARROW)]
}

/// Every specialisation.
pub(super) fn manifest() -> Vec<Source> {
    let mut sources = Vec::new();
    for widths in WIDTHS {
        for partial in [Partial::Bf16, Partial::F32] {
            for tensor_map in [true, false] {
                let code = Code { widths, partial, tensor_map };
                sources.extend([true, false].map(|narrow| source(code, narrow)));
            }
        }
    }
    sources
}

#[cfg(test)]
mod tests;
