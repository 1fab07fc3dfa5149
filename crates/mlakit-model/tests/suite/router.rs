//! One rule for groups of experts: in the reference, in the oracle of `route` and on the device.

use mlakit::op::route::{
    GroupScore, Route, RouteArgs, RouteCase, RouteFields, RouteSpec, Scoring, oracle,
};
use mlakit::op::spec::Scalar;
use mlakit::{Buffer, Category, Device, Lane, Plan};
use mlakit_cpu::Cpu;
use mlakit_model::config::{self, RouterConfig};
use mlakit_model::reference::route;

const HIDDEN: usize = 16;
const EXPERTS: usize = 12;
const ROWS: usize = 64;

fn spec(used_groups: usize) -> RouteSpec {
    RouteSpec::new(RouteFields {
        hidden: HIDDEN,
        experts: EXPERTS,
        used: 3,
        groups: 4,
        used_groups: Some(used_groups),
        scoring: Scoring::Sigmoid,
        bias: true,
        group_score: GroupScore::TopTwoSum,
        normalize: true,
        scale: Scalar::try_from(2.5).unwrap(),
        max_rows: ROWS,
    })
    .unwrap()
}

fn on_the_device(spec: &RouteSpec, case: &RouteCase<'_>) -> (Vec<i32>, Vec<f32>) {
    let device = Cpu::detect().unwrap();
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let plan = Plan::<Route>::for_device::<Cpu>(spec, device.facts()).unwrap();
    let op = plan.prepare(&device).unwrap();
    let tensor = |values: &[f32]| {
        Buffer::<f32, _>::new(&device, (Category::Tensors, "operand"), values).unwrap()
    };
    let (x, weight) = (tensor(case.x), tensor(case.weight));
    let bias = case.bias.map(tensor);
    let pairs = case.x.len() / spec.hidden * spec.used;
    let mut ids = Buffer::<i32, _>::zeroed(&device, (Category::Tensors, "ids"), pairs).unwrap();
    let mut gates = Buffer::<f32, _>::zeroed(&device, (Category::Tensors, "gates"), pairs).unwrap();
    let mut lane = Lane::new(&device, "lane", &[op.plan().scratch_bytes()]).unwrap();
    let args = RouteArgs {
        x: (&x).into(),
        weight: (&weight).into(),
        bias: bias.as_ref().map(Into::into),
        ids: (&mut ids).into(),
        gates: (&mut gates).into(),
        scratch: (&mut lane).into(),
    };
    op.bind(args).unwrap().run(&mut stream).unwrap();
    stream.wait().unwrap();
    (ids.read().unwrap(), gates.read().unwrap())
}

fn in_the_reference(spec: &RouteSpec, case: &RouteCase<'_>, row: usize) -> Vec<(usize, f64)> {
    let x = &case.x[row * HIDDEN..(row + 1) * HIDDEN];
    let logit = |weight: &[f32]| -> f64 {
        x.iter().zip(weight).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum()
    };
    let logits: Vec<f64> = case.weight.chunks_exact(HIDDEN).map(logit).collect();
    let bias: Vec<f64> = case.bias.unwrap().iter().copied().map(f64::from).collect();
    let config = RouterConfig {
        experts: spec.experts,
        experts_per_token: spec.used,
        groups: spec.groups,
        groups_kept: spec.used_groups(),
        scoring: config::Scoring::Sigmoid,
        group_score: config::GroupScore::TopTwoSum,
        correction_bias: true,
        normalize: true,
        scaling_factor: 2.5,
    };
    route(&config, &logits, Some(&bias))
}

/// With biases that make everything that is compared negative an unused group must still not win:
/// each of the three chooses the same experts, all of them of the best groups.
#[test]
fn negative_biased_scores_stay_in_the_used_groups() {
    let mut state = 31_u32;
    // From -1 to 1: the upper bits of a linear congruential generator.
    let mut number = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    let mut numbers = |len: usize| (0..len).map(|_| number()).collect::<Vec<f32>>();
    let (x, weight) = (numbers(ROWS * HIDDEN), numbers(EXPERTS * HIDDEN));
    let bias: Vec<f32> = numbers(EXPERTS).iter().map(|v| v * 0.1 - 3.0).collect();
    let case = RouteCase { x: &x, weight: &weight, bias: Some(&bias) };
    for used_groups in [1, 2, 4] {
        let spec = spec(used_groups);
        let needed = oracle(&spec, &case);
        let (ids, gates) = on_the_device(&spec, &case);
        let mut compared = 0;
        for row in (0..ROWS).filter(|row| needed.gaps[*row] > 1e-5) {
            let range = row * spec.used..(row + 1) * spec.used;
            assert_eq!(ids[range.clone()], needed.ids[range.clone()], "row {row}");
            for ((expert, weight), i) in in_the_reference(&spec, &case, row).into_iter().zip(range)
            {
                assert_eq!(expert as i32, ids[i], "row {row}");
                assert!((weight - f64::from(gates[i])).abs() < 1e-5, "row {row}");
                assert!((weight - needed.gates[i]).abs() < 1e-5, "row {row}");
            }
            compared += 1;
        }
        assert!(compared > ROWS / 2);
        let mut groups: Vec<i32> = ids[..spec.used].iter().map(|id| id / 3).collect();
        groups.sort_unstable();
        groups.dedup();
        assert!(groups.len() <= used_groups, "{groups:?}");
    }
}
