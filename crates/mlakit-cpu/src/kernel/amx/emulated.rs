//! A tile unit in plain code, with the bits of AMX: it defines the arithmetic of the AMX kernels and lets
//! tests run them on any machine.

use super::{ROW_BYTES, TILE, TileUnit};
use crate::kernel::engine::Engine;
use crate::kernel::scalar::Scalar;
use crate::numerics::flush;

/// Eight tiles in memory.
pub(crate) struct Emulated {
    tiles: [[[u32; TILE]; TILE]; 8],
    configured: bool,
}

impl Emulated {
    /// Registers as they are before they are configured.
    pub(crate) fn new() -> Emulated {
        Emulated { tiles: [[[0; TILE]; TILE]; 8], configured: false }
    }

    fn check(&self) {
        assert!(self.configured, "tile registers are used without being configured");
    }
}

impl TileUnit for Emulated {
    type E = Scalar;

    #[inline(always)]
    fn engine(&self) -> Scalar {
        Scalar
    }

    /// Fills the registers with NaN: nothing may depend on what they held.
    fn configure(&mut self) {
        self.configured = true;
        self.tiles = [[[0x7fff_7fff; TILE]; TILE]; 8];
    }

    fn release(&mut self) {
        self.configured = false;
    }

    #[inline(always)]
    unsafe fn zero<const T: usize>(&mut self) {
        self.check();
        self.tiles[T] = [[0; TILE]; TILE];
    }

    #[inline(always)]
    unsafe fn load<const T: usize>(&mut self, from: *const u8, stride: usize) {
        self.check();
        for (i, row) in self.tiles[T].iter_mut().enumerate() {
            // SAFETY: readable for 16 rows by contract.
            *row = unsafe { from.add(i * stride).cast::<[u32; TILE]>().read_unaligned() };
        }
    }

    #[inline(always)]
    unsafe fn store<const T: usize>(&mut self, to: *mut u8, stride: usize) {
        self.check();
        debug_assert!(stride >= ROW_BYTES);
        for (i, row) in self.tiles[T].iter().enumerate() {
            // SAFETY: writable for 16 rows by contract.
            unsafe { to.add(i * stride).cast::<[u32; TILE]>().write_unaligned(*row) };
        }
    }

    #[inline(always)]
    unsafe fn dot<const C: usize, const A: usize, const B: usize>(&mut self) {
        self.check();
        for m in 0..TILE {
            let sums = row_sums(&self.tiles[A][m], &self.tiles[B]);
            for (to, sum) in self.tiles[C][m].iter_mut().zip(sums) {
                *to = flush(flush(f32::from_bits(*to)) + sum).to_bits();
            }
        }
    }

    #[inline(always)]
    unsafe fn zip(&self, rows: [*const u16; 2], to: [*mut u32; 2]) {
        // SAFETY: readable by contract.
        let words = unsafe { Scalar.zip_rows(rows[0], rows[1], 0) };
        for (to, words) in to.into_iter().zip(words) {
            // SAFETY: writable by contract.
            unsafe { to.cast::<[u32; TILE]>().write_unaligned(words) };
        }
    }

    #[inline(always)]
    unsafe fn store_weights(&self, to: *mut u32, even: [f32; TILE], odd: [f32; TILE]) {
        // SAFETY: the same contract.
        unsafe { Scalar.store_weights(to, 0, even, odd) }
    }

    #[inline(always)]
    unsafe fn transpose(&self, rows: &[*const u32; TILE], to: *mut u32) {
        for (i, row) in rows.iter().enumerate() {
            // SAFETY: readable for 16 words by contract.
            let words = unsafe { row.cast::<[u32; TILE]>().read_unaligned() };
            for (j, word) in words.into_iter().enumerate() {
                // SAFETY: writable for 256 words by contract.
                unsafe { to.add(j * TILE + i).write_unaligned(word) };
            }
        }
    }
}

/// What one row of an A tile adds to the row of C.
#[inline(always)]
fn row_sums(a: &[u32; TILE], b: &[[u32; TILE]; TILE]) -> [f32; TILE] {
    let odd = |pair: u32| flush(f32::from_bits(pair & 0xffff_0000));
    let even = |pair: u32| flush(f32::from_bits(pair << 16));
    let (mut evens, mut odds) = ([0.0_f32; TILE], [0.0_f32; TILE]);
    for (a, b) in a.iter().zip(b) {
        for n in 0..TILE {
            evens[n] = flush(even(*a).mul_add(even(b[n]), evens[n]));
            odds[n] = flush(odd(*a).mul_add(odd(b[n]), odds[n]));
        }
    }
    for (even, odd) in evens.iter_mut().zip(odds) {
        *even = flush(*even + odd);
    }
    evens
}
