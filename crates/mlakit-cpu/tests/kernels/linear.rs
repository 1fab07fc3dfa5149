//! Linear layers against f64, and what must not change a bit of theirs.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use mlakit_cpu::isa::Isa;
use mlakit_cpu::kernel::{Experts, Kernels, LinearCall, LinearOut};
use mlakit_cpu::numerics::f32_to_bf16;

use crate::common::{Rng, assert_same_bits, f64_of, kernels};

/// Operands of a layer, with a stride that leaves NaN between rows.
struct Layer {
    rows: usize,
    inner: usize,
    outer: usize,
    x: Vec<u16>,
    x_stride: usize,
    w: Vec<u16>,
}

impl Layer {
    fn new(rows: usize, inner: usize, outer: usize, experts: usize) -> Layer {
        let mut rng = Rng((rows * 1_000_003 + inner * 1009 + outer) as u64);
        let x_stride = inner + 3;
        let mut x = rng.bf16_vec(rows * x_stride, 1.0);
        for row in 0..rows {
            x[row * x_stride + inner..(row + 1) * x_stride].fill(0x7fff);
        }
        Layer { rows, inner, outer, x, x_stride, w: rng.bf16_vec(experts * outer * inner, 0.2) }
    }

    fn call(&self, y: &mut [f32]) -> LinearCall<'static> {
        LinearCall {
            rows: self.rows,
            in_features: self.inner,
            out_features: self.outer,
            x: self.x.as_ptr(),
            x_stride: self.x_stride,
            packed: false,
            w: self.w.as_ptr(),
            y: y.as_mut_ptr().cast(),
            y_stride: self.outer,
            out: LinearOut::F32,
            experts: None,
        }
    }

    fn run(&self, kernels: Kernels, parts: &[Range<usize>]) -> Vec<f32> {
        let mut y = vec![f32::NAN; self.rows * self.outer];
        let call = self.call(&mut y);
        for part in parts {
            // SAFETY: operands and outputs are as large as the call says.
            unsafe { kernels.linear(&call, part.clone()) };
        }
        y
    }

    fn whole(&self, kernels: Kernels) -> Vec<f32> {
        self.run(kernels, std::slice::from_ref(&(0..self.outer)))
    }

    /// An output and the sum of magnitudes of its terms.
    fn in_f64(&self, input: usize, expert: usize, out: usize) -> (f64, f64) {
        let x = &self.x[input * self.x_stride..][..self.inner];
        let w = &self.w[(expert * self.outer + out) * self.inner..][..self.inner];
        let terms = x.iter().zip(w).map(|(x, w)| f64_of(*x) * f64_of(*w));
        terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()))
    }
}

/// The bound of f32 accumulation in chains of `inner / 16` steps and more.
fn bound(layer: &Layer, size: f64) -> f64 {
    size * (layer.inner as f64 / 8.0 + 8.0) * 2_f64.powi(-24) + 1e-30
}

