//! One work item, from a row's selection to its output.

use mlakit::op::sparse::Scope;

use super::call::{SparseCall, SparseItem};
use super::gather::{Found, Record, gather};
use crate::kernel::attention::block::{Block, hide_absent, score_block};
use crate::kernel::attention::finish::{finish, nothing};
use crate::kernel::attention::queries::pack_queries;
use crate::kernel::attention::scratch::{self, Area, area, reset};
use crate::kernel::attention::softmax::softmax;
use crate::kernel::attention::values::add_values;
use crate::kernel::attention::{BLOCK, Geometry};
use crate::kernel::engine::Engine;

/// Computes one item.
///
/// # Safety
/// `base` is writable for the scratch bytes of the item's heads and used by nobody else; the call's and
/// the item's pointers are valid as their fields say.
#[inline(always)]
pub(crate) unsafe fn forward<E: Engine>(
    e: E,
    call: &SparseCall<'_>,
    item: &SparseItem,
    base: *mut u8,
) {
    let (attention, lanes, end) = (&call.attention, &item.lanes, item.range.end);
    // SAFETY: the contract of this function.
    unsafe {
        if item.range.is_empty() {
            nothing(attention, lanes);
            return;
        }
        let area = area::<E>(base, (attention.geometry, true), lanes);
        reset(&area);
        pack_queries(e, attention, lanes, &area);
        let mut column = item.range.start;
        let mut keys = Gathered::new(call, &area);
        gather(e, call, item, column, &mut keys);
        while column < end {
            column = item.next_block(column);
            let mut ahead = Gathered::new(call, &area);
            if column < end {
                gather(e, call, item, column, &mut ahead);
            }
            if !keys.block.keys.is_empty() {
                add_block(e, call, &area, [&keys, &ahead]);
            }
            keys = ahead;
        }
        finish(e, attention, lanes, &area);
    }
}

/// Scratch bytes of one worker. Key rows always have room: which scopes need them is no matter of bytes.
pub(crate) fn scratch_bytes<E: Engine>(geometry: Geometry, max_heads: usize) -> usize {
    scratch::bytes::<E>((geometry, true), 1, max_heads)
}

/// A block of records, all of one scope.
struct Gathered {
    block: Block,
    scales: [*const u8; BLOCK],
    scope: Scope,
    /// Bytes of a record that are read, in each scope.
    record_bytes: [usize; 2],
}

impl Gathered {
    #[inline(always)]
    fn new(call: &SparseCall<'_>, area: &Area) -> Gathered {
        let nowhere = area.zeros.cast_const();
        Gathered {
            block: Block::new(nowhere, 0),
            scales: [nowhere; BLOCK],
            scope: Scope::Main,
            record_bytes: [call.caches[0].rows.data_bytes, call.caches[1].rows.data_bytes],
        }
    }
}

impl Found for Gathered {
    #[inline(always)]
    fn push(&mut self, scope: Scope, record: Record) {
        let key = self.block.keys.end;
        self.block.records[key] = record.data;
        self.block.present |= 1 << key;
        self.block.keys.end = key + 1;
        self.block.record_bytes = self.record_bytes[scope as usize];
        self.scales[key] = record.scales;
        self.scope = scope;
    }
}

/// Adds one block of keys to every lane, while the records of the next are fetched.
///
/// # Safety
/// `area` was laid out and reset for the item and holds packed queries; the records of both blocks are
/// readable.
#[inline(always)]
unsafe fn add_block<E: Engine>(
    e: E,
    call: &SparseCall<'_>,
    area: &Area,
    [keys, ahead]: [&Gathered; 2],
) {
    let block = &keys.block;
    let mut rows = block.records;
    let form = &call.caches[keys.scope as usize].rows;
    let all = block.whole_pairs();
    let work = (0..area.size.lanes, all.start / 2..all.end / 2);
    // SAFETY: the contract of this function; `rows` names key rows once they are made, of which the area has
    // one for each key of a block.
    unsafe {
        if !form.in_place::<E>() {
            for key in block.keys.clone() {
                let row = area.key_rows.add(key * area.size.row_bytes);
                form.make(e, [block.records[key], keys.scales[key]], row);
                rows[key] = row;
            }
        }
        score_block(e, area, [block, &ahead.block], &rows);
        hide_absent(area, block, all.clone());
        softmax::<E, false>(e, area, all, call.attention.score_scale_log2);
        add_values(e, &call.attention, area, work, rows.as_ptr());
    }
}
