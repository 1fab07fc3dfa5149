//! What must not change a bit: company, poison, and bad page ids elsewhere; and large offsets.

use std::sync::atomic::AtomicU32;

use mlakit_cpu::isa::Isa;
use mlakit_cpu::kernel::{Kernels, KeyFormat};
use mlakit_cpu::pool::{Pool, PoolOptions};

use crate::common::{Rng, assert_same_bits, kernels};
use crate::definition::{Arithmetic, by_definition};
use crate::dense_inputs::{Case, Division, Outcome, WHOLE, item, run, run_item, shape};

#[test]
fn rows_and_heads_do_not_depend_on_their_company() {
    let mut shape = shape(11, 72, 40, 0);
    shape.requests = vec![(200, 9), (64, 1), (0, 2), (131, 70)];
    shape.window = Some(100);
    for format in [KeyFormat::Bf16, KeyFormat::E4m3] {
        shape.format = format;
        let case = Case::new(&shape, 21);
        for kernels in kernels() {
            let expected = run(kernels, &case, &WHOLE);
            for (rows_per_item, heads_per_item) in [(1, 1), (1, 11), (2, 3), (5, 4), (64, 7)] {
                let division = Division { rows_per_item, heads_per_item, ..WHOLE };
                let got = run(kernels, &case, &division);
                let what = format!("{} {division:?}", kernels.isa());
                assert_same_bits(&got.out, &expected.out, &what);
                assert_same_bits(&got.lse, &expected.lse, &what);
            }
        }
    }
}

