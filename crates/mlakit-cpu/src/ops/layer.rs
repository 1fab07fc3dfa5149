//! `norm`, `rotary`, `embed` and `activation` on the CPU: element by element, rows divided among threads where there is enough to do.
//!
//! Every row is computed alone and in one order, so its bits do not depend on the batch.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use half::bf16;
use mlakit::op::activation::{Activation, ActivationKind, ActivationRegions, ActivationSpec};
use mlakit::op::embed::{Embed, EmbedRegions, EmbedSpec};
use mlakit::op::layer::Float;
use mlakit::op::norm::{Norm, NormRegions, NormSpec};
use mlakit::op::rotary::{Rotary, RotaryRegions, RotarySpec, RotaryStyle};
use mlakit::scratch::Fault;
use mlakit::{Choice, Error, Plan, Refusal, Region, Runs};

use super::{Shared, divide, fault, read};
use crate::device::{Cpu, Facts, Queue};
use crate::pool::Pool;

/// Declares how an operation runs that needs nothing but its `Spec`.
macro_rules! elementwise {
    ($op:ident, $spec:ident, $regions:ident, $kernel:literal, $run:ident) => {
        impl Runs<$op> for Cpu {
            type Code = std::sync::Arc<$spec>;

            fn choose(_: &Facts, _: &$spec) -> Result<Choice, Refusal> {
                Ok(Choice::of($kernel))
            }

            fn prepare(&self, plan: &Plan<$op>) -> Result<Self::Code, Error> {
                Ok(std::sync::Arc::new(plan.spec().clone()))
            }

            fn launch(
                &self,
                code: &Self::Code,
                _: &Plan<$op>,
                regions: &$regions,
                queue: &mut Queue,
            ) -> Result<(), Error> {
                let (spec, r) = (code.clone(), *regions);
                self.enqueue(queue, move |pool: &Pool| $run(pool, &spec, &r))
            }
        }
    };
}
pub(super) use elementwise;

elementwise!(Norm, NormSpec, NormRegions, "norm_scalar", norm);
elementwise!(Rotary, RotarySpec, RotaryRegions, "rotary_scalar", rotary);
elementwise!(Embed, EmbedSpec, EmbedRegions, "embed_scalar", embed);
elementwise!(Activation, ActivationSpec, ActivationRegions, "activation_scalar", activation);

/// Multiply-adds that an exponential or a sine is worth.
pub(super) const FUNCTION: usize = 16;

