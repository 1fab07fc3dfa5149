//! Which rows belong to which request, and which keys a row sees: the rules that every device follows.

use std::ops::Range;

/// The rows of each request, from offsets that are not trusted: they are clamped to the rows that there are and never decrease.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    next: usize,
    rows: usize,
}

impl Rows {
    /// Begins with the first offset; whether it was in bounds.
    pub fn begin(first: i32, rows: usize) -> (Self, bool) {
        let next = usize::try_from(first).unwrap_or(0).min(rows);
        (Self { next, rows }, usize::try_from(first) == Ok(next))
    }

    /// The rows up to the next offset; whether it was in bounds.
    pub fn until(&mut self, offset: i32) -> (Range<usize>, bool) {
        let end = usize::try_from(offset).unwrap_or(0).min(self.rows).max(self.next);
        let range = self.next..end;
        self.next = end;
        (range, usize::try_from(offset) == Ok(end))
    }
}

/// The keys of the rows of one request.
#[derive(Clone, Copy, Debug)]
pub struct Visible {
    /// Rows of the request.
    pub rows: usize,
    /// Its cached tokens, clamped.
    pub kv_len_tokens: usize,
    /// The newest keys that a row sees, if not all.
    pub window: Option<usize>,
}

impl Visible {
    /// A length, clamped to what a page table covers; whether it was in bounds.
    pub fn clamp_length(length: i32, covered_tokens: usize) -> (usize, bool) {
        let clamped = usize::try_from(length).unwrap_or(0).min(covered_tokens);
        (clamped, usize::try_from(length) == Ok(clamped))
    }

    /// What local row `row` sees by the right-aligned causal rule: the last row sees every key.
    pub fn causal(&self, row: usize) -> Range<usize> {
        self.until((self.kv_len_tokens + row + 1).saturating_sub(self.rows).min(self.kv_len_tokens))
    }

    /// What a row sees whose keys end before `end`.
    pub fn until(&self, end: usize) -> Range<usize> {
        self.window.map_or(0, |window| end.saturating_sub(window))..end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_never_leave_the_rows() {
        let (mut rows, fine) = Rows::begin(0, 5);
        assert!(fine);
        assert_eq!(rows.until(3), (0..3, true));
        assert_eq!(rows.until(2), (3..3, false));
        assert_eq!(rows.until(-1), (3..3, false));
        assert_eq!(rows.until(9), (3..5, false));
        assert_eq!(rows.until(5), (5..5, true));
        assert!(!Rows::begin(-4, 5).1);
    }

    #[test]
    fn the_last_row_sees_every_key() {
        let visible = Visible { rows: 3, kv_len_tokens: 2, window: None };
        assert_eq!([0, 1, 2].map(|row| visible.causal(row)), [0..0, 0..1, 0..2]);
        let windowed = Visible { rows: 2, kv_len_tokens: 10, window: Some(4) };
        assert_eq!([0, 1].map(|row| windowed.causal(row)), [5..9, 6..10]);
        assert_eq!(Visible::clamp_length(-3, 8), (0, false));
        assert_eq!(Visible::clamp_length(9, 8), (8, false));
    }
}
