//! From positions to records, through the page table.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::call::{DenseCall, DenseItem, KeyCache, KeyFormat};
use crate::kernel::attention::BLOCK;
use crate::kernel::attention::block::Block;

/// Looks up the keys of `keys` (absolute positions within one block).
///
/// # Safety
/// The item's page table is readable for its width, which covers `keys`.
#[inline(always)]
pub(super) unsafe fn locate(
    call: &DenseCall<'_>,
    item: &DenseItem,
    keys: Range<usize>,
    nowhere: *const u8,
) -> Block {
    let cache = &call.cache;
    let start = keys.start / BLOCK * BLOCK;
    let mut block = Block::new(nowhere, payload_bytes(call));
    (block.start, block.keys) = (start, keys.start - start..keys.end - start);
    let mut position = keys.start;
    while position < keys.end {
        let (page, token) = (position / cache.page_size, position % cache.page_size);
        let run = (cache.page_size - token).min(keys.end - position);
        // SAFETY: the table covers the position.
        let id = unsafe { *item.page_table.add(page) };
        if let Some(base) = page_base(cache, id) {
            let first = position - start;
            for i in 0..run {
                let offset = (token + i) as u64 * cache.record_bytes;
                block.records[first + i] = base.wrapping_add(offset as usize);
                block.present |= 1 << (first + i);
            }
        }
        position += run;
    }
    block
}

/// The first byte of a page, or nothing where the id is out of range.
#[inline(always)]
pub(super) fn page_base(cache: &KeyCache, id: i32) -> Option<*const u8> {
    let id = usize::try_from(id).ok().filter(|&id| id < cache.pages)?;
    // 64-bit: a cache is larger than 2^31 bytes.
    let offset = id as u64 * cache.page_stride_bytes;
    Some(cache.base.wrapping_add(offset as usize))
}

/// Counts the bad page ids that are the item's to count.
///
/// # Safety
/// The item's page table is readable for its width.
#[inline(always)]
pub(super) unsafe fn count_faults(call: &DenseCall<'_>, item: &DenseItem) {
    let cache = &call.cache;
    let counted = &item.counted;
    if counted.tokens.is_empty() {
        return;
    }
    let covered = item.table_width * cache.page_size;
    let (begin, end) = (counted.tokens.start.max(counted.first), counted.tokens.end.min(covered));
    if begin >= end {
        return;
    }
    // The page that holds `begin` is this item's only if no earlier counted position is on it.
    let owns_first = begin == counted.first || begin % cache.page_size == 0;
    let first = begin / cache.page_size + usize::from(!owns_first);
    let mut bad = 0;
    for page in first..end.div_ceil(cache.page_size) {
        // SAFETY: below the table's width.
        let id = unsafe { *item.page_table.add(page) };
        bad += u32::from(page_base(cache, id).is_none());
    }
    if bad > 0 {
        call.faults.fetch_add(bad, Ordering::Relaxed);
    }
}

/// Bytes of a record that a kernel reads.
#[inline(always)]
pub(super) fn payload_bytes(call: &DenseCall<'_>) -> usize {
    match call.cache.format {
        KeyFormat::Bf16 => 2 * call.attention.geometry.qk_width,
        KeyFormat::E4m3 => call.attention.geometry.qk_width,
    }
}
