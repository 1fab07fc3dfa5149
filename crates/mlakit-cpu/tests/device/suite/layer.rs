//! The layer operations against their oracles, over widths that fill no vector, strides, both
//! dtypes and strange numbers; the bits of a row whatever its company and its address.

use half::bf16;
use mlakit::op::activation::{
    Activation, ActivationArgs, ActivationFields, ActivationKind, ActivationSpec,
};
use mlakit::op::embed::{Embed, EmbedArgs, EmbedFields, EmbedSpec};
use mlakit::op::layer::{Float, FloatInput, FloatOutput};
use mlakit::op::norm::{Norm, NormArgs, NormFields, NormSpec};
use mlakit::op::rotary::{Rotary, RotaryArgs, RotaryCase, RotaryFields, RotarySpec, RotaryStyle};
use mlakit::op::spec::Scalar;
use mlakit::{Bound, Buffer, Lane, Lease, Op, Plan, Prepared, Runs, op};

use super::SuiteDevice;
use super::compare::bf16_unit;
use super::dense_run::tensor;
use super::random::Rng;

const FLOATS: [Float; 2] = [Float::Bf16, Float::F32];

/// What lies in gaps and must stay there.
const GAP: f32 = 77.0;

fn scalar(value: f32) -> Scalar {
    Scalar::try_from(value).unwrap()
}

pub fn prepare<O: Op, D: SuiteDevice + Runs<O>>(device: &D, spec: &O::Spec) -> Prepared<O, D> {
    let plan = Plan::<O>::for_device::<D>(spec, device.facts()).unwrap();
    plan.prepare(device).unwrap_or_else(|error| panic!("{spec:?}: {error}"))
}

/// Runs a call to its end; what it counted as faults.
pub fn run<O: Op, D: SuiteDevice + Runs<O>>(
    device: &D,
    prepared: &Prepared<O, D>,
    bind: impl FnOnce(&mut Lane<D>) -> Result<Bound<'static, O, D>, mlakit::Error>,
) -> [u32; 3] {
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let mut lane = Lane::new(device, "lane", &[prepared.plan().scratch_bytes()]).unwrap();
    lane.poison(0xff).unwrap();
    let bound = bind(&mut lane).unwrap();
    bound.run(&mut stream).unwrap();
    stream.wait().unwrap();
    lane.faults().unwrap()
}

/// Values in one of the two dtypes, `before` of them left unused in front, so that the address of
/// the first is whatever it is.
pub struct Tensor<D: SuiteDevice> {
    narrow: Option<Buffer<bf16, D>>,
    wide: Option<Buffer<f32, D>>,
    before: usize,
}

/// Of either dtype.
type Leases<D> = (Option<Lease<bf16, D>>, Option<Lease<f32, D>>);

impl<D: SuiteDevice> Tensor<D> {
    pub fn new(device: &D, float: Float, (before, values): (usize, &[f32])) -> Self {
        let values: Vec<f32> = vec![GAP; before].iter().chain(values).copied().collect();
        let narrow: Vec<bf16> = values.iter().copied().map(bf16::from_f32).collect();
        let is_narrow = float == Float::Bf16;
        Self {
            narrow: is_narrow.then(|| tensor::<bf16, D>(device, &narrow)),
            wide: (!is_narrow).then(|| tensor::<f32, D>(device, &values)),
            before,
        }
    }

    fn leases(&self) -> Leases<D> {
        let narrow = self.narrow.as_ref().map(Buffer::lease);
        let wide = self.wide.as_ref().map(Buffer::lease);
        let before = self.before;
        (
            narrow.map(|lease| lease.part(before..lease.len()).unwrap()),
            wide.map(|lease| lease.part(before..lease.len()).unwrap()),
        )
    }

    pub fn input(&self) -> FloatInput<'static, D> {
        match self.leases() {
            (Some(narrow), _) => FloatInput::Bf16((&narrow).into()),
            (_, wide) => FloatInput::F32((&wide.unwrap()).into()),
        }
    }

    pub fn output(&self) -> FloatOutput<'static, D> {
        match self.leases() {
            (Some(narrow), _) => FloatOutput::Bf16((&narrow).into()),
            (_, wide) => FloatOutput::F32((&wide.unwrap()).into()),
        }
    }

    pub fn read(&self) -> Vec<f32> {
        let values: Vec<f32> = match (&self.narrow, &self.wide) {
            (Some(narrow), _) => narrow.read().unwrap().into_iter().map(bf16::to_f32).collect(),
            (_, wide) => wide.as_ref().unwrap().read().unwrap(),
        };
        assert!(values[..self.before].iter().all(|v| *v == GAP), "what lies in front stays");
        values[self.before..].to_vec()
    }
}

