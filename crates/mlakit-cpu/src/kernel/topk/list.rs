//! The candidates of one row.

use super::order::{LOWEST, NAN, ordered, score_of};
use super::select::Bounds;
use crate::kernel::engine::Engine;

/// Scores of a block.
pub(crate) const BLOCK: usize = 64;

/// Bytes of the head of a list in memory: how many candidates there are, whether there is a floor, the
/// floor.
const HEAD_BYTES: usize = 64;

/// Candidates that a list has room for, so that it can select `topk` of at most `keys`.
pub fn capacity(topk: usize, keys: usize) -> usize {
    let room = (2 * topk).max(topk + 8 * BLOCK).next_multiple_of(BLOCK);
    room.min(keys.next_multiple_of(BLOCK))
}

/// Bytes of a list of this capacity.
pub fn list_bytes(capacity: usize) -> usize {
    HEAD_BYTES + capacity * 8
}

/// Words of the head of a list.
const HEAD: usize = HEAD_BYTES / 4;

/// A list of candidates, ascending in position, in memory of the caller's.
#[derive(Debug)]
pub struct Candidates<'a> {
    head: &'a mut [i32],
    numbers: &'a mut [i32],
    positions: &'a mut [i32],
    topk: usize,
}

impl<'a> Candidates<'a> {
    /// The list that lies in `memory`, as it was left there; whoever [`clear`](Self::clear)s it first
    /// may lend memory with any contents.
    ///
    /// # Panics
    /// Memory of another length than [`list_bytes`] gives.
    pub fn in_memory(memory: &'a mut [i32], topk: usize) -> Self {
        let (head, rest) = memory.split_at_mut(HEAD);
        assert!(rest.len().is_multiple_of(2), "a list is numbers and as many positions");
        let (numbers, positions) = rest.split_at_mut(rest.len() / 2);
        Self { head, numbers, positions, topk }
    }

    /// A list that nothing may be put into.
    pub fn none() -> Self {
        Self { head: &mut [], numbers: &mut [], positions: &mut [], topk: 0 }
    }

    /// Forgets all candidates.
    pub fn clear(&mut self) {
        self.head.fill(0);
    }

    /// Adds the scores of a block of positions that begins at `first`; bit `i` of `present` says whether
    /// score `i` is one. Positions are larger than all before.
    #[inline(always)]
    pub(crate) fn push<E: Engine>(
        &mut self,
        e: E,
        scores: &[f32; BLOCK],
        present: u64,
        first: i32,
    ) {
        if self.len() + BLOCK > self.numbers.len() && self.len() > self.topk {
            self.make_room();
        }
        match self.floor() {
            None if present == u64::MAX => self.push_all(scores, first),
            None => self.push_some(scores, present, first),
            // Everything but NaN beats it, and a comparison of floats would not say so.
            Some(NAN) => self.push_some(scores, present, first),
            Some(floor) => {
                let floor = e.splat(score_of(floor));
                let mut found = 0;
                for lane in (0..BLOCK).step_by(E::W) {
                    // SAFETY: `W` divides the length of a block.
                    let scores_here = unsafe { e.load(scores.as_ptr().add(lane)) };
                    found |= u64::from(e.above(scores_here, floor)) << lane;
                }
                found &= present;
                while found != 0 {
                    let at = found.trailing_zeros() as usize;
                    self.put(ordered(scores[at]), first + at as i32);
                    found &= found - 1;
                }
            }
        }
    }

    /// Adds the scores of positions from `first` on, which are larger than all before.
    #[inline(always)]
    pub(crate) fn push_scores<E: Engine>(&mut self, e: E, scores: &[f32], first: usize) {
        let (blocks, rest) = scores.as_chunks::<BLOCK>();
        for (i, block) in blocks.iter().enumerate() {
            self.push(e, block, u64::MAX, (first + i * BLOCK) as i32);
        }
        if !rest.is_empty() {
            let mut block = [0.0; BLOCK];
            block[..rest.len()].copy_from_slice(rest);
            let present = (1 << rest.len()) - 1;
            self.push(e, &block, present, (first + blocks.len() * BLOCK) as i32);
        }
    }

    #[inline(always)]
    fn push_all(&mut self, scores: &[f32; BLOCK], first: i32) {
        let len = self.len();
        let numbers = &mut self.numbers[len..len + BLOCK];
        for (number, score) in numbers.iter_mut().zip(scores) {
            *number = ordered(*score);
        }
        for (i, position) in self.positions[len..len + BLOCK].iter_mut().enumerate() {
            *position = first + i as i32;
        }
        self.head[0] = (len + BLOCK) as i32;
    }

