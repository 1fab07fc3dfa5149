//! `selection` on the host.

use super::spec::{SelectionSpec, Slot};
use crate::scratch::{FAULT_NAMES, Fault};

/// The operands on the host.
#[derive(Clone, Copy, Debug)]
pub struct SelectionCase<'a> {
    /// `[R, T]`.
    pub positions: &'a [i32],
    /// `[R]`.
    pub request: &'a [i32],
    /// `[B, W]`.
    pub page_table: &'a [i32],
    /// `W`.
    pub table_width: usize,
    /// `[R]`, pooled only.
    pub last_position: Option<&'a [i64]>,
}

/// What the oracle says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelectionResult {
    /// `[R, T']`.
    pub slots: Vec<i32>,
    /// `[R]`.
    pub slot_counts: Vec<i32>,
    /// By [`Fault`]: one for each slot that an entry out of bounds left at -1, one for each bad request.
    pub faults: [u32; FAULT_NAMES.len()],
}

/// Converts.
pub fn oracle(spec: &SelectionSpec, case: &SelectionCase<'_>) -> SelectionResult {
    let width = case.table_width;
    let batch = case.page_table.len() / width.max(1);
    let (mut slots, mut slot_counts) = (Vec::new(), Vec::new());
    let mut faults = [0; FAULT_NAMES.len()];
    let mut bad = |count: usize| faults[Fault::Id as usize] += count as u32;
    for (row, positions) in case.positions.chunks_exact(spec.topk).enumerate() {
        let first = slots.len();
        let request = usize::try_from(case.request[row]).ok().filter(|r| *r < batch);
        let found = match request {
            Some(request) => {
                let table = &case.page_table[request * width..(request + 1) * width];
                let last = case.last_position.map_or(-1, |last| last[row]);
                row_slots(spec, positions, last, table)
            }
            None => {
                bad(usize::from(case.request[row] != -1));
                Vec::new()
            }
        };
        bad(found.iter().filter(|slot| **slot == Slot::Bad).count());
        slots.extend(found.iter().map(|slot| match slot {
            Slot::At(slot) => *slot,
            Slot::Unused | Slot::Bad => -1,
        }));
        slot_counts.push(found.len() as i32);
        slots.resize(first + spec.slots(), -1);
    }
    SelectionResult { slots, slot_counts, faults }
}

/// The live prefix of a row.
fn row_slots(spec: &SelectionSpec, positions: &[i32], last: i64, table: &[i32]) -> Vec<Slot> {
    let live = positions.iter().rposition(|position| *position >= 0).map_or(0, |at| at + 1);
    let (size, tail) = (spec.pool_size as u64, spec.tail(last));
    let mut slots = Vec::new();
    for position in &positions[..live] {
        for token in 0..size {
            slots.push(match u64::try_from(*position) {
                Err(_) => Slot::Unused,
                Ok(pool) if spec.is_pooled() && pool >= spec.complete_pools(last) => Slot::Bad,
                Ok(pool) => spec.slot(pool * size + token, table),
            });
        }
    }
    slots.extend(tail.map(|position| spec.slot(position, table)));
    slots
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(more: &str) -> SelectionSpec {
        let text = format!(
            r#"{{"page_size":16,"topk":4,"max_rows":4,"max_batch":2,"max_table_width":4{more}}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn entries_keep_their_places() {
        let case = SelectionCase {
            positions: &[0, -1, 17, -1, 3, 70, 35, 1, 1, 2, 3, 4, 1, 2, 3, 4],
            request: &[0, 1, -1, 2],
            page_table: &[5, 0, 7, -1, 2, 3],
            table_width: 3,
            last_position: None,
        };
        let result = oracle(&spec(""), &case);
        assert_eq!(result.slots[..4], [80, -1, 1, -1]);
        // Position 70 is beyond the table; page -1 is merely unused.
        assert_eq!(result.slots[4..8], [-1, -1, 51, -1]);
        assert!(result.slots[8..].iter().all(|slot| *slot == -1));
        assert_eq!(result.slot_counts, [3, 4, 0, 0]);
        assert_eq!(result.faults, [2, 0, 0]);
    }

    #[test]
    fn pools_expand_and_the_tail_follows() {
        let case = SelectionCase {
            positions: &[0, 2, -1, -1, 1, -1, -1, -1],
            request: &[0, 0],
            page_table: &[5, 0],
            table_width: 2,
            last_position: Some(&[13, 6]),
        };
        let result = oracle(&spec(r#","pool_size":4"#), &case);
        assert_eq!(result.slots[..10], [80, 81, 82, 83, 88, 89, 90, 91, 92, 93]);
        assert!(result.slots[10..19].iter().all(|slot| *slot == -1));
        // Pool 1 holds token 7, which the row at 6 does not see.
        assert_eq!(result.slots[19..26], [-1, -1, -1, -1, 84, 85, 86]);
        assert_eq!(result.slot_counts, [10, 7]);
        assert_eq!(result.faults, [4, 0, 0]);
    }
}