/// A tensor of either dtype that is read.
#[derive(Clone, Copy)]
pub(super) enum Source<'r> {
    Bf16(&'r [bf16]),
    F32(&'r [f32]),
}

impl<'r> Source<'r> {
    /// # Safety
    /// As [`read`].
    pub(super) unsafe fn new(float: Float, region: Region, len: usize) -> Self {
        // SAFETY: the caller's contract.
        unsafe {
            match float {
                Float::Bf16 => Self::Bf16(read(region, len)),
                Float::F32 => Self::F32(read(region, len)),
            }
        }
    }

    pub(super) fn at(self, index: usize) -> f32 {
        match self {
            Self::Bf16(values) => values[index].to_f32(),
            Self::F32(values) => values[index],
        }
    }
}

/// Elements from the first of `records` to the last, which has no gap behind it.
fn strided(records: usize, stride: usize, width: usize) -> usize {
    records.checked_sub(1).map_or(0, |last| last * stride + width)
}

/// Rows of one task of an output, mutable.
///
/// # Safety
/// The region has the elements, belongs to the running launch, and no other task touches them.
unsafe fn part<'r, T>(shared: &Shared<T>, range: Range<usize>) -> &'r mut [T] {
    // SAFETY: the caller's contract.
    unsafe { std::slice::from_raw_parts_mut(shared.get().add(range.start), range.len()) }
}

fn norm(pool: &Pool, spec: &NormSpec, r: &NormRegions) {
    let (width, in_stride, out_stride) = (spec.width, spec.in_stride(), spec.out_stride());
    let elements = strided(r.rows, in_stride, width);
    let biases = if spec.bias { width } else { 0 };
    // SAFETY: operands of this launch, bound at these sizes.
    let (x, weight, bias): (Source<'_>, &[f32], &[f32]) = unsafe {
        (Source::new(spec.input, r.x, elements), read(r.weight, width), read(r.bias, biases))
    };
    let (y, wide) = (Shared::<bf16>::of(r.y), Shared::<f32>::of(r.y_wide));
    divide(pool, (r.rows, 1), width * 4, &|rows| {
        for row in rows {
            let first = row * in_stride;
            let Moments { scale, mean, root } = match x {
                Source::F32(x) => moments(x[first..first + width].iter().copied(), spec),
                Source::Bf16(x) => {
                    moments(x[first..first + width].iter().map(|v| v.to_f32()), spec)
                }
            };
            let value = |i: usize| {
                let scaled = x.at(first + i) * scale;
                // Without a mean or a bias nothing is subtracted or added: that would change the sign of a zero.
                let centered = if spec.center { scaled - mean } else { scaled };
                let y = centered * root * weight[i];
                if spec.bias { y + bias[i] } else { y }
            };
            if spec.narrow {
                // SAFETY: the row of this task alone; the output was bound at this size.
                let y = unsafe { part(&y, row * out_stride..row * out_stride + width) };
                for (i, y) in y.iter_mut().enumerate() {
                    *y = bf16::from_f32(value(i));
                }
            }
            if spec.wide {
                // SAFETY: as above.
                let wide = unsafe { part(&wide, row * width..(row + 1) * width) };
                for (i, wide) in wide.iter_mut().enumerate() {
                    *wide = value(i);
                }
            }
        }
    });
}

/// What a row is multiplied by whose squares overflow F32: exact, and far enough from both ends for the squares of any finite row,
/// however wide.
const SCALE_DOWN: f32 = 1.0 / (1u128 << 80) as f32;

/// What a row is normalised by.
struct Moments {
    /// A factor for the elements. It is 1, which changes no bit, unless the sum of the squares is not finite.
    scale: f32,
    /// Their mean once they are multiplied by it; 0 where the `Spec` does not center.
    mean: f32,
    /// 1 / sqrt(mean of their squares + eps), likewise, and with the mean subtracted.
    root: f32,
}

fn moments(values: impl ExactSizeIterator<Item = f32> + Clone, spec: &NormSpec) -> Moments {
    let mean = |scale: f32| -> f32 {
        if !spec.center {
            return 0.0;
        }
        let sum: f64 = values.clone().map(|value| f64::from(value * scale)).sum();
        (sum / spec.width as f64) as f32
    };
    let squares = |scale: f32, mean: f32| {
        let scaled = values.clone().map(move |value| value * scale);
        if spec.center {
            sum_of_squares(scaled.map(|value| value - mean))
        } else {
            sum_of_squares(scaled)
        }
    };
    let (mut scale, mut center) = (1.0, mean(1.0));
    let mut sum = squares(scale, center);
    if !sum.is_finite() {
        (scale, center) = (SCALE_DOWN, mean(SCALE_DOWN));
        sum = squares(scale, center);
    }
    let square = sum / spec.width as f64 + f64::from(spec.eps.value()) * f64::from(scale).powi(2);
    Moments { scale, mean: center, root: (1.0 / square.sqrt()) as f32 }
}

/// Eight running sums, so that the loop is not one chain of additions; no fused multiply-add, which without the instruction is a
/// library call.
fn sum_of_squares(values: impl Iterator<Item = f32>) -> f64 {
    let mut sums = [0.0f32; 8];
    for (i, value) in values.enumerate() {
        sums[i % 8] += value * value;
    }
    sums.iter().map(|sum| f64::from(*sum)).sum()
}

/// The widest rotated part whose cosines and sines fit the stack; a wider one is rotated in pieces.
const PAIRS: usize = 128;

fn rotary(pool: &Pool, spec: &RotarySpec, r: &RotaryRegions) {
    let (in_stride, out_stride) = (spec.in_stride(), spec.out_stride());
    let pairs = spec.width / 2;
    let elements = strided(r.rows * spec.heads, in_stride, spec.head_width());
    let around = [0..spec.before, spec.before + spec.width..spec.head_width()];
    // SAFETY: operands of this launch, bound at these sizes.
    let (x, positions, inv_freq): (Source<'_>, &[i32], &[f32]) = unsafe {
        (Source::new(spec.input, r.x, elements), read(r.positions, r.rows), read(r.inv_freq, pairs))
    };
    let y = Shared::<bf16>::of(r.y);
    let factor = spec.attention_factor.value();
    let (step, gap) = match spec.style {
        RotaryStyle::Pair => (2, 1),
        RotaryStyle::Half => (1, pairs),
    };
    divide(pool, (r.rows, 1), pairs * FUNCTION + spec.heads * spec.head_width() * 2, &|rows| {
        for row in rows {
            for head in row * spec.heads..(row + 1) * spec.heads {
                for i in around.iter().cloned().flatten() {
                    let value = bf16::from_f32(x.at(head * in_stride + i));
                    // SAFETY: an element of this task's row; the output was bound at this size.
                    unsafe { *y.get().add(head * out_stride + i) = value };
                }
            }
            for piece in (0..pairs).step_by(PAIRS) {
                let count = PAIRS.min(pairs - piece);
                let mut turn = [(0.0f32, 0.0f32); PAIRS];
                for (turn, frequency) in turn.iter_mut().zip(&inv_freq[piece..piece + count]) {
                    let (sin, cos) = (positions[row] as f32 * frequency).sin_cos();
                    *turn = (cos * factor, sin * factor);
                }
                for head in row * spec.heads..(row + 1) * spec.heads {
                    for (j, (cos, sin)) in turn[..count].iter().enumerate() {
                        let i = spec.before + (piece + j) * step;
                        let from = head * in_stride + i;
                        let (a, b) = (x.at(from), x.at(from + gap));
                        let to = head * out_stride + i;
                        // SAFETY: elements of this task's row; the output was bound at this size.
                        unsafe {
                            *y.get().add(to) = bf16::from_f32(a * cos - b * sin);
                            *y.get().add(to + gap) = bf16::from_f32(b * cos + a * sin);
                        }
                    }
                }
            }
        }
    });
}

fn embed(pool: &Pool, spec: &EmbedSpec, r: &EmbedRegions) {
    let width = spec.width;
    // SAFETY: operands of this launch, bound at these sizes.
    let (table, ids): (Source<'_>, &[i32]) =
        unsafe { (Source::new(spec.table, r.table, r.vocab * width), read(r.ids, r.rows)) };
    let (narrow, wide) = (Shared::<bf16>::of(r.y), Shared::<f32>::of(r.y));
    let scale = spec.scale.value();
    divide(pool, (r.rows, 1), width, &|rows| {
        for row in rows {
            let found = usize::try_from(ids[row]).ok().filter(|id| *id < r.vocab);
            if found.is_none() && ids[row] != -1 {
                // SAFETY: the scratch of this launch.
                unsafe { fault(r.scratch, Fault::Id) }.fetch_add(1, Relaxed);
            }
            let value = |i: usize| found.map_or(0.0, |id| table.at(id * width + i) * scale);
            let range = row * width..(row + 1) * width;
            // SAFETY: the row of this task alone; the output was bound at this size, and only the slice of its dtype is made.
            unsafe {
                match spec.output {
                    Float::F32 => {
                        part(&wide, range).iter_mut().enumerate().for_each(|(i, y)| *y = value(i));
                    }
                    Float::Bf16 => {
                        let y = part(&narrow, range).iter_mut().enumerate();
                        y.for_each(|(i, y)| *y = bf16::from_f32(value(i)));
                    }
                }
            }
        }
    });
}

fn activation(pool: &Pool, spec: &ActivationSpec, r: &ActivationRegions) {
    let width = spec.width;
    // SAFETY: operands of this launch, bound at these sizes.
    let (x, gates) = unsafe {
        let gates = r.rows * spec.gate_width().unwrap_or(0);
        (
            Source::new(spec.input, r.x, r.rows * spec.in_width()),
            Source::new(spec.input, r.gate, gates),
        )
    };
    let (narrow, wide) = (Shared::<bf16>::of(r.y), Shared::<f32>::of(r.y));
    let value = |element: usize| {
        let (gate, up) = match spec.gate_span {
            Some(span) => (gates.at(element / span), x.at(element)),
            None => {
                let first = element / width * 2 * width + element % width;
                (x.at(first), x.at(first + width))
            }
        };
        match spec.kind {
            ActivationKind::Silu => gate / (1.0 + (-gate).exp()) * up,
            ActivationKind::Sigmoid => up / (1.0 + (-gate).exp()),
        }
    };
    divide(pool, (r.rows * width, 1), FUNCTION, &|elements| {
        // SAFETY: the elements of this task alone; the output was bound at this size, and only the slice of its dtype is made.
        unsafe {
            match spec.output {
                Float::F32 => {
                    let y = part(&wide, elements.clone()).iter_mut();
                    y.zip(elements).for_each(|(y, element)| *y = value(element));
                }
                Float::Bf16 => {
                    let y = part(&narrow, elements.clone()).iter_mut();
                    y.zip(elements).for_each(|(y, element)| *y = bf16::from_f32(value(element)));
                }
            }
        }
    });
}