    #[inline(always)]
    fn push_some(&mut self, scores: &[f32; BLOCK], mut present: u64, first: i32) {
        while present != 0 {
            let at = present.trailing_zeros() as usize;
            let number = ordered(scores[at]);
            if self.floor().is_none_or(|floor| number > floor) {
                self.put(number, first + at as i32);
            }
            present &= present - 1;
        }
    }

    /// Adds the candidates of a list whose positions are all larger.
    pub fn absorb(&mut self, other: &Candidates<'_>) {
        for (number, position) in other.numbers[..other.len()].iter().zip(&*other.positions) {
            if self.len() == self.numbers.len() && self.len() > self.topk {
                self.make_room();
            }
            if self.floor().is_none_or(|floor| *number > floor) {
                self.put(*number, *position);
            }
        }
    }

    /// Cuts the list down to the best `topk`; positions and numbers of these, in order.
    pub fn finish(&mut self) -> (&[i32], &[i32]) {
        self.cut();
        let len = self.len();
        (&self.positions[..len], &self.numbers[..len])
    }

    fn len(&self) -> usize {
        self.head[0] as usize
    }

    /// What a score must beat, once `topk` candidates are held.
    fn floor(&self) -> Option<i32> {
        (self.head[1] != 0).then_some(self.head[2])
    }

    #[inline(always)]
    fn put(&mut self, number: i32, position: i32) {
        let len = self.len();
        (self.numbers[len], self.positions[len]) = (number, position);
        self.head[0] = len as i32 + 1;
    }

    /// Drops what is not among the best `topk`, or most of it: what is dropped is no candidate, and a few
    /// others may stay.
    #[inline(always)]
    fn make_room(&mut self) {
        let numbers = &self.numbers[..self.len()];
        let bounds = Bounds::of(numbers).narrowed(numbers, self.topk);
        let kept = bounds.larger + bounds.inside;
        if kept > self.topk + (self.numbers.len() - self.topk) / 4 {
            // Many are nearly as good as the last of the best.
            return self.cut();
        }
        self.keep(bounds.low);
        // Whatever is as good as the last of the best, or in its range, gets in.
        self.set_floor(bounds.low.saturating_sub(1));
    }

    /// Keeps the best `topk`.
    fn cut(&mut self) {
        if self.len() <= self.topk {
            return;
        }
        let numbers = &self.numbers[..self.len()];
        let bounds = Bounds::of(numbers).exact(numbers, self.topk);
        self.keep_equal(bounds.low, self.topk - bounds.larger);
        self.set_floor(bounds.low);
    }

    /// Keeps what is at least `low`, in its order.
    #[inline(always)]
    fn keep(&mut self, low: i32) {
        let (len, mut kept) = (self.len(), 0);
        let (numbers, positions) = (&mut self.numbers[..len], &mut self.positions[..len]);
        for i in 0..len {
            // Written whether it stays or not, so that the loop has no branch; `kept <= i`.
            let number = numbers[i];
            (numbers[kept], positions[kept]) = (number, positions[i]);
            kept += usize::from(number >= low);
        }
        self.head[0] = kept as i32;
    }

    /// Keeps what is more than `floor`, and the first `equal` that are it, in their order.
    fn keep_equal(&mut self, floor: i32, mut equal: usize) {
        let (len, mut kept) = (self.len(), 0);
        let (numbers, positions) = (&mut self.numbers[..len], &mut self.positions[..len]);
        for i in 0..len {
            let number = numbers[i];
            let is_equal = number == floor && equal > 0;
            equal -= usize::from(is_equal);
            (numbers[kept], positions[kept]) = (number, positions[i]);
            kept += usize::from(is_equal || number > floor);
        }
        self.head[0] = kept as i32;
    }

    /// Sets what a score must beat. No score has a number below that of -inf but NaN, or -1, which would
    /// be -0: a floor there becomes the next one below, which is that of a score.
    fn set_floor(&mut self, floor: i32) {
        let floor = match floor {
            -1 => -2,
            floor if floor < LOWEST => NAN,
            floor => floor,
        };
        (self.head[1], self.head[2]) = (1, floor);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Floors that no score has.
    #[test]
    fn a_floor_is_that_of_a_score() {
        let mut memory = vec![0; list_bytes(capacity(1, 64)) / 4];
        let mut list = Candidates::in_memory(&mut memory, 1);
        for (floor, needed) in [(-1, -2), (0, 0), (NAN, NAN), (NAN + 9, NAN), (LOWEST, LOWEST)] {
            list.set_floor(floor);
            assert_eq!(list.floor(), Some(needed));
            assert!(ordered(score_of(needed)) == needed);
        }
    }
}
