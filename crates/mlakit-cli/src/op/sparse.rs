//! `sparse` from a case file.

use half::bf16;
use mlakit::op::dense::{QueryCase, QueryDtype, QueryInput};
use mlakit::op::sparse::{
    ExtraCase, ExtraInput, Selection, SelectionCase, SelectionInput, Sparse, SparseArgs,
    SparseCase, oracle,
};
use mlakit::splits::{BLOCK, Budget, Capacity, Division, Splits};
use mlakit::{Choice, Device, Dtype, E4m3, Error, PageGeometry};
use safetensors::Dtype as FileDtype;
use serde_json::{Map, Value};

use super::dense::{given, lse_output};
use super::source::{Lying, Source};
use super::{Call, CaseOp, Exact, Expected, Optional};
use crate::Failure;
use crate::case::shape::number;
use crate::case::{Axis, Dims, Table, TensorRule, Tensors};

impl CaseOp for Sparse {
    const TABLE: Table = Table {
        inputs: &[
            TensorRule::needed(
                "q",
                &[Dtype::Bf16, Dtype::E4m3],
                &[Axis::Of("R"), Axis::Of("H"), Axis::Of("K")],
            ),
            TensorRule::needed("cache", &[Dtype::U8], &[Axis::Of("P"), Axis::Of("page_bytes")]),
            TensorRule::optional("positions", &[Dtype::I32], &[Axis::Of("R"), Axis::Of("T")]),
            TensorRule::optional("counts", &[Dtype::I32], &[Axis::Of("R")]),
            TensorRule::optional("request", &[Dtype::I32], &[Axis::Of("R")]),
            TensorRule::optional("page_table", &[Dtype::I32], &[Axis::Of("B"), Axis::Of("W")]),
            TensorRule::optional("slots", &[Dtype::I32], &[Axis::Of("R"), Axis::Of("T")]),
            TensorRule::optional("slot_counts", &[Dtype::I32], &[Axis::Of("R")]),
            TensorRule::optional("sink", &[Dtype::F32], &[Axis::Of("H")]),
            TensorRule::optional(
                "extra_cache",
                &[Dtype::U8],
                &[Axis::Of("P2"), Axis::Of("extra_page_bytes")],
            ),
            TensorRule::optional("extra_slots", &[Dtype::I32], &[Axis::Of("R"), Axis::Of("T2")]),
            TensorRule::optional("extra_slot_counts", &[Dtype::I32], &[Axis::Of("R")]),
            TensorRule::optional("kv_scale", &[Dtype::F32], &[Axis::Exactly(1)]),
            TensorRule::optional("q_scale", &[Dtype::F32], &[Axis::Exactly(1)]),
        ],
        equal: &[("heads", "H"), ("qk_width", "K")],
        capacity: &[
            ("max_rows", "R"),
            ("max_batch", "B"),
            ("max_table_width", "W"),
            ("width", "T"),
            ("extra_width", "T2"),
        ],
    };
    const DIVIDES: bool = true;

    fn derive(spec: &mut Map<String, Value>, tensors: &Tensors<'_>, dims: &Dims) {
        let has = |name: &str| tensors.find(name).is_some();
        let is_e4m3 = tensors.find("q").is_some_and(|q| q.dtype == FileDtype::F8_E4M3);
        spec.entry("query").or_insert_with(|| if is_e4m3 { "e4m3" } else { "bf16" }.into());
        let selection = if has("slots") { "slots" } else { "positions" };
        spec.entry("selection").or_insert_with(|| selection.into());
        spec.entry("sink").or_insert_with(|| has("sink").into());
        // Where a list is missing, the spec shall stand all the same: the error is about the list.
        spec.entry("width").or_insert_with(|| 1.into());
        if spec.contains_key("extra_record") {
            spec.entry("extra_width").or_insert_with(|| 1.into());
        }
        if spec.get("selection").and_then(Value::as_str) == Some("positions") {
            spec.entry("max_batch").or_insert_with(|| 1.into());
            spec.entry("max_table_width").or_insert_with(|| 1.into());
            let page_size = number(spec, "page_size").unwrap_or(1);
            let covered = dims.of("W").saturating_mul(page_size).clamp(1, 1 << 30);
            spec.entry("max_kv_tokens").or_insert_with(|| covered.into());
        }
    }

    fn optional(spec: &Self::Spec) -> Vec<Optional> {
        let positions = spec.selection == Selection::Positions;
        let extra = spec.extra_record.is_some();
        let tensor = |name, wanted, because| Optional { name, wanted, because };
        let mut list = Vec::new();
        for name in ["positions", "counts", "request", "page_table"] {
            list.push(tensor(name, positions, "the spec's `selection` decides"));
        }
        for name in ["slots", "slot_counts"] {
            list.push(tensor(name, !positions, "the spec's `selection` decides"));
        }
        for name in ["extra_cache", "extra_slots", "extra_slot_counts"] {
            list.push(tensor(name, extra, "the spec's `extra_record` decides"));
        }
        list.push(tensor("sink", spec.sink, "the spec's `sink` decides"));
        list.push(tensor("kv_scale", spec.has_kv_scale(), "the spec's `record` decides"));
        let because = "the dtype of q and the spec's `quantize_query` decide";
        list.push(tensor("q_scale", spec.has_query_scale(), because));
        list
    }

