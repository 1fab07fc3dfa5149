//! Dense attention against its definition, bit for bit, and against f64.

use std::ops::Range;
use std::sync::atomic::AtomicU32;

use mlakit_cpu::e4m3;
use mlakit_cpu::isa::Isa;
use mlakit_cpu::kernel::{Geometry, Kernels, KeyFormat, LseBase, OutFormat, QueryFormat, Visible};
use mlakit_cpu::numerics::{bf16_to_f32, f32_to_bf16};

use crate::common::{Rng, assert_same_bits, kernels};
use crate::definition::{Arithmetic, by_definition, in_f64};
use crate::dense_inputs::{Case, Division, Outcome, Shape, WHOLE, item, run, run_item, shape};

/// (request, row in the request, row in the call) of every row.
fn rows_of(case: &Case) -> Vec<[usize; 3]> {
    let rows = |request: usize| {
        let first = case.first_row(request);
        (0..case.shape.requests[request].1).map(move |row| [request, row, first + row])
    };
    (0..case.shape.requests.len()).flat_map(rows).collect()
}

fn clip(keys: Range<usize>, to: &Range<usize>) -> Range<usize> {
    let start = keys.start.max(to.start);
    start..keys.end.min(to.end).max(start)
}

/// Compares a run with the definition (bits) and with f64.
fn check(kernels: Kernels, case: &Case, division: &Division, exact: bool) {
    let outcome = run(kernels, case, division);
    let arithmetic = Arithmetic::of(kernels.isa());
    let Geometry { heads, value_width, .. } = case.shape.geometry;
    for [request, row, at] in rows_of(case) {
        for head in 0..heads {
            let keys = clip(case.visible(request, row), &division.tokens);
            let lane = at * heads + head;
            let got = &outcome.out[lane * value_width..(lane + 1) * value_width];
            let what = format!(
                "{} request {request} row {row} head {head} keys {keys:?} of {:?}",
                kernels.isa(),
                case.shape
            );
            if exact {
                let (out, lse) = by_definition(arithmetic, case, [request, at, head], keys.clone());
                assert_same_bits(got, &out, &what);
                assert_same_bits(&outcome.lse[lane..=lane], &[lse], &what);
            }
            let (out, lse, size) = in_f64(case, [request, at, head], keys, LseBase::Two);
            for v in 0..value_width {
                // Weights are rounded to BF16; the rest is scores in f32.
                let bound = size[v] * (1.0 / 256.0 + 2e-4);
                let error = (f64::from(got[v]) - out[v]).abs();
                assert!(error <= bound, "{what} element {v}: {} is not {}", got[v], out[v]);
            }
            if lse == f64::NEG_INFINITY {
                assert_eq!(outcome.lse[lane], f32::NEG_INFINITY, "{what}");
                assert!(got.iter().all(|x| x.to_bits() == 0), "{what}: not zero");
            } else {
                let error = (f64::from(outcome.lse[lane]) - lse).abs();
                assert!(error <= 3e-5 * lse.abs().max(1.0), "{what}: lse off by {error}");
            }
        }
    }
}

#[test]
fn lengths_around_block_boundaries() {
    for kernels in kernels() {
        for kv_len in [0, 1, 2, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 300] {
            let mut shape = shape(3, 96, 64, kv_len);
            for page_size in [1, 16, 48] {
                shape.page_size = page_size;
                let case = Case::new(&shape, kv_len as u64);
                check(kernels, &case, &WHOLE, true);
            }
        }
    }
}

#[test]
fn real_widths() {
    let widths = [(576, 512), (512, 512), (320, 256), (288, 256), (160, 128), (1088, 1024)];
    for kernels in kernels() {
        for (qk_width, value_width) in widths {
            let case = Case::new(&shape(2, qk_width, value_width, 70), qk_width as u64);
            check(kernels, &case, &WHOLE, true);
        }
    }
}

#[test]
fn head_counts() {
    for kernels in kernels() {
        for heads in [1, 2, 3, 5, 8, 11, 13, 16, 17, 24, 33, 99, 128] {
            let case = Case::new(&shape(heads, 36, 18, 67), heads as u64);
            check(kernels, &case, &WHOLE, true);
        }
    }
}

/// A random shape.
fn random_shape(rng: &mut Rng) -> Shape {
    let value_width = 1 + rng.below(80);
    let qk_width = (value_width + rng.below(40)).next_multiple_of(2).max(2);
    let format = rng.pick(&[KeyFormat::Bf16, KeyFormat::E4m3]);
    let query = match format {
        KeyFormat::Bf16 => QueryFormat::Bf16,
        KeyFormat::E4m3 => rng.pick(&[
            QueryFormat::Bf16,
            QueryFormat::E4m3,
            QueryFormat::Bf16AsE4m3 { q_scale: 0.0 },
        ]),
    };
    let mut requests = Vec::new();
    for _ in 0..1 + rng.below(3) {
        let kv_len = rng.pick(&[0, 1, 5, 31, 64, 65, 100, 127, 130, 193, 257, 330]);
        requests.push((kv_len, rng.pick(&[1, 1, 2, 4, 7, 70])));
    }
    Shape {
        geometry: Geometry { heads: 1 + rng.below(9), qk_width, value_width },
        format,
        query,
        page_size: rng.pick(&[1, 16, 32, 48, 64, 256]),
        padding: [2 * rng.below(9), 2 * rng.below(70)],
        requests,
        window: rng.pick(&[None, None, Some(1), Some(2), Some(66)]),
        query_scale: rng.pick(&[0.1, 1.0, 4.0]),
    }
}

