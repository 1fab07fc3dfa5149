//! AVX-512 with BF16 dot products and VBMI: 16 lanes, a pair a step. The bits are those of the
//! scalar kernels.

use std::arch::x86_64::*;
use std::mem::transmute;

use super::avx512::{lanes_512, rounded};
use super::engine::{Engine, decode_e4m3_by_table};
use crate::e4m3::BF16_OF_CODE;

/// Proof that the machine has AVX-512 F, BW, VL, DQ, BF16 and VBMI.
#[derive(Clone, Copy)]
pub(crate) struct Avx512Bf16(());

impl Avx512Bf16 {
    /// # Safety
    /// The machine has AVX-512 F, BW, VL, DQ, BF16 and VBMI.
    #[inline(always)]
    pub(crate) unsafe fn assume() -> Avx512Bf16 {
        Avx512Bf16(())
    }
}

impl Engine for Avx512Bf16 {
    type V = __m512;
    type M = __m512i;

    const HALVES: usize = 1;
    const KEY_BYTES: usize = 2;

    lanes_512!();

    #[inline(always)]
    fn mac(self, acc: __m512, a: __m512i, b: __m512i) -> __m512 {
        // SAFETY: both types are 64 bytes of 32 BF16.
        let a = unsafe { transmute::<__m512i, __m512bh>(a) };
        // SAFETY: as above.
        let b = unsafe { transmute::<__m512i, __m512bh>(b) };
        // SAFETY: `self` proves that the machine has this register-only instruction.
        unsafe { _mm512_dpbf16_ps(acc, a, b) }
    }
    #[inline(always)]
    fn pack(pair: u32, _half: usize) -> u32 {
        pair
    }
    /// A chunk is interleaved within 128-bit parts (`zip_rows`), which costs one instruction a
    /// vector on every machine; a full interleave costs three on some. So the first accumulator
    /// holds elements 0-3, 8-11, 16-19, 24-27 of the chunk and the second the others.
    #[inline(always)]
    fn in_order(self, chunk: [__m512; 2]) -> [__m512; 2] {
        // SAFETY: `self` proves that the machine has these register-only instructions.
        unsafe {
            let first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
            let second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
            [
                _mm512_permutex2var_ps(chunk[0], first, chunk[1]),
                _mm512_permutex2var_ps(chunk[0], second, chunk[1]),
            ]
        }
    }
    #[inline(always)]
    unsafe fn splat_pair(self, pair: *const u32, _half: usize) -> __m512i {
        // SAFETY: readable for 4 bytes by contract.
        let word = unsafe { pair.read_unaligned() };
        // SAFETY: `self` proves that the machine has this register-only instruction.
        unsafe { _mm512_set1_epi32(word as i32) }
    }
    #[inline(always)]
    unsafe fn splat_packed(self, word: *const u32) -> __m512i {
        // SAFETY: readable by contract.
        unsafe { _mm512_set1_epi32(*word as i32) }
    }
    #[inline(always)]
    unsafe fn load_packed(self, words: *const u32) -> __m512i {
        // SAFETY: readable for 16 words by contract.
        unsafe { _mm512_loadu_si512(words.cast()) }
    }
    #[inline(always)]
    unsafe fn store_weights(self, to: *mut u32, _half_stride: usize, even: __m512, odd: __m512) {
        // SAFETY: writable for 16 words by contract; the rest is register-only.
        unsafe {
            let lower = _mm512_srli_epi32::<16>(rounded(even));
            let upper = _mm512_and_si512(rounded(odd), _mm512_set1_epi32(0xffff_0000_u32 as i32));
            _mm512_storeu_si512(to.cast(), _mm512_or_si512(lower, upper));
        }
    }
    #[inline(always)]
    unsafe fn load_pairs(self, pairs: *const u32, _half: usize) -> __m512i {
        // SAFETY: readable for 64 bytes by contract.
        unsafe { _mm512_loadu_si512(pairs.cast()) }
    }
    #[inline(always)]
    unsafe fn zip_rows(self, even: *const u16, odd: *const u16, _half: usize) -> [__m512i; 2] {
        // SAFETY: readable for 32 BF16 by contract; the rest is register-only.
        unsafe {
            let even = _mm512_loadu_si512(even.cast());
            let odd = _mm512_loadu_si512(odd.cast());
            [_mm512_unpacklo_epi16(even, odd), _mm512_unpackhi_epi16(even, odd)]
        }
    }
    #[inline(always)]
    unsafe fn splat_key(self, row: *const u8, pair: usize, half: usize) -> __m512i {
        // SAFETY: the row has the pair.
        unsafe { self.splat_pair(row.add(4 * pair).cast(), half) }
    }
    #[inline(always)]
    unsafe fn zip_keys(self, even: *const u8, odd: *const u8, half: usize) -> [__m512i; 2] {
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
        let whole = count / 64 * 64;
        for i in (0..whole).step_by(64) {
            // SAFETY: 64 codes from `i` are below `count`; the rest is register-only.
            unsafe {
                let [first, second] = decode_codes(_mm512_loadu_si512(from.add(i).cast()));
                _mm512_storeu_si512(to.add(i).cast(), first);
                _mm512_storeu_si512(to.add(i + 32).cast(), second);
            }
        }
        // SAFETY: the rest of the same ranges.
        unsafe { decode_e4m3_by_table(from.add(whole), to.add(whole), count - whole) }
    }
}

/// One byte of the BF16 of each of the 128 codes without sign.
const fn bytes_of_codes(upper: bool) -> [u8; 128] {
    let mut bytes = [0; 128];
    let mut code = 0;
    while code < 128 {
        let bits = BF16_OF_CODE[code];
        bytes[code] = if upper { (bits >> 8) as u8 } else { bits as u8 };
        code += 1;
    }
    bytes
}

static UPPER_BYTES: [u8; 128] = bytes_of_codes(true);
static LOWER_BYTES: [u8; 128] = bytes_of_codes(false);

/// BF16 bits of 64 codes: two lookups in tables of 128 bytes, which ignore the sign bit of their
/// index, and an interleave.
///
/// # Safety
/// The machine has AVX-512 BW and VBMI.
#[inline(always)]
unsafe fn decode_codes(codes: __m512i) -> [__m512i; 2] {
    // SAFETY: the tables are 128 bytes; the rest is register-only.
    unsafe {
        let table = |bytes: *const u8| {
            [_mm512_loadu_si512(bytes.cast()), _mm512_loadu_si512(bytes.add(64).cast())]
        };
        let upper = table(UPPER_BYTES.as_ptr());
        let lower = table(LOWER_BYTES.as_ptr());
        // The interleave works within 128-bit parts: bring 8 codes of each half together first.
        let order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
        let codes = _mm512_permutexvar_epi64(order, codes);
        let sign = _mm512_and_si512(codes, _mm512_set1_epi8(-128));
        let high = _mm512_permutex2var_epi8(upper[0], codes, upper[1]);
        let high = _mm512_or_si512(high, sign);
        let low = _mm512_permutex2var_epi8(lower[0], codes, lower[1]);
        [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)]
    }
}
