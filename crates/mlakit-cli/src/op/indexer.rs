//! `indexer` from a case file.

use half::bf16;
use mlakit::op::indexer::{Indexer, IndexerArgs, IndexerCase, oracle};
use mlakit::{Choice, Device, Dtype, Error, PageGeometry};
use serde_json::{Map, Value};

use super::dense::given;
use super::source::{Lying, Source};
use super::{Call, CaseOp, Exact, Expected, Optional, Values};
use crate::case::shape::number;
use crate::case::{Axis, Dims, Table, TensorRule, Tensors};

impl CaseOp for Indexer {
    const TABLE: Table = Table {
        inputs: &[
            TensorRule::needed("q", &[Dtype::Bf16], &[Axis::Of("R"), Axis::Of("I"), Axis::Of("D")]),
            TensorRule::needed("weights", &[Dtype::F32], &[Axis::Of("R"), Axis::Of("I")]),
            TensorRule::needed("cache", &[Dtype::U8], &[Axis::Of("P"), Axis::Of("page_bytes")]),
            TensorRule::needed("page_table", &[Dtype::I32], &[Axis::Of("B"), Axis::Of("W")]),
            TensorRule::needed("kv_lens", &[Dtype::I32], &[Axis::Of("B")]),
            TensorRule::needed("q_offsets", &[Dtype::I32], &[Axis::OneMore("B")]),
            TensorRule::optional("last_position", &[Dtype::I64], &[Axis::Of("R")]),
        ],
        equal: &[("heads", "I"), ("width", "D")],
        capacity: &[("max_rows", "R"), ("max_batch", "B"), ("max_table_width", "W")],
    };

    fn derive(spec: &mut Map<String, Value>, _: &Tensors<'_>, dims: &Dims) {
        if let Some(page_size) = number(spec, "page_size") {
            let covered = dims.of("W").saturating_mul(page_size).clamp(1, 1 << 30);
            spec.entry("max_kv_tokens").or_insert_with(|| covered.into());
        }
    }

    fn optional(spec: &Self::Spec) -> Vec<Optional> {
        vec![pooled("last_position", spec.is_pooled())]
    }

    fn pages(spec: &Self::Spec) -> Option<PageGeometry> {
        Some(spec.pages())
    }

    fn outputs(call: &Call<'_, Self>) -> Vec<Expected> {
        let (rows, topk) = (call.dims.of("R"), call.spec.topk);
        let mut outputs = vec![
            Expected::new("positions", Dtype::I32, vec![rows, topk]),
            Expected::new("counts", Dtype::I32, vec![rows]),
        ];
        if call.spec.scores {
            outputs.push(Expected::new("scores", Dtype::F32, vec![rows, topk]));
        }
        outputs
    }

    fn args<D: Device, S: Source<D>>(
        call: &Call<'_, Self>,
        source: &mut S,
    ) -> Result<IndexerArgs<'static, D>, Error> {
        let (spec, plain, rows) = (&call.spec, Lying::default(), call.dims.of("R"));
        let selected = rows * spec.topk;
        Ok(IndexerArgs {
            q: source.input("q", plain)?,
            weights: source.input("weights", plain)?,
            cache: source.cache()?,
            page_table: source.input("page_table", plain)?,
            kv_lens: source.input("kv_lens", plain)?,
            q_offsets: source.input("q_offsets", plain)?,
            last_position: given(spec.is_pooled(), "last_position", source)?,
            positions: source.output("positions", selected, plain)?,
            counts: source.output("counts", rows, plain)?,
            scores: match spec.scores {
                true => Some(source.output("scores", selected, plain)?),
                false => None,
            },
            scratch: source.scratch(),
        })
    }

    fn oracle(call: &Call<'_, Self>, _: &Choice) -> Exact {
        let (spec, tensors) = (&call.spec, &call.tensors);
        let (q, weights) = (tensors.values::<bf16>("q"), tensors.values::<f32>("weights"));
        let (cache, table) = (tensors.values::<u8>("cache"), tensors.values::<i32>("page_table"));
        let (lens, offsets) =
            (tensors.values::<i32>("kv_lens"), tensors.values::<i32>("q_offsets"));
        let last = tensors.values::<i64>("last_position");
        let result = oracle(
            spec,
            &IndexerCase {
                q: &q,
                weights: &weights,
                cache: &cache,
                page_stride_bytes: call.dims.of("page_bytes"),
                page_table: &table,
                kv_lens: &lens,
                q_offsets: &offsets,
                last_position: spec.is_pooled().then_some(&last[..]),
            },
        );
        let mut values = vec![ints(&result.positions), ints(&result.counts)];
        if spec.scores {
            values.push(Values::Numbers(result.scores.into_iter().map(f64::from).collect()));
        }
        Exact {
            outputs: Self::outputs(call).into_iter().zip(values).collect(),
            faults: result.faults,
        }
    }
}

/// A tensor that a case has where keys or entries are pools.
pub(super) fn pooled(name: &'static str, wanted: bool) -> Optional {
    Optional { name, wanted, because: "the spec's `pool_size` decides" }
}

/// Whole numbers, all determined.
pub(super) fn ints(values: &[i32]) -> Values {
    Values::Bytes(bytemuck::cast_slice(values).to_vec())
}