#[test]
fn random_shapes() {
    let mut rng = Rng(7);
    for seed in 0..120 {
        let case = Case::new(&random_shape(&mut rng), seed);
        let division = Division {
            rows_per_item: rng.pick(&[1, 3, 64]),
            heads_per_item: rng.pick(&[1, 4, 128]),
            tokens: rng.pick(&[(0, usize::MAX), (64, 128), (0, 64), (128, 1000)]).into_range(),
        };
        for kernels in kernels() {
            check(kernels, &case, &division, true);
        }
    }
}

trait IntoRange {
    fn into_range(self) -> Range<usize>;
}

impl IntoRange for (usize, usize) {
    fn into_range(self) -> Range<usize> {
        self.0..self.1
    }
}

#[test]
fn those_that_flush_denormals_agree_on_them_and_on_extremes() {
    // Tiny queries and keys of every magnitude; f64 bounds do not hold here, bits must.
    let mut rng = Rng(11);
    for seed in 0..20 {
        let mut shape = shape(5, 64, 48, 150);
        shape.query_scale = rng.pick(&[1e-20, 1e-38, 1.0]);
        let mut case = Case::new(&shape, seed);
        for element in &mut case.cache {
            if rng.below(3) == 0 && *element != 0xffff {
                *element = rng.pick(&[0x0001, 0x8001, 0x007f, 0x0080, 0x8080, 0, 0x8000, 0x7e00]);
            }
        }
        for element in &mut case.queries {
            if rng.below(4) == 0 {
                *element = rng.pick(&[0x0001, 0x8040, 0x0080, 0, 0x8000, 0x4000]);
            }
        }
        for kernels in kernels() {
            let outcome = run(kernels, &case, &WHOLE);
            if matches!(kernels.isa(), Isa::Avx2 | Isa::Avx512) {
                continue;
            }
            for head in 0..5 {
                let arithmetic = Arithmetic::of(kernels.isa());
                let (out, lse) = by_definition(arithmetic, &case, [0, 0, head], 0..150);
                let what = format!("{} seed {seed} head {head}", kernels.isa());
                assert_same_bits(&outcome.out[head * 48..(head + 1) * 48], &out, &what);
                assert_same_bits(&outcome.lse[head..=head], &[lse], &what);
            }
        }
    }
}

#[test]
fn bf16_output_is_the_rounded_f32_output_and_natural_lse_follows() {
    for kernels in kernels() {
        let case = Case::new(&shape(3, 64, 50, 90), 5);
        let expected = run(kernels, &case, &WHOLE);
        let mut outcome = Outcome { out: vec![0.0; 150], lse: vec![0.0; 3], faults: 0 };
        let faults = AtomicU32::new(0);
        let mut bf16 = vec![0xffff_u16; 151];
        let mut item = item(&case, 0, 0..1, 0..3, &mut outcome);
        item.lanes.out.values = bf16.as_mut_ptr().cast();
        item.lanes.out.format = OutFormat::Bf16;
        item.lanes.out.lse_base = LseBase::Natural;
        run_item(kernels, &case.call(&faults), &item);
        let rounded: Vec<u16> = expected.out.iter().map(|x| f32_to_bf16(*x)).collect();
        assert_eq!(&bf16[..150], rounded);
        assert_eq!(bf16[150], 0xffff, "wrote past the output");
        for head in 0..3 {
            let natural = f64::from(expected.lse[head]) * std::f64::consts::LN_2;
            assert!((f64::from(outcome.lse[head]) - natural).abs() < 1e-6 * natural.abs().max(1.0));
        }
    }
}

#[test]
fn explicit_lengths_clamp_and_may_be_empty() {
    let mut shape = shape(2, 32, 16, 100);
    shape.requests = vec![(100, 6)];
    let mut case = Case::new(&shape, 3);
    // The table covers 100 keys here, so a length beyond it is clamped to what it covers.
    case.table_width = 6;
    let lengths = [0, -5, 1, 64, 96, i32::MAX];
    for kernels in kernels() {
        let mut outcome = Outcome { out: vec![0.0; 192], lse: vec![0.0; 12], faults: 0 };
        let faults = AtomicU32::new(0);
        let mut item = item(&case, 0, 0..6, 0..2, &mut outcome);
        item.visible = Visible::Lengths { lengths: lengths.as_ptr(), kv_len: 96 };
        run_item(kernels, &case.call(&faults), &item);
        for (row, length) in lengths.into_iter().enumerate() {
            for head in 0..2 {
                let keys = 0..length.clamp(0, 96) as usize;
                let arithmetic = Arithmetic::of(kernels.isa());
                let (out, lse) = by_definition(arithmetic, &case, [0, row, head], keys);
                let lane = row * 2 + head;
                let what = format!("{} length {length}", kernels.isa());
                assert_same_bits(&outcome.out[lane * 16..(lane + 1) * 16], &out, &what);
                assert_same_bits(&outcome.lse[lane..=lane], &[lse], &what);
            }
        }
    }
}

#[test]
fn query_rounding_is_that_of_the_codec() {
    // 0.37 / 0.11 lies between codes; the kernel must divide, then round.
    let code = e4m3::encode(bf16_to_f32(f32_to_bf16(0.37)) / 0.11);
    assert_eq!(e4m3::decode_f32(code), 3.25);
}
