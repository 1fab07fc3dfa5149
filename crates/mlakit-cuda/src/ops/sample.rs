//! `sample`: a block a row.

use mlakit::op::sample::{Sample, SampleRegions, SampleSpec};
use mlakit::{Choice, Error, Plan, Refusal, Runs};

use super::layer;
use crate::device::Cuda;
use crate::facts::Facts;
use crate::module::{Kernel, Source};
use crate::stream::Queue;

/// Threads of a block.
const THREADS: u32 = 1024;

/// As `SampleParams` of the kernel.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    logits: u64,
    temperature: u64,
    random: u64,
    ids: u64,
    vocab: i64,
}

const _: () = assert!(size_of::<Params>() == 40, "the kernel mirrors this");

impl Runs<Sample> for Cuda {
    type Code = Kernel;

    fn choose(_: &Facts, _: &SampleSpec) -> Result<Choice, Refusal> {
        Ok(Choice::of("portable_sample"))
    }

    fn prepare(&self, plan: &Plan<Sample>) -> Result<Kernel, Error> {
        self.kernel(&source(plan.spec().temperature))
    }

    fn launch(
        &self,
        code: &Kernel,
        plan: &Plan<Sample>,
        regions: &SampleRegions,
        queue: &mut Queue,
    ) -> Result<(), Error> {
        if regions.rows == 0 {
            return Ok(());
        }
        let params = Params {
            logits: regions.logits.address(),
            temperature: regions.temperature.address(),
            random: regions.random.address(),
            ids: regions.ids.address(),
            vocab: layer::wide(plan.spec().vocab),
        };
        // SAFETY: the entry takes these parameters; every address is a region of this launch, bound
        // at the sizes that rows and vocabulary say.
        unsafe { queue.launch(code, layer::grid(self, regions.rows)?, &params) }
    }
}

fn source(temperature: bool) -> Source {
    layer::source(
        ("portable_sample", "portable_sample"),
        &[layer::COMMON, include_str!("../../kernels/portable_sample.cu")],
        vec![("TEMPERATURE", layer::switch(temperature))],
        (THREADS, 64),
    )
}

/// Every specialisation.
pub(crate) fn manifest() -> Vec<Source> {
    vec![source(false), source(true)]
}
