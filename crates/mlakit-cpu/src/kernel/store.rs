//! Storing two vectors of results, whole or in part.

use super::engine::Engine;

/// Stores the first `min(width, 2 W)` elements of `chunk` as F32 or BF16.
///
/// # Safety
/// `to` is writable for that many elements, aligned to their size.
#[inline(always)]
pub(super) unsafe fn store_chunk<E: Engine>(
    e: E,
    chunk: [E::V; 2],
    to: *mut u8,
    f32_out: bool,
    width: usize,
) {
    // SAFETY: whole chunks go straight to `to`; a part goes through a buffer of a whole one.
    unsafe {
        match (f32_out, width >= 2 * E::W) {
            (true, true) => store_f32(e, chunk, to.cast()),
            (false, true) => store_bf16(e, chunk, to.cast()),
            (true, false) => {
                let mut whole = [0_f32; 32];
                store_f32(e, chunk, whole.as_mut_ptr());
                std::ptr::copy_nonoverlapping(whole.as_ptr(), to.cast(), width);
            }
            (false, false) => {
                let mut whole = [0_u16; 32];
                store_bf16(e, chunk, whole.as_mut_ptr());
                std::ptr::copy_nonoverlapping(whole.as_ptr(), to.cast(), width);
            }
        }
    }
}

/// # Safety
/// `to` is writable for `2 W` f32.
#[inline(always)]
unsafe fn store_f32<E: Engine>(e: E, chunk: [E::V; 2], to: *mut f32) {
    // SAFETY: two vectors.
    unsafe {
        e.store(to, chunk[0]);
        e.store(to.add(E::W), chunk[1]);
    }
}

/// # Safety
/// `to` is writable for `2 W` BF16.
#[inline(always)]
unsafe fn store_bf16<E: Engine>(e: E, chunk: [E::V; 2], to: *mut u16) {
    // SAFETY: two vectors.
    unsafe {
        e.store_bf16(to, chunk[0]);
        e.store_bf16(to.add(E::W), chunk[1]);
    }
}
