//! From a selection to records: entries that refer to a token, closed up.

use mlakit::op::sparse::{Entry, Place, Scope};

use super::call::{List, RecordCache, SparseCall, SparseItem};
use crate::kernel::engine::Engine;

/// Where records are found in a block of columns goes.
pub(super) trait Found {
    /// The next record, the `scope`th cache's.
    fn push(&mut self, scope: Scope, record: Record);
}

/// The bytes of one token.
#[derive(Clone, Copy)]
pub(super) struct Record {
    pub(super) data: *const u8,
    pub(super) scales: *const u8,
}

/// Looks up the columns from `column` to the end of its block, and counts those that are out of bounds where
/// the item does so.
///
/// # Safety
/// The item's lists are readable as their fields say.
#[inline(always)]
pub(super) unsafe fn gather<E: Engine>(
    e: E,
    call: &SparseCall<'_>,
    item: &SparseItem,
    column: usize,
    found: &mut impl Found,
) {
    let (scope, entries) = item.columns.block(column, item.range.end);
    let (cache, list) = (&call.caches[scope as usize], item.lists[scope as usize]);
    let mut bad = 0;
    for index in entries {
        // SAFETY: the entry is a live one.
        match unsafe { entry(list, index, cache) } {
            Entry::Unused => {}
            Entry::Bad => bad += 1,
            Entry::At(place) => {
                let record = record(cache, place);
                if cache.rows.planar {
                    // The plane of scales is not fetched with the data.
                    e.prefetch(record.scales);
                }
                found.push(scope, record);
            }
        }
    }
    if bad > 0 && item.counts_faults {
        call.faults.fetch_add(bad, std::sync::atomic::Ordering::Relaxed);
    }
}

/// What an entry refers to.
///
/// # Safety
/// The list is readable at `index`, its page table as its field says.
#[inline(always)]
unsafe fn entry(list: List, index: usize, cache: &RecordCache) -> Entry {
    match list {
        List::Slots { entries } => {
            // SAFETY: the contract of this function.
            let slot = unsafe { *entries.add(index) };
            Entry::of_slot(slot, cache.page_size, cache.pages)
        }
        List::Positions { entries, table, covered } => {
            // SAFETY: the contract of this function.
            let position = unsafe { *entries.add(index) };
            let width = covered.div_ceil(cache.page_size);
            // SAFETY: the table has the pages of all positions below `covered`.
            let table = unsafe { std::slice::from_raw_parts(table, width) };
            Entry::of_position(position, (table, covered), cache.page_size, cache.pages)
        }
    }
}

/// The bytes of a token. The product is 64 bits wide: a cache is larger than 2^31 bytes.
#[inline(always)]
fn record(cache: &RecordCache, place: Place) -> Record {
    let page = cache.base.wrapping_add((place.page as u64 * cache.page_stride_bytes) as usize);
    Record {
        data: page.wrapping_add(cache.data.first + place.token * cache.data.stride),
        scales: page.wrapping_add(cache.scales.first + place.token * cache.scales.stride),
    }
}
