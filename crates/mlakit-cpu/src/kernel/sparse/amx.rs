//! Sparse attention on tiles, in stretches of 256 columns: the records of a stretch become rows of BF16 once
//! for all heads, closed up.

use mlakit::op::sparse::Scope;

use super::call::{SparseCall, SparseItem};
use super::gather::{Found, Record, gather};
use crate::kernel::amx::{DEPTH, TileUnit};
use crate::kernel::attention::amx::keys::{Ahead, Stretch};
use crate::kernel::attention::amx::scores::{hide_absent, pack_queries, score_panel};
use crate::kernel::attention::amx::scratch::{PANEL, TileArea, area};
use crate::kernel::attention::amx::softmax::{LaneTile, softmax};
use crate::kernel::attention::amx::values::{add_values, rescale, stage_values};
use crate::kernel::attention::amx::{KEYS, finish_tiles, reset, units_of};
use crate::kernel::attention::finish::nothing;
use crate::kernel::engine::Engine;

/// Computes one item.
///
/// # Safety
/// `base` is writable for the scratch bytes of the item's heads and used by nobody else; the call's and
/// the item's pointers are valid as their fields say.
#[inline(always)]
pub(crate) unsafe fn forward<U: TileUnit>(
    unit: &mut U,
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
        let area = area(base, attention.geometry, lanes);
        reset(&area);
        pack_queries(unit, attention, lanes, &area);
        unit.configure();
        let zeros = area.common.zeros.cast_const();
        let mut two = [Gathered::new(zeros), Gathered::new(zeros)];
        let [keys, ahead] = &mut two;
        let (mut keys, mut ahead) = (keys, ahead);
        let mut column = item.range.start;
        column = keys.fill(unit.engine(), call, item, column);
        loop {
            let last = column >= end;
            column = ahead.fill(unit.engine(), call, item, column);
            if !keys.stretch.keys.is_empty() {
                add_stretch(unit, call, &area, keys, &ahead.stretch);
            }
            if last {
                break;
            }
            (keys, ahead) = (ahead, keys);
        }
        unit.release();
        finish_tiles(unit, attention, lanes, &area);
    }
}

/// A stretch of records, perhaps of both scopes.
struct Gathered {
    stretch: Stretch,
    scales: [*const u8; KEYS],
    scopes: [Scope; KEYS],
}

impl Gathered {
    fn new(nowhere: *const u8) -> Gathered {
        let (scales, scopes) = ([nowhere; KEYS], [Scope::Main; KEYS]);
        Gathered { stretch: Stretch::new(nowhere), scales, scopes }
    }

    /// Looks up the columns from `column` to the end of its stretch, and returns what follows.
    ///
    /// # Safety
    /// As [`gather`].
    #[inline(always)]
    unsafe fn fill<E: Engine>(
        &mut self,
        e: E,
        call: &SparseCall<'_>,
        item: &SparseItem,
        column: usize,
    ) -> usize {
        self.stretch.begin(0..0);
        let end = ((column / KEYS + 1) * KEYS).min(item.range.end);
        let mut column = column;
        while column < end {
            // SAFETY: the contract of this function.
            unsafe { gather(e, call, item, column, self) };
            column = item.next_block(column);
        }
        column
    }
}

impl Found for Gathered {
    #[inline(always)]
    fn push(&mut self, scope: Scope, record: Record) {
        let key = self.stretch.push(record.data);
        (self.scales[key], self.scopes[key]) = (record.scales, scope);
    }
}

/// Adds one stretch of keys to every lane, while the records of the next are fetched.
///
/// # Safety
/// `area` was laid out and reset for the item, the unit is configured; the records of both are readable.
#[inline(always)]
unsafe fn add_stretch<U: TileUnit>(
    unit: &mut U,
    call: &SparseCall<'_>,
    area: &TileArea,
    gathered: &mut Gathered,
    next: &Stretch,
) {
    let attention = &call.attention;
    let payload = call.caches[0].rows.data_bytes.max(call.caches[1].rows.data_bytes);
    let ahead = &mut Ahead::new(next, payload, units_of(area, &gathered.stretch));
    // SAFETY: the contract of this function; the stretch names rows once they are made.
    unsafe {
        make_rows(unit.engine(), call, area, gathered);
        let keys = &gathered.stretch;
        if area.tiles.lanes > 1 {
            stage_values(unit, attention.geometry, area, keys, ahead);
        }
        for first in (0..area.tiles.lanes).step_by(PANEL) {
            let panel = first..(first + PANEL).min(area.tiles.lanes);
            score_panel(unit, area, &panel, keys, ahead);
            let e = unit.engine();
            hide_absent(e, area, panel.len(), keys);
            for (of_panel, index) in panel.clone().enumerate() {
                let work = (keys.steps(), attention.score_scale_log2);
                softmax::<U, false>(unit, area, LaneTile { index, of_panel }, work, ahead);
                rescale(e, area, index);
            }
            add_values(unit, attention.geometry, area, (&panel, keys), ahead);
        }
    }
}

/// Makes BF16 rows of the records, filled up with zeros to whole chunks.
///
/// # Safety
/// The records are readable; `area` was laid out for the call.
#[inline(always)]
unsafe fn make_rows<E: Engine>(
    e: E,
    call: &SparseCall<'_>,
    area: &TileArea,
    gathered: &mut Gathered,
) {
    let rows = (area.common.key_rows, area.common.size.row_bytes);
    let width = call.attention.geometry.qk_width;
    let missing = width.next_multiple_of(DEPTH) - width;
    for key in gathered.stretch.keys.clone() {
        let record = [gathered.stretch.rows[key], gathered.scales[key]];
        gathered.stretch.name_row(key, rows);
        let row = gathered.stretch.rows[key].cast_mut();
        let form = &call.caches[gathered.scopes[key] as usize].rows;
        // SAFETY: the record is readable and the area has a row for each key of a stretch, whole chunks long.
        unsafe {
            form.make(e, record, row);
            row.add(2 * width).write_bytes(0, 2 * missing);
        }
    }
}
