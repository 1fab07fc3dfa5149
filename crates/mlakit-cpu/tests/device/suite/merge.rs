//! Merging partial results: against the oracle, and what weighs nothing.

use half::bf16;
use mlakit::op::merge::{
    LseInput, LseOutput, Merge, MergeArgs, MergeCase, MergeFields, MergeSpec, Partial,
    PartialInput, oracle,
};
use mlakit::{Base2, Lane, Lse, LseBase, Natural, Plan};

use super::SuiteDevice;
use super::compare::rms;
use super::dense_run::tensor;
use super::random::Rng;

struct Parts {
    spec: MergeSpec,
    outs: Vec<f32>,
    lses: Vec<f32>,
    sink: Vec<f32>,
    rows: usize,
}

/// Parts of which some are empty and hold NaN, in rows of which some are empty altogether.
fn parts(fields: &MergeFields, rows: usize, rng: &mut Rng) -> Parts {
    let (results, width) = (rows * fields.heads, fields.value_width);
    let mut lses: Vec<f32> = (0..fields.splits * results).map(|_| rng.normal() * 4.0).collect();
    let mut outs = rng.normals(lses.len() * width);
    if fields.partial == Partial::Bf16 {
        outs.iter_mut().for_each(|v| *v = bf16::from_f32(*v).to_f32());
    }
    for (part, lse) in lses.iter_mut().enumerate() {
        if part % results % 5 == 4 || rng.chance(4) {
            *lse = rng.pick(&[f32::NEG_INFINITY, f32::NAN, f32::INFINITY]);
            outs[part * width..(part + 1) * width].fill(f32::NAN);
        }
    }
    let infinite = [f32::INFINITY, f32::NEG_INFINITY];
    let sink = |rng: &mut Rng| if rng.chance(4) { rng.pick(&infinite) } else { rng.normal() };
    let sink = (0..fields.heads).map(|_| sink(rng)).collect();
    Parts { spec: MergeSpec::new(fields.clone()).unwrap(), outs, lses, sink, rows }
}

fn run<D: SuiteDevice>(device: &D, parts: &Parts) -> (Vec<bf16>, Vec<f32>) {
    let spec = &parts.spec;
    let plan = Plan::<Merge>::for_device::<D>(spec, device.facts()).unwrap();
    let prepared = plan.prepare(device).unwrap();
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let results = parts.rows * spec.heads;
    let narrow: Vec<bf16> = parts.outs.iter().map(|v| bf16::from_f32(*v)).collect();
    let (wide, narrow) =
        (tensor::<f32, D>(device, &parts.outs), tensor::<bf16, D>(device, &narrow));
    let natural = tensor::<Lse<Natural>, D>(device, &parts.lses);
    let base2 = tensor::<Lse<Base2>, D>(device, &parts.lses);
    let sink = tensor::<f32, D>(device, &parts.sink);
    let mut out = tensor::<bf16, D>(device, &vec![bf16::NAN; results * spec.value_width]);
    let mut out_natural = tensor::<Lse<Natural>, D>(device, &vec![f32::NAN; results]);
    let mut out_base2 = tensor::<Lse<Base2>, D>(device, &vec![f32::NAN; results]);
    let mut lane = Lane::new(device, "lane", &[plan.scratch_bytes()]).unwrap();
    let args = MergeArgs {
        outs: match spec.partial {
            Partial::Bf16 => PartialInput::Bf16((&narrow).into()),
            Partial::F32 => PartialInput::F32((&wide).into()),
        },
        lses: match spec.lse {
            LseBase::Natural => LseInput::Natural((&natural).into()),
            LseBase::Base2 => LseInput::Base2((&base2).into()),
        },
        sink: spec.sink.then(|| (&sink).into()),
        out: (&mut out).into(),
        lse: match spec.lse {
            LseBase::Natural => LseOutput::Natural((&mut out_natural).into()),
            LseBase::Base2 => LseOutput::Base2((&mut out_base2).into()),
        },
        scratch: (&mut lane).into(),
    };
    prepared.bind(args).unwrap().run(&mut stream).unwrap();
    stream.wait().unwrap();
    let lse = match spec.lse {
        LseBase::Natural => out_natural.read().unwrap(),
        LseBase::Base2 => out_base2.read().unwrap(),
    };
    (out.read().unwrap(), lse)
}

