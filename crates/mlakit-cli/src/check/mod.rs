//! `mlakit check`: this device against the oracle.

use half::bf16;
use safetensors::Dtype as FileDtype;
use serde::Serialize;

use crate::args::CheckArgs;
use crate::case::Tensor;
use crate::device::{self, AnyDevice, Environment};
use crate::failure::Failure;
use crate::op::{self, Exact, Expected, Outcome, Values, compare};
use crate::progress::Progress;
use crate::report::{self, Report};

pub mod cases;
pub mod list;
pub mod random;

use list::Named;

/// The bound of outputs: RMS of the error of a row over RMS of the row, against f64 before any
/// rounding. Probabilities that are rounded to BF16 cost about 1e-3, and so does rounding a partial
/// result, and rounding an output (docs/numerics.md); of a narrow row each may come to 2e-3.
pub const OUTPUT_BOUND: f64 = 4e-3;
/// The bound of a log-sum-exp, relative to the larger of it and 1. Scores are sums of several
/// hundred f32 products.
pub const LSE_BOUND: f64 = 1e-4;

/// One case that was compared.
#[derive(Clone, Debug, Serialize)]
pub struct Line {
    operation: &'static str,
    name: String,
    kernel: &'static str,
    /// The largest error of all outputs, as a share of its bound: above 1 fails.
    error_of_bound: f64,
    /// Of the output with that share.
    max_rel_error: f64,
    bound: f64,
    /// Of each output.
    outputs: Vec<OutputError>,
    ok: bool,
    /// What went wrong, with the first element that did.
    #[serde(skip_serializing_if = "Option::is_none")]
    failure: Option<String>,
}

/// The largest error of one output.
#[derive(Clone, Debug, Serialize)]
struct OutputError {
    name: &'static str,
    max_rel_error: f64,
    bound: f64,
}

/// Every case, and the verdict.
#[derive(Clone, Debug, Serialize)]
pub struct Checked {
    device: String,
    cases: Vec<Line>,
    failed: usize,
    ok: bool,
}

impl Checked {
    /// Whether every case is within its bound.
    pub fn ok(&self) -> bool {
        self.ok
    }
}

impl Report for Checked {
    fn lines(&self) -> Vec<String> {
        let rows = self.cases.iter().map(|line| {
            vec![
                line.operation.to_owned(),
                line.name.clone(),
                line.kernel.to_owned(),
                format!("{:.1e}", line.max_rel_error),
                format!("{:.1e}", line.bound),
                if line.ok { "ok" } else { "FAILED" }.to_owned(),
            ]
        });
        let header = ["operation", "case", "kernel", "max rel error", "bound", ""];
        let mut lines = vec![report::table(&header, &[3, 4], rows.collect())];
        for line in &self.cases {
            if let Some(failure) = &line.failure {
                lines.push(format!("{} {}: {failure}", line.operation, line.name));
            }
        }
        let (passed, all) = (self.cases.len() - self.failed, self.cases.len());
        lines.push(format!("{passed} of {all} cases are within their bounds on {}", self.device));
        lines
    }
}

/// `mlakit check`.
///
/// # Errors
/// A device that is not there, an operation that is none. A case that fails is a line of the
/// result.
pub fn command(args: &CheckArgs, environment: &Environment) -> Result<Checked, Failure> {
    let wanted = args.op.as_deref().map(op::find).transpose()?.map(|operation| operation.name);
    let device = device::open(&args.device, environment)?;
    let mut list = list::all();
    list.retain(|case| case.quick || !args.quick);
    list.retain(|case| wanted.is_none_or(|name| name == case.shape.operation()));
    let mut progress = Progress::new("check", list.len());
    let mut cases = Vec::with_capacity(list.len());
    for (index, case) in list.iter().enumerate() {
        progress.step(&case.name);
        cases.push(compare_case(case, index as u64, &device)?);
        progress.done();
    }
    let failed = cases.iter().filter(|line| !line.ok).count();
    Ok(Checked { device: device.describe(), cases, failed, ok: failed == 0 })
}

fn compare_case(case: &Named, seed: u64, device: &AnyDevice) -> Result<Line, Failure> {
    let operation = op::find(case.shape.operation())?;
    let built = case.shape.build(seed);
    let needed = (operation.oracle)(built.clone())?;
    let mut line = Line {
        operation: operation.name,
        name: case.name.clone(),
        kernel: "",
        error_of_bound: f64::INFINITY,
        max_rel_error: f64::INFINITY,
        bound: 0.0,
        outputs: Vec::new(),
        ok: false,
        failure: None,
    };
    match (operation.run)(built, device, 1) {
        Ok(ran) => {
            line.kernel = ran.plan.kernel();
            line.judge(&needed, &ran.outcome);
        }
        Err(failure) => line.failure = Some(failure.message().to_owned()),
    }
    Ok(line)
}

impl Line {
    fn judge(&mut self, needed: &Exact, given: &Outcome) {
        self.error_of_bound = -1.0;
        for ((Expected { name, .. }, needed), (_, given)) in
            needed.outputs.iter().zip(&given.outputs)
        {
            let worst = Worst::of(name, needed, given);
            let (max_rel_error, bound) = (worst.error, worst.bound);
            self.outputs.push(OutputError { name, max_rel_error, bound });
            let share = if worst.error == 0.0 { 0.0 } else { worst.error / worst.bound };
            if share > 1.0 && self.failure.is_none() {
                self.failure = Some(worst.text);
            }
            if share > self.error_of_bound {
                self.error_of_bound = share;
                (self.max_rel_error, self.bound) = (worst.error, worst.bound);
            }
        }
        if needed.faults != given.faults {
            let text = format!("faults: needed {:?}, given {:?}", needed.faults, given.faults);
            self.failure.get_or_insert(text);
        }
        self.ok = self.failure.is_none();
    }
}