/// Values as a tensor of this dtype holds them.
fn held(float: Float, mut values: Vec<f32>) -> Vec<f32> {
    values.iter_mut().for_each(|v| *v = float.round(f64::from(*v)));
    values
}

/// Records of `width` values, `stride` apart, with `gap` between and behind them.
fn spread(values: &[f32], (width, stride): (usize, usize), gap: f32) -> Vec<f32> {
    let record = |values: &[f32]| [values, &vec![gap; stride - width]].concat();
    values.chunks_exact(width).flat_map(record).collect()
}

/// Fails at the first value beyond a BF16 unit (where results are BF16) and a relative and an
/// absolute floor; gaps keep theirs.
#[track_caller]
fn close(
    what: &str,
    (given, float): (&[f32], Float),
    (needed, (width, stride)): (&[f64], (usize, usize)),
    (relative, absolute): (f64, f64),
) {
    assert_eq!(given.len() / stride, needed.len() / width, "{what}: records");
    for (record, (given, needed)) in
        given.chunks_exact(stride).zip(needed.chunks_exact(width)).enumerate()
    {
        for (i, (g, n)) in given.iter().zip(needed).enumerate() {
            let unit = if float == Float::Bf16 { bf16_unit(*n) } else { 0.0 };
            let bound = unit + relative * n.abs() + absolute;
            let same = f64::from(*g) == *n || (f64::from(*g) - n).abs() <= bound;
            assert!(same, "{what}: {record}, {i}: given {g}, needed {n}, bound {bound:.1e}");
        }
        let gap = given[width..].iter().all(|v| *v == GAP);
        assert!(gap, "{what}: the gap behind record {record}");
    }
}

#[track_caller]
fn same_bits(what: &str, given: &[f32], needed: &[f32]) {
    assert_eq!(given.len(), needed.len(), "{what}");
    let differs = given.iter().zip(needed).position(|(g, n)| g.to_bits() != n.to_bits());
    assert_eq!(differs, None, "{what}");
}

/// A normalisation of these rows, each result with its gaps.
fn normalise<D: SuiteDevice>(
    device: &D,
    prepared: &Prepared<Norm, D>,
    (before, x): (usize, &[f32]),
    (weight, bias): (&[f32], &[f32]),
) -> [Vec<f32>; 2] {
    let spec = prepared.plan().spec();
    let rows = x.len() / spec.in_stride();
    let x = Tensor::new(device, spec.input, (before, x));
    let weight = Tensor::new(device, Float::F32, (before, weight));
    let bias = Tensor::new(device, Float::F32, (before, bias));
    let y = Tensor::new(device, Float::Bf16, (before, &vec![GAP; rows * spec.out_stride()]));
    let wide = Tensor::new(device, Float::F32, (before, &vec![GAP; rows * spec.width]));
    run(device, prepared, |lane| {
        prepared.bind(NormArgs {
            x: x.input(),
            weight: (&weight.leases().1.unwrap()).into(),
            bias: spec.bias.then(|| (&bias.leases().1.unwrap()).into()),
            y: spec.narrow.then(|| (&y.leases().0.unwrap()).into()),
            y_wide: spec.wide.then(|| (&wide.leases().1.unwrap()).into()),
            scratch: lane.lease(),
        })
    });
    [y.read(), wide.read()]
}

/// Rows of ordinary, tiny and large numbers, up to those whose squares F32 does not hold; a row has
/// the bits that it has alone, at any address.
pub fn norms_agree_and_know_no_company<D: SuiteDevice>(device: &D) {
    norms_agree(device, (false, false));
}

/// The same with a mean that is subtracted, a bias that is added, and both.
pub fn layer_norms_agree_and_know_no_company<D: SuiteDevice>(device: &D) {
    for kind in [(true, true), (true, false), (false, true)] {
        norms_agree(device, kind);
    }
}

