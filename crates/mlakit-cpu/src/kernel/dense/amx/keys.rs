//! A stretch of keys: where its records lie, and as which rows tiles read them.

use std::ops::Range;

use super::super::call::{DenseCall, DenseItem, KeyFormat};
use super::super::pages::page_base;
use super::KEYS;
use super::scratch::TileArea;
use crate::kernel::amx::{DEPTH, TILE};
use crate::kernel::engine::Engine;

/// The records of a stretch of keys.
pub(super) struct Stretch {
    /// The absolute position of key 0: a multiple of [`KEYS`].
    pub(super) start: usize,
    /// Keys that some row of the item sees, counted from `start`.
    pub(super) keys: Range<usize>,
    /// Of each key the BF16 row, whole chunks long, or, until rows are made, its record; `nowhere` where it
    /// was not looked up or its page id is bad.
    pub(super) rows: [*const u8; KEYS],
    /// Of each 16 keys: the first row and the bytes from a row to the next. Rows of keys that have no record
    /// are readable and hold anything.
    pub(super) groups: [(*const u8, usize); KEYS / TILE],
    nowhere: *const u8,
    /// Bit `j % 64` of word `j / 64` is set where key `j` has a record.
    present: [u64; KEYS / 64],
}

impl Stretch {
    /// No keys. `nowhere` is a row of zeros.
    pub(super) fn new(nowhere: *const u8) -> Stretch {
        Stretch {
            start: 0,
            keys: 0..0,
            rows: [nowhere; KEYS],
            groups: [(nowhere, 0); KEYS / TILE],
            nowhere,
            present: [0; KEYS / 64],
        }
    }

    /// Looks up the keys of `keys` (absolute positions within one stretch).
    ///
    /// # Safety
    /// The item's page table is readable for its width, which covers `keys`.
    #[inline(always)]
    pub(super) unsafe fn locate(
        &mut self,
        call: &DenseCall<'_>,
        item: &DenseItem,
        keys: Range<usize>,
    ) {
        let cache = &call.cache;
        self.start = keys.start / KEYS * KEYS;
        self.keys = keys.start - self.start..keys.end - self.start;
        self.rows.fill(self.nowhere);
        self.groups.fill((self.nowhere, 0));
        self.present.fill(0);
        let mut position = keys.start;
        while position < keys.end {
            let (page, token) = (position / cache.page_size, position % cache.page_size);
            let run = (cache.page_size - token).min(keys.end - position);
            // SAFETY: the table covers the position.
            let id = unsafe { *item.page_table.add(page) };
            if let Some(base) = page_base(cache, id) {
                let first = position - self.start;
                self.name_rows(first..first + run, (base, token), cache.record_bytes as usize);
            }
            position += run;
        }
    }

    /// Names neighbours in one page, the first of which is `token` of the page at `base`.
    #[inline(always)]
    fn name_rows(&mut self, keys: Range<usize>, (base, token): (*const u8, usize), stride: usize) {
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

    /// Makes BF16 rows where tiles cannot read records in place.
    ///
    /// # Safety
    /// The records are readable; `area` was laid out for the call.
    #[inline(always)]
    pub(super) unsafe fn make_rows<E: Engine>(
        &mut self,
        e: E,
        call: &DenseCall<'_>,
        area: &TileArea,
    ) {
        let (first, stride) = (area.common.key_rows, area.common.size.row_bytes);
        for key in self.keys.clone() {
            if !self.has(key) {
                continue;
            }
            let row = first.wrapping_add(key * stride);
            // SAFETY: the record is present and the area has a row for each key of a stretch.
            unsafe { make_row(e, call, self.rows[key], row) };
            self.rows[key] = row;
            self.groups[key / TILE] = (first.wrapping_add(key / TILE * TILE * stride), stride);
        }
    }

    /// Whether a key has a record.
    #[inline(always)]
    pub(super) fn has(&self, key: usize) -> bool {
        self.present[key / 64] >> (key % 64) & 1 == 1
    }

    /// Groups of 32 keys that hold the keys.
    #[inline(always)]
    pub(super) fn steps(&self) -> Range<usize> {
        self.keys.start / DEPTH..self.keys.end.div_ceil(DEPTH)
    }
}

/// Whether tiles read records where they lie: 16 neighbours lie in one page, and chunks of 32 elements end
/// where records do.
pub(super) fn in_place(call: &DenseCall<'_>) -> bool {
    call.cache.format == KeyFormat::Bf16
        && call.cache.page_size.is_multiple_of(TILE)
        && call.geometry.qk_width.is_multiple_of(DEPTH)
}

/// Makes the BF16 row of a record, filled up with zeros to whole chunks.
///
/// # Safety
/// `record` is readable for its payload, `row` writable for whole chunks.
#[inline(always)]
unsafe fn make_row<E: Engine>(e: E, call: &DenseCall<'_>, record: *const u8, row: *mut u8) {
    let width = call.geometry.qk_width;
    let missing = width.next_multiple_of(DEPTH) - width;
    // SAFETY: the contract of this function.
    unsafe {
        match call.cache.format {
            KeyFormat::Bf16 => e.row_of_bf16(record, row, width),
            KeyFormat::E4m3 => e.row_of_e4m3(record, row, width),
        }
    }
    // SAFETY: the row is whole chunks long.
    unsafe { row.add(2 * width).write_bytes(0, 2 * missing) };
}

/// Asks for the records of the next stretch, a few lines at a time while this one is worked on: a burst
/// would fill the miss buffers and stop the loads of tiles behind it.
pub(super) struct Ahead<'s> {
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
    pub(super) fn new(keys: &'s Stretch, payload_bytes: usize, units: usize) -> Ahead<'s> {
        let lines = payload_bytes.div_ceil(LINE);
        let rate = (keys.keys.len() * lines * 256).div_ceil(units.max(1));
        Ahead { keys, key: keys.keys.start, line: 0, lines, rate, earned: 0 }
    }

    /// After `units` of work.
    #[inline(always)]
    pub(super) fn step<E: Engine>(&mut self, e: E, units: usize) {
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
