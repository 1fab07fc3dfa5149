//! The probe of `linear`: small whole numbers, so that every order of summation gives the same
//! bits.

use half::bf16;

use super::bind::LinearArgs;
use super::oracle::{LinearCase, oracle};
use super::plan::Linear;
use super::spec::LinearFields;
use crate::op::layer::{Float, FloatProbe, pick};
use crate::scratch::Fault;
use crate::{Error, Probe, Runs, Warm};

/// Whole numbers from -2 to 2. Over any width in use their products sum to far less than 2^24, so
/// F32 sums are exact.
fn whole(i: usize) -> f32 {
    pick(i, 5) as f32 - 2.0
}

struct Inputs {
    x: Vec<f32>,
    bias: Vec<f32>,
    ids: Vec<i32>,
    gates: Vec<f32>,
    before: Vec<f32>,
}

impl Inputs {
    /// What must not be read is NaN: the gate and the own `x` of an id that is no expert, and `y`
    /// unless it is added to.
    fn new(spec: &LinearFields, (rows, experts): (usize, usize), ids: Vec<i32>) -> Self {
        let live = |index: usize| usize::try_from(ids[index]).is_ok_and(|id| id < experts);
        let own_x = |i: usize| !spec.combines() || live(i / spec.in_width);
        // An F32 `x` has more bits than BF16 holds, still few enough for exact sums.
        let more = |i: usize| if spec.input == Float::F32 { whole(i + 5) / 256.0 } else { 0.0 };
        let value = |i: usize| if own_x(i) { whole(i) + more(i) } else { f32::NAN };
        let gate = |index: usize| [1.0, -1.0, 2.0, 0.5][index % 4];
        Self {
            x: (0..rows * spec.x_row()).map(value).collect(),
            bias: (0..spec.out_width).map(|i| whole(i + 7)).collect(),
            gates: (0..ids.len()).map(|i| if live(i) { gate(i) } else { f32::NAN }).collect(),
            before: (0..rows * spec.y_row())
                .map(|i| if spec.accumulate { whole(i + 3) } else { f32::NAN })
                .collect(),
            ids,
        }
    }
}

/// Runs on probes until ids of every kind have been used, and compares bit by bit.
pub(super) fn probe<'w, D: Runs<Linear>>(warm: &mut Warm<'w, Linear, D>) -> Result<(), Error> {
    let spec = warm.spec();
    let rows = spec.max_rows.min(3);
    let experts = spec.experts.map_or(1, |experts| experts.count.unwrap_or(3));
    let weight: Vec<bf16> =
        (0..experts * spec.matrix()).map(|i| bf16::from_f32(whole(i + 1))).collect();
    let on_device = warm.probe::<bf16>(&weight)?;
    let bound = experts as i32;
    let kinds = [0, bound, bound - 1, -1, bound / 2, i32::MAX, i32::MIN];
    let chosen = rows * spec.used();
    let step = if spec.experts.is_some() { chosen } else { kinds.len() };
    for first in (0..kinds.len()).step_by(step) {
        let ids = (first..first + chosen).map(|i| kinds[i % kinds.len()]).collect();
        let inputs = Inputs::new(&spec, (rows, experts), ids);
        compare(warm, &inputs, (&weight, &on_device))?;
    }
    Ok(())
}

fn compare<'w, D: Runs<Linear>>(
    warm: &mut Warm<'w, Linear, D>,
    inputs: &Inputs,
    (weight, on_device): (&[bf16], &Probe<'w, bf16, D>),
) -> Result<(), Error> {
    let spec = warm.spec();
    let Inputs { x, bias, ids, gates, before } = inputs;
    let bias = if spec.bias { &bias[..] } else { &[] };
    let result = oracle(&spec, &LinearCase { x, weight, bias, ids, gates, before });
    let needed: Vec<f32> = result.y.iter().map(|v| spec.output.round(*v)).collect();

    let x = FloatProbe::new(warm, spec.input, x)?;
    let bias = warm.probe::<f32>(bias)?;
    let (ids, gates) = (warm.probe::<i32>(ids)?, warm.probe::<f32>(gates)?);
    let mut y = FloatProbe::new(warm, spec.output, before)?;
    let mut scratch = warm.scratch()?;
    warm.run(LinearArgs {
        x: x.input(),
        weight: on_device.into(),
        bias: spec.bias.then(|| (&bias).into()),
        ids: spec.experts.is_some().then(|| (&ids).into()),
        gates: spec.combines().then(|| (&gates).into()),
        y: y.output(),
        scratch: (&mut scratch).into(),
    })?;
    let given = y.read(warm)?;
    Warm::<Linear, D>::expect(&needed, &given, |n, g| n == g)?;
    let faults = warm.faults(&scratch)?;
    Warm::<Linear, D>::expect(&[result.faults], &[faults[Fault::Id as usize]], |n, g| n == g)
}
