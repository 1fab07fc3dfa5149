//! The rate of independent multiply-adds in registers: what a kernel could reach at most.

use mlakit_cpu::isa::Isa;
use mlakit_cpu::pool::Pool;

/// Operations a second (a multiply-add is two) of all threads together.
pub fn rate(isa: Isa, pool: &Pool) -> f64 {
    let mut best = 0.0_f64;
    for _ in 0..4 {
        let clock = crate::Clock::start(pool);
        pool.run(pool.threads(), &|_, _| {
            std::hint::black_box(spin(isa));
        });
        let operations = (pool.threads() * steps_of(isa) * CHAINS) as f64 * operations_of(isa);
        best = best.max(operations / clock.seconds());
    }
    best
}

/// Steps of a run: a few milliseconds.
const STEPS: usize = 1_000_000;

/// Independent chains: more than latency times throughput anywhere.
const CHAINS: usize = 12;

/// A product of tiles takes 16 cycles.
fn steps_of(isa: Isa) -> usize {
    if isa == Isa::Amx { STEPS / 16 } else { STEPS }
}

/// Operations of one instruction.
fn operations_of(isa: Isa) -> f64 {
    match isa {
        Isa::Scalar => 2.0,
        Isa::Avx2 => 16.0,
        Isa::Avx512 => 32.0,
        Isa::Avx512Bf16 => 64.0,
        Isa::Amx => 16384.0,
    }
}

fn spin(isa: Isa) -> f32 {
    match isa {
        Isa::Scalar => scalar(),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a pool of kernels of this instruction set exists, so the machine has it.
        _ => unsafe {
            match isa {
                Isa::Avx2 => x86::avx2(),
                Isa::Avx512 => x86::avx512(),
                Isa::Amx => x86::amx(),
                _ => x86::avx512bf16(),
            }
        },
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("only scalar kernels exist here"),
    }
}

fn scalar() -> f32 {
    let mut sums = [0.0_f32; CHAINS];
    let factor = std::hint::black_box(0.5_f32);
    for _ in 0..STEPS {
        for sum in &mut sums {
            *sum = sum.mul_add(factor, factor);
        }
    }
    sums.iter().sum()
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{CHAINS, STEPS};
    use std::arch::asm;
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx2,fma")]
    pub fn avx2() -> f32 {
        let factor = _mm256_set1_ps(std::hint::black_box(0.5));
        let mut sums = [factor; CHAINS];
        for _ in 0..STEPS {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, factor, factor);
            }
        }
        sums.into_iter().map(|v| _mm256_cvtss_f32(v)).sum()
    }

    #[target_feature(enable = "avx512f")]
    pub fn avx512() -> f32 {
        let factor = _mm512_set1_ps(std::hint::black_box(0.5));
        let mut sums = [factor; CHAINS];
        for _ in 0..STEPS {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, factor, factor);
            }
        }
        sums.into_iter().map(|v| _mm512_cvtss_f32(v)).sum()
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    pub fn avx512bf16() -> f32 {
        let bits = _mm512_set1_epi16(std::hint::black_box(0x3f00));
        // SAFETY: both types are 64 bytes of 32 BF16.
        let factor = unsafe { std::mem::transmute::<__m512i, __m512bh>(bits) };
        let mut sums = [_mm512_setzero_ps(); CHAINS];
        for _ in 0..STEPS {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, factor, factor);
            }
        }
        sums.into_iter().map(|v| _mm512_cvtss_f32(v)).sum()
    }

    /// Products of tiles of zeros into four accumulators, three times a step.
    pub fn amx() -> f32 {
        let mut config = [0_u8; 64];
        config[0] = 1;
        for tile in 0..8 {
            config[16 + 2 * tile] = 64;
            config[48 + tile] = 16;
        }
        // SAFETY: the instruction set was chosen as available, which includes the leave to use tiles; they
        // are configured first and given up last, and nothing else uses them.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) config.as_ptr(), options(nostack, readonly));
            for _ in 0..super::steps_of(mlakit_cpu::isa::Isa::Amx) {
                asm!(
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm5, tmm6",
                    "tdpbf16ps tmm2, tmm4, tmm7",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm5, tmm6",
                    "tdpbf16ps tmm2, tmm4, tmm7",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm5, tmm6",
                    "tdpbf16ps tmm2, tmm4, tmm7",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    options(nostack, nomem)
                );
            }
            asm!("tilerelease", options(nostack, nomem));
        }
        0.0
    }
}
