//! BF16 against F32 partial results: what the dtype costs in error and saves in scratch.

use mlakit::op::dense::Dense;
use mlakit::op::merge::Partial;
use mlakit::splits::{Budget, Division};
use mlakit::{Plan, Splits};

use super::SuiteDevice;
use super::dense_inputs::{DenseInputs, DenseShape, shape};
use super::dense_run::{prepare, run_prepared};

const CASES: u64 = 1000;
const SPLITS: usize = 8;

fn case_shape(partial: Partial, tokens: usize) -> DenseShape {
    let mut shape = shape(2, (576, 512), &[(tokens, 1)]);
    (shape.partial, shape.splits, shape.page_size) = (partial, Splits::Count(SPLITS), 64);
    shape
}

/// Relative L2 distance of what the device gives from exact attention on the same inputs.
fn error<D: SuiteDevice>(device: &D, inputs: &DenseInputs, exact: &[f64]) -> f64 {
    let given = run_prepared(device, &prepare(device, &inputs.spec), inputs).out;
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let differences = &mut given.iter().zip(exact).map(|(g, n)| g.to_f64() - n);
    (square(differences) / square(&mut exact.iter().copied())).sqrt()
}

/// The mean relative L2 error over a thousand seeded cases with each dtype, against f64 without any
/// rounding. Prints both figures and both sizes of scratch; docs/numerics.md quotes them.
pub fn f32_partials_are_closer<D: SuiteDevice>(device: &D) {
    let mut sums = [0.0; 2];
    let lengths = [512, 640, 768, 1024];
    let mut kept = Vec::new();
    for partial in [Partial::Bf16, Partial::F32] {
        kept.extend(lengths.map(|tokens| prepare(device, &case_shape(partial, tokens).spec())));
    }
    for seed in 0..CASES {
        let tokens = lengths[seed as usize % lengths.len()];
        let mut inputs = DenseInputs::new(&case_shape(Partial::F32, tokens), seed);
        let exact = inputs.oracle(Division { splits: 1, fixed_tokens: None }).out;
        for (sum, partial) in sums.iter_mut().zip([Partial::Bf16, Partial::F32]) {
            inputs.shape.partial = partial;
            inputs.spec = inputs.shape.spec();
            *sum += error(device, &inputs, &exact);
        }
    }
    drop(kept);
    let [narrow, wide] = sums.map(|sum| sum / CASES as f64);
    let bytes = [Partial::Bf16, Partial::F32].map(|partial| scratch::<D>(device, partial));
    println!("{}: mean relative L2 over {CASES} cases", device.facts());
    println!("  bf16 partials {narrow:.3e}, partial_out {} bytes", bytes[0]);
    println!("  f32 partials {wide:.3e}, partial_out {} bytes", bytes[1]);
    assert!(wide < narrow && narrow < 4e-3, "{wide:e} {narrow:e}");
    assert_eq!(bytes[1], 2 * bytes[0]);
    assert_eq!(bytes[0], SPLITS * 2 * 512 * 2);
}

fn scratch<D: SuiteDevice>(device: &D, partial: Partial) -> usize {
    let spec = case_shape(partial, 1024).spec();
    let plan = Plan::<Dense>::for_device::<D>(&spec, device.facts()).unwrap();
    let region = plan.scratch().iter().find(|region| region.name == Dense::PARTIAL_OUT);
    region.unwrap().bytes
}

/// The dtype of partials doubles one region and changes nothing else of a plan: not the splits, not
/// another region, and nothing at all where there is one split. Budgets count splits and rows.
pub fn the_dtype_changes_one_region<D: SuiteDevice>(device: &D) {
    for splits in [Splits::Count(1), Splits::Count(7), Splits::Auto, Splits::FixedTokens(64)] {
        for budget in [None, Some(3)] {
            let plan = |partial| {
                let mut fields: mlakit::op::dense::DenseFields =
                    case_shape(partial, 1000).spec().into();
                fields.splits = splits;
                if !matches!(splits, Splits::FixedTokens(_)) {
                    fields.budget = Budget { max_splits: budget, max_partial_rows: None };
                }
                let spec = mlakit::op::dense::DenseSpec::new(fields).unwrap();
                Plan::<Dense>::for_device::<D>(&spec, device.facts()).unwrap()
            };
            let (narrow, wide) = (plan(Partial::Bf16), plan(Partial::F32));
            assert_eq!(narrow.choice().splits, wide.choice().splits);
            assert_ne!(narrow.identity(), wide.identity());
            for (a, b) in narrow.scratch().iter().zip(wide.scratch()) {
                let factor = if a.name == Dense::PARTIAL_OUT { 2 } else { 1 };
                assert_eq!((a.name, a.bytes * factor), (b.name, b.bytes), "{splits:?}");
            }
            let parts = narrow.choice().splits;
            let stored = parts > 1 && !narrow.choice().partials_stay_on_chip;
            let needed = if stored { parts * 2 } else { 0 };
            let bytes = |name| narrow.scratch().iter().find(|r| r.name == name).unwrap().bytes;
            assert_eq!(bytes(Dense::PARTIAL_OUT), needed * 512 * 2);
            assert_eq!(bytes(Dense::PARTIAL_LSE), needed * 4);
        }
    }
}
