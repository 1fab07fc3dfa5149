//! Allocations of the CPU device, and host copies to and from them.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use mlakit::scratch::ALIGN;
use mlakit::{Error, Region};

/// From this size on memory is mapped, so that resident memory follows the ledger: what is freed goes back to the system at once, and
/// what was never touched takes nothing.
const MAPPED_FROM_BYTES: usize = 1 << 16;

/// From this size on large pages are asked for: a cache of many megabytes is read at random page ids.
const HUGE_FROM_BYTES: usize = 4 << 20;

/// One allocation, zeroed when obtained, aligned to [`ALIGN`]; dropping it frees it.
pub struct Memory {
    address: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the memory belongs to this value alone, and nothing about it is bound to a thread.
unsafe impl Send for Memory {}

impl Memory {
    /// Obtains zeroed memory.
    pub(crate) fn obtain(bytes: usize) -> Result<Self, Error> {
        let address = if bytes < MAPPED_FROM_BYTES { heap(bytes) } else { map(bytes) };
        let error = || Error::OutOfMemory { what: "memory".into(), bytes };
        address.map(|address| Self { address, bytes }).ok_or_else(error)
    }

    /// Where it begins.
    pub(crate) fn address(&self) -> u64 {
        self.address.as_ptr() as u64
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.bytes < MAPPED_FROM_BYTES {
            // SAFETY: `heap` made it with this layout, and it is freed once.
            unsafe { dealloc(self.address.as_ptr(), layout(self.bytes)) };
        } else {
            // SAFETY: `map` made exactly this mapping, and it is unmapped once.
            unsafe { libc::munmap(self.address.as_ptr().cast(), self.bytes) };
        }
    }
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes.max(1), ALIGN).expect("a small size and a power of two")
}

fn heap(bytes: usize) -> Option<NonNull<u8>> {
    // SAFETY: the layout's size is at least 1.
    NonNull::new(unsafe { alloc_zeroed(layout(bytes)) })
}

fn map(bytes: usize) -> Option<NonNull<u8>> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new private mapping at an address of the system's choice touches nothing that exists.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return None;
    }
    if bytes >= HUGE_FROM_BYTES {
        // SAFETY: the range is the mapping made above; the advice changes no contents, and its failure changes nothing.
        unsafe { libc::madvise(at, bytes, libc::MADV_HUGEPAGE) };
    }
    NonNull::new(at.cast())
}

/// Copies from the host.
pub(crate) fn copy_in(to: Region, bytes: &[u8]) {
    let to = to.address() as *mut u8;
    // SAFETY: the core makes regions from live allocations, passes no more bytes than the region has, and has checked that nothing
    // else uses it now; host slices and device memory never overlap, because no reference into device memory is handed out.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
}

/// Copies to the host.
pub(crate) fn copy_out(from: Region, bytes: &mut [u8]) {
    let from = from.address() as *const u8;
    // SAFETY: as in `copy_in`; nothing writes the region now.
    unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
}
