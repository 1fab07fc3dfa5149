//! Where the `n`-th largest of some numbers lies, by counting in ever narrower ranges.
//!
//! Ranges begin at what the numbers really span. Scores of one row span little of what an F32 can, and
//! by the digits of their bits most of them would fall into a few counters.

/// Counters of a pass. What lies outside a range has one more.
const COUNTERS: usize = 1 << 11;

/// A range of numbers that holds the `n`-th largest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bounds {
    /// The smallest number of the range.
    pub(super) low: i32,
    /// The largest.
    pub(super) high: i32,
    /// How many are larger than all of the range.
    pub(super) larger: usize,
    /// How many lie in it.
    pub(super) inside: usize,
}

impl Bounds {
    /// The range of all numbers; there is at least one.
    #[inline(always)]
    pub(super) fn of(numbers: &[i32]) -> Self {
        let (mut low, mut high) = (i32::MAX, i32::MIN);
        for number in numbers {
            low = low.min(*number);
            high = high.max(*number);
        }
        Self { low, high, larger: 0, inside: numbers.len() }
    }

    /// A part of the range, 1 / 2048 of it or a single number, that still holds the one of which
    /// `wanted - 1` or fewer are larger and `wanted` or more at least as large.
    #[inline(always)]
    pub(super) fn narrowed(self, numbers: &[i32], wanted: usize) -> Self {
        let distance = |number: i32| (number as u32).wrapping_sub(self.low as u32);
        let span = distance(self.high);
        let shift = (u32::BITS - span.leading_zeros()).saturating_sub(COUNTERS.ilog2());
        let mut counts = [0_u32; 2 * COUNTERS];
        for number in numbers {
            let at = distance(*number);
            let counter = if at <= span { (at >> shift) as usize } else { COUNTERS };
            // The mask spares the check of a bound.
            counts[counter & (2 * COUNTERS - 1)] += 1;
        }
        let mut found = (span >> shift) as usize;
        let mut larger = self.larger;
        while larger + (counts[found] as usize) < wanted {
            larger += counts[found] as usize;
            found -= 1;
        }
        let low = (self.low as u32).wrapping_add((found as u32) << shift);
        let high = distance(low as i32).saturating_add((1 << shift) - 1).min(span);
        Self {
            low: low as i32,
            high: (self.low as u32).wrapping_add(high) as i32,
            larger,
            inside: counts[found] as usize,
        }
    }

    /// The number itself.
    #[inline(always)]
    pub(super) fn exact(mut self, numbers: &[i32], wanted: usize) -> Self {
        while self.low < self.high {
            self = self.narrowed(numbers, wanted);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(numbers: &[i32], wanted: usize) {
        let mut sorted = numbers.to_vec();
        sorted.sort_unstable_by(|a, b| b.cmp(a));
        let needed = sorted[wanted - 1];
        let larger = |than: i32| sorted.iter().filter(|number| **number > than).count();
        let first = Bounds::of(numbers).narrowed(numbers, wanted);
        assert!((first.low..=first.high).contains(&needed), "{first:?} {needed}");
        assert_eq!(first.larger, larger(first.high));
        assert_eq!(
            first.larger + first.inside,
            numbers.len() - sorted.iter().filter(|n| **n < first.low).count()
        );
        let exact = Bounds::of(numbers).exact(numbers, wanted);
        assert_eq!((exact.low, exact.high, exact.larger), (needed, needed, larger(needed)));
    }

    #[test]
    fn agrees_with_sorting() {
        let mut seed = 7_u32;
        let mut next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            seed
        };
        for spread in [0, 1, 10, 11, 12, 20, 31] {
            for len in [1, 2, 63, 500] {
                let numbers: Vec<i32> =
                    (0..len).map(|_| (next() as i32) >> (31 - spread)).collect();
                for wanted in [1, len / 2, len - 1, len].into_iter().filter(|wanted| *wanted > 0) {
                    check(&numbers, wanted);
                }
            }
        }
        for wanted in 1..=5 {
            check(&[i32::MIN, i32::MAX, i32::MIN, 0, -1], wanted);
        }
    }
}