#[test]
fn a_nan_key_reaches_exactly_the_rows_that_see_it() {
    let mut shape = shape(3, 64, 32, 0);
    shape.requests = vec![(150, 40)];
    shape.window = Some(64);
    for format in [KeyFormat::Bf16, KeyFormat::E4m3] {
        shape.format = format;
        let clean = Case::new(&shape, 9);
        for position in [70, 111, 112, 149] {
            let mut case = Case::new(&shape, 9);
            let offset = case.record_offset(0, position).unwrap();
            let payload = 64 * case.element_bytes();
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut case.cache);
            bytes[offset..offset + payload].fill(0xff);
            for kernels in kernels() {
                let expected = run(kernels, &clean, &WHOLE);
                let got = run(kernels, &case, &WHOLE);
                for row in 0..40 {
                    let sees = case.visible(0, row).contains(&position);
                    for lane in 3 * row..3 * row + 3 {
                        let range = lane * 32..(lane + 1) * 32;
                        let what = format!("{} row {row} key {position}", kernels.isa());
                        if sees {
                            assert!(got.lse[lane].is_nan(), "{what}");
                            assert!(got.out[range].iter().all(|x| x.is_nan()), "{what}");
                        } else {
                            assert_same_bits(&got.out[range.clone()], &expected.out[range], &what);
                            let lse = [&got.lse[lane..=lane], &expected.lse[lane..=lane]];
                            assert_same_bits(lse[0], lse[1], &what);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn bad_page_ids_hide_their_keys_and_are_counted_once() {
    for page_size in [1, 16, 48] {
        let mut shape = shape(2, 32, 16, 0);
        shape.page_size = page_size;
        shape.requests = vec![(150, 3), (100, 1)];
        let mut case = Case::new(&shape, 4);
        case.table_of(0)[0] = -1;
        case.table_of(0)[2] = case.pages as i32;
        case.table_of(1)[1] = i32::MIN;
        for kernels in kernels() {
            let whole = run(kernels, &case, &WHOLE);
            assert_eq!(whole.faults, 3, "{} page size {page_size}", kernels.isa());
            for (row, [request, in_request]) in [[0, 0], [0, 1], [0, 2], [1, 0]].iter().enumerate()
            {
                for head in 0..2 {
                    let keys = case.visible(*request, *in_request);
                    let place = [*request, row, head];
                    let (out, lse) =
                        by_definition(Arithmetic::of(kernels.isa()), &case, place, keys);
                    let lane = row * 2 + head;
                    let what = format!("{} page size {page_size} row {row}", kernels.isa());
                    assert_same_bits(&whole.out[lane * 16..(lane + 1) * 16], &out, &what);
                    assert_same_bits(&whole.lse[lane..=lane], &[lse], &what);
                }
            }
            // Splits and rows divided: the same count.
            let mut faults = 0;
            for tokens in [0..64, 64..128, 128..usize::MAX] {
                let division = Division { rows_per_item: 2, heads_per_item: 1, tokens };
                faults += run(kernels, &case, &division).faults;
            }
            assert_eq!(faults, 3, "{} page size {page_size} in splits", kernels.isa());
        }
    }
}

#[test]
fn a_request_whose_pages_are_all_bad_has_no_result() {
    let mut case = Case::new(&shape(3, 32, 16, 130), 4);
    case.tables.fill(-7);
    for kernels in kernels() {
        let outcome = run(kernels, &case, &WHOLE);
        assert_eq!(outcome.faults, 9);
        assert!(outcome.out.iter().all(|x| x.to_bits() == 0));
        assert!(outcome.lse.iter().all(|&x| x == f32::NEG_INFINITY));
    }
}

/// Reserved, untouched memory.
struct Sparse {
    base: *mut u8,
    bytes: usize,
}

impl Sparse {
    fn new(bytes: usize) -> Sparse {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new anonymous mapping.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        Sparse { base: base.cast(), bytes }
    }
}

impl Drop for Sparse {
    fn drop(&mut self) {
        // SAFETY: the mapping that `new` made.
        unsafe { libc::munmap(self.base.cast(), self.bytes) };
    }
}

#[test]
fn pages_past_two_to_the_31_bytes() {
    let case = Case::new(&shape(3, 64, 48, 100), 13);
    let stride = (1_usize << 29) + 4096;
    let cache = Sparse::new(stride * case.pages);
    for page in 0..case.pages {
        let from = &case.cache[page * case.page_stride() / 2..];
        // SAFETY: a page of the case fits into a page of the sparse cache.
        unsafe {
            let to = cache.base.add(page * stride);
            std::ptr::copy_nonoverlapping(from.as_ptr().cast(), to, case.page_stride());
        }
    }
    for kernels in kernels() {
        let expected = run(kernels, &case, &WHOLE);
        let faults = AtomicU32::new(0);
        let mut call = case.call(&faults);
        call.cache.base = cache.base;
        call.cache.page_stride_bytes = stride as u64;
        let mut outcome = Outcome { out: vec![0.0; 144], lse: vec![0.0; 3], faults: 0 };
        let item = item(&case, 0, 0..1, 0..3, &mut outcome);
        run_item(kernels, &call, &item);
        assert_same_bits(&outcome.out, &expected.out, kernels.isa().name());
        assert_same_bits(&outcome.lse, &expected.lse, kernels.isa().name());
    }
}

#[test]
fn scalar_and_avx512bf16_give_the_same_bits() {
    let Ok(wide) = Kernels::new(Isa::Avx512Bf16) else {
        println!("skipped: this machine has no avx512bf16");
        return;
    };
    let scalar = Kernels::new(Isa::Scalar).unwrap();
    let mut rng = Rng(3);
    for seed in 0..12 {
        let mut shape = shape(rng.pick(&[1, 16, 40]), 576, 512, 300);
        shape.requests = vec![(300, rng.pick(&[1, 3]))];
        shape.format = rng.pick(&[KeyFormat::Bf16, KeyFormat::E4m3]);
        let case = Case::new(&shape, seed);
        let (got, expected) = (run(wide, &case, &WHOLE), run(scalar, &case, &WHOLE));
        assert_same_bits(&got.out, &expected.out, "avx512bf16 against scalar");
        assert_same_bits(&got.lse, &expected.lse, "avx512bf16 against scalar");
    }
}

/// Pointers that tasks use for separate rows.
struct Shared<T>(T);

// SAFETY: every task writes its own rows and its own worker's scratch.
unsafe impl<T> Sync for Shared<T> {}

#[test]
fn threads_do_not_change_a_bit() {
    let mut shape = shape(5, 96, 64, 0);
    shape.requests = vec![(260, 24)];
    let case = Case::new(&shape, 31);
    for kernels in kernels() {
        let expected = run(kernels, &case, &WHOLE);
        for threads in [1, 2, 3, 5] {
            let options = PoolOptions { threads, ..PoolOptions::default() };
            let pool = Pool::new(options).unwrap();
            let faults = AtomicU32::new(0);
            let call = case.call(&faults);
            let mut outcome = Outcome { out: vec![0.0; 24 * 320], lse: vec![0.0; 120], faults: 0 };
            let items: Vec<_> =
                (0..12).map(|i| item(&case, 0, 2 * i..2 * i + 2, 0..5, &mut outcome)).collect();
            let bytes =
                kernels.dense_scratch_bytes(call.attention.geometry, call.cache.format, 2, 5);
            let mut scratch = vec![vec![0xff_u8; bytes]; threads];
            let scratch: Vec<*mut u8> = scratch.iter_mut().map(|s| s.as_mut_ptr()).collect();
            let shared = Shared((call, items, scratch));
            let shared = &shared;
            for _ in 0..3 {
                pool.run(12, &|task, worker| {
                    let (call, items, scratch) = &shared.0;
                    // SAFETY: the items have separate rows, a worker has its own scratch.
                    unsafe { kernels.dense(call, &items[task], scratch[worker]) };
                });
                let what = format!("{} on {threads} threads", kernels.isa());
                assert_same_bits(&outcome.out, &expected.out, &what);
                assert_same_bits(&outcome.lse, &expected.lse, &what);
            }
        }
    }
}
