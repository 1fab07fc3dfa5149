//! Per-head projections against f64, and what must not change a bit of theirs.

use mlakit_cpu::isa::Isa;
use mlakit_cpu::kernel::{Kernels, OutFormat, ProjectionCall, ProjectionTask};
use mlakit_cpu::numerics::f32_to_bf16;

use crate::common::{Rng, assert_same_bits, f64_of, kernels};

/// Operands `[rows, heads, inner]` (inside wider rows) and `[heads, inner, outer]`.
struct Heads {
    rows: usize,
    heads: usize,
    inner: usize,
    outer: usize,
    x: Vec<u16>,
    weight: Vec<u16>,
}

/// Elements between heads of `x`.
const GAP: usize = 5;

impl Heads {
    fn new([rows, heads, inner, outer]: [usize; 4]) -> Heads {
        let mut rng = Rng((rows * 31 + heads * 1009 + inner * 7 + outer) as u64);
        let x = rng.bf16_vec(rows * heads * (inner + GAP), 1.0);
        let weight = rng.bf16_vec(heads * inner * outer, 0.3);
        Heads { rows, heads, inner, outer, x, weight }
    }

    fn call(&self, y: *mut u8, format: OutFormat) -> ProjectionCall {
        ProjectionCall {
            heads: self.heads,
            inner: self.inner,
            outer: self.outer,
            x: self.x.as_ptr(),
            x_head_stride: self.inner + GAP,
            x_row_stride: self.heads * (self.inner + GAP),
            weight: self.weight.as_ptr(),
            y,
            y_head_stride: self.outer,
            y_row_stride: self.heads * self.outer,
            format,
        }
    }

    fn whole(&self) -> ProjectionTask {
        ProjectionTask { rows: 0..self.rows, heads: 0..self.heads, columns: 0..self.outer }
    }

    fn run(&self, kernels: Kernels, tasks: &[ProjectionTask]) -> Vec<f32> {
        let mut y = vec![f32::NAN; self.rows * self.heads * self.outer];
        let call = self.call(y.as_mut_ptr().cast(), OutFormat::F32);
        for task in tasks {
            // SAFETY: operands and outputs are as large as the call says.
            unsafe { kernels.project(&call, task) };
        }
        y
    }
}

#[test]
fn shapes_against_f64() {
    for kernels in kernels() {
        for shape in [
            [1, 1, 2, 1],
            [1, 3, 16, 31],
            [2, 2, 64, 32],
            [3, 1, 6, 33],
            [5, 2, 30, 64],
            [13, 3, 128, 80],
            [29, 1, 10, 17],
        ] {
            let operands = Heads::new(shape);
            let y = operands.run(kernels, &[operands.whole()]);
            let [rows, heads, inner, outer] = shape;
            for (index, got) in y.iter().enumerate() {
                let (row, head, out) =
                    (index / outer / heads, index / outer % heads, index % outer);
                let x = &operands.x[(row * heads + head) * (inner + GAP)..][..inner];
                let (mut sum, mut size) = (0.0, 0.0_f64);
                for (k, x) in x.iter().enumerate() {
                    let w = operands.weight[(head * inner + k) * outer + out];
                    sum += f64_of(*x) * f64_of(w);
                    size += (f64_of(*x) * f64_of(w)).abs();
                }
                let error = (f64::from(*got) - sum).abs();
                let bound = size * inner as f64 * 2_f64.powi(-24);
                assert!(error <= bound, "{} {shape:?} [{row},{head},{out}]", kernels.isa());
            }
            assert_eq!(y.len(), rows * heads * outer);
        }
    }
}

#[test]
fn division_changes_no_bit_and_bf16_is_rounded_f32() {
    let operands = Heads::new([31, 4, 96, 100]);
    for kernels in kernels() {
        let expected = operands.run(kernels, &[operands.whole()]);
        let mut tasks = Vec::new();
        for rows in [0..1, 1..13, 13..31] {
            for heads in [0..1, 1..4] {
                for columns in [0..32, 32..96, 96..100] {
                    tasks.push(ProjectionTask {
                        rows: rows.clone(),
                        heads: heads.clone(),
                        columns,
                    });
                }
            }
        }
        let got = operands.run(kernels, &tasks);
        assert_same_bits(&got, &expected, &format!("{} divided", kernels.isa()));
        let mut bf16 = vec![0xaaaa_u16; expected.len() + 1];
        let call = operands.call(bf16.as_mut_ptr().cast(), OutFormat::Bf16);
        // SAFETY: operands and outputs are as large as the call says.
        unsafe { kernels.project(&call, &operands.whole()) };
        let rounded: Vec<u16> = expected.iter().map(|x| f32_to_bf16(*x)).collect();
        assert_eq!(&bf16[..expected.len()], rounded);
        assert_eq!(bf16[expected.len()], 0xaaaa, "wrote past the output");
    }
}

#[test]
fn every_instruction_set_gives_the_scalar_bits_on_ordinary_numbers() {
    let operands = Heads::new([14, 2, 128, 70]);
    let scalar = Kernels::new(Isa::Scalar).unwrap();
    let expected = operands.run(scalar, &[operands.whole()]);
    for kernels in kernels() {
        let got = operands.run(kernels, &[operands.whole()]);
        assert_same_bits(&got, &expected, kernels.isa().name());
    }
}
