//! Linear layers and projections: against the oracle, and the bits of a row whatever its company.

use half::bf16;
use mlakit::op::layer::{Float, FloatInput, FloatOutput};
use mlakit::op::linear::{Experts, Linear, LinearArgs, LinearCase, LinearFields, LinearSpec};
use mlakit::op::projection::{Projection, ProjectionArgs, ProjectionFields, ProjectionSpec};
use mlakit::{Lane, Plan, op};

use super::SuiteDevice;
use super::compare::{bf16_unit, rms};
use super::dense_run::tensor;
use super::random::Rng;

const EXPERTS: usize = 6;

/// The operands of a linear layer, for all rows.
struct Layer {
    spec: LinearSpec,
    x: Vec<f32>,
    weight: Vec<bf16>,
    bias: Vec<f32>,
    ids: Vec<i32>,
    gates: Vec<f32>,
    before: Vec<f32>,
}

impl Layer {
    fn new(fields: &LinearFields, rng: &mut Rng) -> Self {
        let spec = LinearSpec::new(fields.clone()).unwrap();
        let (rows, used) = (spec.max_rows, spec.used());
        let matrices = if spec.experts.is_some() { EXPERTS } else { 1 };
        let mut x = rng.normals(rows * spec.x_row());
        if spec.input == Float::Bf16 {
            x.iter_mut().for_each(|v| *v = bf16::from_f32(*v).to_f32());
        }
        // Beyond the experts and below them too: such an id contributes nothing.
        let mut ids = || rng.below(EXPERTS + 2) as i32 - 1;
        let ids = (0..rows * used).map(|_| ids()).collect();
        Self {
            weight: rng.bf16s(matrices * spec.matrix()),
            bias: rng.normals(spec.out_width),
            gates: rng.normals(rows * used),
            before: rng.normals(rows * spec.y_row()),
            x,
            ids,
            spec,
        }
    }

    /// The same layer with only these rows.
    fn rows(&self, rows: std::ops::Range<usize>) -> Self {
        fn part<T: Clone>(all: &[T], each: usize, rows: &std::ops::Range<usize>) -> Vec<T> {
            all[rows.start * each..rows.end * each].to_vec()
        }
        let (x, y, used) = (self.spec.x_row(), self.spec.y_row(), self.spec.used());
        Self {
            spec: self.spec.clone(),
            x: part(&self.x, x, &rows),
            weight: self.weight.clone(),
            bias: self.bias.clone(),
            ids: part(&self.ids, used, &rows),
            gates: part(&self.gates, used, &rows),
            before: part(&self.before, y, &rows),
        }
    }

    /// What the device gives, and how many ids it found to be no expert.
    fn run<D: SuiteDevice>(&self, device: &D) -> (Vec<f32>, u32) {
        let spec = &self.spec;
        let plan = Plan::<Linear>::for_device::<D>(spec, device.facts()).unwrap();
        let prepared = plan.prepare(device).unwrap();
        let caller = device.own_stream().unwrap();
        let mut stream = device.stream(&caller).unwrap();
        let narrow =
            |values: &[f32]| -> Vec<bf16> { values.iter().map(|v| bf16::from_f32(*v)).collect() };
        let (x, x_narrow) =
            (tensor::<f32, D>(device, &self.x), tensor::<bf16, D>(device, &narrow(&self.x)));
        let weight = tensor::<bf16, D>(device, &self.weight);
        let bias = tensor::<f32, D>(device, &self.bias);
        let (ids, gates) =
            (tensor::<i32, D>(device, &self.ids), tensor::<f32, D>(device, &self.gates));
        let mut y = tensor::<f32, D>(device, &self.before);
        let mut y_narrow = tensor::<bf16, D>(device, &narrow(&self.before));
        let mut lane = Lane::new(device, "lane", &[plan.scratch_bytes()]).unwrap();
        lane.poison(0xff).unwrap();
        let args = LinearArgs {
            x: match spec.input {
                Float::Bf16 => FloatInput::Bf16((&x_narrow).into()),
                Float::F32 => FloatInput::F32((&x).into()),
            },
            weight: (&weight).into(),
            bias: spec.bias.then(|| (&bias).into()),
            ids: spec.experts.map(|_| (&ids).into()),
            gates: spec.combines().then(|| (&gates).into()),
            y: match spec.output {
                Float::Bf16 => FloatOutput::Bf16((&mut y_narrow).into()),
                Float::F32 => FloatOutput::F32((&mut y).into()),
            },
            scratch: (&mut lane).into(),
        };
        prepared.bind(args).unwrap().run(&mut stream).unwrap();
        stream.wait().unwrap();
        let given = match spec.output {
            Float::Bf16 => y_narrow.read().unwrap().into_iter().map(bf16::to_f32).collect(),
            Float::F32 => y.read().unwrap(),
        };
        (given, lane.faults().unwrap()[0])
    }
}

/// Widths that fill no vector, wide ones, many rows; both dtypes on both sides; bias, accumulation, experts.
fn layers() -> Vec<LinearFields> {
    let mut layers = Vec::new();
    let experts = |used, combine| Some(Experts { count: Some(EXPERTS), used, combine });
    for (in_width, out_width, max_rows) in
        [(7, 33, 5), (64, 48, 1), (130, 17, 20), (512, 96, 3), (200, 72, 150)]
    {
        for (input, output, accumulate) in [
            (Float::Bf16, Float::Bf16, false),
            (Float::Bf16, Float::F32, true),
            (Float::F32, Float::Bf16, false),
            (Float::F32, Float::F32, true),
        ] {
            for (bias, experts) in
                [(false, None), (true, None), (false, experts(3, false)), (false, experts(2, true))]
            {
                layers.push(LinearFields {
                    in_width,
                    out_width,
                    max_rows,
                    input,
                    output,
                    accumulate,
                    bias,
                    experts,
                });
            }
        }
    }
    layers
}

