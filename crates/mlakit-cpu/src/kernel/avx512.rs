//! AVX-512 F, BW, VL and DQ: 16 lanes, each half of a BF16 pair widened to f32 and multiplied by
//! itself. The methods that AVX-512 BF16 shares are in `lanes_512!`.

use std::arch::x86_64::*;

use super::engine::{Engine, decode_e4m3_by_table, widen_e4m3_row, widen_row};

/// Proof that the machine has AVX-512 F, BW, VL and DQ.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    /// # Safety
    /// The machine has AVX-512 F, BW, VL and DQ.
    #[inline(always)]
    pub(crate) unsafe fn assume() -> Avx512 {
        Avx512(())
    }
}

/// The upper half of `v` rounded to BF16, NaN made quiet; the lower half is undefined.
///
/// # Safety
/// The machine has AVX-512 F.
#[inline(always)]
pub(super) unsafe fn rounded(v: __m512) -> __m512i {
    // SAFETY: register-only AVX-512 F instructions.
    unsafe {
        let bits = _mm512_castps_si512(v);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let up = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
        let number = _mm512_add_epi32(bits, up);
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
        _mm512_mask_or_epi32(number, nan, bits, _mm512_set1_epi32(0x0040_0000))
    }
}

/// Sixteen BF16 widened.
///
/// # Safety
/// The machine has AVX-512 F; `from` is readable for 16 BF16.
#[inline(always)]
pub(super) unsafe fn widened(from: *const u16) -> __m512 {
    // SAFETY: readable by contract; the rest is register-only.
    unsafe {
        let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
    }
}

/// The methods of [`Engine`] that need no more than AVX-512 F, BW, VL and DQ.
macro_rules! lanes_512 {
    () => {
        const W: usize = 16;
        const REGISTERS: usize = 32;

        lanes_512! {@
            add(a, b) = _mm512_add_ps(a, b);
            sub(a, b) = _mm512_sub_ps(a, b);
            mul(a, b) = _mm512_mul_ps(a, b);
            fma(a, b, c) = _mm512_fmadd_ps(a, b, c);
            max(a, b) = _mm512_max_ps(a, b);
            round(v) = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(v);
        }

        #[inline(always)]
        fn splat(self, x: f32) -> __m512 {
            // SAFETY: `self` proves that the machine has this register-only instruction.
            unsafe { _mm512_set1_ps(x) }
        }
        #[inline(always)]
        fn times_power(self, v: __m512, whole: __m512) -> __m512 {
            // SAFETY: `self` proves that the machine has these register-only instructions.
            unsafe {
                let shift = _mm512_slli_epi32::<23>(_mm512_cvtps_epi32(whole));
                _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(v), shift))
            }
        }
        #[inline(always)]
        fn zero_below(self, v: __m512, x: __m512, floor: f32) -> __m512 {
            // SAFETY: `self` proves that the machine has these register-only instructions.
            unsafe {
                let keep = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(floor));
                _mm512_maskz_mov_ps(keep, v)
            }
        }
        #[inline(always)]
        fn finite_or_zero(self, v: __m512) -> __m512 {
            // SAFETY: `self` proves that the machine has these register-only instructions.
            unsafe {
                let lowest = _mm512_set1_ps(f32::NEG_INFINITY);
                _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(v, lowest), v)
            }
        }
        #[inline(always)]
        fn above(self, v: __m512, than: __m512) -> u32 {
            // SAFETY: `self` proves that the machine has this register-only instruction.
            unsafe { u32::from(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(v, than)) }
        }
        #[inline(always)]
        fn sum(self, v: __m512) -> f32 {
            // SAFETY: `self` proves that the machine has these register-only instructions.
            unsafe {
                let upper = _mm512_extractf32x8_ps::<1>(v);
                let eight = _mm256_add_ps(_mm512_castps512_ps256(v), upper);
                let upper = _mm256_extractf128_ps::<1>(eight);
                let four = _mm_add_ps(_mm256_castps256_ps128(eight), upper);
                let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
            }
        }

        #[inline(always)]
        unsafe fn load(self, from: *const f32) -> __m512 {
            // SAFETY: readable for 16 f32 by contract.
            unsafe { _mm512_loadu_ps(from) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32, v: __m512) {
            // SAFETY: writable for 16 f32 by contract.
            unsafe { _mm512_storeu_ps(to, v) }
        }
        #[inline(always)]
        unsafe fn load_bf16(self, from: *const u16) -> __m512 {
            // SAFETY: readable for 16 BF16 by contract.
            unsafe { $crate::kernel::avx512::widened(from) }
        }
        #[inline(always)]
        unsafe fn store_bf16(self, to: *mut u16, v: __m512) {
            // SAFETY: writable for 16 BF16 by contract; the rest is register-only.
            unsafe {
                let words = _mm512_srli_epi32::<16>($crate::kernel::avx512::rounded(v));
                _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(words));
            }
        }
        #[inline(always)]
        unsafe fn mask_outside(
            self,
            v: __m512,
            key: i32,
            lo: *const i32,
            hi: *const i32,
        ) -> __m512 {
            // SAFETY: readable for 16 i32 by contract; the rest is register-only.
            unsafe {
                let key = _mm512_set1_epi32(key);
                let from_lo = _mm512_cmple_epi32_mask(_mm512_loadu_si512(lo.cast()), key);
                let keep = _mm512_mask_cmpgt_epi32_mask(
                    from_lo,
                    _mm512_loadu_si512(hi.cast()),
                    key,
                );
                _mm512_mask_mov_ps(_mm512_set1_ps(f32::NEG_INFINITY), keep, v)
            }
        }
        #[inline(always)]
        fn prefetch(self, address: *const u8) {
            // SAFETY: a prefetch never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
        }
    };
    (@ $($name:ident($($argument:ident),+) = $call:expr;)+) => {$(
        #[inline(always)]
        fn $name(self, $($argument: __m512),+) -> __m512 {
            // SAFETY: `self` proves that the machine has this register-only instruction.
            unsafe { $call }
        }
    )+};
}
pub(super) use lanes_512;

