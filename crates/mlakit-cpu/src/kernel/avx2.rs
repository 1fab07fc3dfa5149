//! AVX2 with FMA: 8 lanes, each half of a BF16 pair widened to f32 and multiplied by itself.

use std::arch::x86_64::*;

use super::engine::{Engine, decode_e4m3_by_table, widen_e4m3_row, widen_row};

/// Proof that the machine has AVX2 and FMA.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// # Safety
    /// The machine has AVX2 and FMA.
    #[inline(always)]
    pub(crate) unsafe fn assume() -> Avx2 {
        Avx2(())
    }

    /// The upper half of `v` rounded to BF16, NaN made quiet; the lower half is undefined.
    #[inline(always)]
    fn rounded(self, v: __m256) -> __m256i {
        // SAFETY: `self` proves that the machine has these register-only instructions.
        unsafe {
            let bits = _mm256_castps_si256(v);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let up = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
            let number = _mm256_add_epi32(bits, up);
            let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
            _mm256_blendv_epi8(number, quiet, nan)
        }
    }

    /// f32 of half `half` of pairs.
    #[inline(always)]
    fn half(self, pairs: __m256i, half: usize) -> __m256 {
        // SAFETY: `self` proves that the machine has these register-only instructions.
        unsafe {
            _mm256_castsi256_ps(if half == 0 {
                _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff_0000_u32 as i32))
            } else {
                _mm256_slli_epi32::<16>(pairs)
            })
        }
    }
}

/// Methods that are one register-only instruction.
macro_rules! instructions {
    ($($name:ident($($argument:ident),+) = $call:expr;)+) => {$(
        #[inline(always)]
        fn $name(self, $($argument: __m256),+) -> __m256 {
            // SAFETY: `self` proves that the machine has this register-only instruction.
            unsafe { $call }
        }
    )+};
}

impl Engine for Avx2 {
    type V = __m256;
    type M = __m256;

    const W: usize = 8;
    const HALVES: usize = 2;
    const KEY_BYTES: usize = 4;
    const REGISTERS: usize = 16;

