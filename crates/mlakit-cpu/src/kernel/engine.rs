//! What a kernel needs of an instruction set. Kernels are written once, over [`Engine`]; an
//! instruction set is an implementation of it, and a set of entry points that enable its
//! features.
//!
//! Products of BF16 are taken in *pairs*: two neighbours along the contracted axis share a 32-bit
//! word, the first in the lower half. A machine with `vdpbf16ps` multiplies a pair in one step
//! (`HALVES` = 1); one without widens a half at a time to f32 and needs two fused multiply-adds
//! (`HALVES` = 2), the odd half first, which is the order of `vdpbf16ps`. Half 0 is the odd one.
//!
//! A closure that is handed to the standard library does not get the features of an entry point, so
//! kernels call engine methods from loops, never from `map` and its like.

use crate::numerics::{EXP2_FLOOR, EXP2_POLYNOMIAL};

/// An instruction set. A value proves that the machine has it, so that pure arithmetic is safe to
/// call; what touches memory is unsafe for its pointers.
pub(crate) trait Engine: Copy {
    /// `W` lanes of f32.
    type V: Copy;
    /// `W` lanes of a factor: BF16 pairs (`HALVES` = 1) or f32 (`HALVES` = 2).
    type M: Copy;

    /// Lanes.
    const W: usize;
    /// Steps that a pair product takes.
    const HALVES: usize;
    /// Vector registers; decides the size of register tiles.
    const REGISTERS: usize;
    /// Bytes of an element of a key row: 2 where tiles read BF16, 4 where a block's records are
    /// widened to f32 once for all query vectors.
    const KEY_BYTES: usize;

    fn splat(self, x: f32) -> Self::V;
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger; `b` where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// The nearest integers, ties to even.
    fn round(self, v: Self::V) -> Self::V;
    /// `v * 2^whole` by adding to the exponent; `whole` holds integers.
    fn times_power(self, v: Self::V, whole: Self::V) -> Self::V;
    /// `v`, or 0 where `x < floor`.
    fn zero_below(self, v: Self::V, x: Self::V, floor: f32) -> Self::V;
    /// `v`, or 0 where it is -inf.
    fn finite_or_zero(self, v: Self::V) -> Self::V;
    /// A bit for each lane of `v` that is larger than that of `than`; none where either is NaN.
    fn above(self, v: Self::V, than: Self::V) -> u32;
    /// The sum of the lanes: lane i + lane i + W/2 for all i, then the same on the halves.
    fn sum(self, v: Self::V) -> f32;
    /// `acc + a * b` over a pair (or one half of it).
    fn mac(self, acc: Self::V, a: Self::M, b: Self::M) -> Self::V;
    /// What a packed operand holds of `pair` for `half`.
    fn pack(pair: u32, half: usize) -> u32;
    /// Turns the two accumulators of a [`Engine::zip_rows`] chunk into element order.
    fn in_order(self, chunk: [Self::V; 2]) -> [Self::V; 2];

