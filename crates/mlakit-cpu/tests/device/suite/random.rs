//! Seeded numbers (SplitMix64), and choices that use every value of a list equally often.

use half::bf16;

/// A generator; the same seed gives the same numbers everywhere.
#[derive(Clone)]
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

    pub fn chance(&mut self, one_in: usize) -> bool {
        self.below(one_in) == 0
    }

    pub fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())].clone()
    }

    pub fn shuffle<T>(&mut self, values: &mut [T]) {
        for end in (1..values.len()).rev() {
            values.swap(end, self.below(end + 1));
        }
    }

    /// Roughly normal with variance 1: four uniform numbers, never beyond 3.5.
    pub fn normal(&mut self) -> f32 {
        let bits = self.bits();
        let sum: f32 = (0..4).map(|i| ((bits >> (16 * i)) & 0xffff) as f32 / 65536.0).sum();
        (sum - 2.0) * 3f32.sqrt()
    }

    pub fn bf16(&mut self) -> bf16 {
        bf16::from_f32(self.normal())
    }

    pub fn bf16s(&mut self, len: usize) -> Vec<bf16> {
        (0..len).map(|_| self.bf16()).collect()
    }

    pub fn normals(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.normal()).collect()
    }
}

/// Deals the values of a list: each comes up once before any comes up again.
pub struct Deck<T> {
    values: Vec<T>,
    next: usize,
}

impl<T: Clone> Deck<T> {
    pub fn new(values: &[T]) -> Self {
        Self { values: values.to_vec(), next: 0 }
    }

    pub fn deal(&mut self, rng: &mut Rng) -> T {
        if self.next == 0 {
            rng.shuffle(&mut self.values);
        }
        let value = self.values[self.next].clone();
        self.next = (self.next + 1) % self.values.len();
        value
    }
}
