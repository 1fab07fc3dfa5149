//! Every operation prepares: its probe runs on the device and agrees with the oracle, and leaves
//! nothing behind.

use mlakit::op::activation::{Activation, ActivationFields, ActivationKind, ActivationSpec};
use mlakit::op::dense::Dense;
use mlakit::op::embed::{Embed, EmbedFields, EmbedSpec};
use mlakit::op::layer::Float;
use mlakit::op::linear::{Experts, Linear, LinearFields, LinearSpec};
use mlakit::op::merge::{Merge, MergeFields, MergeSpec, Partial};
use mlakit::op::norm::{Norm, NormFields, NormSpec};
use mlakit::op::projection::{Projection, ProjectionFields, ProjectionSpec};
use mlakit::op::rotary::{Rotary, RotaryFields, RotarySpec, RotaryStyle};
use mlakit::op::route::{GroupScore, Route, RouteFields, RouteSpec, Scoring};
use mlakit::op::sample::{Sample, SampleFields, SampleSpec};
use mlakit::op::spec::Scalar;
use mlakit::op::writer::{Writer, WriterFields, WriterSpec};
use mlakit::{Category, LseBase, Op, Plan, RecordFormat, Runs, Splits};

use super::SuiteDevice;
use super::dense_inputs::{Query, shape};
use super::writer;

const HEADS: [usize; 7] = [1, 3, 8, 11, 16, 99, 128];
const FLOATS: [Float; 2] = [Float::Bf16, Float::F32];
const SWITCH: [bool; 2] = [false, true];

/// Prepares each; the ledger saw the probes and shows none of them any more.
fn prepares<O: Op, D: SuiteDevice + Runs<O>>(device: &D, specs: Vec<O::Spec>) {
    assert!(!specs.is_empty());
    for spec in specs {
        let plan = Plan::<O>::for_device::<D>(&spec, device.facts()).unwrap();
        plan.prepare(device).unwrap_or_else(|error| panic!("{} {spec:?}: {error}", O::NAME));
        assert_eq!(device.census().live(Category::Probe), 0, "{} {spec:?}", O::NAME);
    }
    assert!(device.census().peak(Category::Probe) > 0);
    assert_eq!(device.census().live(Category::Retiring), 0);
}

fn scalar(value: f32) -> Scalar {
    Scalar::try_from(value).unwrap()
}

pub fn dense_prepares<D: SuiteDevice>(device: &D) {
    let mut specs = Vec::new();
    for (index, heads) in HEADS.into_iter().enumerate() {
        for (record, query) in [
            (RecordFormat::Bf16, Query::Bf16),
            (RecordFormat::E4m3, Query::Bf16),
            (RecordFormat::E4m3, Query::E4m3),
            (RecordFormat::E4m3, Query::Quantized),
        ] {
            let mut one = shape(heads, (66, 34), &[(500, 3), (70, 1)]);
            (one.record, one.query) = (record, query);
            one.page_size = [1, 16, 48, 64, 256][index % 5];
            one.splits = [Splits::Auto, Splits::Count(7), Splits::FixedTokens(128)][index % 3];
            one.partial = [Partial::Bf16, Partial::F32][index % 2];
            one.lse = [LseBase::Natural, LseBase::Base2][index / 2 % 2];
            one.window = [None, Some(1), Some(66)][index / 3 % 3];
            one.row_lengths = index % 4 == 3;
            one.padding.0 = [0, 6][index % 2];
            specs.push(one.spec());
        }
    }
    for widths in [(576, 512), (512, 512), (320, 256), (288, 256), (160, 128), (1088, 1024)] {
        specs.push(shape(16, widths, &[(200, 2)]).spec());
    }
    prepares::<Dense, D>(device, specs);
}

pub fn merge_prepares<D: SuiteDevice>(device: &D) {
    let mut specs = Vec::new();
    for (splits, heads, value_width) in
        [(1, 1, 1), (2, 3, 34), (7, 11, 512), (64, 8, 128), (33, 99, 1024)]
    {
        for partial in [Partial::Bf16, Partial::F32] {
            for lse in [LseBase::Natural, LseBase::Base2] {
                for (sink, sink_in_lse) in [(false, false), (true, false), (true, true)] {
                    let max_rows = 5;
                    let fields = MergeFields {
                        splits,
                        heads,
                        value_width,
                        partial,
                        lse,
                        sink,
                        sink_in_lse,
                        max_rows,
                    };
                    specs.push(MergeSpec::new(fields).unwrap());
                }
            }
        }
    }
    prepares::<Merge, D>(device, specs);
}

pub fn writer_prepares<D: SuiteDevice>(device: &D) {
    let mut specs = Vec::new();
    for record in RecordFormat::ALL {
        for widths in [(512, 64), (512, 0), (448, 64), (33, 8), (1, 0)] {
            for page_size in [1, 16, 48, 256] {
                for padding in [0, 10] {
                    specs.extend(writer_spec(record, widths, page_size, padding));
                }
            }
        }
    }
    let facts = device.facts();
    specs.retain(|spec| Plan::<Writer>::for_device::<D>(spec, facts).is_ok());
    assert!(specs.len() >= 2 * 5 * 4 * 2, "at least bf16 and e4m3 are written everywhere");
    prepares::<Writer, D>(device, specs);
}

/// The writer of a token, if the format can store it.
fn writer_spec(
    record: RecordFormat,
    (latent, rope): (usize, usize),
    page_size: usize,
    padding: usize,
) -> Option<WriterSpec> {
    let fields = WriterFields {
        record,
        record_width: (padding > 0).then_some(latent + rope + padding),
        page_size,
        max_rows: 1 + page_size,
        ..writer::token((record, latent, rope))
    };
    WriterSpec::new(fields).ok()
}

