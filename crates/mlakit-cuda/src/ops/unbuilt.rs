//! Operations that have no kernel for this device: each is refused when it is planned, by name.

use mlakit::op::hadamard::{Hadamard, HadamardRegions, HadamardSpec};
use mlakit::op::indexer::{Indexer, IndexerRegions, IndexerSpec};
use mlakit::op::pool::{Pool, PoolRegions, PoolSpec};
use mlakit::op::selection::{Selection, SelectionRegions, SelectionSpec};
use mlakit::op::sparse::{Sparse, SparseRegions, SparseSpec};
use mlakit::{Choice, Error, Op, Plan, Refusal, Runs};

use super::Compiles;
use crate::device::Cuda;
use crate::facts::Facts;
use crate::module::Source;
use crate::stream::Queue;

/// Code that nobody can have: there is no plan to make it from.
#[derive(Debug)]
pub enum Never {}

fn refusal<O: Op>() -> Refusal {
    Refusal {
        what: format!("the operation {}", O::NAME),
        because: "there is no CUDA kernel for it".into(),
        instead: "the CPU".into(),
    }
}

macro_rules! unbuilt {
    ($($op:ident, $spec:ident, $regions:ident;)*) => {
        $(
            impl Runs<$op> for Cuda {
                type Code = Never;

                fn choose(_: &Facts, _: &$spec) -> Result<Choice, Refusal> {
                    Err(refusal::<$op>())
                }

                fn prepare(&self, _: &Plan<$op>) -> Result<Never, Error> {
                    Err(Error::Refused(refusal::<$op>()))
                }

                fn launch(
                    &self,
                    code: &Never,
                    _: &Plan<$op>,
                    _: &$regions,
                    _: &mut Queue,
                ) -> Result<(), Error> {
                    match *code {}
                }
            }

            impl Compiles<$op> for Cuda {
                fn sources(_: &Plan<$op>) -> Vec<Source> {
                    Vec::new()
                }
            }
        )*
    };
}

unbuilt! {
    Hadamard, HadamardSpec, HadamardRegions;
    Indexer, IndexerSpec, IndexerRegions;
    Pool, PoolSpec, PoolRegions;
    Selection, SelectionSpec, SelectionRegions;
    Sparse, SparseSpec, SparseRegions;
}
