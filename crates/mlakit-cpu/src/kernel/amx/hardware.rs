//! The tile unit of AMX. The instructions have no stable intrinsics: each is one assembly statement.
//!
//! The compiler knows nothing of tile registers, so nothing it emits touches them, and between
//! `configure` and `release` no foreign code runs on the thread.

use std::arch::asm;
use std::arch::x86_64::*;
use std::sync::OnceLock;

use super::{TILE, TileUnit};
use crate::kernel::avx512bf16::Avx512Bf16;
use crate::kernel::engine::Engine;

/// Whether this process may use tiles of BF16: the processor has them, the system keeps them for a
/// thread, and it was asked, once, for leave to use them.
pub(crate) fn is_usable() -> bool {
    static USABLE: OnceLock<bool> = OnceLock::new();
    *USABLE.get_or_init(|| processor_has_tiles() && system_keeps_tiles() && ask_for_tiles())
}

/// Bits 22 and 24 of EDX of CPUID leaf 7: AMX-BF16 and AMX-TILE.
fn processor_has_tiles() -> bool {
    const WANTED: u32 = 1 << 22 | 1 << 24;
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & WANTED == WANTED
}

/// Bits 17 and 18 of XCR0: the system saves tile configuration and tiles.
fn system_keeps_tiles() -> bool {
    // Bit 27 of ECX of CPUID leaf 1: XGETBV may be executed.
    if __cpuid(1).ecx >> 27 & 1 == 0 {
        return false;
    }
    let lower: u32;
    // SAFETY: the system has enabled XGETBV, and register 0 always exists.
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") lower, out("edx") _, options(nomem, nostack));
    }
    lower >> 17 & 3 == 3
}

/// Linux grants the large state of tiles to a process that asks for it.
#[cfg(target_os = "linux")]
fn ask_for_tiles() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_ulong = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_ulong = 18;
    // SAFETY: the call takes two numbers and touches no memory of the process.
    let status =
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) };
    status == 0
}

#[cfg(not(target_os = "linux"))]
fn ask_for_tiles() -> bool {
    false
}

/// The tile registers of the thread, and proof that it may use them.
pub(crate) struct Amx {
    vectors: Avx512Bf16,
}

impl Amx {
    /// # Safety
    /// [`is_usable`] holds, and the machine has what [`Avx512Bf16`] asks for.
    #[inline(always)]
    pub(crate) unsafe fn assume() -> Amx {
        // SAFETY: the contract of this function.
        Amx { vectors: unsafe { Avx512Bf16::assume() } }
    }
}

/// What `ldtilecfg` reads: palette 1, eight tiles of 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static FULL_TILES: Config = {
    let mut config =
        Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    let mut tile = 0;
    while tile < 8 {
        config.row_bytes[tile] = 64;
        config.rows[tile] = TILE as u8;
        tile += 1;
    }
    config
};

impl TileUnit for Amx {
    type E = Avx512Bf16;

    #[inline(always)]
    fn engine(&self) -> Avx512Bf16 {
        self.vectors
    }

