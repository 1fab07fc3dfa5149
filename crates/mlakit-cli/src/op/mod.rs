//! `mlakit op`: one operation on the inputs of a case file.

use half::bf16;
use mlakit::op::dense::Dense;
use mlakit::op::indexer::Indexer;
use mlakit::op::merge::Merge;
use mlakit::op::projection::Projection;
use mlakit::op::selection::Selection;
use mlakit::op::sparse::Sparse;
use mlakit::op::writer::Writer;
use mlakit::scratch::FAULT_NAMES;
use mlakit::{Choice, Device, Dtype, Error, Op, PageGeometry, Plan, Runs};
use mlakit_cpu::Cpu;
use mlakit_cuda::{Compiles, Cuda, planned_kernels};
use serde_json::{Map, Value};

use crate::case::tensor::file_dtype;
use crate::case::{Case, Dims, Table, Tensor, Tensors};
use crate::device::{AnyDevice, AnyFacts};
use crate::failure::Failure;
use crate::plan::PlanReport;

mod command;
pub mod compare;
mod dense;
mod indexer;
mod merge;
mod projection;
mod selection;
pub mod session;
pub mod source;
mod sparse;
mod spec;
mod writer;

pub use command::command;
use session::Session;
use source::Source;
pub use spec::read_spec;

/// What the program needs to know of an operation to run it from a file.
pub trait CaseOp: Op {
    /// Its tensors.
    const TABLE: Table;
    /// Whether its plans divide rows into splits.
    const DIVIDES: bool = false;

    /// Fields that are absent and follow from the tensors in another way than the table says.
    fn derive(_spec: &mut Map<String, Value>, _tensors: &Tensors<'_>, _dims: &Dims) {}
    /// For each tensor that not every case has, whether this Spec has it.
    fn optional(spec: &Self::Spec) -> Vec<Optional>;
    /// The cache that it reads or writes.
    fn pages(_spec: &Self::Spec) -> Option<PageGeometry> {
        None
    }
    /// The cache of a second scope that it reads.
    fn extra_pages(_spec: &Self::Spec) -> Option<PageGeometry> {
        None
    }
    /// What neither the table nor the Spec can check.
    fn check(_call: &Call<'_, Self>) -> Result<(), Failure> {
        Ok(())
    }
    /// The outputs.
    fn outputs(call: &Call<'_, Self>) -> Vec<Expected>;
    /// The operands of one call, from wherever they are.
    fn args<D: Device, S: Source<D>>(
        call: &Call<'_, Self>,
        source: &mut S,
    ) -> Result<Self::Args<'static, D>, Error>;
    /// What the oracle says, rounding where a plan of this choice does.
    fn oracle(call: &Call<'_, Self>, choice: &Choice) -> Exact;
    /// Where a plan is not what the Spec asked for.
    fn notes(_spec: &Self::Spec, _choice: &Choice) -> Vec<String> {
        Vec::new()
    }
}

/// A tensor that not every case has.
#[derive(Clone, Copy, Debug)]
pub struct Optional {
    /// Its name.
    pub name: &'static str,
    /// Whether this Spec has it.
    pub wanted: bool,
    /// What decides.
    pub because: &'static str,
}

/// A case whose Spec is whole and whose tensors fit it.
#[derive(Debug)]
pub struct Call<'c, O: Op> {
    /// What is declared.
    pub spec: O::Spec,
    /// The sizes.
    pub dims: Dims,
    /// The inputs.
    pub tensors: Tensors<'c>,
}

/// An output by name, dtype and shape.
#[derive(Clone, Debug, PartialEq)]
pub struct Expected {
    /// Its name.
    pub name: &'static str,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its axes.
    pub shape: Vec<usize>,
}

impl Expected {
    /// An output.
    pub fn new(name: &'static str, dtype: Dtype, shape: Vec<usize>) -> Self {
        Self { name, dtype, shape }
    }

    /// Its elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().copied().fold(1, usize::saturating_mul)
    }

    /// With its bytes.
    pub fn tensor(&self, bytes: Vec<u8>) -> (&'static str, Tensor<'static>) {
        let (dtype, shape) = (file_dtype(self.dtype), self.shape.clone());
        (self.name, Tensor { dtype, shape, bytes: bytes.into() })
    }
}

/// The outputs of one run.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// By name, in the order of the format.
    pub outputs: Vec<(&'static str, Tensor<'static>)>,
    /// What was skipped or clamped.
    pub faults: [u32; FAULT_NAMES.len()],
}