/// Every kind of linear layer is the oracle's, ids that are no expert are counted.
pub fn agrees_with_the_oracle<D: SuiteDevice>(device: &D) {
    let mut rng = Rng(71);
    for fields in layers() {
        let layer = Layer::new(&fields, &mut rng);
        let needed = op::linear::oracle(
            &layer.spec,
            &LinearCase {
                x: &layer.x,
                weight: &layer.weight,
                bias: if fields.bias { &layer.bias } else { &[] },
                ids: &layer.ids,
                gates: &layer.gates,
                before: &layer.before,
            },
        );
        let (given, faults) = layer.run(device);
        assert_eq!(faults, needed.faults, "{fields:?}");
        // F32 sums of `in_width` products, of which an F32 `x` keeps 16 bits.
        let floor = 2e-5 * rms(needed.y.iter().copied());
        for (index, (g, n)) in given.iter().zip(&needed.y).enumerate() {
            let unit = if fields.output == Float::Bf16 { bf16_unit(*n) } else { 0.0 };
            let bound = unit + floor;
            assert!(
                (f64::from(*g) - n).abs() <= bound,
                "y {index}: given {g}, needed {n}, bound {bound:.1e}\n{fields:?}"
            );
        }
    }
}

/// A row alone has the bits that it has in the batch.
pub fn rows_know_no_company<D: SuiteDevice>(device: &D) {
    let mut rng = Rng(72);
    for fields in layers() {
        let layer = Layer::new(&fields, &mut rng);
        let (whole, _) = layer.run(device);
        for rows in
            [0..1, fields.max_rows / 2..fields.max_rows, fields.max_rows - 1..fields.max_rows]
        {
            let (given, _) = layer.rows(rows.clone()).run(device);
            let needed = &whole[rows.start * layer.spec.y_row()..][..given.len()];
            let differs = given.iter().zip(needed).position(|(g, n)| g.to_bits() != n.to_bits());
            assert_eq!(differs, None, "rows {rows:?} of {fields:?}");
        }
    }
}

/// Heads with gaps on both sides, both output dtypes: the oracle's values, the gaps untouched, and
/// a row alone has the bits that it has in the batch.
pub fn projections_agree_and_know_no_company<D: SuiteDevice>(device: &D) {
    const ROWS: usize = 19;
    let mut rng = Rng(73);
    for (heads, in_width, out_width, gaps) in
        [(1, 2, 1, (0, 0)), (3, 34, 19, (5, 3)), (16, 128, 64, (64, 0)), (99, 64, 33, (0, 7))]
    {
        let fields = ProjectionFields {
            heads,
            in_width,
            out_width,
            in_stride: Some(in_width + gaps.0),
            out_stride: Some(out_width + gaps.1),
            output: Float::Bf16,
            max_rows: ROWS,
        };
        let spec = ProjectionSpec::new(fields).unwrap();
        let weight = rng.bf16s(heads * in_width * out_width);
        let (from, to) = (in_width + gaps.0, out_width + gaps.1);
        let x = rng.bf16s(ROWS * heads * from);
        let tight: Vec<bf16> = x.chunks(from).flat_map(|head| &head[..in_width]).copied().collect();
        let needed = op::projection::oracle(&spec, &tight, &weight);
        let given = project(device, &spec, (&x, &weight));
        for (index, head) in given.chunks(to).enumerate() {
            assert!(head[out_width..].iter().all(|v| v.is_nan()), "the gap behind head {index}");
            let needed = &needed[index * out_width..(index + 1) * out_width];
            let floor = 1e-5 * rms(needed.iter().copied());
            for (g, n) in head.iter().zip(needed) {
                let close = (g.to_f64() - n).abs() <= bf16_unit(*n) + floor;
                assert!(close, "result {index}: given {g}, needed {n}\n{spec:?}");
            }
        }
        let row = heads * from;
        let alone = project(device, &spec, (&x[2 * row..3 * row], &weight));
        let same = alone.iter().zip(&given[2 * heads * to..]);
        assert!(same.into_iter().all(|(a, b)| a.to_bits() == b.to_bits()), "{spec:?}");
    }
}

/// The outputs, strided as the spec says, NaN in the gaps.
fn project<D: SuiteDevice>(
    device: &D,
    spec: &ProjectionSpec,
    (x, weight): (&[bf16], &[bf16]),
) -> Vec<bf16> {
    let plan = Plan::<Projection>::for_device::<D>(spec, device.facts()).unwrap();
    let prepared = plan.prepare(device).unwrap();
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let rows = x.len() / (spec.heads * spec.in_stride());
    let nan = vec![bf16::NAN; rows * spec.heads * spec.out_stride()];
    let (x, weight) = (tensor::<bf16, D>(device, x), tensor::<bf16, D>(device, weight));
    let mut y = tensor::<bf16, D>(device, &nan);
    let mut lane = Lane::new(device, "lane", &[plan.scratch_bytes()]).unwrap();
    let args = ProjectionArgs {
        x: (&x).into(),
        weight: (&weight).into(),
        y: FloatOutput::Bf16((&mut y).into()),
        scratch: (&mut lane).into(),
    };
    prepared.bind(args).unwrap().run(&mut stream).unwrap();
    stream.wait().unwrap();
    y.read().unwrap()
}
