//! Random numbers, BF16 vectors, and the instruction sets under test.

use mlakit_cpu::isa::Isa;
use mlakit_cpu::kernel::Kernels;
use mlakit_cpu::numerics::{bf16_to_f32, f32_to_bf16};

/// The kernels of this machine, and those of AMX in plain code; says what is left out.
pub fn kernels() -> Vec<Kernels> {
    let mut found = vec![Kernels::emulated_amx()];
    for isa in Isa::ALL {
        match Kernels::new(isa) {
            Ok(kernels) => found.push(kernels),
            Err(error) => println!("skipped: {error}"),
        }
    }
    found
}

/// A small generator (splitmix64).
pub struct Rng(pub u64);

impl Rng {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.bits() % end as u64) as usize
    }

    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// Roughly normal, variance 1.
    pub fn normal(&mut self) -> f32 {
        let sum: f64 = (0..12).map(|_| (self.bits() >> 11) as f64 / (1_u64 << 53) as f64).sum();
        (sum - 6.0) as f32
    }

    pub fn bf16(&mut self, scale: f32) -> u16 {
        f32_to_bf16(self.normal() * scale)
    }

    pub fn bf16_vec(&mut self, len: usize, scale: f32) -> Vec<u16> {
        (0..len).map(|_| self.bf16(scale)).collect()
    }
}

pub fn f64_of(bits: u16) -> f64 {
    f64::from(bf16_to_f32(bits))
}

/// Bits of F32, with all NaN equal: the payload of a NaN is not defined.
pub fn bits_of(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() }).collect()
}

/// Fails with the first place where the two differ.
#[track_caller]
pub fn assert_same_bits(got: &[f32], expected: &[f32], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}: lengths");
    let (got_bits, expected_bits) = (bits_of(got), bits_of(expected));
    if let Some(i) = (0..got.len()).find(|&i| got_bits[i] != expected_bits[i]) {
        panic!(
            "{what}: element {i} of {} is {} ({:#010x}), expected {} ({:#010x})",
            got.len(),
            got[i],
            got_bits[i],
            expected[i],
            expected_bits[i]
        );
    }
}
