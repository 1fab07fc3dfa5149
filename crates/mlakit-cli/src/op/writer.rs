//! `writer` from a case file.

use half::bf16;
use mlakit::op::writer::{Writer, WriterArgs, WriterCase, WriterInput, oracle};
use mlakit::scratch::Fault;
use mlakit::{Choice, Device, Dtype, Error, PageGeometry, RecordFormat};
use serde_json::{Map, Value};

use super::dense::given;
use super::source::{Lying, Source};
use super::{Call, CaseOp, Exact, Expected, Optional, Values};
use crate::Failure;
use crate::case::{Axis, Dims, Table, TensorRule, Tensors};

/// The width of tokens that no tensor has, where the spec leaves it open.
const MISSING_WIDTH: u64 = 512;

impl CaseOp for Writer {
    const TABLE: Table = Table {
        inputs: &[
            TensorRule::optional("latent", &[Dtype::Bf16], &[Axis::Of("N"), Axis::Of("L")]),
            TensorRule::optional("rope", &[Dtype::Bf16], &[Axis::Of("N"), Axis::Of("r")]),
            TensorRule::optional("key", &[Dtype::Bf16], &[Axis::Of("N"), Axis::Of("D")]),
            TensorRule::needed("slots", &[Dtype::I64], &[Axis::Of("M")]),
            TensorRule::needed("cache", &[Dtype::U8], &[Axis::Of("P"), Axis::Of("page_bytes")]),
            TensorRule::optional("kv_scale", &[Dtype::F32], &[Axis::Exactly(1)]),
        ],
        equal: &[("latent_width", "L"), ("rope_width", "r"), ("key_width", "D")],
        capacity: &[("max_rows", "M")],
    };

    fn derive(spec: &mut Map<String, Value>, tensors: &Tensors<'_>, _: &Dims) {
        // Where tokens are missing, or there are some that do not belong to the record, the spec shall stand all the same: then the error
        // is about the tensor, by name.
        let name = spec.get("record").and_then(Value::as_str).unwrap_or_default();
        let is_index = RecordFormat::parse(name).is_ok_and(RecordFormat::is_index);
        let (own, other) = if is_index {
            ("key_width", &[("latent", "latent_width"), ("rope", "rope_width")][..])
        } else {
            ("latent_width", &[("key", "key_width")][..])
        };
        let fits = |width: &Value| {
            let rope = spec.get("rope_width").and_then(Value::as_u64).unwrap_or(0);
            width.as_u64().and_then(|width| width.checked_sub(rope)).filter(|width| *width > 0)
        };
        let missing = spec.get("record_width").and_then(fits).unwrap_or(MISSING_WIDTH);
        spec.entry(own).or_insert_with(|| missing.into());
        for (_, width) in other.iter().filter(|(tensor, _)| tensors.find(tensor).is_some()) {
            spec.remove(*width);
        }
    }

    fn optional(spec: &Self::Spec) -> Vec<Optional> {
        let because = "the spec's `record` decides";
        let is_index = spec.record.is_index();
        vec![
            Optional { name: "latent", wanted: !is_index, because },
            Optional { name: "key", wanted: is_index, because },
            Optional {
                name: "rope",
                wanted: spec.rope_width > 0,
                because: "the spec's `rope_width` decides",
            },
            Optional { name: "kv_scale", wanted: spec.record.is_scaled(), because },
        ]
    }

    fn pages(spec: &Self::Spec) -> Option<PageGeometry> {
        Some(spec.pages())
    }

    fn check(call: &Call<'_, Self>) -> Result<(), Failure> {
        let (rows, slots) = (call.dims.of("N"), call.dims.of("M"));
        // Without tokens of either kind the error is about the tensor that is missing.
        let has_tokens = ["latent", "key"].iter().any(|name| call.tensors.find(name).is_some());
        if slots <= rows || !has_tokens {
            return Ok(());
        }
        Err(Failure::input(
            format!("tensor `slots`: needed I64 [M], M <= N={rows}, given I64 [{slots}]"),
            "give a slot for each token, or for the first ones",
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
        let tokens = if spec.record.is_index() {
            WriterInput::Key(source.input("key", plain)?)
        } else {
            WriterInput::Latent {
                latent: source.input("latent", plain)?,
                rope: given(spec.rope_width > 0, "rope", source)?,
            }
        };
        Ok(WriterArgs {
            tokens,
            slots: source.input("slots", plain)?,
            cache: source.cache_mut()?,
            kv_scale: given(spec.record.is_scaled(), "kv_scale", source)?,
            scratch: source.scratch(),
        })
    }

    fn oracle(call: &Call<'_, Self>, _: &Choice) -> Exact {
        let tensors = &call.tensors;
        let first = if call.spec.record.is_index() { "key" } else { "latent" };
        let (latent, rope) = (tensors.values::<bf16>(first), tensors.values::<bf16>("rope"));
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
