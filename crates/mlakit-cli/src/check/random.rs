//! Numbers for cases that are made here: the same on every machine.

use half::bf16;

/// SplitMix64.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// From a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `end`, which is not 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.bits() % end as u64) as usize
    }

    /// Nearly normal: mean 0, variance 1, within 3.5.
    pub fn normal(&mut self) -> f32 {
        // The sum of four uniform numbers of 16 bits has variance 4/12.
        let bits = self.bits();
        let sum: u32 = (0..4).map(|i| (bits >> (16 * i)) as u32 & 0xffff).sum();
        (sum as f32 / 65536.0 - 2.0) * 3f32.sqrt()
    }

    /// BF16 numbers of a standard deviation.
    pub fn bf16s(&mut self, len: usize, deviation: f32) -> Vec<bf16> {
        (0..len).map(|_| bf16::from_f32(self.normal() * deviation)).collect()
    }

    /// F32 numbers of a standard deviation.
    pub fn f32s(&mut self, len: usize, deviation: f32) -> Vec<f32> {
        (0..len).map(|_| self.normal() * deviation).collect()
    }

    /// The numbers below `len` in another order.
    pub fn order(&mut self, len: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..len).collect();
        for last in (1..len).rev() {
            order.swap(last, self.below(last + 1));
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_nearly_normal_and_orders_are_whole() {
        let mut random = Random::new(7);
        let values = random.f32s(20_000, 1.0);
        let mean = values.iter().sum::<f32>() / 20_000.0;
        let variance = values.iter().map(|v| v * v).sum::<f32>() / 20_000.0;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05, "{mean} {variance}");
        let mut order = random.order(100);
        assert_ne!(order, (0..100).collect::<Vec<_>>());
        order.sort_unstable();
        assert_eq!(order, (0..100).collect::<Vec<_>>());
    }
}