/// The largest error of one output.
struct Worst {
    error: f64,
    bound: f64,
    text: String,
}

impl Worst {
    fn of(name: &str, needed: &Values, given: &Tensor<'_>) -> Self {
        let (bound, width) = match name {
            "lse" => (LSE_BOUND, 1),
            "cache" => (0.0, 1),
            _ => (OUTPUT_BOUND, given.shape.last().copied().unwrap_or(1).max(1)),
        };
        let n: Vec<f64> = match needed {
            Values::Numbers(numbers) => numbers.clone(),
            Values::Bytes(bytes) => bytes.iter().map(|byte| f64::from(*byte)).collect(),
        };
        let g: Vec<f64> = match given.dtype {
            FileDtype::BF16 => given.values::<bf16>().iter().map(|v| v.to_f64()).collect(),
            FileDtype::F32 => given.values::<f32>().iter().map(|v| f64::from(*v)).collect(),
            _ => given.bytes.iter().map(|byte| f64::from(*byte)).collect(),
        };
        let mut worst = Self { error: 0.0, bound, text: String::new() };
        if n.len() != g.len() {
            let text = format!("{name}: needed {} elements, given {}", n.len(), g.len());
            return Self { error: f64::INFINITY, bound, text };
        }
        for (row, (n, g)) in n.chunks(width).zip(g.chunks(width)).enumerate() {
            let error = if name == "lse" { relative(n[0], g[0]) } else { row_error(n, g) };
            if error > worst.error {
                let far = |i: &usize| (n[*i] - g[*i]).abs();
                let at = (0..n.len()).max_by(|a, b| far(a).total_cmp(&far(b))).unwrap_or(0);
                let place = compare::coordinate(row * width + at, &given.shape);
                let values = format!("needed {}, given {}", n[at], g[at]);
                let verdict = format!("the error {error:.2e} is above {bound:.2e}");
                worst.text = format!("{name} at {place:?}: {values}; {verdict}");
                worst.error = error;
            }
        }
        worst
    }
}

/// An error relative to the larger of a number and 1.
fn relative(needed: f64, given: f64) -> f64 {
    if needed == given || (needed.is_nan() && given.is_nan()) {
        return 0.0;
    }
    let error = (needed - given).abs() / needed.abs().max(1.0);
    if error.is_nan() { f64::INFINITY } else { error }
}

/// RMS of the error over RMS of what is needed. What is needed as 0 must be 0.
fn row_error(needed: &[f64], given: &[f64]) -> f64 {
    if needed == given {
        return 0.0;
    }
    let error: f64 = needed.iter().zip(given).map(|(n, g)| (n - g).powi(2)).sum();
    let size: f64 = needed.iter().map(|n| n.powi(2)).sum();
    let ratio = (error / size).sqrt();
    if ratio.is_nan() { f64::INFINITY } else { ratio }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mlakit::Dtype;

    fn out(values: &[f32], width: usize) -> Tensor<'static> {
        let values: Vec<bf16> = values.iter().map(|v| bf16::from_f32(*v)).collect();
        Tensor::new(Dtype::Bf16, vec![values.len() / width, width], &values)
    }

    #[test]
    fn one_wrong_row_is_found_among_right_ones() {
        let needed = Values::Numbers(vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let right = out(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2);
        assert_eq!(Worst::of("out", &needed, &right).error, 0.0);
        let worst = Worst::of("out", &needed, &out(&[1.0, 2.0, 3.0, 4.5, 5.0, 6.0], 2));
        assert!((worst.error - 0.1).abs() < 1e-9, "{}", worst.error);
        assert!(worst.text.starts_with("out at [1, 1]: needed 4, given 4.5"), "{}", worst.text);
        // A byte is right or wrong.
        let bytes = Tensor::new(Dtype::U8, vec![1, 2], &[7u8, 9]);
        assert_eq!(Worst::of("cache", &Values::Bytes(vec![7, 9]), &bytes).error, 0.0);
        let worst = Worst::of("cache", &Values::Bytes(vec![7, 8]), &bytes);
        assert!(worst.error > worst.bound && worst.text.starts_with("cache at [0, 1]"));
    }

    #[test]
    fn nothing_hides_behind_nan_or_zero() {
        let zero = Values::Numbers(vec![0.0, 0.0]);
        assert_eq!(Worst::of("out", &zero, &out(&[0.0, 1e-20], 2)).error, f64::INFINITY);
        let one = Values::Numbers(vec![1.0, 1.0]);
        assert_eq!(Worst::of("out", &one, &out(&[1.0, f32::NAN], 2)).error, f64::INFINITY);
        assert_eq!(Worst::of("out", &one, &out(&[1.0], 1)).error, f64::INFINITY);
        assert_eq!(relative(f64::NEG_INFINITY, f64::NEG_INFINITY), 0.0);
        assert_eq!(relative(f64::NEG_INFINITY, 3.0), f64::INFINITY);
        assert_eq!(relative(0.0, f64::NAN), f64::INFINITY);
    }

    #[test]
    fn every_case_is_a_case_and_names_are_unique() {
        let list = list::all();
        for (index, case) in list.iter().enumerate() {
            let operation = op::find(case.shape.operation()).unwrap();
            (operation.check)(case.shape.build(index as u64)).unwrap();
            let same = |other: &&Named| {
                (&other.name, other.shape.operation()) == (&case.name, case.shape.operation())
            };
            assert_eq!(list.iter().filter(same).count(), 1, "{}", case.name);
        }
        assert!(list.len() >= 60 && list.iter().filter(|case| case.quick).count() >= 20);
    }
}
