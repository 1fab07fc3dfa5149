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
pub mod sparse;

use list::Named;

/// The bound of an output as a whole: RMS of the error over RMS of what f64 says before any
/// rounding. Probabilities that are rounded to BF16 cost 1e-3 to 2e-3, and so does rounding a
/// partial result, and rounding an output (docs/numerics.md).
pub const OUTPUT_BOUND: f64 = 4e-3;
/// The same of each row. A row may consist of one probability and one number, whose roundings to
/// BF16 are at most 2^-8 each; a partial result is a third one.
pub const ROW_BOUND: f64 = 3.0 / 256.0;
/// The bound of a log-sum-exp, relative to the larger of it and 1. Scores are sums of several
/// hundred f32 products.
pub const LSE_BOUND: f64 = 1e-4;

/// One case that was compared.
#[derive(Clone, Debug, Serialize)]
pub struct Line {
    operation: &'static str,
    name: String,
    kernel: &'static str,
    /// The largest error of all, as a share of its bound: above 1 fails.
    error_of_bound: f64,
    /// Of each output.
    outputs: Vec<OutputError>,
    ok: bool,
    /// What went wrong, with the first element that did.
    #[serde(skip_serializing_if = "Option::is_none")]
    failure: Option<String>,
}

/// The errors of one output.
#[derive(Clone, Debug, Serialize)]
struct OutputError {
    name: &'static str,
    /// As a whole.
    rel_error: f64,
    bound: f64,
    /// Of the worst row.
    max_rel_error: f64,
    row_bound: f64,
    /// The worst element of the worst row.
    #[serde(skip)]
    text: String,
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
            let worst = line.outputs.iter().max_by(|a, b| a.share().total_cmp(&b.share()));
            let number = |value: Option<f64>| value.map_or("-".into(), |v| format!("{v:.1e}"));
            vec![
                line.operation.to_owned(),
                line.name.clone(),
                line.kernel.to_owned(),
                number(worst.map(|worst| worst.rel_error)),
                number(worst.map(|worst| worst.bound)),
                number(worst.map(|worst| worst.max_rel_error)),
                number(worst.map(|worst| worst.row_bound)),
                if line.ok { "ok" } else { "FAILED" }.to_owned(),
            ]
        });
        let header =
            ["operation", "case", "kernel", "rel error", "bound", "worst row", "bound", ""];
        let mut lines = vec![report::table(&header, &[3, 4, 5, 6], rows.collect())];
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
    let needed = (operation.oracle)(built.clone(), &device.facts())?;
    let mut line = Line {
        operation: operation.name,
        name: case.name.clone(),
        kernel: "",
        error_of_bound: f64::INFINITY,
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
        self.error_of_bound = 0.0;
        for ((Expected { name, .. }, needed), (_, given)) in
            needed.outputs.iter().zip(&given.outputs)
        {
            let error = OutputError::of(name, needed, given);
            if error.share() > 1.0 && self.failure.is_none() {
                self.failure = Some(error.text.clone());
            }
            self.error_of_bound = self.error_of_bound.max(error.share());
            self.outputs.push(error);
        }
        if needed.faults != given.faults {
            let text = format!("faults: needed {:?}, given {:?}", needed.faults, given.faults);
            self.failure.get_or_insert(text);
        }
        self.ok = self.failure.is_none();
    }
}

impl OutputError {
    fn of(name: &'static str, needed: &Values, given: &Tensor<'_>) -> Self {
        let (bound, row_bound, width) = match name {
            "lse" => (LSE_BOUND, LSE_BOUND, 1),
            "cache" => (0.0, 0.0, 1),
            _ => (OUTPUT_BOUND, ROW_BOUND, given.shape.last().copied().unwrap_or(1).max(1)),
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
        let (rel_error, max_rel_error, text) = (0.0, 0.0, String::new());
        let mut errors = Self { name, rel_error, bound, max_rel_error, row_bound, text };
        if n.len() != g.len() {
            errors.max_rel_error = f64::INFINITY;
            errors.text = format!("{name}: needed {} elements, given {}", n.len(), g.len());
            return errors;
        }
        for (row, (n, g)) in n.chunks(width).zip(g.chunks(width)).enumerate() {
            let error = if name == "lse" { relative(n[0], g[0]) } else { row_error(n, g) };
            if error > errors.max_rel_error {
                errors.max_rel_error = error;
                let far = |i: &usize| (n[*i] - g[*i]).abs();
                let at = (0..n.len()).max_by(|a, b| far(a).total_cmp(&far(b))).unwrap_or(0);
                let place = compare::coordinate(row * width + at, &given.shape);
                let values = format!("needed {}, given {}", n[at], g[at]);
                errors.text =
                    format!("{name} at {place:?}: {values}; error of the row {error:.2e}");
            }
        }
        errors.rel_error = if name == "lse" { errors.max_rel_error } else { row_error(&n, &g) };
        errors
    }

    /// The larger error as a share of its bound.
    fn share(&self) -> f64 {
        let share = |error: f64, bound: f64| if error == 0.0 { 0.0 } else { error / bound };
        share(self.rel_error, self.bound).max(share(self.max_rel_error, self.row_bound))
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
        assert_eq!(OutputError::of("out", &needed, &right).share(), 0.0);
        let wrong = out(&[1.0, 2.0, 3.0, 4.5, 5.0, 6.0], 2);
        let wrong = OutputError::of("out", &needed, &wrong);
        assert!((wrong.max_rel_error - 0.1).abs() < 1e-9, "{}", wrong.max_rel_error);
        assert!((wrong.rel_error - 0.5 / 91f64.sqrt()).abs() < 1e-9, "{}", wrong.rel_error);
        assert!(wrong.text.starts_with("out at [1, 1]: needed 4, given 4.5"), "{}", wrong.text);
        // A byte is right or wrong.
        let bytes = Tensor::new(Dtype::U8, vec![1, 2], &[7u8, 9]);
        let of = |needed| OutputError::of("cache", &Values::Bytes(needed), &bytes);
        assert_eq!(of(vec![7, 9]).share(), 0.0);
        let wrong = of(vec![7, 8]);
        assert!(wrong.share() > 1.0 && wrong.text.starts_with("cache at [0, 1]"));
    }

    #[test]
    fn nothing_hides_behind_nan_or_zero() {
        let share = |needed: &Values, given: &[f32], width| {
            OutputError::of("out", needed, &out(given, width)).share()
        };
        let zero = Values::Numbers(vec![0.0, 0.0]);
        assert_eq!(share(&zero, &[0.0, 1e-20], 2), f64::INFINITY);
        let one = Values::Numbers(vec![1.0, 1.0]);
        assert_eq!(share(&one, &[1.0, f32::NAN], 2), f64::INFINITY);
        assert_eq!(share(&one, &[1.0], 1), f64::INFINITY);
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
