//! `mlakit plan`: what an operation or a model needs, computed without a device.

use mlakit::Plan;
use mlakit::scratch::{FAULT_BYTES, RegionSpec};
use mlakit_cuda::PlannedKernel;
use serde::Serialize;
use serde_json::Value;

use crate::args::PlanArgs;
use crate::case::read::object;
use crate::case::read_file;
use crate::device::{self, Environment};
use crate::failure::Failure;
use crate::op::{self, CaseOp};
use crate::report::{self, Report};

pub mod model;
pub mod weights;

/// A plan, as it is printed.
#[derive(Clone, Debug, Serialize)]
pub struct PlanReport {
    /// The facts that it was made for.
    planned_for: String,
    /// The whole Spec: what a case file's `spec` takes.
    spec: Value,
    /// The kernel.
    kernel: &'static str,
    /// Parts that a row may be divided into; absent for an operation that divides none.
    #[serde(skip_serializing_if = "Option::is_none")]
    splits: Option<usize>,
    /// Where it is not what the Spec asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
    /// The fault block and the regions behind it.
    scratch: Vec<RegionSpec>,
    /// All of them, each aligned.
    scratch_bytes: usize,
    /// What `prepare` compiles for a GPU, and what each takes of a multiprocessor.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    kernels: Vec<PlannedKernel>,
}

impl PlanReport {
    /// Of a plan.
    pub fn of<O: CaseOp>(plan: &Plan<O>) -> Self {
        Self {
            planned_for: plan.planned_for().to_owned(),
            spec: serde_json::to_value(plan.spec()).unwrap_or(Value::Null),
            kernel: plan.choice().kernel,
            splits: O::DIVIDES.then_some(plan.choice().splits),
            notes: O::notes(plan.spec(), plan.choice()),
            scratch: [&[RegionSpec::new("fault_block", FAULT_BYTES)], plan.scratch()].concat(),
            scratch_bytes: plan.scratch_bytes(),
            kernels: Vec::new(),
        }
    }

    /// With the kernels of a GPU.
    pub fn with_kernels(self, kernels: Vec<PlannedKernel>) -> Self {
        Self { kernels, ..self }
    }

    /// The kernel.
    pub fn kernel(&self) -> &'static str {
        self.kernel
    }

    /// What was chosen, by name.
    pub fn choices(&self) -> Vec<(&'static str, String)> {
        let mut choices = vec![("kernel", self.kernel.to_owned())];
        choices.extend(self.splits.map(|splits| ("splits", splits.to_string())));
        choices.extend(self.notes.iter().map(|note| ("note", note.clone())));
        choices
    }

    /// Every scratch region in bytes, and the total.
    pub fn scratch_table(&self) -> String {
        let row = |name: &str, bytes: usize| {
            vec![name.to_owned(), bytes.to_string(), report::bytes(bytes)]
        };
        let mut rows: Vec<_> =
            self.scratch.iter().map(|region| row(region.name, region.bytes)).collect();
        rows.push(row("total, each aligned", self.scratch_bytes));
        report::table(&["scratch", "bytes", ""], &[1], rows)
    }
}

impl Report for PlanReport {
    fn lines(&self) -> Vec<String> {
        let mut rows = vec![("planned for", self.planned_for.clone())];
        rows.extend(self.choices());
        let mut lines = vec![report::pairs(&rows), self.scratch_table()];
        if !self.kernels.is_empty() {
            lines.push(kernel_table(&self.kernels));
        }
        lines.push("spec".into());
        lines.push(serde_json::to_string_pretty(&self.spec).unwrap_or_default());
        lines
    }
}

/// Registers, shared and local memory of compiled kernels.
pub fn kernel_table(kernels: &[PlannedKernel]) -> String {
    let row = |kernel: &PlannedKernel| {
        let numbers = match kernel.resources {
            None => vec!["known once compiled".to_owned(), String::new(), String::new()],
            Some(r) => vec![
                r.registers.to_string(),
                (r.static_shared_bytes + r.dynamic_shared_bytes).to_string(),
                r.local_bytes.to_string(),
            ],
        };
        std::iter::once(kernel.title.clone()).chain(numbers).collect()
    };
    let header = ["compiled kernel", "registers", "shared bytes", "local bytes"];
    report::table(&header, &[1, 2, 3], kernels.iter().map(row).collect())
}

/// Either of the two things that can be planned.
#[derive(Serialize)]
#[serde(untagged)]
enum Planned {
    Operation {
        operation: &'static str,
        #[serde(flatten)]
        plan: PlanReport,
    },
    Model(Box<model::ModelReport>),
}

impl Report for Planned {
    fn lines(&self) -> Vec<String> {
        match self {
            Self::Operation { operation, plan } => {
                let mut lines = vec![report::pairs(&[("operation", (*operation).to_owned())])];
                lines.extend(plan.lines());
                lines
            }
            Self::Model(model) => model.lines(),
        }
    }
}

/// `mlakit plan`.
///
/// # Errors
/// A Spec or a config that is not one; a refusal; weights that do not fit the memory.
pub fn command(args: &PlanArgs, environment: &Environment) -> Result<impl Report + use<>, Failure> {
    match (&args.op, &args.spec, &args.config) {
        (Some(name), Some(spec), _) => {
            let operation = op::find(name)?;
            let spec = object(&spec_text(spec)?)?;
            let facts = device::facts(&args.device, args.gpu.as_deref(), environment)?;
            let plan = (operation.plan)(spec, &facts)?;
            Ok(Planned::Operation { operation: operation.name, plan })
        }
        (_, _, Some(config)) => {
            device::check_names(&args.device, args.gpu.as_deref(), environment)?;
            let report = model::plan(config, &model::Question::from(args))?;
            Ok(Planned::Model(Box::new(report.noting(without_effect(args)))))
        }
        _ => Err(Failure::input(
            "plan: needed --op with --spec, or --config, given neither",
            "see `mlakit plan --help`",
        )),
    }
}

/// What was said of a device, on which the memory of a model does not depend.
fn without_effect(args: &PlanArgs) -> Option<String> {
    let flags = [
        ("--device", args.device.device.is_some()),
        ("--gpu", args.gpu.is_some()),
        ("--ordinal", args.device.ordinal.is_some()),
        ("--isa", args.device.isa.is_some()),
        ("--threads", args.device.threads.is_some()),
    ];
    let given: Vec<_> = flags.iter().filter(|(_, given)| *given).map(|(flag, _)| *flag).collect();
    (!given.is_empty()).then(|| {
        format!("{}: without effect, these bytes are the same on every device", given.join(", "))
    })
}

/// The Spec itself, or the contents of the file behind `@`.
fn spec_text(text: &str) -> Result<String, Failure> {
    let Some(path) = text.strip_prefix('@') else { return Ok(text.to_owned()) };
    if path.is_empty() {
        let text = "--spec @: needed the name of a file behind @, given nothing";
        return Err(Failure::input(text, "give --spec @FILE, or the JSON object itself"));
    }
    String::from_utf8(read_file(path.as_ref())?).map_err(|_| {
        Failure::input(format!("--spec @{path}: not UTF-8 text"), "give a file with a JSON object")
    })
}