/// f32 of half `half` of pairs.
///
/// # Safety
/// The machine has AVX-512 F.
#[inline(always)]
unsafe fn half_of(pairs: __m512i, half: usize) -> __m512 {
    // SAFETY: register-only AVX-512 F instructions.
    unsafe {
        _mm512_castsi512_ps(if half == 0 {
            _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32))
        } else {
            _mm512_slli_epi32::<16>(pairs)
        })
    }
}

impl Engine for Avx512 {
    type V = __m512;
    type M = __m512;

    const HALVES: usize = 2;
    const KEY_BYTES: usize = 4;

    lanes_512!();

    #[inline(always)]
    fn mac(self, acc: __m512, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves that the machine has this register-only instruction.
        unsafe { _mm512_fmadd_ps(a, b, acc) }
    }
    #[inline(always)]
    fn pack(pair: u32, half: usize) -> u32 {
        if half == 0 { pair & 0xffff_0000 } else { pair << 16 }
    }
    #[inline(always)]
    fn in_order(self, chunk: [__m512; 2]) -> [__m512; 2] {
        chunk
    }
    #[inline(always)]
    unsafe fn splat_pair(self, pair: *const u32, half: usize) -> __m512 {
        // SAFETY: readable for 4 bytes by contract.
        let word = unsafe { pair.read_unaligned() };
        // SAFETY: `self` proves that the machine has these register-only instructions.
        unsafe { half_of(_mm512_set1_epi32(word as i32), half) }
    }
    #[inline(always)]
    unsafe fn splat_packed(self, word: *const u32) -> __m512 {
        // SAFETY: readable by contract.
        unsafe { _mm512_set1_ps(*word.cast::<f32>()) }
    }
    #[inline(always)]
    unsafe fn load_packed(self, words: *const u32) -> __m512 {
        // SAFETY: readable for 16 words by contract.
        unsafe { _mm512_loadu_ps(words.cast()) }
    }
    #[inline(always)]
    unsafe fn store_weights(self, to: *mut u32, half_stride: usize, even: __m512, odd: __m512) {
        // SAFETY: writable for 16 words at each offset by contract; the rest is register-only.
        unsafe {
            _mm512_storeu_ps(to.cast(), half_of(rounded(odd), 0));
            _mm512_storeu_ps(to.add(half_stride).cast(), half_of(rounded(even), 0));
        }
    }
    #[inline(always)]
    unsafe fn load_pairs(self, pairs: *const u32, half: usize) -> __m512 {
        // SAFETY: readable for 64 bytes by contract; the rest is register-only.
        unsafe { half_of(_mm512_loadu_si512(pairs.cast()), half) }
    }
    #[inline(always)]
    unsafe fn zip_rows(self, even: *const u16, odd: *const u16, half: usize) -> [__m512; 2] {
        let row = if half == 0 { odd } else { even };
        // SAFETY: readable for 32 BF16 by contract.
        unsafe { [widened(row), widened(row.add(16))] }
    }
    #[inline(always)]
    unsafe fn splat_key(self, row: *const u8, pair: usize, half: usize) -> __m512 {
        // SAFETY: the row has the pair: f32 `2 pair` and `2 pair + 1`.
        unsafe { self.splat(*row.cast::<f32>().add(2 * pair + 1 - half)) }
    }
    #[inline(always)]
    unsafe fn zip_keys(self, even: *const u8, odd: *const u8, half: usize) -> [__m512; 2] {
        let row = if half == 0 { odd } else { even }.cast::<f32>();
        // SAFETY: readable for two vectors by contract.
        unsafe { [self.load(row), self.load(row.add(Self::W))] }
    }
    #[inline(always)]
    unsafe fn row_of_bf16(self, from: *const u8, to: *mut u8, count: usize) {
        // SAFETY: the same contract.
        unsafe { widen_row(self, from, to, count) }
    }
    #[inline(always)]
    unsafe fn row_of_e4m3(self, from: *const u8, to: *mut u8, count: usize) {
        // SAFETY: the same contract.
        unsafe { widen_e4m3_row(self, from, to, count) }
    }
    #[inline(always)]
    unsafe fn decode_e4m3(self, from: *const u8, to: *mut u16, count: usize) {
        let whole = count / 32 * 32;
        for i in (0..whole).step_by(32) {
            // SAFETY: 32 codes from `i` are below `count`; the rest is register-only.
            unsafe {
                let codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(from.add(i).cast()));
                _mm512_storeu_si512(to.add(i).cast(), decode_codes(codes));
            }
        }
        // SAFETY: the rest of the same ranges.
        unsafe { decode_e4m3_by_table(from.add(whole), to.add(whole), count - whole) }
    }
}

/// BF16 bits of 32 codes that were widened to 16 bits.
///
/// # Safety
/// The machine has AVX-512 BW.
#[inline(always)]
unsafe fn decode_codes(codes: __m512i) -> __m512i {
    // SAFETY: register-only AVX-512 BW instructions.
    unsafe {
        let magnitude = _mm512_and_si512(codes, _mm512_set1_epi16(0x7f));
        let sign = _mm512_slli_epi16::<8>(_mm512_xor_si512(codes, magnitude));
        let normal =
            _mm512_add_epi16(_mm512_slli_epi16::<4>(magnitude), _mm512_set1_epi16(120 << 7));
        // The eight subnormals, m * 2^-9, by table.
        let table = _mm512_broadcast_i32x4(_mm_setr_epi16(
            0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60,
        ));
        let small = _mm512_cmplt_epi16_mask(magnitude, _mm512_set1_epi16(8));
        let number = _mm512_mask_permutexvar_epi16(normal, small, magnitude, table);
        let nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f));
        let value = _mm512_mask_mov_epi16(number, nan, _mm512_set1_epi16(0x7fc0));
        _mm512_or_si512(value, sign)
    }
}
