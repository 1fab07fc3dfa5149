//! `writer` from a case file.

use half::bf16;
use mlakit::op::writer::{Writer, WriterArgs, WriterCase, oracle};
use mlakit::scratch::Fault;
use mlakit::{Choice, Device, Dtype, Error, PageGeometry};
use serde_json::{Map, Value};

use super::dense::given;
use super::source::{Lying, Source};
use super::{Call, CaseOp, Exact, Expected, Optional, Values};
use crate::Failure;
use crate::case::{Axis, Dims, Table, TensorRule, Tensors};

impl CaseOp for Writer {
    const TABLE: Table = Table {
        inputs: &[
            TensorRule::needed("latent", &[Dtype::Bf16], &[Axis::Of("N"), Axis::Of("L")]),
            TensorRule::optional("rope", &[Dtype::Bf16], &[Axis::Of("N"), Axis::Of("r")]),
            TensorRule::needed("slots", &[Dtype::I64], &[Axis::Of("M")]),
            TensorRule::needed("cache", &[Dtype::U8], &[Axis::Of("P"), Axis::Of("page_bytes")]),
            TensorRule::optional("kv_scale", &[Dtype::F32], &[Axis::Exactly(1)]),
        ],
        equal: &[("latent_width", "L"), ("rope_width", "r")],
        capacity: &[("max_rows", "M")],
    };

    fn derive(spec: &mut Map<String, Value>, _: &Tensors<'_>, _: &Dims) {
        spec.entry("rope_width").or_insert_with(|| 0.into());
    }

    fn optional(spec: &Self::Spec) -> Vec<Optional> {
        vec![
            Optional {
                name: "rope",
                wanted: spec.rope_width > 0,
                because: "the spec's `rope_width` decides",
            },
            Optional {
                name: "kv_scale",
                wanted: spec.record.is_scaled(),
                because: "the spec's `record` decides",
            },
        ]
    }

    fn pages(spec: &Self::Spec) -> Option<PageGeometry> {
        Some(spec.pages())
    }

    fn check(call: &Call<'_, Self>) -> Result<(), Failure> {
        let (rows, slots) = (call.dims.of("N"), call.dims.of("M"));
        if slots <= rows {
            return Ok(());
        }
        Err(Failure::input(
            format!("tensor `slots`: needed I64 [M], M <= N={rows}, given I64 [{slots}]"),
            "give a slot for each token of `latent`, or for the first ones",
        ))
    }

    fn outputs(call: &Call<'_, Self>) -> Vec<Expected> {
        let shape = vec![call.dims.of("P"), call.dims.of("page_bytes")];
        vec![Expected::new("cache", Dtype::U8, shape)]
    }

    fn args<D: Device, S: Source<D>>(
        call: &Call<'_, Self>,
        source: &mut S,
    ) -> Result<WriterArgs<'static, D>, Error> {
        let (spec, plain) = (&call.spec, Lying::default());
        Ok(WriterArgs {
            latent: source.input("latent", plain)?,
            rope: given(spec.rope_width > 0, "rope", source)?,
            slots: source.input("slots", plain)?,
            cache: source.cache_mut()?,
            kv_scale: given(spec.record.is_scaled(), "kv_scale", source)?,
            scratch: source.scratch(),
        })
    }

    fn oracle(call: &Call<'_, Self>, _: &Choice) -> Exact {
        let tensors = &call.tensors;
        let (latent, rope) = (tensors.values::<bf16>("latent"), tensors.values::<bf16>("rope"));
        let slots = tensors.values::<i64>("slots");
        let case = WriterCase {
            latent: &latent,
            rope: &rope,
            slots: &slots,
            page_stride_bytes: call.dims.of("page_bytes"),
            kv_scale: tensors.scalar("kv_scale").unwrap_or(1.0),
        };
        let mut cache = tensors.values::<u8>("cache").into_owned();
        let skipped = oracle(&call.spec, &case, &mut cache);
        let mut faults = super::NO_FAULTS;
        faults[Fault::Id as usize] = skipped;
        let outputs = Self::outputs(call).into_iter().zip([Values::Bytes(cache)]).collect();
        Exact { outputs, faults }
    }
}