    fn pages(spec: &Self::Spec) -> Option<PageGeometry> {
        Some(spec.pages())
    }

    fn extra_pages(spec: &Self::Spec) -> Option<PageGeometry> {
        spec.extra().map(|extra| extra.pages)
    }

    /// A number of splits that was asked for and is not what the plan has.
    fn notes(spec: &Self::Spec, choice: &Choice) -> Vec<String> {
        let Splits::Count(asked) = spec.splits else { return Vec::new() };
        if choice.splits >= asked {
            return Vec::new();
        }
        let unbounded = Capacity { budget: Budget::default(), ..spec.capacity() };
        let blocks = unbounded.blocks();
        let why = if blocks <= choice.splits {
            format!("a row has at most {blocks} blocks of {BLOCK} columns")
        } else {
            "`budget` allows no more".to_owned()
        };
        vec![format!("{asked} splits were asked for, the plan has {}: {why}", choice.splits)]
    }

    fn check(call: &Call<'_, Self>) -> Result<(), Failure> {
        let given = call.tensors.find("q").map(|q| q.dtype);
        let needed = match call.spec.query {
            QueryDtype::Bf16 => FileDtype::BF16,
            QueryDtype::E4m3 => FileDtype::F8_E4M3,
        };
        match given {
            Some(given) if given != needed => Err(Failure::input(
                format!("tensor `q`: needed {needed} (the spec's `query`), given {given}"),
                "remove `query` from the spec, or change the tensor",
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
    ) -> Result<SparseArgs<'static, D>, Error> {
        let (spec, plain) = (&call.spec, Lying::default());
        let results = call.dims.of("R") * spec.heads;
        let extra = match spec.extra() {
            None => None,
            Some(_) => Some(ExtraInput {
                cache: source.extra_cache()?,
                slots: source.input("extra_slots", plain)?,
                slot_counts: source.input("extra_slot_counts", plain)?,
            }),
        };
        Ok(SparseArgs {
            q: match spec.query {
                QueryDtype::Bf16 => QueryInput::Bf16(source.input::<bf16>("q", plain)?),
                QueryDtype::E4m3 => QueryInput::E4m3(source.input::<E4m3>("q", plain)?),
            },
            cache: source.cache()?,
            selection: match spec.selection {
                Selection::Positions => SelectionInput::Positions {
                    positions: source.input("positions", plain)?,
                    counts: source.input("counts", plain)?,
                    request: source.input("request", plain)?,
                    page_table: source.input("page_table", plain)?,
                    table_width: call.dims.of("W"),
                },
                Selection::Slots => SelectionInput::Slots {
                    slots: source.input("slots", plain)?,
                    counts: source.input("slot_counts", plain)?,
                },
            },
            extra,
            sink: given(spec.sink, "sink", source)?,
            kv_scale: given(spec.has_kv_scale(), "kv_scale", source)?,
            q_scale: given(spec.has_query_scale(), "q_scale", source)?,
            out: source.output("out", results * spec.value_width, plain)?,
            lse: lse_output(spec.lse, results, source)?,
            scratch: source.scratch(),
        })
    }

    /// With the splits of the device's plan, whose results it rounds as the device does.
    fn oracle(call: &Call<'_, Self>, choice: &Choice) -> Exact {
        let (spec, tensors) = (&call.spec, &call.tensors);
        let (wide, narrow) = (tensors.values::<bf16>("q"), tensors.values::<u8>("q"));
        let (cache, extra_cache) = (tensors.values("cache"), tensors.values("extra_cache"));
        let i32s = |name| tensors.values::<i32>(name);
        let (positions, counts) = (i32s("positions"), i32s("counts"));
        let (request, page_table) = (i32s("request"), i32s("page_table"));
        let (slots, slot_counts) = (i32s("slots"), i32s("slot_counts"));
        let (extra_slots, extra_counts) = (i32s("extra_slots"), i32s("extra_slot_counts"));
        let sink = tensors.values::<f32>("sink");
        let case = SparseCase {
            q: match spec.query {
                QueryDtype::Bf16 => QueryCase::Bf16(&wide),
                QueryDtype::E4m3 => QueryCase::E4m3(&narrow),
            },
            cache: &cache,
            page_stride_bytes: call.dims.of("page_bytes"),
            selection: match spec.selection {
                Selection::Positions => SelectionCase::Positions {
                    positions: &positions,
                    counts: &counts,
                    request: &request,
                    page_table: &page_table,
                    table_width: call.dims.of("W"),
                },
                Selection::Slots => SelectionCase::Slots { slots: &slots, counts: &slot_counts },
            },
            extra: spec.extra().map(|_| ExtraCase {
                cache: &extra_cache,
                page_stride_bytes: call.dims.of("extra_page_bytes"),
                slots: &extra_slots,
                slot_counts: &extra_counts,
            }),
            sink: spec.sink.then_some(&sink[..]),
            kv_scale: tensors.scalar("kv_scale").unwrap_or(1.0),
            q_scale: tensors.scalar("q_scale").unwrap_or(1.0),
        };
        let result = oracle(spec, Division::new(spec.splits, choice.splits), &case);
        Exact::numbers(call, vec![result.out, result.lse], result.faults)
    }
}