fn norms_agree<D: SuiteDevice>(device: &D, (center, bias): (bool, bool)) {
    const SCALES: [f32; 7] = [1.0, 1e-4, 1e-12, 3e4, 0.0, 1e20, 1e37];
    const ROWS: usize = SCALES.len();
    let mut rng = Rng(81);
    for width in [1, 7, 64, 129, 2056] {
        for (input, (narrow, wide), gap) in [
            (Float::Bf16, (true, false), 0),
            (Float::Bf16, (true, true), 8),
            (Float::F32, (true, true), 3),
            (Float::F32, (false, true), 0),
        ] {
            let fields = NormFields {
                width,
                eps: scalar(1e-5),
                center,
                bias,
                max_rows: ROWS,
                input,
                in_stride: Some(width + gap),
                out_stride: narrow.then_some(width + 2 * gap),
                narrow,
                wide,
            };
            let what = format!("{fields:?}");
            let spec = NormSpec::new(fields).unwrap();
            let prepared = prepare::<Norm, D>(device, &spec);
            let mut x = rng.normals(ROWS * width);
            for (row, scale) in x.chunks_exact_mut(width).zip(SCALES) {
                row.iter_mut().for_each(|v| *v *= scale);
            }
            let (x, weight) = (held(input, x), rng.normals(width));
            let biases = rng.normals(if bias { width } else { 0 });
            let needed = op::norm::oracle(&spec, &x, &weight, &biases);
            // Where something is subtracted or added, terms of the size of the weights cancel.
            let floor = if center || bias { 1e-5 } else { 1e-30 };
            let x = spread(&x, (width, width + gap), f32::NAN);
            let [y, y_wide] = normalise(device, &prepared, (0, &x), (&weight, &biases));
            let (stride, tight) = ((width, spec.out_stride()), (width, width));
            if narrow {
                close(&what, (&y, Float::Bf16), (&needed, stride), (1e-5, floor));
            }
            if wide {
                close(&what, (&y_wide, Float::F32), (&needed, tight), (1e-5, floor));
            }
            for row in 0..ROWS {
                let x = &x[row * spec.in_stride()..(row + 1) * spec.in_stride()];
                let [alone, alone_wide] =
                    normalise(device, &prepared, (row, x), (&weight, &biases));
                same_bits(&what, &alone, &y[row * stride.1..(row + 1) * stride.1]);
                same_bits(&what, &alone_wide, &y_wide[row * width..(row + 1) * width]);
            }
        }
    }
}

/// Positions near and far, backwards and at the ends; frequencies of models and one above 1.
pub fn rotations_agree<D: SuiteDevice>(device: &D) {
    rotate(device, (0, 0));
}

/// The same of the first, the last and some middle elements of heads whose others are copied.
pub fn rotations_of_a_part_agree<D: SuiteDevice>(device: &D) {
    for around in [(0, 64), (64, 0), (3, 1)] {
        rotate(device, around);
    }
}

fn rotate<D: SuiteDevice>(device: &D, (before, after): (usize, usize)) {
    const POSITIONS: [i32; 9] =
        [0, 1, -7, 4_095, 163_839, 1_048_577, 16_777_217, i32::MAX, i32::MIN];
    let mut rng = Rng(82);
    for (heads, width, gap) in [(1, 2, 0), (3, 6, 5), (11, 64, 64), (16, 258, 0)] {
        for (style, input, factor) in [
            (RotaryStyle::Pair, Float::Bf16, 1.0),
            (RotaryStyle::Half, Float::F32, 1.3),
            (RotaryStyle::Pair, Float::F32, 0.7),
        ] {
            let whole = before + width + after;
            let fields = RotaryFields {
                heads,
                width,
                style,
                input,
                before,
                after,
                in_stride: Some(whole + gap),
                out_stride: Some(whole + 2 * gap),
                attention_factor: scalar(factor),
                max_rows: POSITIONS.len(),
            };
            let what = format!("{fields:?}");
            let spec = RotarySpec::new(fields).unwrap();
            let prepared = prepare::<Rotary, D>(device, &spec);
            let frequency = |j: usize| 1.7 * 10_000f32.powf(-2.0 * j as f32 / width as f32);
            let inv_freq: Vec<f32> = (0..width / 2).map(frequency).collect();
            let x = held(input, rng.normals(POSITIONS.len() * heads * whole));
            let case = RotaryCase { x: &x, positions: &POSITIONS, inv_freq: &inv_freq };
            let needed = op::rotary::oracle(&spec, &case);

            let x = spread(&x, (whole, whole + gap), f32::NAN);
            let x = Tensor::new(device, input, (0, &x));
            let positions = tensor::<i32, D>(device, &POSITIONS);
            let inv_freq = tensor::<f32, D>(device, &inv_freq);
            let records = POSITIONS.len() * heads;
            let gaps = vec![GAP; records * spec.out_stride()];
            let y = Tensor::new(device, Float::Bf16, (0, &gaps));
            run(device, &prepared, |lane| {
                prepared.bind(RotaryArgs {
                    x: x.input(),
                    positions: (&positions.lease()).into(),
                    inv_freq: (&inv_freq.lease()).into(),
                    y: (&y.leases().0.unwrap()).into(),
                    scratch: lane.lease(),
                })
            });
            let needed = (&needed[..], (whole, spec.out_stride()));
            close(&what, (&y.read(), Float::Bf16), needed, (0.0, 1e-6));
        }
    }
}

