//! `projection` from a case file. There, heads follow each other without gaps; the Spec's strides
//! say how they lie on the device.

use half::bf16;
use mlakit::op::layer::{Float, FloatOutput};
use mlakit::op::projection::{Projection, ProjectionArgs, ProjectionSpec, oracle};
use mlakit::{Choice, Device, Dtype, Error};

use super::source::{Lying, Source, Strided};
use super::{Call, CaseOp, Exact, Expected, NO_FAULTS, Optional};
use crate::case::{Axis, Table, TensorRule};

impl CaseOp for Projection {
    const TABLE: Table = Table {
        inputs: &[
            TensorRule::needed("x", &[Dtype::Bf16], &[Axis::Of("R"), Axis::Of("H"), Axis::Of("p")]),
            TensorRule::needed(
                "weight",
                &[Dtype::Bf16],
                &[Axis::Of("H"), Axis::Of("p"), Axis::Of("n")],
            ),
        ],
        equal: &[("heads", "H"), ("in_width", "p"), ("out_width", "n")],
        capacity: &[("max_rows", "R")],
    };

    fn optional(_: &ProjectionSpec) -> Vec<Optional> {
        Vec::new()
    }

    fn outputs(call: &Call<'_, Self>) -> Vec<Expected> {
        let shape = vec![call.dims.of("R"), call.spec.heads, call.spec.out_width];
        vec![Expected::new("y", call.spec.output.dtype(), shape)]
    }

    fn args<D: Device, S: Source<D>>(
        call: &Call<'_, Self>,
        source: &mut S,
    ) -> Result<ProjectionArgs<'static, D>, Error> {
        let spec = &call.spec;
        let lying = |width, stride| Lying(Some(Strided { width, stride }));
        let results = call.dims.of("R") * spec.heads * spec.out_width;
        let results = (results, lying(spec.out_width, spec.out_stride()));
        Ok(ProjectionArgs {
            x: source.input::<bf16>("x", lying(spec.in_width, spec.in_stride()))?,
            weight: source.input::<bf16>("weight", Lying::default())?,
            y: match spec.output {
                Float::Bf16 => FloatOutput::Bf16(source.output("y", results.0, results.1)?),
                Float::F32 => FloatOutput::F32(source.output("y", results.0, results.1)?),
            },
            scratch: source.scratch(),
        })
    }

    fn oracle(call: &Call<'_, Self>, _: &Choice) -> Exact {
        let (x, weight) = (call.tensors.values::<bf16>("x"), call.tensors.values::<bf16>("weight"));
        let y = oracle(&call.spec, &x, &weight);
        Exact::numbers(call, vec![y], NO_FAULTS)
    }
}
