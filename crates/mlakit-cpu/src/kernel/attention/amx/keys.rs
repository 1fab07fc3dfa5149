//! A stretch of keys: where its records lie, and as which rows tiles read them.

use std::ops::Range;

use super::KEYS;
use crate::kernel::amx::{DEPTH, TILE};
use crate::kernel::engine::Engine;

/// The records of a stretch of keys.
pub(in crate::kernel) struct Stretch {
    /// The absolute position of key 0: a multiple of [`KEYS`].
    pub(in crate::kernel) start: usize,
    /// Keys that some row of the item sees, counted from `start`.
    pub(in crate::kernel) keys: Range<usize>,
    /// Of each key the BF16 row, whole chunks long, or, until rows are made, its record; `nowhere` where it
    /// was not looked up or its page id is bad.
    pub(in crate::kernel) rows: [*const u8; KEYS],
    /// Of each 16 keys: the first row and the bytes from a row to the next. Rows of keys that have no record
    /// are readable and hold anything.
    pub(in crate::kernel) groups: [(*const u8, usize); KEYS / TILE],
    nowhere: *const u8,
    /// Bit `j % 64` of word `j / 64` is set where key `j` has a record.
    present: [u64; KEYS / 64],
}

impl Stretch {
    /// No keys. `nowhere` is a row of zeros.
    pub(in crate::kernel) fn new(nowhere: *const u8) -> Stretch {
        Stretch {
            start: 0,
            keys: 0..0,
            rows: [nowhere; KEYS],
            groups: [(nowhere, 0); KEYS / TILE],
            nowhere,
            present: [0; KEYS / 64],
        }
    }

    /// Begins with the keys of `keys` on the grid of stretches, none of which has a record yet.
    #[inline(always)]
    pub(in crate::kernel) fn begin(&mut self, keys: Range<usize>) {
        self.start = keys.start / KEYS * KEYS;
        self.keys = keys.start - self.start..keys.end - self.start;
        self.rows.fill(self.nowhere);
        self.groups.fill((self.nowhere, 0));
        self.present.fill(0);
    }

    /// Takes one more key, the next of those that were taken, whose record is this.
    #[inline(always)]
    pub(in crate::kernel) fn push(&mut self, record: *const u8) -> usize {
        let key = self.keys.end;
        self.rows[key] = record;
        self.present[key / 64] |= 1 << (key % 64);
        self.keys.end = key + 1;
        key
    }

    /// Names neighbours in one page, the first of which is `token` of the page at `base`.
    #[inline(always)]
    pub(in crate::kernel) fn name_rows(
        &mut self,
        keys: Range<usize>,
        (base, token): (*const u8, usize),
        stride: usize,
    ) {
        let first = base.wrapping_add(token * stride);
        for (i, row) in self.rows[keys.clone()].iter_mut().enumerate() {
            *row = first.wrapping_add(i * stride);
        }
        for key in keys.clone() {
            self.present[key / 64] |= 1 << (key % 64);
        }
        for group in keys.start / TILE..keys.end.div_ceil(TILE) {
            // A page has a record for each of its tokens, so all 16 are memory of the pool. (Where pages are
            // of one token, rows are made and this is not used.)
            let at = first.wrapping_add(group * TILE * stride).wrapping_sub(keys.start * stride);
            self.groups[group] = (at, stride);
        }
    }

    /// Names the row that was made of the record of `key`, the `key`th of rows at `first`, `stride` apart.
    #[inline(always)]
    pub(in crate::kernel) fn name_row(&mut self, key: usize, (first, stride): (*mut u8, usize)) {
        self.rows[key] = first.wrapping_add(key * stride);
        self.groups[key / TILE] = (first.wrapping_add(key / TILE * TILE * stride), stride);
    }

    /// Whether a key has a record.
    #[inline(always)]
    pub(in crate::kernel) fn has(&self, key: usize) -> bool {
        self.present[key / 64] >> (key % 64) & 1 == 1
    }

    /// Groups of 32 keys that hold the keys.
    #[inline(always)]
    pub(in crate::kernel) fn steps(&self) -> Range<usize> {
        self.keys.start / DEPTH..self.keys.end.div_ceil(DEPTH)
    }
}

/// Asks for the records of the next stretch, a few lines at a time while this one is worked on: a burst
/// would fill the miss buffers and stop the loads of tiles behind it.
pub(in crate::kernel) struct Ahead<'s> {
    keys: &'s Stretch,
    key: usize,
    line: usize,
    /// Cache lines of a record.
    lines: usize,
    /// Lines a unit of work, and lines earned so far, in 1/256.
    rate: usize,
    earned: usize,
}

/// Bytes of a cache line.
const LINE: usize = 64;

impl<'s> Ahead<'s> {
    /// Spreads the lines of `keys` over `units` of work.
    pub(in crate::kernel) fn new(
        keys: &'s Stretch,
        payload_bytes: usize,
        units: usize,
    ) -> Ahead<'s> {
        let lines = payload_bytes.div_ceil(LINE);
        let rate = (keys.keys.len() * lines * 256).div_ceil(units.max(1));
        Ahead { keys, key: keys.keys.start, line: 0, lines, rate, earned: 0 }
    }

    /// After `units` of work.
    #[inline(always)]
    pub(in crate::kernel) fn step<E: Engine>(&mut self, e: E, units: usize) {
        self.earned += units * self.rate;
        let mut count = self.earned / 256;
        self.earned %= 256;
        while count > 0 && self.key < self.keys.keys.end {
            let record = self.keys.rows[self.key];
            let end = (self.line + count).min(self.lines);
            count -= end - self.line;
            for line in self.line..end {
                e.prefetch(record.wrapping_add(line * LINE));
            }
            self.line = end;
            if end == self.lines {
                (self.key, self.line) = (self.key + 1, 0);
            }
        }
    }
}
