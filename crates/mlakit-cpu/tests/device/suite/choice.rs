//! `route` and `sample` against their oracles, over random numbers and strange ones. A choice that
//! hangs on a few units of F32 may be made otherwise and be right: such rows are left out.

use mlakit::op;
use mlakit::op::route::{
    GroupScore, Route, RouteArgs, RouteCase, RouteFields, RouteResult, RouteSpec, Scoring,
};
use mlakit::op::sample::{Sample, SampleArgs, SampleCase, SampleFields, SampleSpec};
use mlakit::op::spec::Scalar;

use super::SuiteDevice;
use super::dense_run::tensor;
use super::layer::{prepare, run};
use super::random::Rng;

/// Rows of a batch: more than a small tile has.
const ROWS: usize = 37;

/// What F32 sums and functions move at most, relative to what is compared.
const UNDECIDED: f64 = 1e-5;

fn routers() -> Vec<RouteSpec> {
    let mut specs = Vec::new();
    for (hidden, experts, used, groups, used_groups) in [
        (1, 1, 1, 1, None),
        (7, 6, 6, 1, None),
        (130, 40, 5, 8, Some(3)),
        (515, 256, 8, 8, Some(4)),
        (64, 72, 6, 3, Some(1)),
    ] {
        for (scoring, bias, normalize, group_score) in [
            (Scoring::Sigmoid, true, true, GroupScore::TopTwoSum),
            (Scoring::Softmax, false, false, GroupScore::Max),
            (Scoring::Softmax, true, true, GroupScore::Max),
        ] {
            let fields = RouteFields {
                hidden,
                experts,
                used,
                groups,
                used_groups,
                scoring,
                bias,
                group_score,
                normalize,
                scale: Scalar::try_from(2.5).unwrap(),
                max_rows: ROWS,
            };
            specs.push(RouteSpec::new(fields).unwrap());
        }
    }
    specs
}

/// Ids and gates of these rows.
fn route<D: SuiteDevice>(
    device: &D,
    spec: &RouteSpec,
    case: &RouteCase<'_>,
) -> (Vec<i32>, Vec<f32>) {
    let prepared = prepare::<Route, D>(device, spec);
    let rows = case.x.len() / spec.hidden;
    let x = tensor::<f32, D>(device, case.x);
    let weight = tensor::<f32, D>(device, case.weight);
    let bias = case.bias.map(|bias| tensor::<f32, D>(device, bias));
    let ids = tensor::<i32, D>(device, &vec![i32::MIN; rows * spec.used]);
    let gates = tensor::<f32, D>(device, &vec![f32::NAN; rows * spec.used]);
    run(device, &prepared, |lane| {
        prepared.bind(RouteArgs {
            x: (&x.lease()).into(),
            weight: (&weight.lease()).into(),
            bias: bias.as_ref().map(|bias| (&bias.lease()).into()),
            ids: (&ids.lease()).into(),
            gates: (&gates.lease()).into(),
            scratch: lane.lease(),
        })
    });
    (ids.read().unwrap(), gates.read().unwrap())
}

/// The ids and gates of clear rows are the oracle's, and a row alone has the bits that it has in
/// the batch.
pub fn routes_agree_and_know_no_company<D: SuiteDevice>(device: &D) {
    let mut rng = Rng(91);
    for spec in routers() {
        let x = rng.normals(ROWS * spec.hidden);
        let mut weight = rng.normals(spec.experts * spec.hidden);
        let width = (spec.hidden as f32).sqrt();
        weight.iter_mut().for_each(|w| *w /= width);
        let bias = spec.bias.then(|| rng.normals(spec.experts));
        let case = RouteCase { x: &x, weight: &weight, bias: bias.as_deref() };
        let needed = op::route::oracle(&spec, &case);
        let (ids, gates) = route(device, &spec, &case);
        compare_routes(&spec, (&ids, &gates), &needed);
        for row in [0, ROWS - 1] {
            let alone = RouteCase { x: &x[row * spec.hidden..(row + 1) * spec.hidden], ..case };
            let (alone_ids, alone_gates) = route(device, &spec, &alone);
            let of_row = row * spec.used..(row + 1) * spec.used;
            assert_eq!(alone_ids, ids[of_row.clone()], "row {row} alone of {spec:?}");
            let same = alone_gates.iter().zip(&gates[of_row]);
            assert!(same.into_iter().all(|(a, b)| a.to_bits() == b.to_bits()), "{spec:?}");
        }
    }
}

#[track_caller]
fn compare_routes(spec: &RouteSpec, (ids, gates): (&[i32], &[f32]), needed: &RouteResult) {
    let clear = (0..ROWS).filter(|row| needed.gaps[*row] >= UNDECIDED);
    let clear: Vec<usize> = clear.collect();
    assert!(clear.len() * 4 >= ROWS * 3, "most rows are clear: {spec:?}");
    for row in clear {
        for at in row * spec.used..(row + 1) * spec.used {
            assert_eq!(ids[at], needed.ids[at], "row {row} of {spec:?}");
            let (given, needed) = (f64::from(gates[at]), needed.gates[at]);
            assert!(
                (given - needed).abs() <= 1e-5 * needed.abs() + 1e-30,
                "gate {at}: given {given}, needed {needed}\n{spec:?}"
            );
        }
    }
}

