//! The command itself: reads a case, runs it, writes its outputs, prints a summary.

use std::path::Path;

use mlakit::Dtype;
use mlakit::scratch::FAULT_NAMES;
use serde::Serialize;
use serde_json::{Map, Value};

use super::{Operation, Outcome, compare, find};
use crate::args::OpArgs;
use crate::case::{Case, Tensor, read_file, write, write_file};
use crate::device::{self, Environment};
use crate::failure::Failure;
use crate::plan::PlanReport;
use crate::report::{self, Report};

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
    write::keep_input(&args.out, ("--case", &args.case))?;
    let bytes = read_file(&args.case)?;
    let place = args.case.display();
    let case = open(&bytes, operation).map_err(|failure| failure.within(&place))?;
    let metadata = case.metadata.clone();
    let replays = args.replay.unwrap_or(0);
    let (device, plan, outcome) = if args.oracle {
        // The host computes it, with the splits of a plan for whatever these facts describe.
        let facts = device::facts(&args.device, None, environment)?;
        let exact = (operation.oracle)(case, &facts).map_err(|failure| failure.within(&place))?;
        ("oracle (f64)".to_owned(), None, exact.rounded())
    } else {
        let device = device::open(&args.device, environment)?;
        let ran = (operation.run)(case, &device, replays);
        let ran = ran.map_err(|failure| failure.within(&place))?;
        (device.describe(), Some(ran.plan), ran.outcome)
    };
    let faults = outcome.faults.iter().map(|count| u64::from(*count)).sum();
    let counted = Tensor::new(Dtype::I32, vec![1], &[i32::try_from(faults).unwrap_or(i32::MAX)]);
    let mut tensors: Vec<(&str, &Tensor<'_>)> =
        outcome.outputs.iter().map(|(name, tensor)| (*name, tensor)).collect();
    tensors.push(("faults", &counted));
    write_file(&args.out, &metadata, &tensors)?;
    Ok(OpReport::new(operation, (device, plan), (outcome, faults), (replays, &args.out)))
}

/// A case of this operation.
fn open<'f>(bytes: &'f [u8], operation: &Operation) -> Result<Case<'f>, Failure> {
    let case = Case::parse(bytes)?;
    if case.operation == operation.name {
        return Ok(case);
    }
    let (needed, given) = (operation.name, &case.operation);
    Err(Failure::input(
        format!("needed a case of {needed}, given one of {given:?}"),
        "run the operation that the case is for, or give another case",
    ))
}

impl OpReport {
    fn new(
        operation: &Operation,
        (device, plan): (String, Option<PlanReport>),
        (outcome, faults): (Outcome, u64),
        (replays, out): (usize, &Path),
    ) -> Self {
        let kinds = FAULT_NAMES.iter().zip(outcome.faults);
        Self {
            operation: operation.name,
            device,
            plan,
            replays,
            outputs: outcome.outputs.iter().map(Printed::new).collect(),
            faults,
            faults_by_kind: kinds.map(|(name, n)| ((*name).to_owned(), n.into())).collect(),
            out: out.display().to_string(),
        }
    }
}

impl Printed {
    fn new((name, tensor): &(&'static str, Tensor<'_>)) -> Self {
        let (dtype, shape) = (tensor.dtype.to_string(), tensor.shape.clone());
        Self { name, dtype, shape, checksum: compare::checksum(&tensor.bytes) }
    }
}
