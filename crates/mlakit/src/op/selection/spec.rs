//! What a caller declares of a selection, and what an entry of one refers to.

use serde::{Deserialize, Serialize};

use crate::op::indexer::{MAX_POOL, MAX_SELECTED};
use crate::op::spec::{MAX_ROWS, checked_spec, within};
use crate::{Error, Error::Contract};

/// The fields of a [`SelectionSpec`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SelectionFields {
    /// Tokens of a page of the pool that the slots are for: 1 or a multiple of 16.
    pub page_size: usize,
    /// Entries of a row.
    pub topk: usize,
    /// Tokens of an entry; 1 where entries are tokens.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub pool_size: usize,
    /// Pooled only: whether the tokens behind the last complete pool are selected too.
    #[serde(default = "yes")]
    pub tail: bool,
    /// Pages of the pool, where known: ids from there on are out of bounds. Without it only what makes a slot that I32 does not hold is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pages: Option<usize>,
    /// Row capacity.
    pub max_rows: usize,
    /// Request capacity.
    pub max_batch: usize,
    /// Page table width at most.
    pub max_table_width: usize,
}

fn one() -> usize {
    1
}

fn is_one(number: &usize) -> bool {
    *number == 1
}

fn yes() -> bool {
    true
}

checked_spec! {
    /// A selection that can exist.
    SelectionSpec, SelectionFields, "SelectionFields"
}

/// What became of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// A slot.
    At(i32),
    /// Nothing: the entry is negative, or its page is marked unused.
    Unused,
    /// Out of bounds.
    Bad,
}

impl SelectionFields {
    /// Whether an entry is more than one token.
    pub fn is_pooled(&self) -> bool {
        self.pool_size > 1
    }

    /// Slots of a row.
    pub fn slots(&self) -> usize {
        self.topk * self.pool_size + self.pool_size - 1
    }

    /// The slot of a position, by the page table of its request.
    pub fn slot(&self, position: u64, table: &[i32]) -> Slot {
        let (column, offset) = (position / self.page_size as u64, position % self.page_size as u64);
        let entry = usize::try_from(column).ok().and_then(|column| table.get(column));
        let page = match entry {
            Some(-1) => return Slot::Unused,
            Some(page) => u64::try_from(*page).ok(),
            None => None,
        };
        let inside = |page: &u64| self.pages.is_none_or(|pages| *page < pages as u64);
        let slot = page.filter(inside).map(|page| page * self.page_size as u64 + offset);
        match slot.and_then(|slot| i32::try_from(slot).ok()) {
            Some(slot) => Slot::At(slot),
            None => Slot::Bad,
        }
    }

    /// The pools that are complete for a row at `last_position`: those that hold no token after its own.
    pub fn complete_pools(&self, last_position: i64) -> u64 {
        u64::try_from(last_position).map_or(0, |last| (last + 1) / self.pool_size as u64)
    }

    /// The tokens of a row at `last_position` that are in no complete pool.
    pub fn tail(&self, last_position: i64) -> std::ops::Range<u64> {
        let Ok(last) = u64::try_from(last_position) else { return 0..0 };
        let end = last + 1;
        let begin =
            if self.tail && self.is_pooled() { end - end % self.pool_size as u64 } else { end };
        begin..end
    }

    fn check(&self) -> Result<(), Error> {
        let size = self.page_size;
        if size != 1 && (!size.is_multiple_of(16) || !(16..=1 << 16).contains(&size)) {
            let needed = "1 or a multiple of 16, at most 65536".to_owned();
            return Err(Contract { what: "page_size", needed, given: size.to_string() });
        }
        within("topk", self.topk, 1, MAX_SELECTED)?;
        within("pool_size", self.pool_size, 1, MAX_POOL)?;
        within("pages", self.pages.unwrap_or(0), 0, 1 << 31)?;
        within("max_rows", self.max_rows, 1, MAX_ROWS)?;
        within("max_batch", self.max_batch, 1, MAX_ROWS)?;
        within("max_table_width", self.max_table_width, 1, 1 << 30)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(more: &str) -> SelectionSpec {
        let text = format!(
            r#"{{"page_size":16,"topk":512,"max_rows":2,"max_batch":2,"max_table_width":4{more}}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn pools_of_four_and_their_tail() {
        assert_eq!(spec(r#","pool_size":4"#).slots(), 2051);
        assert_eq!(spec(r#","pool_size":16"#).slots(), 512 * 16 + 15);
        assert_eq!(spec("").slots(), 512);
        let pooled = spec(r#","pool_size":4"#);
        assert_eq!([2, 3, 4, 10].map(|last| pooled.tail(last)), [0..3, 4..4, 4..5, 8..11]);
        assert_eq!(pooled.tail(-1), 0..0);
        assert!(spec(r#","pool_size":4,"tail":false"#).tail(6).is_empty());
        assert!(spec("").tail(6).is_empty());
    }

    #[test]
    fn slots_are_bounded() {
        let (spec, table) = (spec(r#","pages":3"#), [2, -1, 3, -2]);
        let slots = [0, 15, 16, 32, 48, 64, u64::MAX].map(|position| spec.slot(position, &table));
        use Slot::{At, Bad, Unused};
        assert_eq!(slots, [At(32), At(47), Unused, Bad, Bad, Bad, Bad]);
    }

    #[test]
    fn a_slot_that_i32_does_not_hold_is_bad() {
        let table = [(i32::MAX / 16), i32::MAX / 16 + 1];
        assert_eq!(spec("").slot(15, &table), Slot::At(i32::MAX));
        assert_eq!(spec("").slot(16, &table), Slot::Bad);
    }

    #[test]
    fn bad_fields_are_named() {
        let refused = |text: &str| {
            let text = format!(
                r#"{{"page_size":16,"topk":5,"max_rows":2,"max_batch":2,"max_table_width":4,{text}}}"#
            );
            serde_json::from_str::<SelectionSpec>(&text).is_err()
        };
        assert!(refused(r#""pool_size":0"#));
        assert!(refused(r#""pool":1"#));
        let fields = |change: fn(&mut SelectionFields)| {
            let mut fields = SelectionFields::from(spec(""));
            change(&mut fields);
            SelectionSpec::new(fields).unwrap_err().to_string()
        };
        assert!(fields(|f| f.page_size = 17).starts_with("page_size"));
        assert!(fields(|f| f.topk = 0).starts_with("topk"));
        assert!(fields(|f| f.max_rows = 0).starts_with("max_rows"));
    }
}