/// Equal scores go to the smaller id, NaN is chosen last.
pub fn routes_break_ties_by_index<D: SuiteDevice>(device: &D) {
    let text = r#"{"hidden":1,"experts":40,"used":6,"scoring":"sigmoid","max_rows":37,"groups":4}"#;
    let spec: RouteSpec = serde_json::from_str(text).unwrap();
    let mut weight = vec![f32::NAN; 40];
    for (at, value) in [(39, 2.0), (3, 2.0), (20, -0.0), (11, 0.0), (30, f32::NEG_INFINITY)] {
        weight[at] = value;
    }
    let case = RouteCase { x: &[1.0], weight: &weight, bias: None };
    let (ids, gates) = route(device, &spec, &case);
    assert_eq!(ids, [3, 39, 11, 20, 30, 0]);
    assert!(gates[4] == 0.0 && gates[5].is_nan(), "{gates:?}");
    assert_eq!(ids, op::route::oracle(&spec, &case).ids);
}

/// Ids of these rows.
fn sample<D: SuiteDevice>(device: &D, spec: &SampleSpec, case: &SampleCase<'_>) -> Vec<i32> {
    let prepared = prepare::<Sample, D>(device, spec);
    let rows = case.logits.len() / spec.vocab;
    let logits = tensor::<f32, D>(device, case.logits);
    let temperature = tensor::<f32, D>(device, &[case.temperature]);
    let random = tensor::<f32, D>(device, case.random);
    let ids = tensor::<i32, D>(device, &vec![i32::MIN; rows]);
    run(device, &prepared, |lane| {
        prepared.bind(SampleArgs {
            logits: (&logits.lease()).into(),
            temperature: spec.temperature.then(|| (&temperature.lease()).into()),
            random: spec.temperature.then(|| (&random.lease()).into()),
            ids: (&ids.lease()).into(),
            scratch: lane.lease(),
        })
    });
    ids.read().unwrap()
}

/// Drawn and greedy ids over vocabularies of every size; a temperature changes what is drawn.
pub fn samples_agree<D: SuiteDevice>(device: &D) {
    let mut rng = Rng(92);
    for vocab in [1, 31, 1024, 4_097, 40_001] {
        let fields = SampleFields { vocab, max_rows: ROWS, temperature: true };
        let spec = SampleSpec::new(fields).unwrap();
        let mut logits = rng.normals(ROWS * vocab);
        logits.iter_mut().for_each(|z| *z *= 3.0);
        let random: Vec<f32> =
            (0..ROWS).map(|_| (rng.bits() >> 40) as f32 / 16_777_216.0).collect();
        let mut clear = 0;
        for temperature in [0.0, 0.6, 1.0, 40.0] {
            let case = SampleCase { logits: &logits, temperature, random: &random };
            let needed = op::sample::oracle(&spec, &case);
            let given = sample(device, &spec, &case);
            for (row, gap) in needed.gaps.iter().enumerate().filter(|(_, gap)| **gap >= 2e-6) {
                let at = format!("row {row}, gap {gap:.1e}, temperature {temperature}, {vocab}");
                assert_eq!(given[row], needed.ids[row], "{at}");
                clear += 1;
            }
            assert!(given.iter().all(|id| (0..vocab as i32).contains(id)));
        }
        assert!(clear >= ROWS * 3, "{clear} of {} rows are clear", ROWS * 4);
        let greedy = SampleSpec::new(SampleFields { temperature: false, ..fields_of(vocab) });
        let case = SampleCase { logits: &logits, temperature: f32::NAN, random: &random };
        let needed = op::sample::oracle(greedy.as_ref().unwrap(), &case).ids;
        assert_eq!(sample(device, &greedy.unwrap(), &case), needed);
    }
}

fn fields_of(vocab: usize) -> SampleFields {
    SampleFields { vocab, max_rows: ROWS, temperature: true }
}

/// NaN, infinities, temperatures and random numbers that are none: always an id of the row, and the
/// one that the contract says.
pub fn strange_logits_give_an_id<D: SuiteDevice>(device: &D) {
    const N: f32 = f32::NAN;
    const UP: f32 = f32::INFINITY;
    const DOWN: f32 = f32::NEG_INFINITY;
    let rows: [[f32; 4]; 6] = [
        [N, 1.0, 1.0, DOWN],
        [0.0, UP, 5.0, UP],
        [DOWN; 4],
        [N; 4],
        [3e38, -3e38, N, 2e38],
        [1e-40, 2e-40, -1e-40, 0.0],
    ];
    let spec = SampleSpec::new(fields_of(4)).unwrap();
    for temperature in [1.0, 0.0, -1.0, N, UP, 1e38, 1e-38] {
        for random in [0.0, 0.4, 0.6, 0.99, 1.0, 7.0, N, -3.0] {
            let (logits, random) = (rows.concat(), [random; 6]);
            let case = SampleCase { logits: &logits, temperature, random: &random };
            let needed = op::sample::oracle(&spec, &case);
            let given = sample(device, &spec, &case);
            for row in (0..6).filter(|row| needed.gaps[*row] > 1e-3 || random[0] >= 1.0) {
                let what = format!("row {row}, temperature {temperature}, random {}", random[0]);
                assert_eq!(given[row], needed.ids[row], "{what}");
            }
        }
    }
}