/// An operation that runs from a file.
#[derive(Clone, Copy)]
pub struct Operation {
    /// Its name.
    pub name: &'static str,
    /// Checks a case without running it.
    pub check: fn(Case<'_>) -> Result<(), Failure>,
    /// Plans a Spec.
    pub plan: fn(Map<String, Value>, &AnyFacts) -> Result<PlanReport, Failure>,
    /// Runs a case.
    pub run: fn(Case<'_>, &AnyDevice, usize) -> Result<Ran, Failure>,
    /// Runs the oracle, with the splits of the plan for these facts.
    pub oracle: fn(Case<'_>, &AnyFacts) -> Result<Exact, Failure>,
}

/// A case that a device ran.
pub struct Ran {
    /// What it computed.
    pub outcome: Outcome,
    /// The plan.
    pub plan: PlanReport,
}

/// What the oracle says of a case.
pub struct Exact {
    /// By output, in the order of the format.
    pub outputs: Vec<(Expected, Values)>,
    /// What was skipped or clamped.
    pub faults: [u32; FAULT_NAMES.len()],
}

/// The elements of an output of the oracle.
pub enum Values {
    /// Numbers before their rounding to the dtype of the output.
    Numbers(Vec<f64>),
    /// Bytes, all of them determined.
    Bytes(Vec<u8>),
}

/// Nothing was skipped or clamped.
const NO_FAULTS: [u32; FAULT_NAMES.len()] = [0; FAULT_NAMES.len()];

impl Exact {
    /// Numbers for each output of a call.
    fn numbers<O: CaseOp>(
        call: &Call<'_, O>,
        values: Vec<Vec<f64>>,
        faults: [u32; FAULT_NAMES.len()],
    ) -> Self {
        let values = values.into_iter().map(Values::Numbers);
        Self { outputs: O::outputs(call).into_iter().zip(values).collect(), faults }
    }

    /// Each number rounded once, to the dtype of its output.
    pub fn rounded(self) -> Outcome {
        let bytes = |dtype: Dtype, values: Values| -> Vec<u8> {
            let numbers = match values {
                Values::Bytes(bytes) => return bytes,
                Values::Numbers(numbers) => numbers.into_iter(),
            };
            match dtype {
                Dtype::Bf16 => numbers.flat_map(|v| bf16::from_f64(v).to_le_bytes()).collect(),
                _ => numbers.flat_map(|v| (v as f32).to_le_bytes()).collect(),
            }
        };
        let outputs = self.outputs.into_iter();
        let outputs = outputs.map(|(output, values)| output.tensor(bytes(output.dtype, values)));
        Outcome { outputs: outputs.collect(), faults: self.faults }
    }
}

/// The operations, in the order of the format.
pub const OPERATIONS: [Operation; 7] = [
    of::<Dense>(),
    of::<Sparse>(),
    of::<Indexer>(),
    of::<Selection>(),
    of::<Merge>(),
    of::<Writer>(),
    of::<Projection>(),
];

const fn of<O: CaseOp>() -> Operation
where
    Cpu: Runs<O>,
    Cuda: Runs<O> + Compiles<O>,
{
    Operation {
        name: O::NAME,
        check: |case| Call::<O>::new(case).map(drop),
        plan: plan::<O>,
        run: run::<O>,
        oracle: oracle::<O>,
    }
}

/// The operation of this name.
///
/// # Errors
/// A name that no operation has.
pub fn find(name: &str) -> Result<&'static Operation, Failure> {
    OPERATIONS.iter().find(|operation| operation.name == name).ok_or_else(|| {
        let names: Vec<_> = OPERATIONS.iter().map(|operation| operation.name).collect();
        Failure::input(
            format!("operation `{name}`: needed one of {}", names.join(", ")),
            "correct the name; `mlakit op --help` shows how a case is run",
        )
    })
}

fn plan<O: CaseOp>(spec: Map<String, Value>, facts: &AnyFacts) -> Result<PlanReport, Failure>
where
    Cpu: Runs<O>,
    Cuda: Runs<O> + Compiles<O>,
{
    let spec = read_spec::<O>(spec)?;
    match facts {
        AnyFacts::Cpu(facts) => Ok(PlanReport::of(&Plan::<O>::for_device::<Cpu>(&spec, facts)?)),
        AnyFacts::Cuda(facts) => {
            let plan = Plan::<O>::for_device::<Cuda>(&spec, facts)?;
            Ok(PlanReport::of(&plan).with_kernels(planned_kernels(&plan, facts)))
        }
    }
}

fn run<O: CaseOp>(case: Case<'_>, device: &AnyDevice, replays: usize) -> Result<Ran, Failure>
where
    Cpu: Runs<O>,
    Cuda: Runs<O> + Compiles<O>,
{
    let call = Call::<O>::new(case)?;
    match device {
        AnyDevice::Cpu(cpu) => run_on(&call, cpu, replays),
        AnyDevice::Cuda(gpu) => {
            let Ran { outcome, plan } = run_on(&call, gpu, replays)?;
            let of = Plan::<O>::for_device::<Cuda>(&call.spec, gpu.facts())?;
            let plan = plan.with_kernels(planned_kernels(&of, gpu.facts()));
            Ok(Ran { outcome, plan })
        }
    }
}

fn run_on<O: CaseOp, D: Runs<O>>(
    call: &Call<'_, O>,
    device: &D,
    replays: usize,
) -> Result<Ran, Failure> {
    let caller = device.own_stream()?;
    let mut session = Session::new(call, device, &caller)?;
    let outcome = session.run()?;
    if replays > 0 {
        let mut replay = session.capture()?;
        for number in 1..=replays {
            let given = session.replay(&mut replay)?;
            compare::same_bits(number, &outcome, &given)?;
        }
    }
    Ok(Ran { outcome, plan: PlanReport::of(session.plan()) })
}

fn oracle<O: CaseOp>(case: Case<'_>, facts: &AnyFacts) -> Result<Exact, Failure>
where
    Cpu: Runs<O>,
    Cuda: Runs<O> + Compiles<O>,
{
    let call = Call::<O>::new(case)?;
    match facts {
        AnyFacts::Cpu(facts) => {
            let plan = Plan::<O>::for_device::<Cpu>(&call.spec, facts)?;
            Ok(O::oracle(&call, plan.choice()))
        }
        AnyFacts::Cuda(facts) => {
            let plan = Plan::<O>::for_device::<Cuda>(&call.spec, facts)?;
            Ok(O::oracle(&call, plan.choice()))
        }
    }
}

impl<'c, O: CaseOp> Call<'c, O> {
    /// Checks a case: every tensor against the table, the fields, and what the operation itself
    /// asks for.
    ///
    /// # Errors
    /// The first thing that is wrong, by name.
    pub fn new(case: Case<'c>) -> Result<Self, Failure> {
        let Case { mut spec, tensors, .. } = case;
        let dims = O::TABLE.check(&mut spec, &tensors)?;
        O::derive(&mut spec, &tensors, &dims);
        let call = Self { spec: read_spec::<O>(spec)?, dims, tensors };
        O::check(&call)?;
        call.check_optional()?;
        call.check_pages()?;
        call.check_scales()?;
        call.check_memory()?;
        Ok(call)
    }

    fn check_optional(&self) -> Result<(), Failure> {
        for Optional { name, wanted, because } in O::optional(&self.spec) {
            let (needed, given, help) = match (wanted, self.tensors.find(name)) {
                (true, None) => ("one", "nothing".to_owned(), "add it to the case"),
                (false, Some(given)) => ("none", given.kind(), "remove it from the case"),
                _ => continue,
            };
            let text = format!("tensor `{name}`: needed {needed} ({because}), given {given}");
            return Err(Failure::input(text, help));
        }
        Ok(())
    }

    fn check_pages(&self) -> Result<(), Failure> {
        let caches = [
            ("cache", O::pages(&self.spec), "page_bytes"),
            ("extra_cache", O::extra_pages(&self.spec), "extra_page_bytes"),
        ];
        for (name, geometry, bytes) in caches {
            let Some(geometry) = geometry else { continue };
            let (needed, given) = (geometry.payload_bytes(), self.dims.of(bytes));
            if given < needed {
                return Err(Failure::input(
                    format!(
                        "tensor `{name}`: needed {needed} bytes a page or more ({geometry}), \
                         given {given}"
                    ),
                    "compare `record`, `page_size` and the widths in the spec with the cache",
                ));
            }
        }
        Ok(())
    }

    fn check_scales(&self) -> Result<(), Failure> {
        for name in ["kv_scale", "q_scale"] {
            if let Some(scale) = self.tensors.scalar(name)
                && !(scale.is_finite() && scale > 0.0)
            {
                return Err(Failure::input(
                    format!("tensor `{name}`: needed a finite number above 0, given {scale}"),
                    "write the factor that turns codes into values",
                ));
            }
        }
        Ok(())
    }

    /// What the host needs beside the file: outputs, and the oracle's in f64.
    fn check_memory(&self) -> Result<(), Failure> {
        for output in O::outputs(self) {
            let bytes = output.elements().saturating_mul(16);
            crate::machine::ensure_memory(&format!("output `{}`", output.name), bytes)?;
        }
        Ok(())
    }
}
