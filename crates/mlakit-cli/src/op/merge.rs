//! `merge` from a case file.

use mlakit::op::merge::{LseInput, Merge, MergeArgs, MergeCase, Partial, PartialInput, oracle};
use mlakit::{Choice, Device, Dtype, Error, LseBase};
use safetensors::Dtype as FileDtype;
use serde_json::{Map, Value};

use super::dense::{given, lse_output};
use super::source::{Lying, Source};
use super::{Call, CaseOp, Exact, Expected, NO_FAULTS, Optional};
use crate::case::tensor::file_dtype;
use crate::case::{Axis, Dims, Table, TensorRule, Tensors};

impl CaseOp for Merge {
    const TABLE: Table = Table {
        inputs: &[
            TensorRule::needed(
                "outs",
                &[Dtype::Bf16, Dtype::F32],
                &[Axis::Of("S"), Axis::Of("R"), Axis::Of("H"), Axis::Of("V")],
            ),
            TensorRule::needed(
                "lses",
                &[Dtype::F32],
                &[Axis::Of("S"), Axis::Of("R"), Axis::Of("H")],
            ),
            TensorRule::optional("sink", &[Dtype::F32], &[Axis::Of("H")]),
        ],
        equal: &[("splits", "S"), ("heads", "H"), ("value_width", "V")],
        capacity: &[("max_rows", "R")],
    };

    fn derive(spec: &mut Map<String, Value>, tensors: &Tensors<'_>, _: &Dims) {
        let is_f32 = tensors.find("outs").is_some_and(|outs| outs.dtype == FileDtype::F32);
        spec.entry("partial").or_insert_with(|| if is_f32 { "f32" } else { "bf16" }.into());
        let has_sink = tensors.find("sink").is_some();
        spec.entry("sink").or_insert_with(|| has_sink.into());
    }

    fn optional(spec: &Self::Spec) -> Vec<Optional> {
        let because = "the spec's `sink` decides";
        vec![Optional { name: "sink", wanted: spec.sink, because }]
    }

    fn check(call: &Call<'_, Self>) -> Result<(), crate::Failure> {
        let needed = file_dtype(call.spec.partial.dtype());
        match call.tensors.find("outs").map(|outs| outs.dtype) {
            Some(given) if given != needed => Err(crate::Failure::input(
                format!("tensor `outs`: needed {needed} (the spec's `partial`), given {given}"),
                "remove `partial` from the spec, or change the tensor",
            )),
            _ => Ok(()),
        }
    }

    fn outputs(call: &Call<'_, Self>) -> Vec<Expected> {
        let (rows, heads) = (call.dims.of("R"), call.spec.heads);
        vec![
            Expected::new("out", Dtype::Bf16, vec![rows, heads, call.spec.value_width]),
            Expected::new("lse", Dtype::F32, vec![rows, heads]),
        ]
    }

    fn args<D: Device, S: Source<D>>(
        call: &Call<'_, Self>,
        source: &mut S,
    ) -> Result<MergeArgs<'static, D>, Error> {
        let (spec, plain) = (&call.spec, Lying::default());
        let results = call.dims.of("R") * spec.heads;
        Ok(MergeArgs {
            outs: match spec.partial {
                Partial::Bf16 => PartialInput::Bf16(source.input("outs", plain)?),
                Partial::F32 => PartialInput::F32(source.input("outs", plain)?),
            },
            lses: match spec.lse {
                LseBase::Natural => LseInput::Natural(source.input("lses", plain)?),
                LseBase::Base2 => LseInput::Base2(source.input("lses", plain)?),
            },
            sink: given(spec.sink, "sink", source)?,
            out: source.output("out", results * spec.value_width, plain)?,
            lse: lse_output(spec.lse, results, source)?,
            scratch: source.scratch(),
        })
    }

    fn oracle(call: &Call<'_, Self>, _: &Choice) -> Exact {
        let (spec, tensors) = (&call.spec, &call.tensors);
        let outs: Vec<f32> = match spec.partial {
            Partial::Bf16 => {
                tensors.values::<half::bf16>("outs").iter().map(|v| v.to_f32()).collect()
            }
            Partial::F32 => tensors.values("outs").into_owned(),
        };
        let (lses, sink) = (tensors.values::<f32>("lses"), tensors.values::<f32>("sink"));
        let sink = spec.sink.then_some(&sink[..]);
        let (out, lse) = oracle(spec, &MergeCase { outs: &outs, lses: &lses, sink });
        Exact::numbers(call, vec![out, lse], NO_FAULTS)
    }
}
