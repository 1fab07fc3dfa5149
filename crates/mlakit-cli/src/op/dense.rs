//! `dense` from a case file.

use half::bf16;
use mlakit::op::dense::{
    Dense, DenseArgs, DenseCase, DenseSpec, QueryCase, QueryDtype, QueryInput, oracle,
};
use mlakit::op::merge::LseOutput;
use mlakit::splits::{BLOCK, Budget, Capacity, Division, Splits};
use mlakit::{Choice, Device, Dtype, E4m3, Element, Error, Input, LseBase, PageGeometry};
use safetensors::Dtype as FileDtype;
use serde_json::{Map, Value};

use super::source::{Lying, Source};
use super::{Call, CaseOp, Exact, Expected, Optional};
use crate::case::shape::number;
use crate::case::{Axis, Dims, Table, TensorRule, Tensors};

impl CaseOp for Dense {
    const TABLE: Table = Table {
        inputs: &[
            TensorRule::needed(
                "q",
                &[Dtype::Bf16, Dtype::E4m3],
                &[Axis::Of("R"), Axis::Of("H"), Axis::Of("K")],
            ),
            TensorRule::needed("cache", &[Dtype::U8], &[Axis::Of("P"), Axis::Of("page_bytes")]),
            TensorRule::needed("page_table", &[Dtype::I32], &[Axis::Of("B"), Axis::Of("W")]),
            TensorRule::needed("kv_lens", &[Dtype::I32], &[Axis::Of("B")]),
            TensorRule::needed("q_offsets", &[Dtype::I32], &[Axis::OneMore("B")]),
            TensorRule::optional("row_kv_lens", &[Dtype::I32], &[Axis::Of("R")]),
            TensorRule::optional("kv_scale", &[Dtype::F32], &[Axis::Exactly(1)]),
            TensorRule::optional("q_scale", &[Dtype::F32], &[Axis::Exactly(1)]),
        ],
        equal: &[("heads", "H"), ("qk_width", "K")],
        capacity: &[("max_rows", "R"), ("max_batch", "B"), ("max_table_width", "W")],
    };
    const DIVIDES: bool = true;

    fn derive(spec: &mut Map<String, Value>, tensors: &Tensors<'_>, dims: &Dims) {
        let is_e4m3 = tensors.find("q").is_some_and(|q| q.dtype == FileDtype::F8_E4M3);
        spec.entry("query").or_insert_with(|| if is_e4m3 { "e4m3" } else { "bf16" }.into());
        let each_row = tensors.find("row_kv_lens").is_some();
        spec.entry("row_lengths").or_insert_with(|| each_row.into());
        if let Some(page_size) = number(spec, "page_size") {
            let covered = dims.of("W").saturating_mul(page_size).clamp(1, 1 << 30);
            spec.entry("max_kv_tokens").or_insert_with(|| covered.into());
        }
    }

    fn optional(spec: &Self::Spec) -> Vec<Optional> {
        vec![
            Optional {
                name: "row_kv_lens",
                wanted: spec.row_lengths,
                because: "the spec's `row_lengths` decides",
            },
            Optional {
                name: "kv_scale",
                wanted: spec.record.is_scaled(),
                because: "the spec's `record` decides",
            },
            Optional {
                name: "q_scale",
                wanted: spec.has_query_scale(),
                because: "the dtype of q and the spec's `quantize_query` decide",
            },
        ]
    }

    fn pages(spec: &Self::Spec) -> Option<PageGeometry> {
        Some(spec.pages())
    }

    /// A number of splits that was asked for and is not what the plan has; a table that is too
    /// narrow for the tokens; why it is not the device's fastest kernel.
    fn notes(spec: &Self::Spec, choice: &Choice) -> Vec<String> {
        let kernel = choice.note.clone();
        fewer_splits(spec, choice).into_iter().chain(narrow_table(spec)).chain(kernel).collect()
    }

