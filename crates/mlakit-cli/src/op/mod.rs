//! `mlakit op`: one operation on the inputs of a case file.

use half::bf16;
use mlakit::op::dense::Dense;
use mlakit::op::merge::Merge;
use mlakit::op::projection::Projection;
use mlakit::op::writer::Writer;
use mlakit::scratch::FAULT_NAMES;
use mlakit::{Device, Dtype, Error, Op, PageGeometry, Plan, Runs};
use mlakit_cpu::Cpu;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::args::OpArgs;
use crate::case::tensor::file_dtype;
use crate::case::{Case, Dims, Table, Tensor, Tensors, read_file, write, write_file};
use crate::device::{self, AnyDevice, AnyFacts, Environment};
use crate::failure::Failure;
use crate::plan::PlanReport;
use crate::report::{self, Report};

pub mod compare;
mod dense;
mod merge;
mod projection;
pub mod session;
pub mod source;
mod writer;

use session::Session;
use source::Source;

/// What the program needs to know of an operation to run it from a file.
pub trait CaseOp: Op {
    /// Its tensors.
    const TABLE: Table;

    /// Fields that are absent and follow from the tensors in another way than the table says.
    fn derive(_spec: &mut Map<String, Value>, _tensors: &Tensors<'_>, _dims: &Dims) {}
    /// For each tensor that not every case has, whether this Spec has it.
    fn optional(spec: &Self::Spec) -> Vec<Optional>;
    /// The cache that it reads or writes.
    fn pages(_spec: &Self::Spec) -> Option<PageGeometry> {
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
    /// What the oracle says.
    fn oracle(call: &Call<'_, Self>) -> Outcome;
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
    /// Runs the oracle.
    pub oracle: fn(Case<'_>) -> Result<Ran, Failure>,
}

/// A case that was run, by a device or by the oracle.
pub struct Ran {
    /// What it computed.
    pub outcome: Outcome,
    /// The plan, where a device ran it.
    pub plan: Option<PlanReport>,
}

/// The operations, in the order of the format.
pub const OPERATIONS: [Operation; 4] =
    [of::<Dense>(), of::<Merge>(), of::<Writer>(), of::<Projection>()];

const fn of<O: CaseOp>() -> Operation
where
    Cpu: Runs<O>,
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
{
    let spec = read_spec::<O>(spec)?;
    match facts {
        AnyFacts::Cpu(facts) => Ok(PlanReport::of(&Plan::<O>::for_device::<Cpu>(&spec, facts)?)),
    }
}

fn run<O: CaseOp>(case: Case<'_>, device: &AnyDevice, replays: usize) -> Result<Ran, Failure>
where
    Cpu: Runs<O>,
{
    let call = Call::<O>::new(case)?;
    match device {
        AnyDevice::Cpu(cpu) => run_on(&call, cpu, replays),
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
    let plan = Some(PlanReport::of(session.plan()));
    Ok(Ran { outcome, plan })
}

fn oracle<O: CaseOp>(case: Case<'_>) -> Result<Ran, Failure> {
    let call = Call::<O>::new(case)?;
    Ok(Ran { outcome: O::oracle(&call), plan: None })
}

/// Makes a Spec from its fields.
///
/// # Errors
/// A field that is unknown, absent, of another type or out of its bounds, by name.
pub fn read_spec<O: Op>(fields: Map<String, Value>) -> Result<O::Spec, Failure> {
    serde_path_to_error::deserialize(Value::Object(fields)).map_err(|error| {
        let path = error.path().to_string();
        let place = if path == "." { String::new() } else { format!(" field `{path}`") };
        Failure::input(
            format!("spec{place}: {}", error.inner()),
            format!("`mlakit plan --op {} --spec JSON` checks a spec", O::NAME),
        )
    })
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
        let Some(geometry) = O::pages(&self.spec) else { return Ok(()) };
        let (needed, given) = (geometry.payload_bytes(), self.dims.of("page_bytes"));
        if given >= needed {
            return Ok(());
        }
        Err(Failure::input(
            format!(
                "tensor `cache`: needed {needed} bytes a page or more ({geometry}), given {given}"
            ),
            "compare `record`, `page_size` and the widths in the spec with the cache",
        ))
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

/// An outcome from f64 values, each rounded once to the dtype of its output.
fn rounded<O: CaseOp>(
    call: &Call<'_, O>,
    values: &[&[f64]],
    faults: [u32; FAULT_NAMES.len()],
) -> Outcome {
    let bytes = |dtype: Dtype, values: &[f64]| -> Vec<u8> {
        match dtype {
            Dtype::Bf16 => values.iter().flat_map(|v| bf16::from_f64(*v).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|v| (*v as f32).to_le_bytes()).collect(),
        }
    };
    let outputs = O::outputs(call).into_iter().zip(values);
    let outputs = outputs.map(|(output, values)| output.tensor(bytes(output.dtype, values)));
    Outcome { outputs: outputs.collect(), faults }
}

/// What `mlakit op` prints.
#[derive(Serialize)]
struct OpReport {
    operation: &'static str,
    device: String,
    #[serde(flatten)]
    plan: Option<PlanReport>,
    replays: usize,
    outputs: Vec<Printed>,
    faults: u64,
    faults_by_kind: Map<String, Value>,
    out: String,
}

#[derive(Serialize)]
struct Printed {
    name: &'static str,
    dtype: String,
    shape: Vec<usize>,
    /// FNV-1a, 64 bits, of the bytes.
    checksum: String,
}

impl Report for OpReport {
    fn lines(&self) -> Vec<String> {
        let mut rows =
            vec![("operation", self.operation.to_owned()), ("device", self.device.clone())];
        if let Some(plan) = &self.plan {
            rows.extend(plan.choices());
        }
        if self.replays > 0 {
            rows.push(("replays", format!("{}, the bits of the eager run", self.replays)));
        }
        rows.push(("faults", self.faults.to_string()));
        rows.push(("written", self.out.clone()));
        let outputs = self.outputs.iter().map(|output| {
            let shape = format!("{:?}", output.shape);
            vec![output.name.to_owned(), output.dtype.clone(), shape, output.checksum.clone()]
        });
        let outputs =
            report::table(&["output", "dtype", "shape", "checksum"], &[], outputs.collect());
        let mut lines = vec![report::pairs(&rows)];
        lines.extend(self.plan.iter().map(PlanReport::scratch_table));
        lines.push(outputs);
        lines
    }
}

/// `mlakit op`.
///
/// # Errors
/// Anything that is wrong with the case, the device or the output path; a replay with other bits.
pub fn command(args: &OpArgs, environment: &Environment) -> Result<impl Report + use<>, Failure> {
    let operation = find(&args.operation)?;
    write::check_path(&args.out)?;
    let bytes = read_file(&args.case)?;
    let place = args.case.display();
    let case = Case::parse(&bytes).map_err(|failure| failure.within(&place))?;
    if case.operation != operation.name {
        return Err(Failure::input(
            format!(
                "{place}: needed a case of {}, given one of {:?}",
                operation.name, case.operation
            ),
            format!("run `mlakit op {}`, or give another case", case.operation),
        ));
    }
    let metadata = case.metadata.clone();
    let replays = args.replay.unwrap_or(0);
    let (device, ran) = if args.oracle {
        ("oracle (f64)".to_owned(), (operation.oracle)(case))
    } else {
        let device = device::open(&args.device, environment)?;
        (device.describe(), (operation.run)(case, &device, replays))
    };
    let ran = ran.map_err(|failure| failure.within(&place))?;
    let faults: u64 = ran.outcome.faults.iter().map(|count| u64::from(*count)).sum();
    let counted = Tensor::new(Dtype::I32, vec![1], &[i32::try_from(faults).unwrap_or(i32::MAX)]);
    let mut tensors: Vec<(&str, &Tensor<'_>)> =
        ran.outcome.outputs.iter().map(|(name, tensor)| (*name, tensor)).collect();
    tensors.push(("faults", &counted));
    write_file(&args.out, &metadata, &tensors)?;
    let kinds = FAULT_NAMES.iter().zip(ran.outcome.faults);
    Ok(OpReport {
        operation: operation.name,
        device,
        plan: ran.plan,
        replays,
        outputs: ran.outcome.outputs.iter().map(Printed::new).collect(),
        faults,
        faults_by_kind: kinds.map(|(name, count)| ((*name).to_owned(), count.into())).collect(),
        out: args.out.display().to_string(),
    })
}

impl Printed {
    fn new((name, tensor): &(&'static str, Tensor<'_>)) -> Self {
        let (dtype, shape) = (tensor.dtype.to_string(), tensor.shape.clone());
        Self { name, dtype, shape, checksum: compare::checksum(&tensor.bytes) }
    }
}