    /// # Safety
    /// `from` is readable for `W` f32.
    unsafe fn load(self, from: *const f32) -> Self::V;
    /// # Safety
    /// `to` is writable for `W` f32.
    unsafe fn store(self, to: *mut f32, v: Self::V);
    /// Widens `W` BF16.
    /// # Safety
    /// `from` is readable for `W` BF16.
    unsafe fn load_bf16(self, from: *const u16) -> Self::V;
    /// Rounds to `W` BF16.
    /// # Safety
    /// `to` is writable for `W` BF16.
    unsafe fn store_bf16(self, to: *mut u16, v: Self::V);
    /// `v`, or -inf in the lanes for which `lo <= key < hi` does not hold.
    /// # Safety
    /// `lo` and `hi` are readable for `W` i32.
    unsafe fn mask_outside(self, v: Self::V, key: i32, lo: *const i32, hi: *const i32) -> Self::V;
    /// One pair of memory in all lanes.
    /// # Safety
    /// `pair` is readable for 4 bytes, at any alignment.
    unsafe fn splat_pair(self, pair: *const u32, half: usize) -> Self::M;
    /// One word that [`Engine::pack`] made, in all lanes.
    /// # Safety
    /// `word` is readable and aligned.
    unsafe fn splat_packed(self, word: *const u32) -> Self::M;
    /// `W` words that [`Engine::pack`] made.
    /// # Safety
    /// `words` is readable for `W` words.
    unsafe fn load_packed(self, words: *const u32) -> Self::M;
    /// Rounds softmax weights of two keys to BF16 and stores them packed: `W` words a half.
    /// # Safety
    /// `to` is writable for `W` words at each of `HALVES` offsets, `half_stride` words apart.
    unsafe fn store_weights(self, to: *mut u32, half_stride: usize, even: Self::V, odd: Self::V);
    /// `W` neighbouring pairs of memory.
    /// # Safety
    /// `pairs` is readable for `4 * W` bytes, at any alignment.
    unsafe fn load_pairs(self, pairs: *const u32, half: usize) -> Self::M;
    /// The pairs (even[i], odd[i]) for 2 W elements of two rows, in the order that
    /// [`Engine::in_order`] undoes.
    /// # Safety
    /// Both rows are readable for `2 * W` BF16, at any alignment.
    unsafe fn zip_rows(self, even: *const u16, odd: *const u16, half: usize) -> [Self::M; 2];
    /// Pair `pair` of a key row in all lanes.
    /// # Safety
    /// The row has the pair.
    unsafe fn splat_key(self, row: *const u8, pair: usize, half: usize) -> Self::M;
    /// [`Engine::zip_rows`] of key rows.
    /// # Safety
    /// Both rows are readable for `2 * W` elements.
    unsafe fn zip_keys(self, even: *const u8, odd: *const u8, half: usize) -> [Self::M; 2];
    /// Makes a key row of a BF16 record; only for `KEY_BYTES` = 4.
    /// # Safety
    /// `from` is readable and `to` writable for `count` elements.
    unsafe fn row_of_bf16(self, from: *const u8, to: *mut u8, count: usize);
    /// Makes a key row of an E4M3 record, exactly.
    /// # Safety
    /// `from` is readable and `to` writable for `count` elements.
    unsafe fn row_of_e4m3(self, from: *const u8, to: *mut u8, count: usize);
    /// Decodes E4M3 to BF16, exactly.
    /// # Safety
    /// `from` is readable for `count` bytes, `to` writable for `count` BF16.
    unsafe fn decode_e4m3(self, from: *const u8, to: *mut u16, count: usize);
    /// Asks for a cache line; any address is allowed.
    fn prefetch(self, address: *const u8);
}

/// `2^x` in every lane, the bits of [`crate::numerics::exp2`].
#[inline(always)]
pub(crate) fn exp2<E: Engine>(e: E, x: E::V) -> E::V {
    let whole = e.round(x);
    let rest = e.sub(x, whole);
    let mut value = e.splat(EXP2_POLYNOMIAL[5]);
    for term in (0..5).rev() {
        value = e.fma(value, rest, e.splat(EXP2_POLYNOMIAL[term]));
    }
    value = e.fma(value, rest, e.splat(1.0));
    e.zero_below(e.times_power(value, whole), x, EXP2_FLOOR)
}

/// Makes a widened key row of a BF16 record.
///
/// # Safety
/// As [`Engine::row_of_bf16`].
#[inline(always)]
pub(crate) unsafe fn widen_row<E: Engine>(e: E, from: *const u8, to: *mut u8, count: usize) {
    let (from, to) = (from.cast::<u16>(), to.cast::<f32>());
    let whole = count / E::W * E::W;
    for i in (0..whole).step_by(E::W) {
        // SAFETY: a vector from `i` lies below `count`.
        unsafe { e.store(to.add(i), e.load_bf16(from.add(i))) };
    }
    for i in whole..count {
        // SAFETY: `i < count`.
        unsafe { *to.add(i) = crate::numerics::bf16_to_f32(from.add(i).read_unaligned()) };
    }
}

/// Makes a widened key row of an E4M3 record, by way of BF16.
///
/// # Safety
/// As [`Engine::row_of_e4m3`].
#[inline(always)]
pub(crate) unsafe fn widen_e4m3_row<E: Engine>(e: E, from: *const u8, to: *mut u8, count: usize) {
    const CHUNK: usize = 64;
    let mut bf16 = [0_u16; CHUNK];
    for i in (0..count).step_by(CHUNK) {
        let part = CHUNK.min(count - i);
        // SAFETY: the chunk's part lies below `count`.
        unsafe {
            e.decode_e4m3(from.add(i), bf16.as_mut_ptr(), part);
            widen_row(e, bf16.as_ptr().cast(), to.add(4 * i), part);
        }
    }
}

/// Decodes with the table of all codes: any count, any machine.
///
/// # Safety
/// As [`Engine::decode_e4m3`].
#[inline(always)]
pub(crate) unsafe fn decode_e4m3_by_table(from: *const u8, to: *mut u16, count: usize) {
    for i in 0..count {
        // SAFETY: `i < count`.
        let code = unsafe { *from.add(i) };
        // SAFETY: `i < count`.
        unsafe { to.add(i).write_unaligned(crate::e4m3::decode(code)) };
    }
}
