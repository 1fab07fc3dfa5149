//! Portable code: sixteen lanes in an array. It defines the arithmetic of every kernel; AVX-512
//! BF16 gives its bits. Where the machine has FMA the same code is compiled with it, because
//! a fused multiply-add in software is a hundred times slower; the bits are the same.

use super::engine::{Engine, decode_e4m3_by_table};
use crate::numerics::{bf16_to_f32, dot_pair, f32_to_bf16, round_to_bf16};

/// Portable lanes.
#[derive(Clone, Copy)]
pub(crate) struct Scalar;

type Lanes = [f32; 16];

#[inline(always)]
fn map(mut lane: impl FnMut(usize) -> f32) -> Lanes {
    let mut out = [0.0; 16];
    for (i, x) in out.iter_mut().enumerate() {
        *x = lane(i);
    }
    out
}

impl Engine for Scalar {
    type V = Lanes;
    type M = [u32; 16];

    const W: usize = 16;
    const HALVES: usize = 1;
    const KEY_BYTES: usize = 2;
    const REGISTERS: usize = 16;

    #[inline(always)]
    fn splat(self, x: f32) -> Lanes {
        [x; 16]
    }
    #[inline(always)]
    fn add(self, a: Lanes, b: Lanes) -> Lanes {
        map(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: Lanes, b: Lanes) -> Lanes {
        map(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: Lanes, b: Lanes) -> Lanes {
        map(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn fma(self, a: Lanes, b: Lanes, c: Lanes) -> Lanes {
        map(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    fn max(self, a: Lanes, b: Lanes) -> Lanes {
        map(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn round(self, v: Lanes) -> Lanes {
        map(|i| v[i].round_ties_even())
    }
    #[inline(always)]
    fn times_power(self, v: Lanes, whole: Lanes) -> Lanes {
        map(|i| f32::from_bits(v[i].to_bits().wrapping_add((whole[i] as i32 as u32) << 23)))
    }
    #[inline(always)]
    fn zero_below(self, v: Lanes, x: Lanes, floor: f32) -> Lanes {
        map(|i| if x[i] < floor { 0.0 } else { v[i] })
    }
    #[inline(always)]
    fn finite_or_zero(self, v: Lanes) -> Lanes {
        map(|i| if v[i] == f32::NEG_INFINITY { 0.0 } else { v[i] })
    }
    #[inline(always)]
    fn above(self, v: Lanes, than: Lanes) -> u32 {
        let mut mask = 0;
        for i in 0..16 {
            mask |= u32::from(v[i] > than[i]) << i;
        }
        mask
    }
    #[inline(always)]
    fn sum(self, mut v: Lanes) -> f32 {
        let mut half = 8;
        while half > 0 {
            for i in 0..half {
                v[i] += v[i + half];
            }
            half /= 2;
        }
        v[0]
    }
    #[inline(always)]
    fn mac(self, acc: Lanes, a: [u32; 16], b: [u32; 16]) -> Lanes {
        map(|i| dot_pair(acc[i], a[i], b[i]))
    }
    #[inline(always)]
    fn pack(pair: u32, _half: usize) -> u32 {
        pair
    }
    #[inline(always)]
    fn in_order(self, chunk: [Lanes; 2]) -> [Lanes; 2] {
        chunk
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Lanes {
        // SAFETY: readable for 16 f32 by contract.
        unsafe { from.cast::<Lanes>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: Lanes) {
        // SAFETY: writable for 16 f32 by contract.
        unsafe { to.cast::<Lanes>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> Lanes {
        // SAFETY: readable for 16 BF16 by contract.
        let bits = unsafe { from.cast::<[u16; 16]>().read_unaligned() };
        map(|i| bf16_to_f32(bits[i]))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16, v: Lanes) {
        let bits: [u16; 16] = std::array::from_fn(|i| f32_to_bf16(v[i]));
        // SAFETY: writable for 16 BF16 by contract.
        unsafe { to.cast::<[u16; 16]>().write_unaligned(bits) }
    }
    #[inline(always)]
    unsafe fn mask_outside(self, v: Lanes, key: i32, lo: *const i32, hi: *const i32) -> Lanes {
        // SAFETY: readable for 16 i32 by contract.
        let lo = unsafe { lo.cast::<[i32; 16]>().read_unaligned() };
        // SAFETY: as above.
        let hi = unsafe { hi.cast::<[i32; 16]>().read_unaligned() };
        map(|i| if lo[i] <= key && key < hi[i] { v[i] } else { f32::NEG_INFINITY })
    }
    #[inline(always)]
    unsafe fn splat_pair(self, pair: *const u32, _half: usize) -> [u32; 16] {
        // SAFETY: readable for 4 bytes by contract.
        [unsafe { pair.read_unaligned() }; 16]
    }
    #[inline(always)]
    unsafe fn splat_packed(self, word: *const u32) -> [u32; 16] {
        // SAFETY: readable by contract.
        [unsafe { *word }; 16]
    }
    #[inline(always)]
    unsafe fn load_packed(self, words: *const u32) -> [u32; 16] {
        // SAFETY: readable for 16 words by contract.
        unsafe { words.cast::<[u32; 16]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store_weights(self, to: *mut u32, _half_stride: usize, even: Lanes, odd: Lanes) {
        let mut words = [0; 16];
        for (i, word) in words.iter_mut().enumerate() {
            *word = round_to_bf16(even[i]) >> 16 | round_to_bf16(odd[i]) & 0xffff_0000;
        }
        // SAFETY: writable for 16 words by contract.
        unsafe { to.cast::<[u32; 16]>().write_unaligned(words) }
    }
    #[inline(always)]
    unsafe fn load_pairs(self, pairs: *const u32, _half: usize) -> [u32; 16] {
        // SAFETY: readable for 64 bytes by contract.
        unsafe { pairs.cast::<[u32; 16]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn zip_rows(self, even: *const u16, odd: *const u16, _half: usize) -> [[u32; 16]; 2] {
        // SAFETY: readable for 32 BF16 by contract.
        let even = unsafe { even.cast::<[u16; 32]>().read_unaligned() };
        // SAFETY: as above.
        let odd = unsafe { odd.cast::<[u16; 32]>().read_unaligned() };
        let mut chunk = [[0; 16]; 2];
        for i in 0..32 {
            chunk[i / 16][i % 16] = u32::from(odd[i]) << 16 | u32::from(even[i]);
        }
        chunk
    }
    #[inline(always)]
    unsafe fn splat_key(self, row: *const u8, pair: usize, half: usize) -> [u32; 16] {
        // SAFETY: the row has the pair.
        unsafe { self.splat_pair(row.add(4 * pair).cast(), half) }
    }
    #[inline(always)]
    unsafe fn zip_keys(self, even: *const u8, odd: *const u8, half: usize) -> [[u32; 16]; 2] {
        // SAFETY: the same contract.
        unsafe { self.zip_rows(even.cast(), odd.cast(), half) }
    }
    #[inline(always)]
    unsafe fn row_of_bf16(self, from: *const u8, to: *mut u8, count: usize) {
        // SAFETY: readable and writable by contract; the ranges are different memory.
        unsafe { std::ptr::copy_nonoverlapping(from, to, 2 * count) }
    }
    #[inline(always)]
    unsafe fn row_of_e4m3(self, from: *const u8, to: *mut u8, count: usize) {
        // SAFETY: the same contract.
        unsafe { self.decode_e4m3(from, to.cast(), count) }
    }
    #[inline(always)]
    unsafe fn decode_e4m3(self, from: *const u8, to: *mut u16, count: usize) {
        // SAFETY: the same contract.
        unsafe { decode_e4m3_by_table(from, to, count) }
    }
    #[inline(always)]
    fn prefetch(self, _address: *const u8) {}
}
