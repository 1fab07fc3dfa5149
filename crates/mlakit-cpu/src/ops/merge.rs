//! `merge` on the CPU.

use mlakit::op::merge::{Merge, MergeRegions, MergeSpec, Partial};
use mlakit::{Choice, Error, LseBase, Plan, Refusal, Region, Runs};

use super::{Shared, divide};
use crate::device::{Cpu, Facts, Queue};
use crate::kernel::{self, Kernels, MergeCall, OutFormat};
use crate::pool::Pool;

/// Code of a merge: its kernels and its shape.
pub struct MergeCode {
    kernels: Kernels,
    shape: Shape,
}

#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) splits: usize,
    pub(super) heads: usize,
    pub(super) width: usize,
    pub(super) format: OutFormat,
    pub(super) lse_base: kernel::LseBase,
    pub(super) out_lse_base: kernel::LseBase,
    pub(super) nan_spreads: bool,
    pub(super) sink_in_lse: bool,
}

pub(super) fn lse_base(base: LseBase) -> kernel::LseBase {
    match base {
        LseBase::Natural => kernel::LseBase::Natural,
        LseBase::Base2 => kernel::LseBase::Two,
    }
}

pub(super) fn format(partial: Partial) -> OutFormat {
    match partial {
        Partial::Bf16 => OutFormat::Bf16,
        Partial::F32 => OutFormat::F32,
    }
}

impl Runs<Merge> for Cpu {
    type Code = MergeCode;

    fn choose(facts: &Facts, _: &MergeSpec) -> Result<Choice, Refusal> {
        Ok(Choice::of(super::kernel_name("merge", facts)))
    }

    fn prepare(&self, plan: &Plan<Merge>) -> Result<MergeCode, Error> {
        let spec = plan.spec();
        let shape = Shape {
            splits: spec.splits,
            heads: spec.heads,
            width: spec.value_width,
            format: format(spec.partial),
            lse_base: lse_base(spec.lse),
            out_lse_base: lse_base(spec.lse),
            nan_spreads: false,
            sink_in_lse: spec.sink_in_lse,
        };
        Ok(MergeCode { kernels: self.kernels()?, shape })
    }

    fn launch(
        &self,
        code: &MergeCode,
        _: &Plan<Merge>,
        regions: &MergeRegions,
        queue: &mut Queue,
    ) -> Result<(), Error> {
        let (kernels, shape) = (code.kernels, code.shape);
        let r = *regions;
        self.enqueue(queue, move |pool: &Pool| {
            let operands = Operands {
                rows: r.rows,
                outs: r.outs,
                lses: r.lses,
                sink: r.sink,
                out: r.out,
                lse: r.lse,
            };
            run(pool, kernels, shape, &operands);
        })
    }
}

/// What a merge reads and writes.
pub(super) struct Operands {
    pub(super) rows: usize,
    pub(super) outs: Region,
    pub(super) lses: Region,
    pub(super) sink: Region,
    pub(super) out: Region,
    pub(super) lse: Region,
}

/// Merges every (row, head), divided among the threads.
pub(super) fn run(pool: &Pool, kernels: Kernels, shape: Shape, operands: &Operands) {
    let lanes = operands.rows * shape.heads;
    let (out, lse) = (Shared::<u16>::of(operands.out), Shared::<f32>::of(operands.lse));
    let (outs, lses) = (Shared::<u8>::of(operands.outs), Shared::<f32>::of(operands.lses));
    let sink = Shared::<f32>::of(operands.sink);
    divide(pool, (lanes, 1), shape.splits * shape.width, &|lanes_of_task| {
        let call = MergeCall {
            splits: shape.splits,
            heads: shape.heads,
            width: shape.width,
            outs: outs.get(),
            format: shape.format,
            lses: lses.get(),
            lse_base: shape.lse_base,
            split_stride: lanes,
            sink: sink.get(),
            nan_spreads: shape.nan_spreads,
            sink_in_lse: shape.sink_in_lse,
            out: out.get(),
            lse: lse.get(),
            out_lse_base: shape.out_lse_base,
        };
        // SAFETY: the operands were bound at these sizes, and tasks have lanes of their own.
        unsafe { kernels.merge(&call, lanes_of_task) };
    });
}