    instructions! {
        add(a, b) = _mm256_add_ps(a, b);
        sub(a, b) = _mm256_sub_ps(a, b);
        mul(a, b) = _mm256_mul_ps(a, b);
        fma(a, b, c) = _mm256_fmadd_ps(a, b, c);
        max(a, b) = _mm256_max_ps(a, b);
        round(v) = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(v);
        mac(acc, a, b) = _mm256_fmadd_ps(a, b, acc);
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        // SAFETY: `self` proves that the machine has this register-only instruction.
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    fn times_power(self, v: __m256, whole: __m256) -> __m256 {
        // SAFETY: `self` proves that the machine has these register-only instructions.
        unsafe {
            let shift = _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(whole));
            _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), shift))
        }
    }
    #[inline(always)]
    fn zero_below(self, v: __m256, x: __m256, floor: f32) -> __m256 {
        // SAFETY: `self` proves that the machine has these register-only instructions.
        unsafe { _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x, _mm256_set1_ps(floor)), v) }
    }
    #[inline(always)]
    fn finite_or_zero(self, v: __m256) -> __m256 {
        // SAFETY: `self` proves that the machine has these register-only instructions.
        unsafe {
            let lowest = _mm256_set1_ps(f32::NEG_INFINITY);
            _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_EQ_OQ>(v, lowest), v)
        }
    }
    #[inline(always)]
    fn above(self, v: __m256, than: __m256) -> u32 {
        // SAFETY: `self` proves that the machine has these register-only instructions.
        unsafe { _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(v, than)) as u32 }
    }
    #[inline(always)]
    fn sum(self, v: __m256) -> f32 {
        // SAFETY: `self` proves that the machine has these register-only instructions.
        unsafe {
            let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }
    #[inline(always)]
    fn pack(pair: u32, half: usize) -> u32 {
        if half == 0 { pair & 0xffff_0000 } else { pair << 16 }
    }
    #[inline(always)]
    fn in_order(self, chunk: [__m256; 2]) -> [__m256; 2] {
        chunk
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m256 {
        // SAFETY: readable for 8 f32 by contract.
        unsafe { _mm256_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: __m256) {
        // SAFETY: writable for 8 f32 by contract.
        unsafe { _mm256_storeu_ps(to, v) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> __m256 {
        // SAFETY: readable for 8 BF16 by contract; the rest is register-only.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16, v: __m256) {
        // SAFETY: writable for 8 BF16 by contract; the rest is register-only.
        unsafe {
            let words = _mm256_srli_epi32::<16>(self.rounded(v));
            let packed = _mm256_packus_epi32(words, words);
            let joined = _mm256_permute4x64_epi64::<0b1000>(packed);
            _mm_storeu_si128(to.cast(), _mm256_castsi256_si128(joined));
        }
    }
    #[inline(always)]
    unsafe fn mask_outside(self, v: __m256, key: i32, lo: *const i32, hi: *const i32) -> __m256 {
        // SAFETY: readable for 8 i32 by contract; the rest is register-only.
        unsafe {
            let key = _mm256_set1_epi32(key);
            let before = _mm256_cmpgt_epi32(_mm256_loadu_si256(lo.cast()), key);
            let inside = _mm256_cmpgt_epi32(_mm256_loadu_si256(hi.cast()), key);
            let keep = _mm256_castsi256_ps(_mm256_andnot_si256(before, inside));
            _mm256_blendv_ps(_mm256_set1_ps(f32::NEG_INFINITY), v, keep)
        }
    }
    #[inline(always)]
    unsafe fn splat_pair(self, pair: *const u32, half: usize) -> __m256 {
        // SAFETY: readable for 4 bytes by contract.
        let word = unsafe { pair.read_unaligned() };
        // SAFETY: `self` proves that the machine has this register-only instruction.
        self.half(unsafe { _mm256_set1_epi32(word as i32) }, half)
    }
    #[inline(always)]
    unsafe fn splat_packed(self, word: *const u32) -> __m256 {
        // SAFETY: readable by contract.
        unsafe { _mm256_broadcast_ss(&*word.cast::<f32>()) }
    }
    #[inline(always)]
    unsafe fn load_packed(self, words: *const u32) -> __m256 {
        // SAFETY: readable for 8 words by contract.
        unsafe { _mm256_loadu_ps(words.cast()) }
    }
    #[inline(always)]
    unsafe fn store_weights(self, to: *mut u32, half_stride: usize, even: __m256, odd: __m256) {
        let upper = |v| self.half(self.rounded(v), 0);
        // SAFETY: writable for 8 words by contract.
        unsafe { _mm256_storeu_ps(to.cast(), upper(odd)) };
        // SAFETY: as above, one half further.
        unsafe { _mm256_storeu_ps(to.add(half_stride).cast(), upper(even)) };
    }
    #[inline(always)]
    unsafe fn load_pairs(self, pairs: *const u32, half: usize) -> __m256 {
        // SAFETY: readable for 32 bytes by contract.
        self.half(unsafe { _mm256_loadu_si256(pairs.cast()) }, half)
    }
    #[inline(always)]
    unsafe fn zip_rows(self, even: *const u16, odd: *const u16, half: usize) -> [__m256; 2] {
        let row = if half == 0 { odd } else { even };
        // SAFETY: readable for 16 BF16 by contract.
        let first = unsafe { self.load_bf16(row) };
        // SAFETY: as above.
        let second = unsafe { self.load_bf16(row.add(8)) };
        [first, second]
    }
    #[inline(always)]
    unsafe fn splat_key(self, row: *const u8, pair: usize, half: usize) -> __m256 {
        // SAFETY: the row has the pair: f32 `2 pair` and `2 pair + 1`.
        unsafe { self.splat(*row.cast::<f32>().add(2 * pair + 1 - half)) }
    }
    #[inline(always)]
    unsafe fn zip_keys(self, even: *const u8, odd: *const u8, half: usize) -> [__m256; 2] {
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
        let whole = count / 16 * 16;
        for i in (0..whole).step_by(16) {
            // SAFETY: 16 codes from `i` are below `count`; the rest is register-only.
            unsafe {
                let codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(from.add(i).cast()));
                _mm256_storeu_si256(to.add(i).cast(), decode_codes(codes));
            }
        }
        // SAFETY: the rest of the same ranges.
        unsafe { decode_e4m3_by_table(from.add(whole), to.add(whole), count - whole) }
    }
    #[inline(always)]
    fn prefetch(self, address: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
    }
}

/// BF16 bits of 16 codes that were widened to 16 bits.
///
/// # Safety
/// The machine has AVX2.
#[inline(always)]
unsafe fn decode_codes(codes: __m256i) -> __m256i {
    // SAFETY: register-only AVX2 instructions.
    unsafe {
        let magnitude = _mm256_and_si256(codes, _mm256_set1_epi16(0x7f));
        let sign = _mm256_slli_epi16::<8>(_mm256_xor_si256(codes, magnitude));
        let normal =
            _mm256_add_epi16(_mm256_slli_epi16::<4>(magnitude), _mm256_set1_epi16(120 << 7));
        // The eight subnormals by table: m * 2^-9 has a zero lower byte except for 3, 5, 6, 7, so
        // both bytes are looked up; the index of the upper byte of each word selects a zero.
        let upper = _mm256_setr_epi8(
            0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, 0, 0, 0, 0, 0, 0, 0, 0, //
            0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, 0, 0, 0, 0, 0, 0, 0, 0,
        );
        let lower = _mm256_setr_epi8(
            0, 0, -128, -64, 0, 0x20, 0x40, 0x60, 0, 0, 0, 0, 0, 0, 0, 0, //
            0, 0, -128, -64, 0, 0x20, 0x40, 0x60, 0, 0, 0, 0, 0, 0, 0, 0,
        );
        let high = _mm256_slli_epi16::<8>(_mm256_shuffle_epi8(upper, magnitude));
        let subnormal = _mm256_or_si256(high, _mm256_shuffle_epi8(lower, magnitude));
        let small = _mm256_cmpgt_epi16(_mm256_set1_epi16(8), magnitude);
        let number = _mm256_blendv_epi8(normal, subnormal, small);
        let nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
        let value = _mm256_blendv_epi8(number, _mm256_set1_epi16(0x7fc0), nan);
        _mm256_or_si256(value, sign)
    }
}