pub fn projection_prepares<D: SuiteDevice>(device: &D) {
    let mut specs = Vec::new();
    for heads in HEADS {
        for (in_width, out_width) in [(128, 512), (512, 128), (2, 1), (34, 19)] {
            for (output, gap) in [(Float::Bf16, 0), (Float::F32, 0), (Float::Bf16, 26)] {
                let fields = ProjectionFields {
                    heads,
                    in_width,
                    out_width,
                    in_stride: (gap > 0).then_some(in_width + gap),
                    out_stride: (gap > 0).then_some(out_width + gap),
                    output,
                    max_rows: 3,
                };
                specs.push(ProjectionSpec::new(fields).unwrap());
            }
        }
    }
    prepares::<Projection, D>(device, specs);
}

pub fn linear_prepares<D: SuiteDevice>(device: &D) {
    let mut specs = Vec::new();
    let experts = |used, combine| Some(Experts { count: Some(6), used, combine });
    for (in_width, out_width) in [(1, 1), (7, 33), (256, 258), (576, 96)] {
        for input in FLOATS {
            for (output, accumulate) in
                [(Float::Bf16, false), (Float::F32, false), (Float::F32, true)]
            {
                for (bias, experts) in [
                    (false, None),
                    (true, None),
                    (false, experts(1, false)),
                    (false, experts(3, false)),
                    (false, experts(3, true)),
                    (false, Some(Experts { count: None, used: 2, combine: true })),
                ] {
                    let fields = LinearFields {
                        in_width,
                        out_width,
                        max_rows: 5,
                        input,
                        output,
                        accumulate,
                        bias,
                        experts,
                    };
                    specs.push(LinearSpec::new(fields).unwrap());
                }
            }
        }
    }
    prepares::<Linear, D>(device, specs);
}

pub fn norm_prepares<D: SuiteDevice>(device: &D) {
    let mut specs = Vec::new();
    for width in [1, 7, 64, 512, 7168] {
        for input in FLOATS {
            for (narrow, wide) in [(true, false), (true, true), (false, true)] {
                for gap in [0, 5] {
                    let fields = NormFields {
                        width,
                        eps: scalar(1e-6),
                        center: false,
                        bias: false,
                        max_rows: 3,
                        input,
                        in_stride: (gap > 0).then_some(width + gap),
                        out_stride: (narrow && gap > 0).then_some(width + 2 * gap),
                        narrow,
                        wide,
                    };
                    specs.push(NormSpec::new(fields).unwrap());
                }
            }
        }
    }
    prepares::<Norm, D>(device, specs);
}

pub fn rotary_prepares<D: SuiteDevice>(device: &D) {
    let mut specs = Vec::new();
    for heads in [1, 3, 128] {
        for width in [2, 6, 64, 258] {
            for style in [RotaryStyle::Pair, RotaryStyle::Half] {
                for (input, gap, factor) in
                    [(Float::Bf16, 0, 1.0), (Float::F32, 0, 1.3), (Float::Bf16, 128, 0.7)]
                {
                    let fields = RotaryFields {
                        heads,
                        width,
                        style,
                        input,
                        before: 0,
                        after: 0,
                        in_stride: (gap > 0).then_some(width + gap),
                        out_stride: (gap > 0).then_some(width + 2 * gap),
                        attention_factor: scalar(factor),
                        max_rows: 3,
                    };
                    specs.push(RotarySpec::new(fields).unwrap());
                }
            }
        }
    }
    prepares::<Rotary, D>(device, specs);
}

pub fn embed_and_activation_prepare<D: SuiteDevice>(device: &D) {
    let (mut embeds, mut activations) = (Vec::new(), Vec::new());
    for width in [1, 33, 256] {
        for (first, second) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let (table, output) = (FLOATS[first], FLOATS[second]);
            for (vocab, scale) in [(Some(19), 1.0), (None, 1.5)] {
                let scale = scalar(scale);
                let fields = EmbedFields { width, vocab, table, output, scale, max_rows: 5 };
                embeds.push(EmbedSpec::new(fields).unwrap());
            }
            let kind = ActivationKind::Silu;
            let (input, gate_span) = (table, None);
            let fields = ActivationFields { width, gate_span, max_rows: 5, input, output, kind };
            activations.push(ActivationSpec::new(fields).unwrap());
        }
    }
    prepares::<Embed, D>(device, embeds);
    prepares::<Activation, D>(device, activations);
}

pub fn route_and_sample_prepare<D: SuiteDevice>(device: &D) {
    let mut routes = Vec::new();
    for (experts, used, groups, used_groups) in
        [(1, 1, 1, None), (6, 2, 1, None), (16, 4, 4, Some(2)), (256, 8, 8, Some(4))]
    {
        for scoring in [Scoring::Sigmoid, Scoring::Softmax] {
            for (bias, normalize, group_score) in [
                (false, false, GroupScore::TopTwoSum),
                (true, true, GroupScore::TopTwoSum),
                (true, false, GroupScore::Max),
            ] {
                let fields = RouteFields {
                    hidden: 40,
                    experts,
                    used,
                    groups,
                    used_groups,
                    scoring,
                    bias,
                    group_score,
                    normalize,
                    scale: scalar(2.5),
                    max_rows: 6,
                };
                routes.push(RouteSpec::new(fields).unwrap());
            }
        }
    }
    prepares::<Route, D>(device, routes);
    let sample = |vocab, temperature| {
        SampleSpec::new(SampleFields { vocab, max_rows: 4, temperature }).unwrap()
    };
    let vocabs = [1, 2, 258, 4097];
    let specs = vocabs.into_iter().flat_map(|vocab| SWITCH.map(|with| sample(vocab, with)));
    prepares::<Sample, D>(device, specs.collect());
}
