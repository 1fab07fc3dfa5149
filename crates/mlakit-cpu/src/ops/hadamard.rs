//! `hadamard` on the CPU: a row at a time, in log2(width) steps of sums and differences.

use half::bf16;
use mlakit::op::hadamard::{Hadamard, HadamardRegions, HadamardSpec, MAX_HADAMARD};
use mlakit::{Choice, Error, Plan, Refusal, Runs};

use super::layer::{Source, elementwise};
use super::{Shared, divide};
use crate::device::{Cpu, Facts, Queue};
use crate::pool::Pool;

elementwise!(Hadamard, HadamardSpec, HadamardRegions, "hadamard_scalar", transform);

fn transform(pool: &Pool, spec: &HadamardSpec, r: &HadamardRegions) {
    let width = spec.width;
    // SAFETY: an operand of this launch, bound at this size.
    let x = unsafe { Source::new(spec.input, r.x, r.rows * width) };
    let (y, scale) = (Shared::<bf16>::of(r.y), spec.scale() as f32);
    divide(pool, (r.rows, 1), width * (2 + width.ilog2() as usize), &|rows| {
        let mut buffer = [0.0_f32; MAX_HADAMARD];
        for row in rows {
            let values = &mut buffer[..width];
            for (i, value) in values.iter_mut().enumerate() {
                *value = x.at(row * width + i);
            }
            let mut half = 1;
            while half < width {
                for pair in values.chunks_exact_mut(2 * half) {
                    let (low, high) = pair.split_at_mut(half);
                    for (a, b) in low.iter_mut().zip(high) {
                        (*a, *b) = (*a + *b, *a - *b);
                    }
                }
                half *= 2;
            }
            for (i, value) in values.iter().enumerate() {
                // SAFETY: an element of this task's row; the output was bound at this size.
                unsafe { *y.get().add(row * width + i) = bf16::from_f32(value * scale) };
            }
        }
    });
}
