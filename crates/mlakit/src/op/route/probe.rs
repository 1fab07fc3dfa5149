//! The probe of `route`: logits that are exact in F32, so that equal ones are equal on every
//! device, and rows in which nothing else is near a tie.

use super::bind::RouteArgs;
use super::oracle::{RouteCase, oracle};
use super::plan::Route;
use super::spec::{RouteFields, RouteSpec};
use crate::op::layer::{eighths, pick};
use crate::{Error, Probe, Runs, Warm};

/// Rows that are wanted, and how many are tried.
const ROWS: usize = 4;
const TRIES: usize = 200;

/// Fifty times what F32 functions of a few units' error can move.
const MIN_GAP: f64 = 1e-5;

/// A row with at most eight elements that are not 0, all of them 1 or -1, from both ends and
/// between: with weights in eighths every logit is exact in any order of summation.
fn row(spec: &RouteFields, seed: usize) -> Vec<f32> {
    let mut x = vec![0.0; spec.hidden];
    for i in 0..8 {
        x[i * (spec.hidden - 1) / 7] = pick(seed * 8 + i, 2) as f32 * 2.0 - 1.0;
    }
    x
}

/// Rows whose choice is clear. The last is all zeros: every logit is equal, so indices and biases
/// (quarters) decide.
fn rows(spec: &RouteSpec, weight: &[f32], bias: Option<&[f32]>) -> Vec<Vec<f32>> {
    let clear = |x: &Vec<f32>| oracle(spec, &RouteCase { x, weight, bias }).gaps[0] >= MIN_GAP;
    let tried = (0..TRIES).map(|seed| row(spec, seed)).filter(clear);
    tried.take(ROWS - 1).chain([vec![0.0; spec.hidden]]).collect()
}

/// Runs on probes and compares; where there is a bias, once more with one that makes what is
/// compared negative, which an unused group must not win by.
pub(super) fn probe<'w, D: Runs<Route>>(warm: &mut Warm<'w, Route, D>) -> Result<(), Error> {
    let spec = warm.spec();
    let weight: Vec<f32> = (0..spec.experts * spec.hidden).map(eighths).collect();
    let on_device = warm.probe::<f32>(&weight)?;
    let lowest: &[f32] = if spec.bias { &[-1.0, -3.0] } else { &[0.0] };
    for lowest in lowest {
        let quarters = |e: usize| pick(e + 99, 8) as f32 / 4.0 + lowest;
        let bias: Vec<f32> = (0..spec.experts).map(quarters).collect();
        compare(warm, (&weight, &on_device), &bias)?;
    }
    Ok(())
}

/// As many rows at a time as the `Spec` allows.
fn compare<'w, D: Runs<Route>>(
    warm: &mut Warm<'w, Route, D>,
    (weight, on_device): (&[f32], &Probe<'w, f32, D>),
    bias: &[f32],
) -> Result<(), Error> {
    let spec = warm.spec();
    let bias_on_device = warm.probe::<f32>(bias)?;
    let bias = spec.bias.then_some(bias);
    for rows in rows(&spec, weight, bias).chunks(spec.max_rows) {
        let x = rows.concat();
        let result = oracle(&spec, &RouteCase { x: &x, weight, bias });

        let x = warm.probe::<f32>(&x)?;
        let mut ids = warm.probe::<i32>(&vec![i32::MIN; result.ids.len()])?;
        let mut gates = warm.probe::<f32>(&vec![f32::NAN; result.ids.len()])?;
        let mut scratch = warm.scratch()?;
        warm.run(RouteArgs {
            x: (&x).into(),
            weight: on_device.into(),
            bias: spec.bias.then(|| (&bias_on_device).into()),
            ids: (&mut ids).into(),
            gates: (&mut gates).into(),
            scratch: (&mut scratch).into(),
        })?;
        let given = warm.read(&ids)?;
        Warm::<Route, D>::expect(&result.ids, &given, |n, g| n == g)?;
        let given: Vec<f64> = warm.read(&gates)?.into_iter().map(f64::from).collect();
        let close = |n: &f64, g: &f64| (n - g).abs() <= 1e-5 * n.abs() + 1e-30;
        Warm::<Route, D>::expect(&result.gates, &given, close)?;
        Warm::<Route, D>::expect(&[0; 3], &warm.faults(&scratch)?, |n, g| n == g)?;
    }
    Ok(())
}