    #[inline(always)]
    fn configure(&mut self) {
        // SAFETY: `self` proves that tiles may be used; the configuration is a valid one of 64 bytes.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const FULL_TILES, options(nostack, readonly));
        }
    }

    #[inline(always)]
    fn release(&mut self) {
        // SAFETY: `self` proves that tiles may be used.
        unsafe { asm!("tilerelease", options(nostack, nomem)) }
    }

    #[inline(always)]
    unsafe fn zero<const T: usize>(&mut self) {
        // SAFETY: configured by contract.
        unsafe { asm!("tilezero tmm{}", const T, options(nostack, nomem)) }
    }

    #[inline(always)]
    unsafe fn load<const T: usize>(&mut self, from: *const u8, stride: usize) {
        // SAFETY: configured, and readable for 16 rows, by contract.
        unsafe {
            asm!(
                "tileloadd tmm{}, [{} + {}*1]",
                const T, in(reg) from, in(reg) stride, options(nostack, readonly)
            );
        }
    }

    #[inline(always)]
    unsafe fn store<const T: usize>(&mut self, to: *mut u8, stride: usize) {
        // SAFETY: configured, and writable for 16 rows, by contract.
        unsafe {
            asm!(
                "tilestored [{} + {}*1], tmm{}",
                in(reg) to, in(reg) stride, const T, options(nostack)
            );
        }
    }

    #[inline(always)]
    unsafe fn dot<const C: usize, const A: usize, const B: usize>(&mut self) {
        // SAFETY: configured by contract.
        unsafe {
            asm!(
                "tdpbf16ps tmm{}, tmm{}, tmm{}",
                const C, const A, const B, options(nostack, nomem)
            );
        }
    }

    #[inline(always)]
    unsafe fn zip(&self, rows: [*const u16; 2], to: [*mut u32; 2]) {
        // SAFETY: readable by contract.
        let [first, second] = unsafe { self.vectors.zip_rows(rows[0], rows[1], 0) };
        // SAFETY: writable by contract.
        unsafe { _mm512_storeu_si512(to[0].cast(), first) };
        // SAFETY: as above.
        unsafe { _mm512_storeu_si512(to[1].cast(), second) };
    }

    #[inline(always)]
    unsafe fn store_weights(&self, to: *mut u32, even: __m512, odd: __m512) {
        // SAFETY: the processor rounds as `round_to_bf16` does where no number is denormal; writable by
        // contract.
        unsafe {
            let halves = _mm512_cvtne2ps_pbh(odd, even);
            let halves = std::mem::transmute::<__m512bh, __m512i>(halves);
            let order = _mm512_loadu_si512(INTERLEAVE.as_ptr().cast());
            _mm512_storeu_si512(to.cast(), _mm512_permutexvar_epi16(order, halves));
        }
    }

    #[inline(always)]
    unsafe fn transpose(&self, rows: &[*const u32; TILE], to: *mut u32) {
        // SAFETY: readable and writable by contract; the rest is register-only AVX-512 F.
        unsafe {
            let mut words = [_mm512_setzero_si512(); TILE];
            for (word, row) in words.iter_mut().zip(rows) {
                *word = _mm512_loadu_si512(row.cast());
            }
            for (i, word) in transposed(words).into_iter().enumerate() {
                _mm512_storeu_si512(to.add(i * TILE).cast(), word);
            }
        }
    }
}

/// Brings element `i` of both halves together.
static INTERLEAVE: [u16; 32] = {
    let mut order = [0; 32];
    let mut i = 0;
    while i < 16 {
        order[2 * i] = i as u16;
        order[2 * i + 1] = i as u16 + 16;
        i += 1;
    }
    order
};

/// The transpose of 16 rows of 16 words: words, pairs of words, then 128-bit parts change places.
///
/// # Safety
/// The machine has AVX-512 F.
#[inline(always)]
unsafe fn transposed(rows: [__m512i; TILE]) -> [__m512i; TILE] {
    let mut a = rows;
    let mut b = rows;
    // SAFETY: register-only AVX-512 F instructions.
    unsafe {
        for i in (0..TILE).step_by(2) {
            b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
            b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
        }
        // Within 128-bit part p of `a[4 q + c]`: column 4 p + c of rows 4 q to 4 q + 3.
        for i in (0..TILE).step_by(4) {
            a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
            a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
            a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
            a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
        }
        for c in 0..4 {
            let low = _mm512_shuffle_i32x4::<0x88>(a[c], a[4 + c]);
            let high = _mm512_shuffle_i32x4::<0xdd>(a[c], a[4 + c]);
            let low_end = _mm512_shuffle_i32x4::<0x88>(a[8 + c], a[12 + c]);
            let high_end = _mm512_shuffle_i32x4::<0xdd>(a[8 + c], a[12 + c]);
            b[c] = _mm512_shuffle_i32x4::<0x88>(low, low_end);
            b[8 + c] = _mm512_shuffle_i32x4::<0xdd>(low, low_end);
            b[4 + c] = _mm512_shuffle_i32x4::<0x88>(high, high_end);
            b[12 + c] = _mm512_shuffle_i32x4::<0xdd>(high, high_end);
        }
    }
    b
}
