//! How the CPU runs each operation: operands of a launch to kernel calls, divided among the threads of the pool.
//!
//! Every function here runs while its launch holds its operands: the core has numbered each use, so nothing else writes what is read and
//! nothing else touches what is written. That is the argument of each `unsafe` block that makes a slice of a [`Region`].

mod choice;
mod dense;
mod hadamard;
mod indexer;
mod layer;
mod linear;
mod merge;
mod pool;
mod projection;
mod selection;
mod sparse;
mod writer;

use std::ops::Range;
use std::sync::atomic::AtomicU32;

use mlakit::Region;
use mlakit::paging::ViewWords;
use mlakit::scratch::Fault;

use crate::device::Facts;
use crate::isa::Isa;
use crate::pool::Pool;

/// The name of a kernel that is compiled for every instruction set.
fn kernel_name(operation: &'static str, facts: &Facts) -> &'static str {
    // Only attention and indexers run on tiles.
    let isa = match (facts.isa, operation) {
        (Isa::Amx, "dense") => return "dense_amx",
        (Isa::Amx, "sparse") => return "sparse_amx",
        (Isa::Amx, "indexer") => return "indexer_amx",
        (Isa::Amx, _) => Isa::Avx512,
        (isa, _) => isa,
    };
    let names = match operation {
        "sparse" => ["sparse_scalar", "sparse_avx2", "sparse_avx512", "sparse_avx512bf16"],
        "dense" => ["dense_scalar", "dense_avx2", "dense_avx512", "dense_avx512bf16"],
        "indexer" => ["indexer_scalar", "indexer_avx2", "indexer_avx512", "indexer_avx512bf16"],
        "merge" => ["merge_scalar", "merge_avx2", "merge_avx512", "merge_avx512bf16"],
        "linear" => ["linear_scalar", "linear_avx2", "linear_avx512", "linear_avx512bf16"],
        _ => ["projection_scalar", "projection_avx2", "projection_avx512", "projection_avx512bf16"],
    };
    names[isa as usize]
}

/// The elements of a region that is read.
///
/// # Safety
/// The region belongs to the running launch, which does not write it, and has `len` elements at its aligned address.
unsafe fn read<'r, T>(region: Region, len: usize) -> &'r [T] {
    if len == 0 {
        return &[];
    }
    debug_assert!(len * size_of::<T>() <= region.bytes());
    // SAFETY: the caller's contract.
    unsafe { std::slice::from_raw_parts(region.address() as *const T, len) }
}

/// The elements of a region that is written.
///
/// # Safety
/// The region belongs to the running launch and has `len` elements at its aligned address; no other slice of them exists meanwhile.
unsafe fn write<'r, T>(region: Region, len: usize) -> &'r mut [T] {
    if len == 0 {
        return &mut [];
    }
    debug_assert!(len * size_of::<T>() <= region.bytes());
    // SAFETY: the caller's contract.
    unsafe { std::slice::from_raw_parts_mut(region.address() as *mut T, len) }
}

/// A word of the fault block of a lane.
///
/// # Safety
/// The region is the scratch of the running launch.
unsafe fn fault<'r>(scratch: Region, fault: Fault) -> &'r AtomicU32 {
    let word = scratch.address() as *mut u32;
    // SAFETY: a lane begins with the fault block, aligned, and the host reads it only when no launch uses the lane.
    unsafe { AtomicU32::from_ptr(word.add(fault as usize)) }
}

/// A scale of one element where there is one, else 1.
///
/// # Safety
/// Where it is wanted the region belongs to the running launch and has one element.
unsafe fn scale(wanted: bool, region: Region) -> f32 {
    // SAFETY: the caller's contract.
    let values: &[f32] = if wanted { unsafe { read(region, 1) } } else { &[1.0] };
    values[0]
}

/// The words of a pool's view.
///
/// # Safety
/// The region is a view that the running launch reads.
unsafe fn view_words(view: Region) -> ViewWords {
    // SAFETY: the caller's contract; a view is longer than these words.
    ViewWords::from_bytes(unsafe { &*(view.address() as *const [u8; ViewWords::BYTES]) })
}

/// A pointer that tasks of one launch share; each writes elements of its own.
#[derive(Clone, Copy)]
struct Shared<T>(*mut T);

// SAFETY: it is only a pointer; whoever dereferences it argues for that.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    fn of(region: Region) -> Self {
        Self(region.address() as *mut T)
    }

    fn get(&self) -> *mut T {
        self.0
    }
}

/// Work, in multiply-adds, below which waking another thread costs more than it brings.
const WORTH_A_THREAD: usize = 1 << 14;

/// Divides `count` units of `cost` multiply-adds each among threads, in ranges that begin at multiples of `grain`.
fn divide(
    pool: &Pool,
    (count, grain): (usize, usize),
    cost: usize,
    run: &(dyn Fn(Range<usize>) + Sync),
) {
    let grains = count.div_ceil(grain.max(1));
    let useful = (count.saturating_mul(cost) / WORTH_A_THREAD).max(1);
    let tasks = pool.threads().min(grains).min(useful);
    if tasks <= 1 {
        if count > 0 {
            run(0..count);
        }
        return;
    }
    pool.run(tasks, &|task, _| {
        let at = |task: usize| (task * grains / tasks * grain).min(count);
        run(at(task)..at(task + 1));
    });
}