    fn check(call: &Call<'_, Self>) -> Result<(), crate::Failure> {
        let given = call.tensors.find("q").map(|q| q.dtype);
        let needed = match call.spec.query {
            QueryDtype::Bf16 => FileDtype::BF16,
            QueryDtype::E4m3 => FileDtype::F8_E4M3,
        };
        match given {
            Some(given) if given != needed => Err(crate::Failure::input(
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
    ) -> Result<DenseArgs<'static, D>, Error> {
        let (spec, plain) = (&call.spec, Lying::default());
        let results = call.dims.of("R") * spec.heads;
        let row_kv_lens = given(spec.row_lengths, "row_kv_lens", source)?;
        let kv_scale = given(spec.record.is_scaled(), "kv_scale", source)?;
        let q_scale = given(spec.has_query_scale(), "q_scale", source)?;
        Ok(DenseArgs {
            q: match spec.query {
                QueryDtype::Bf16 => QueryInput::Bf16(source.input::<bf16>("q", plain)?),
                QueryDtype::E4m3 => QueryInput::E4m3(source.input::<E4m3>("q", plain)?),
            },
            cache: source.cache()?,
            page_table: source.input("page_table", plain)?,
            kv_lens: source.input("kv_lens", plain)?,
            q_offsets: source.input("q_offsets", plain)?,
            row_kv_lens,
            kv_scale,
            q_scale,
            out: source.output("out", results * spec.value_width, plain)?,
            lse: lse_output(spec.lse, results, source)?,
            scratch: source.scratch(),
        })
    }

    /// With the splits of the device's plan, whose results it rounds as the device does.
    fn oracle(call: &Call<'_, Self>, choice: &Choice) -> Exact {
        let (spec, tensors) = (&call.spec, &call.tensors);
        let (wide, narrow) = (tensors.values::<bf16>("q"), tensors.values::<u8>("q"));
        let (cache, table) = (tensors.values::<u8>("cache"), tensors.values::<i32>("page_table"));
        let (lens, offsets) =
            (tensors.values::<i32>("kv_lens"), tensors.values::<i32>("q_offsets"));
        let row_lens = tensors.values::<i32>("row_kv_lens");
        let result = oracle(
            spec,
            Division::new(spec.splits, choice.splits),
            &DenseCase {
                q: match spec.query {
                    QueryDtype::Bf16 => QueryCase::Bf16(&wide),
                    QueryDtype::E4m3 => QueryCase::E4m3(&narrow),
                },
                cache: &cache,
                page_stride_bytes: call.dims.of("page_bytes"),
                page_table: &table,
                kv_lens: &lens,
                q_offsets: &offsets,
                row_kv_lens: spec.row_lengths.then_some(&row_lens[..]),
                kv_scale: tensors.scalar("kv_scale").unwrap_or(1.0),
                q_scale: tensors.scalar("q_scale").unwrap_or(1.0),
            },
        );
        Exact::numbers(call, vec![result.out, result.lse], result.faults)
    }
}

fn fewer_splits(spec: &DenseSpec, choice: &Choice) -> Option<String> {
    let Splits::Count(asked) = spec.splits else { return None };
    if choice.splits >= asked {
        return None;
    }
    let unbounded = Capacity { budget: Budget::default(), ..spec.capacity() };
    let blocks = unbounded.blocks();
    let why = if blocks <= choice.splits {
        format!("a row touches at most {blocks} blocks of {BLOCK} tokens")
    } else {
        "`budget` allows no more".to_owned()
    };
    Some(format!("{asked} splits were asked for, the plan has {}: {why}", choice.splits))
}

/// Lengths are clamped to what the page table covers, so that capacity beyond it is never used.
fn narrow_table(spec: &DenseSpec) -> Option<String> {
    let (width, page, tokens) = (spec.max_table_width, spec.page_size, spec.max_kv_tokens);
    let covered = width.saturating_mul(page);
    (covered < tokens).then(|| {
        format!(
            "`max_kv_tokens` is {tokens}, but `max_table_width` {width} x `page_size` {page} \
             covers {covered}: longer lengths are clamped to what a table covers"
        )
    })
}

/// An input that only some Specs have.
pub(super) fn given<T: Element, D: Device, S: Source<D>>(
    wanted: bool,
    name: &'static str,
    source: &mut S,
) -> Result<Option<Input<'static, T, D>>, Error> {
    wanted.then(|| source.input(name, Lying::default())).transpose()
}

/// The log-sum-exps that a call writes, in their base.
pub(super) fn lse_output<D: Device, S: Source<D>>(
    base: LseBase,
    results: usize,
    source: &mut S,
) -> Result<LseOutput<'static, D>, Error> {
    let plain = Lying::default();
    Ok(match base {
        LseBase::Natural => LseOutput::Natural(source.output("lse", results, plain)?),
        LseBase::Base2 => LseOutput::Base2(source.output("lse", results, plain)?),
    })
}