#[test]
fn shapes_against_f64() {
    for kernels in kernels() {
        for (rows, inner, outer) in [
            (1, 1, 1),
            (1, 31, 9),
            (1, 64, 17),
            (2, 33, 4),
            (3, 2, 11),
            (5, 16, 8),
            (7, 1000, 13),
            (24, 96, 6),
            (25, 2112, 5),
            (50, 32, 3),
        ] {
            let layer = Layer::new(rows, inner, outer, 1);
            let y = layer.whole(kernels);
            for row in 0..rows {
                for out in 0..outer {
                    let (sum, size) = layer.in_f64(row, 0, out);
                    let error = (f64::from(y[row * outer + out]) - sum).abs();
                    let what = format!("{} {rows}x{inner}x{outer}", kernels.isa());
                    assert!(error <= bound(&layer, size), "{what} [{row},{out}]: off by {error}");
                }
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_company_or_division() {
    for kernels in kernels() {
        for inner in [7, 64, 1200, 2050] {
            let layer = Layer::new(53, inner, 29, 1);
            let expected = layer.whole(kernels);
            let divided = layer.run(kernels, &[0..1, 1..7, 7..8, 8..24, 24..29]);
            assert_same_bits(&divided, &expected, &format!("{} divided", kernels.isa()));
            for rows in [1, 2, 3, 6, 7, 24, 30] {
                for first in [0, 11, 23] {
                    let mut part = Layer::new(53, inner, 29, 1);
                    part.x.drain(..first * part.x_stride);
                    part.rows = rows;
                    let got = part.whole(kernels);
                    let what = format!("{} rows {first}..{}", kernels.isa(), first + rows);
                    assert_same_bits(&got, &expected[first * 29..(first + rows) * 29], &what);
                }
            }
        }
    }
}

#[test]
fn scalar_and_avx512bf16_give_the_same_bits() {
    let Ok(wide) = Kernels::new(Isa::Avx512Bf16) else {
        println!("skipped: this machine has no avx512bf16");
        return;
    };
    let scalar = Kernels::new(Isa::Scalar).unwrap();
    for (rows, inner, outer) in [(1, 2048, 40), (9, 577, 20), (30, 96, 7)] {
        let layer = Layer::new(rows, inner, outer, 1);
        let (got, expected) = (layer.whole(wide), layer.whole(scalar));
        assert_same_bits(&got, &expected, "avx512bf16 against scalar");
    }
}

#[test]
fn bf16_and_added_outputs_follow_the_f32_ones() {
    let layer = Layer::new(5, 80, 9, 1);
    for kernels in kernels() {
        let plain = layer.whole(kernels);
        let mut y: Vec<f32> = (0..45).map(|i| i as f32 * 0.25).collect();
        let mut call = layer.call(&mut y);
        call.out = LinearOut::AddF32;
        // SAFETY: operands and outputs are as large as the call says.
        unsafe { kernels.linear(&call, 0..9) };
        let sums: Vec<f32> = (0..45).map(|i| i as f32 * 0.25 + plain[i]).collect();
        assert_same_bits(&y, &sums, "added");
        let mut bf16 = vec![0xaaaa_u16; 46];
        call.out = LinearOut::Bf16;
        call.y = bf16.as_mut_ptr().cast();
        // SAFETY: as above.
        unsafe { kernels.linear(&call, 0..9) };
        let rounded: Vec<u16> = plain.iter().map(|x| f32_to_bf16(*x)).collect();
        assert_eq!(&bf16[..45], rounded);
        assert_eq!(bf16[45], 0xaaaa);
    }
}

#[test]
fn experts_by_row_in_any_order_and_bad_ids() {
    let (rows, inner, outer, experts, top) = (36, 70, 10, 5, 3);
    let layer = Layer::new(rows, inner, outer, experts);
    let mut rng = Rng(77);
    let mut ids: Vec<i32> = (0..rows).map(|_| rng.below(experts) as i32).collect();
    ids[4] = -1;
    ids[5] = experts as i32;
    ids[35] = i32::MIN;
    let mut order: Vec<u32> = (0..rows as u32).collect();
    order.sort_by_key(|&row| ids[row as usize]);
    for kernels in kernels() {
        let run = |order: *const u32, parts: &[Range<usize>]| {
            let mut y = vec![f32::NAN; rows * outer];
            let faults = AtomicU32::new(0);
            let call = LinearCall {
                experts: Some(Experts {
                    of_row: ids.as_ptr(),
                    count: experts,
                    rows_per_input: top,
                    order,
                    faults: &faults,
                }),
                ..layer.call(&mut y)
            };
            for part in parts {
                // SAFETY: operands and outputs are as large as the call says.
                unsafe { kernels.linear(&call, part.clone()) };
            }
            assert_eq!(faults.load(Ordering::Relaxed), 3);
            y
        };
        let y = run(std::ptr::null(), &[0..4, 4..outer]);
        for (row, &id) in ids.iter().enumerate() {
            for out in 0..outer {
                let got = f64::from(y[row * outer + out]);
                let Some(expert) = usize::try_from(id).ok().filter(|&id| id < experts) else {
                    assert_eq!(got.to_bits(), 0, "row {row} has a bad id");
                    continue;
                };
                let (sum, size) = layer.in_f64(row / top, expert, out);
                assert!((got - sum).abs() <= bound(&layer, size), "[{row},{out}] is {got}");
            }
        }
        let whole = 0..outer;
        let sorted = run(order.as_ptr(), std::slice::from_ref(&whole));
        assert_same_bits(&sorted, &y, &format!("{} sorted by expert", kernels.isa()));
    }
}
