//! What kernels take of a multiprocessor, known without a device: the checked-in manifest.

use std::sync::OnceLock;

use mlakit::{Op, Plan};
use serde::{Deserialize, Serialize};

use crate::device::Cuda;
use crate::facts::Facts;
use crate::module::Resources;
use crate::ops::Compiles;

/// A kernel that a plan needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PlannedKernel {
    /// Entry and macros.
    pub title: String,
    /// What it takes, where the manifest has this specialisation for the GPU's architecture; what is
    /// not there is known once it is compiled.
    pub resources: Option<Resources>,
}

/// The kernels that `prepare` compiles for this plan on a GPU of these facts.
pub fn planned_kernels<O: Op>(plan: &Plan<O>, facts: &Facts) -> Vec<PlannedKernel>
where
    Cuda: Compiles<O>,
{
    let architecture = facts.architecture();
    let planned = |source: crate::Source| {
        let key = source.key(&architecture, manifest().version());
        PlannedKernel { title: source.title(), resources: manifest().find(&key) }
    };
    Cuda::sources(plan).into_iter().map(planned).collect()
}

/// The kernels of the manifest for an architecture (`sm_90a`), by title; empty for one that it does not have.
pub fn recorded_kernels(architecture: &str) -> Vec<PlannedKernel> {
    let rows = manifest().rows.iter().filter(|row| row.architecture == architecture);
    let kernel =
        |row: &Row| PlannedKernel { title: row.kernel.clone(), resources: Some(row.resources()) };
    rows.map(kernel).collect()
}

#[derive(Deserialize)]
struct Manifest {
    nvrtc: String,
    rows: Vec<Row>,
}

#[derive(Deserialize)]
struct Row {
    kernel: String,
    architecture: String,
    key: String,
    registers: u32,
    static_shared_bytes: u32,
    dynamic_shared_bytes: u32,
}

fn manifest() -> &'static Manifest {
    static MANIFEST: OnceLock<Manifest> = OnceLock::new();
    let read = || serde_json::from_str(include_str!("../kernels/manifest.json"));
    MANIFEST.get_or_init(|| read().expect("the embedded manifest, which a test reads"))
}

impl Manifest {
    fn version(&self) -> (u32, u32) {
        let mut parts = self.nvrtc.split('.').map(|part| part.parse().unwrap_or(0));
        (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
    }

    /// Rows have the first digits of a key.
    fn find(&self, key: &str) -> Option<Resources> {
        self.rows.iter().find(|row| key.starts_with(&row.key)).map(Row::resources)
    }
}

impl Row {
    /// A kernel with local memory is not in the manifest.
    fn resources(&self) -> Resources {
        Resources {
            registers: self.registers,
            static_shared_bytes: self.static_shared_bytes,
            dynamic_shared_bytes: self.dynamic_shared_bytes,
            local_bytes: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use mlakit::op::merge::{Merge, MergeFields, Partial};

    use super::*;

    #[test]
    fn a_planned_kernel_is_found_in_the_manifest() {
        let fields = MergeFields {
            splits: 4,
            heads: 16,
            value_width: 512,
            partial: Partial::F32,
            lse: mlakit::LseBase::Natural,
            sink: false,
            sink_in_lse: false,
            max_rows: 8,
        };
        let facts = Facts::preset("h200").unwrap();
        let plan = Plan::<Merge>::for_device::<Cuda>(&fields.try_into().unwrap(), &facts).unwrap();
        let kernels = planned_kernels(&plan, &facts);
        assert_eq!(kernels.len(), 1);
        assert!(kernels[0].resources.is_some_and(|r| r.registers > 0), "{kernels:?}");
        assert!(recorded_kernels("sm_90a").contains(&kernels[0]));
        assert_eq!(recorded_kernels("sm_1"), []);
    }
}
