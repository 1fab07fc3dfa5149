//! `selection` from a case file.

use mlakit::op::selection::{Selection, SelectionArgs, SelectionCase, oracle};
use mlakit::{Choice, Device, Dtype, Error};

use super::dense::given;
use super::indexer::{ints, pooled};
use super::source::{Lying, Source};
use super::{Call, CaseOp, Exact, Expected, Optional};
use crate::case::{Axis, Table, TensorRule};

impl CaseOp for Selection {
    const TABLE: Table = Table {
        inputs: &[
            TensorRule::needed("positions", &[Dtype::I32], &[Axis::Of("R"), Axis::Of("T")]),
            TensorRule::needed("request", &[Dtype::I32], &[Axis::Of("R")]),
            TensorRule::needed("page_table", &[Dtype::I32], &[Axis::Of("B"), Axis::Of("W")]),
            TensorRule::optional("last_position", &[Dtype::I64], &[Axis::Of("R")]),
        ],
        equal: &[("topk", "T")],
        capacity: &[("max_rows", "R"), ("max_batch", "B"), ("max_table_width", "W")],
    };

    fn optional(spec: &Self::Spec) -> Vec<Optional> {
        vec![pooled("last_position", spec.is_pooled())]
    }

    fn outputs(call: &Call<'_, Self>) -> Vec<Expected> {
        let rows = call.dims.of("R");
        vec![
            Expected::new("slots", Dtype::I32, vec![rows, call.spec.slots()]),
            Expected::new("slot_counts", Dtype::I32, vec![rows]),
        ]
    }

    fn args<D: Device, S: Source<D>>(
        call: &Call<'_, Self>,
        source: &mut S,
    ) -> Result<SelectionArgs<'static, D>, Error> {
        let (spec, plain, rows) = (&call.spec, Lying::default(), call.dims.of("R"));
        Ok(SelectionArgs {
            positions: source.input("positions", plain)?,
            request: source.input("request", plain)?,
            page_table: source.input("page_table", plain)?,
            table_width: call.dims.of("W"),
            last_position: given(spec.is_pooled(), "last_position", source)?,
            slots: source.output("slots", rows * spec.slots(), plain)?,
            slot_counts: source.output("slot_counts", rows, plain)?,
            scratch: source.scratch(),
        })
    }

    fn oracle(call: &Call<'_, Self>, _: &Choice) -> Exact {
        let (spec, tensors) = (&call.spec, &call.tensors);
        let (positions, request) =
            (tensors.values::<i32>("positions"), tensors.values::<i32>("request"));
        let table = tensors.values::<i32>("page_table");
        let last = tensors.values::<i64>("last_position");
        let result = oracle(
            spec,
            &SelectionCase {
                positions: &positions,
                request: &request,
                page_table: &table,
                table_width: call.dims.of("W"),
                last_position: spec.is_pooled().then_some(&last[..]),
            },
        );
        let values = [ints(&result.slots), ints(&result.slot_counts)];
        Exact {
            outputs: Self::outputs(call).into_iter().zip(values).collect(),
            faults: result.faults,
        }
    }
}
