//! `projection` on the CPU.

use mlakit::op::layer::Float;
use mlakit::op::projection::{Projection, ProjectionRegions, ProjectionSpec};
use mlakit::{Choice, Error, Plan, Refusal, Runs};

use super::{Shared, divide};
use crate::device::{Cpu, Facts, Queue};
use crate::kernel::{Kernels, OutFormat, ProjectionCall, ProjectionTask};
use crate::pool::Pool;

/// Code of a projection.
pub struct ProjectionCode {
    kernels: Kernels,
    shape: Shape,
}

#[derive(Clone, Copy)]
struct Shape {
    heads: usize,
    inner: usize,
    outer: usize,
    in_stride: usize,
    out_stride: usize,
    format: OutFormat,
}

impl Runs<Projection> for Cpu {
    type Code = ProjectionCode;

    fn choose(facts: &Facts, _: &ProjectionSpec) -> Result<Choice, Refusal> {
        Ok(Choice::of(super::kernel_name("projection", facts)))
    }

    fn prepare(&self, plan: &Plan<Projection>) -> Result<ProjectionCode, Error> {
        let spec = plan.spec();
        let shape = Shape {
            heads: spec.heads,
            inner: spec.in_width,
            outer: spec.out_width,
            in_stride: spec.in_stride(),
            out_stride: spec.out_stride(),
            format: match spec.output {
                Float::Bf16 => OutFormat::Bf16,
                Float::F32 => OutFormat::F32,
            },
        };
        Ok(ProjectionCode { kernels: self.kernels()?, shape })
    }

    fn launch(
        &self,
        code: &ProjectionCode,
        _: &Plan<Projection>,
        regions: &ProjectionRegions,
        queue: &mut Queue,
    ) -> Result<(), Error> {
        let (kernels, shape, r) = (code.kernels, code.shape, *regions);
        self.enqueue(queue, move |pool: &Pool| run(pool, kernels, shape, &r))
    }
}

fn run(pool: &Pool, kernels: Kernels, shape: Shape, r: &ProjectionRegions) {
    let (x, weight) = (Shared::<u16>::of(r.x), Shared::<u16>::of(r.weight));
    let (y, rows) = (Shared::<u8>::of(r.y), r.rows);
    if rows == 0 {
        return;
    }
    divide(pool, (shape.heads, 1), rows * shape.inner * shape.outer, &|heads| {
        let call = ProjectionCall {
            heads: shape.heads,
            inner: shape.inner,
            outer: shape.outer,
            x: x.get(),
            x_head_stride: shape.in_stride,
            x_row_stride: shape.heads * shape.in_stride,
            weight: weight.get(),
            y: y.get(),
            y_head_stride: shape.out_stride,
            y_row_stride: shape.heads * shape.out_stride,
            format: shape.format,
        };
        let task = ProjectionTask { rows: 0..rows, heads, columns: 0..shape.outer };
        // SAFETY: the operands were bound at these sizes, and tasks have heads of their own.
        unsafe { kernels.project(&call, &task) };
    });
}
