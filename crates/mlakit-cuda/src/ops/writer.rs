//! `writer`: a warp a record.

use mlakit::op::writer::{Writer, WriterRegions, WriterSpec};
use mlakit::{Choice, Error, Plan, RecordFormat, Refusal, Runs};

use super::{Compiles, attention, layer};
use crate::device::Cuda;
use crate::facts::Facts;
use crate::module::{Kernel, Source};
use crate::stream::Queue;

/// Threads and rows of a block.
const THREADS: u32 = 256;
const BLOCK_ROWS: usize = 8;

/// As `WriterParams` of the kernel.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    latent: u64,
    rope: u64,
    slots: u64,
    view: u64,
    kv_scale: u64,
    faults: u64,
    rows: i32,
    latent_width: i32,
    rope_width: i32,
    page_size: i32,
    record_bytes: i32,
    reserved: i32,
}

const _: () = assert!(size_of::<Params>() == 72, "the kernel mirrors this");

impl Runs<Writer> for Cuda {
    type Code = Kernel;

    fn choose(facts: &Facts, spec: &WriterSpec) -> Result<Choice, Refusal> {
        if !spec.record.is_plain() {
            let record = spec.record.name();
            return Err(Refusal {
                what: format!("a writer of {record} records, on {facts}"),
                because: "its kernel writes bf16 and e4m3".to_string(),
                instead: "record bf16 or e4m3, or the CPU device".to_string(),
            });
        }
        Ok(Choice::of("portable_writer"))
    }

    fn prepare(&self, plan: &Plan<Writer>) -> Result<Kernel, Error> {
        self.kernel(&source(plan.spec().record))
    }

    fn launch(
        &self,
        code: &Kernel,
        plan: &Plan<Writer>,
        r: &WriterRegions,
        queue: &mut Queue,
    ) -> Result<(), Error> {
        if r.rows == 0 {
            return Ok(());
        }
        let spec = plan.spec();
        let params = Params {
            latent: r.latent.address(),
            rope: r.rope.address(),
            slots: r.slots.address(),
            view: r.view.address(),
            kv_scale: attention::scale(spec.record.is_scaled(), r.kv_scale),
            faults: r.scratch.address(),
            rows: attention::int(r.rows),
            latent_width: attention::int(spec.latent_width),
            rope_width: attention::int(spec.rope_width),
            page_size: attention::int(spec.page_size),
            record_bytes: attention::int(spec.pages().record.bytes()),
            reserved: 0,
        };
        let grid = layer::grid(self, r.rows.div_ceil(BLOCK_ROWS))?;
        // SAFETY: the entry takes these parameters; every address is a region of this launch, bound
        // at the sizes that the rows and widths say, and the view is that of a pool that it writes.
        unsafe { queue.launch(code, grid, &params) }
    }
}

impl Compiles<Writer> for Cuda {
    fn sources(plan: &Plan<Writer>) -> Vec<Source> {
        vec![source(plan.spec().record)]
    }
}

fn source(record: RecordFormat) -> Source {
    Source {
        family: "portable_writer",
        entry: "portable_writer",
        text: &[attention::COMMON, include_str!("../../kernels/portable_writer.cu")],
        defines: vec![("RECORD_E4M3", layer::switch(attention::is_e4m3(record)))],
        threads: THREADS,
        dynamic_shared_bytes: 0,
        registers: 48,
    }
}

/// Every specialisation.
pub(crate) fn manifest() -> Vec<Source> {
    RecordFormat::PLAIN.map(source).to_vec()
}
