//! The device suite on the CPU device, with every instruction set that this machine has.

mod suite;

use std::alloc::{GlobalAlloc, Layout, System};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use mlakit_cpu::isa::Isa;
use mlakit_cpu::{Cpu, Facts};
use suite::dense_inputs::{DenseInputs, Query, shape};
use suite::{compare, device_suite, indexer_replay, invariance, partials, replay, sparse_replay};

/// A device with these instructions, or nothing where this machine does not have them.
fn cpu(isa: Isa, threads: usize) -> Option<Cpu> {
    if !isa.is_available() {
        println!("skipped: this machine has no {isa}");
        return None;
    }
    Some(Cpu::new(Facts { isa, threads }).unwrap())
}

macro_rules! instructions {
    ($($module:ident: $isa:ident with $threads:literal threads;)*) => {
        $(mod $module {
            use super::*;
            device_suite!(cpu(Isa::$isa, $threads));
            device_suite!(sparse cpu(Isa::$isa, $threads));
            device_suite!(indexer cpu(Isa::$isa, $threads));
        })*
    };
}

instructions! {
    scalar: Scalar with 3 threads;
    avx2: Avx2 with 2 threads;
    avx512: Avx512 with 3 threads;
    avx512bf16: Avx512Bf16 with 2 threads;
    amx: Amx with 2 threads;
}

/// Devices of all instruction sets that this machine has.
fn available(threads: usize) -> Vec<Cpu> {
    Isa::ALL.into_iter().filter_map(|isa| cpu(isa, threads)).collect()
}

#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    for isa in Isa::ALL {
        let devices: Vec<Cpu> = (1..=3).filter_map(|threads| cpu(isa, threads)).collect();
        if !devices.is_empty() {
            invariance::fixed_splits_know_no_threads(&devices);
        }
    }
}

#[test]
fn f32_partials_are_closer() {
    partials::f32_partials_are_closer(&Cpu::detect().unwrap());
}

/// The scalar kernels define the arithmetic; the others give the same bits (those without the
/// instruction for BF16 pairs, where no number is denormal, as here). AMX adds in an order of its own,
/// which the kernel tests define.
#[test]
fn scalar_defines_the_bits() {
    for query in [Query::Bf16, Query::E4m3, Query::Quantized] {
        let mut shape = shape(11, (160, 128), &[(300, 5), (65, 1), (0, 1), (700, 20)]);
        shape.query = query;
        if query != Query::Bf16 {
            shape.record = mlakit::RecordFormat::E4m3;
        }
        let inputs = DenseInputs::new(&shape, 3);
        let [scalar, others @ ..] = &available(2)[..] else { panic!("scalar is everywhere") };
        let needed = suite::dense_run::run(scalar, &inputs);
        for device in others.iter().filter(|d| mlakit::Device::facts(*d).isa != Isa::Amx) {
            let what = mlakit::Device::facts(device).to_string();
            compare::same_bits(&what, &suite::dense_run::run(device, &inputs), &needed);
        }
    }
}

/// The same of sparse attention, over every record whose elements are BF16 numbers, as they are here.
#[test]
fn scalar_defines_the_bits_of_sparse_attention() {
    for record in suite::sparse_inputs::records() {
        let requests = &[(300, 2), (65, 1), (0, 1)];
        let mut shape = suite::sparse_inputs::shape(11, (0, 0), 150, requests);
        shape = shape.with_record(record, false);
        (shape.strange, shape.sink) = (true, true);
        let inputs = suite::sparse_inputs::SparseInputs::new(&shape, 3);
        let [scalar, others @ ..] = &available(2)[..] else { panic!("scalar is everywhere") };
        let needed = suite::sparse_run::run(scalar, &inputs);
        for device in others.iter().filter(|d| mlakit::Device::facts(*d).isa != Isa::Amx) {
            let what = format!("{} {}", mlakit::Device::facts(device), record.name());
            compare::same_bits(&what, &suite::sparse_run::run(device, &inputs), &needed);
        }
    }
}

/// Counts the calls of all threads, those of the device's pool too.
struct Counting;

static CALLS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes unchanged to `System`; the counter is a static and allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.fetch_add(1, SeqCst);
        // SAFETY: the caller's contract is `System`'s.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        CALLS.fetch_add(1, SeqCst);
        // SAFETY: `at` came from `System.alloc` with this layout.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Set in the process in which nothing else runs.
const ALONE: &str = "MLAKIT_TEST_ALONE";

/// Counts the allocations of a whole process. libtest's own threads allocate too, so the test runs
/// itself once more in a process of its own, on one thread.
#[test]
fn runs_and_replays_allocate_nothing() {
    if std::env::var_os(ALONE).is_some() {
        for threads in [1, 2, 3] {
            for device in available(threads) {
                replay::nothing_is_allocated(&device, &|| CALLS.load(SeqCst));
                indexer_replay::nothing_is_allocated(&device, &|| CALLS.load(SeqCst));
                sparse_replay::nothing_is_allocated(&device, &|| CALLS.load(SeqCst));
            }
        }
        return;
    }
    let mut alone = Command::new(std::env::current_exe().unwrap());
    alone.env(ALONE, "1");
    alone.args(["--exact", "runs_and_replays_allocate_nothing", "--test-threads=1"]);
    let output = alone.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}