/// Splits x heads x widths x dtypes x bases x sinks, with empty parts and rows, payloads of NaN and
/// infinite sinks.
pub fn agrees_with_the_oracle<D: SuiteDevice>(device: &D) {
    let mut rng = Rng(61);
    for case in 0..96usize {
        let (sink, sink_in_lse) = [(false, false), (true, false), (true, true)][case % 3];
        let fields = MergeFields {
            splits: [1, 2, 7, 33][case / 3 % 4],
            heads: [1, 3, 16, 99][case % 4],
            value_width: [1, 34, 128, 512][case / 5 % 4],
            partial: [Partial::Bf16, Partial::F32][case % 2],
            lse: [LseBase::Natural, LseBase::Base2][case / 2 % 2],
            sink,
            sink_in_lse,
            max_rows: 6,
        };
        let parts = parts(&fields, 1 + case % 6, &mut rng);
        let sinks = sink.then_some(&parts.sink[..]);
        let host = MergeCase { outs: &parts.outs, lses: &parts.lses, sink: sinks };
        let (needed, needed_lse) = oracle(&parts.spec, &host);
        let (given, given_lse) = run(device, &parts);
        for (index, (g, n)) in given_lse.iter().zip(&needed_lse).enumerate() {
            let close = f64::from(*g) == *n || (f64::from(*g) - n).abs() <= 2e-6 * (1.0 + n.abs());
            assert!(close, "lse {index}: given {g}, needed {n}\n{fields:?}");
        }
        let rows = given.chunks_exact(fields.value_width);
        for (index, (given, needed)) in
            rows.zip(needed.chunks_exact(fields.value_width)).enumerate()
        {
            // One rounding to BF16, and F32 sums of terms of the row's size.
            let floor = 1e-5 * rms(needed.iter().copied()).max(1e-3);
            for (element, (g, n)) in given.iter().zip(needed).enumerate() {
                let bound = n.abs() / 256.0 + floor;
                assert!(
                    (g.to_f64() - n).abs() <= bound,
                    "result {index} element {element}: given {g}, needed {n}, bound \
                     {bound:.2e}\n{fields:?}"
                );
            }
        }
    }
}

/// A part of weight 0 contributes nothing whatever it holds, and a single live part passes through
/// bit for bit.
pub fn what_weighs_nothing_changes_no_bit<D: SuiteDevice>(device: &D) {
    for partial in [Partial::Bf16, Partial::F32] {
        let fields = MergeFields {
            splits: 5,
            heads: 3,
            value_width: 34,
            partial,
            lse: LseBase::Base2,
            sink: false,
            sink_in_lse: false,
            max_rows: 2,
        };
        let mut rng = Rng(8);
        let mut parts = parts(&fields, 2, &mut rng);
        let (results, width) = (6, 34);
        let alive = |result: usize| (result * 7) % 5;
        for part in 0..5 * results {
            let live = alive(part % results) == part / results;
            parts.lses[part] = if live { rng.normal() } else { f32::NEG_INFINITY };
            let payload = if live { rng.bf16().to_f32() } else { f32::NAN };
            parts.outs[part * width..(part + 1) * width].fill(payload);
        }
        let (out, lse) = run(device, &parts);
        for result in 0..results {
            let part = alive(result) * results + result;
            assert_eq!(lse[result].to_bits(), parts.lses[part].to_bits(), "lse {result}");
            let needed = bf16::from_f32(parts.outs[part * width]);
            assert!(out[result * width..(result + 1) * width].iter().all(|v| *v == needed));
        }
    }
}