/// Gathered rows are exact, ids that are none are zeros and counted, at any address.
pub fn embeddings_are_exact<D: SuiteDevice>(device: &D) {
    const IDS: [i32; 8] = [3, -1, 0, 18, 19, -2, i32::MIN, i32::MAX];
    let mut rng = Rng(83);
    for width in [1, 33, 256] {
        for (table, output, before) in [
            (Float::Bf16, Float::F32, 0),
            (Float::Bf16, Float::Bf16, 8),
            (Float::F32, Float::Bf16, 1),
            (Float::F32, Float::F32, 3),
        ] {
            for vocab in [None, Some(19)] {
                let scale = scalar(1.5);
                let max_rows = IDS.len();
                let fields = EmbedFields { width, vocab, table, output, scale, max_rows };
                let spec = EmbedSpec::new(fields).unwrap();
                let prepared = prepare::<Embed, D>(device, &spec);
                let values = held(table, rng.normals(19 * width));
                let needed = op::embed::oracle(&spec, &values, &IDS);
                let from = Tensor::new(device, table, (before, &values));
                let ids = tensor::<i32, D>(device, &IDS);
                let y = Tensor::new(device, output, (before, &vec![GAP; IDS.len() * width]));
                let faults = run(device, &prepared, |lane| {
                    prepared.bind(EmbedArgs {
                        table: from.input(),
                        ids: (&ids.lease()).into(),
                        y: y.output(),
                        scratch: lane.lease(),
                    })
                });
                assert_eq!(faults, [needed.faults, 0, 0], "{spec:?}");
                same_bits(&format!("{spec:?}"), &y.read(), &held(output, needed.y));
            }
        }
    }
}

/// Gates of every size, at any address.
pub fn activations_agree<D: SuiteDevice>(device: &D) {
    const ROWS: usize = 4;
    let mut rng = Rng(84);
    for width in [1, 7, 64, 515] {
        for (input, output, before) in [
            (FLOATS[0], FLOATS[0], 0),
            (FLOATS[0], FLOATS[1], 1),
            (FLOATS[1], FLOATS[0], 2),
            (FLOATS[1], FLOATS[1], 0),
        ] {
            let kind = ActivationKind::Silu;
            let gate_span = None;
            let fields = ActivationFields { width, gate_span, max_rows: ROWS, input, output, kind };
            let spec = ActivationSpec::new(fields).unwrap();
            let prepared = prepare::<Activation, D>(device, &spec);
            let mut x = rng.normals(ROWS * 2 * width);
            for (row, scale) in x.chunks_exact_mut(2 * width).zip([1.0, 0.01, 8.0, 300.0]) {
                row.iter_mut().for_each(|v| *v *= scale);
            }
            let x = held(input, x);
            let needed = op::activation::oracle(&spec, &x, &[]);
            let x = Tensor::new(device, input, (before, &x));
            let y = Tensor::new(device, output, (before, &vec![GAP; ROWS * width]));
            run(device, &prepared, |lane| {
                let (gate, scratch) = (None, lane.lease());
                prepared.bind(ActivationArgs { x: x.input(), gate, y: y.output(), scratch })
            });
            let needed = (&needed[..], (width, width));
            close(&format!("{spec:?}"), (&y.read(), output), needed, (2e-6, 1e-30));
        }
    }
}

/// Gates that are operands of their own: one for each element, one for each head.
pub fn gates_apart_agree<D: SuiteDevice>(device: &D) {
    const ROWS: usize = 4;
    let mut rng = Rng(85);
    for (width, span) in [(1, 1), (21, 1), (21, 7), (512, 128), (515, 515)] {
        for (input, output, before) in [
            (FLOATS[0], FLOATS[0], 0),
            (FLOATS[0], FLOATS[1], 1),
            (FLOATS[1], FLOATS[0], 2),
            (FLOATS[1], FLOATS[1], 0),
        ] {
            let (kind, gate_span) = (ActivationKind::Sigmoid, Some(span));
            let fields = ActivationFields { width, gate_span, max_rows: ROWS, input, output, kind };
            let spec = ActivationSpec::new(fields).unwrap();
            let prepared = prepare::<Activation, D>(device, &spec);
            let gates = width / span;
            let mut gate = rng.normals(ROWS * gates);
            for (row, scale) in gate.chunks_exact_mut(gates).zip([1.0, 0.01, 8.0, 300.0]) {
                row.iter_mut().for_each(|v| *v *= scale);
            }
            let (x, gate) = (held(input, rng.normals(ROWS * width)), held(input, gate));
            let needed = op::activation::oracle(&spec, &x, &gate);
            let x = Tensor::new(device, input, (before, &x));
            let gate = Tensor::new(device, input, (before, &gate));
            let y = Tensor::new(device, output, (before, &vec![GAP; ROWS * width]));
            run(device, &prepared, |lane| {
                let (gate, scratch) = (Some(gate.input()), lane.lease());
                prepared.bind(ActivationArgs { x: x.input(), gate, y: y.output(), scratch })
            });
            let needed = (&needed[..], (width, width));
            close(&format!("{spec:?}"), (&y.read(), output), needed, (2e-6, 1e-30));
        }
    }
}
