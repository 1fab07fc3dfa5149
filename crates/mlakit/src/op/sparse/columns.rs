//! The columns of a row, and what an entry of a selection refers to: the rules that every device follows.

use std::ops::Range;

use crate::splits::{BLOCK, Division};

/// One of the two caches of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// The one that every `Spec` has.
    Main = 0,
    /// The second.
    Extra = 1,
}

/// The live columns of a row. Column `c` of the first scope is entry `c` of its list; the second scope begins at the next multiple of
/// [`BLOCK`], so that no block has columns of both, and where it begins depends on this row alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Columns {
    /// Live entries of the first list.
    pub main: usize,
    /// Live entries of the second.
    pub extra: usize,
}

impl Columns {
    /// A count, clamped to the entries that there are; whether it was in bounds.
    pub fn clamp_count(count: i32, width: usize) -> (usize, bool) {
        let clamped = usize::try_from(count).unwrap_or(0).min(width);
        (clamped, usize::try_from(count) == Ok(clamped))
    }

    /// Where the second scope begins.
    pub fn extra_begin(self) -> usize {
        self.main.next_multiple_of(BLOCK)
    }

    /// One behind the last column.
    pub fn end(self) -> usize {
        if self.extra == 0 { self.main } else { self.extra_begin() + self.extra }
    }

    /// The columns of a split: `Auto` and `Count` balance the blocks of this row, `FixedTokens` cuts at multiples of its columns.
    pub fn split(self, division: Division, split: usize) -> Range<usize> {
        let all = 0..self.end();
        division.range(&all, &all, split)
    }

    /// The scope of the block that holds `column`, and which entries of its list are the columns from there up to `end` or the end of
    /// the block. May be empty: between the scopes.
    pub fn block(self, column: usize, end: usize) -> (Scope, Range<usize>) {
        let end = end.min((column / BLOCK + 1) * BLOCK);
        let extra_begin = self.extra_begin();
        if self.extra == 0 || column < extra_begin {
            return (Scope::Main, column.min(self.main)..end.min(self.main));
        }
        (Scope::Extra, column - extra_begin..end - extra_begin)
    }
}

/// Where a token lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The page.
    pub page: usize,
    /// The token in it.
    pub token: usize,
}

/// What an entry of a selection refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Nothing: it is negative, or its page is marked unused.
    Unused,
    /// Nothing that there is: skipped and counted.
    Bad,
    /// A token of the pool.
    At(Place),
}

impl Entry {
    /// Of a slot in a pool of `pages` pages.
    pub fn of_slot(slot: i32, page_size: usize, pages: usize) -> Self {
        let Ok(slot) = usize::try_from(slot) else { return Self::Unused };
        let place = Place { page: slot / page_size, token: slot % page_size };
        if place.page < pages { Self::At(place) } else { Self::Bad }
    }

    /// Of a logical position, by the page table of its request. Positions from `covered` on are out of bounds; a page id of -1 is
    /// unused.
    pub fn of_position(
        position: i32,
        (table, covered): (&[i32], usize),
        page_size: usize,
        pages: usize,
    ) -> Self {
        let Ok(position) = usize::try_from(position) else { return Self::Unused };
        if position >= covered {
            return Self::Bad;
        }
        match table[position / page_size] {
            -1 => Self::Unused,
            page => match usize::try_from(page) {
                Ok(page) if page < pages => Self::At(Place { page, token: position % page_size }),
                _ => Self::Bad,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Splits;

    #[test]
    fn every_column_is_in_one_split_and_one_block() {
        for (main, extra) in [(0, 0), (1, 0), (64, 0), (65, 3), (0, 130), (2051, 128), (63, 64)] {
            let columns = Columns { main, extra };
            for (policy, splits) in
                [(Splits::Auto, 3), (Splits::Count(7), 7), (Splits::FixedTokens(128), 40)]
            {
                let division = Division::new(policy, splits);
                let mut seen = (Vec::new(), Vec::new());
                for split in 0..splits {
                    let range = columns.split(division, split);
                    let mut column = range.start;
                    while column < range.end {
                        assert_eq!(column % BLOCK, 0, "{columns:?} {range:?}");
                        let (scope, entries) = columns.block(column, range.end);
                        match scope {
                            Scope::Main => seen.0.extend(entries),
                            Scope::Extra => seen.1.extend(entries),
                        }
                        column = (column / BLOCK + 1) * BLOCK;
                    }
                }
                assert!(seen.0.into_iter().eq(0..main), "{columns:?} {policy:?}");
                assert!(seen.1.into_iter().eq(0..extra), "{columns:?} {policy:?}");
            }
        }
    }

    #[test]
    fn entries_are_unused_bad_or_there() {
        let at = |page, token| Entry::At(Place { page, token });
        assert_eq!(Entry::of_slot(-1, 16, 2), Entry::Unused);
        assert_eq!(Entry::of_slot(i32::MIN, 16, 2), Entry::Unused);
        assert_eq!(Entry::of_slot(31, 16, 2), at(1, 15));
        assert_eq!(Entry::of_slot(32, 16, 2), Entry::Bad);
        assert_eq!(Entry::of_slot(i32::MAX, 16, 2), Entry::Bad);
        let position = |position| Entry::of_position(position, (&[1, -1, -2, 7, 0], 65), 16, 2);
        assert_eq!(position(-5), Entry::Unused);
        assert_eq!(position(3), at(1, 3));
        assert_eq!(position(16), Entry::Unused);
        assert_eq!(position(32), Entry::Bad);
        assert_eq!(position(48), Entry::Bad);
        assert_eq!(position(64), at(0, 0));
        assert_eq!(position(65), Entry::Bad);
        assert_eq!(Columns::clamp_count(-1, 8), (0, false));
        assert_eq!(Columns::clamp_count(9, 8), (8, false));
        assert_eq!(Columns::clamp_count(8, 8), (8, true));
    }
}
