//! The device suite on the CUDA device, and what only a GPU can show.
//!
//! Where there is no GPU each test says so and passes; with `MLAKIT_REQUIRE_GPU` set it fails
//! instead.

#[path = "../../../mlakit-cpu/tests/device/suite/mod.rs"]
#[allow(dead_code, reason = "contracts of operations that have no kernel on this device")]
mod suite;

// Contracts of layers and models. They name one another from the root of the program that has them.
#[path = "../../../mlakit-model/tests/suite/common.rs"]
#[allow(dead_code, reason = "its other users are tests of the f64 reference")]
mod common;
#[path = "../../../mlakit-model/tests/suite/device.rs"]
mod device;
#[path = "../../../mlakit-model/tests/suite/device_layers.rs"]
mod device_layers;
#[path = "../../../mlakit-model/tests/suite/device_tiny.rs"]
#[allow(dead_code, reason = "the rows that are near ties are bounded for the CPU alone")]
mod device_tiny;

mod dense_families;
mod driver;
mod failures;
mod graphs;
mod large;
mod memory;
mod outside;
mod streams;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::RefCell;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use mlakit_cuda::{Cuda, Options, probe};
use suite::{device_suite, invariance, partials, replay};

/// Set where a missing GPU is a failure.
const REQUIRED: &str = "MLAKIT_REQUIRE_GPU";

/// Tests that look at the memory of the whole GPU run alone, and so do tests with a gate: loading
/// code waits for the running kernels of the context, and holds up every other call of the driver
/// meanwhile.
static GPU: RwLock<()> = RwLock::new(());

#[expect(dead_code, reason = "held until the thread of the test ends")]
enum Turn {
    Shared(RwLockReadGuard<'static, ()>),
    Alone(RwLockWriteGuard<'static, ()>),
}

thread_local! {
    static TURN: RefCell<Option<Turn>> = const { RefCell::new(None) };
}

/// A fresh device, or nothing where there is no GPU.
fn cuda() -> Option<Cuda> {
    cuda_with(Options::from_environment())
}

fn cuda_with(options: Options) -> Option<Cuda> {
    take_turn(|| Turn::Shared(GPU.read().unwrap_or_else(PoisonError::into_inner)));
    open(options)
}

/// The same, while no other test uses the GPU.
fn cuda_alone() -> Option<Cuda> {
    take_turn(|| Turn::Alone(GPU.write().unwrap_or_else(PoisonError::into_inner)));
    open(Options::from_environment())
}

fn take_turn(turn: impl FnOnce() -> Turn) {
    TURN.with_borrow_mut(|held| {
        held.get_or_insert_with(turn);
    });
}

fn open(options: Options) -> Option<Cuda> {
    match probe() {
        Ok(_) => Some(Cuda::with(options).unwrap()),
        Err(reason) => {
            assert!(std::env::var_os(REQUIRED).is_none(), "{REQUIRED} is set: {reason}");
            println!("skipped: {reason}");
            None
        }
    }
}

device_suite!(cuda());

mod models {
    use super::cuda;

    crate::device::model_suite!(cuda());
}

#[test]
fn f32_partials_are_closer() {
    if let Some(device) = cuda() {
        partials::f32_partials_are_closer(&device);
    }
}

/// Two devices of one GPU give the same bits.
#[test]
fn fixed_splits_know_no_device() {
    if let (Some(one), Some(other)) = (cuda(), cuda()) {
        invariance::fixed_splits_know_no_threads(&[one, other]);
    }
}

/// Counts the calls of all threads; the driver's own are not among them.
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

/// Counts the allocations of a whole process, so the test runs itself once more in one of its own.
#[test]
fn runs_and_replays_allocate_nothing() {
    if std::env::var_os(ALONE).is_some() {
        let device = cuda().unwrap();
        replay::nothing_is_allocated(&device, &|| CALLS.load(SeqCst));
        return;
    }
    if cuda().is_none() {
        return;
    }
    let mut alone = Command::new(std::env::current_exe().unwrap());
    alone.env(ALONE, "1");
    alone.args(["--exact", "runs_and_replays_allocate_nothing", "--test-threads=1"]);
    let output = alone.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}
