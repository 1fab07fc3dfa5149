//! `selection` on the CPU.

use std::sync::atomic::Ordering::Relaxed;

use mlakit::op::selection::{Selection, SelectionRegions, SelectionSpec, Slot};
use mlakit::scratch::Fault;
use mlakit::{Choice, Error, Plan, Refusal, Runs};

use super::layer::elementwise;
use super::{Shared, divide, fault, read};
use crate::device::{Cpu, Facts, Queue};
use crate::pool::Pool;

elementwise!(Selection, SelectionSpec, SelectionRegions, "selection_scalar", select);

fn select(pool: &Pool, spec: &SelectionSpec, r: &SelectionRegions) {
    let (slots, counts) = (Shared::<i32>::of(r.slots), Shared::<i32>::of(r.slot_counts));
    divide(pool, (r.rows, 1), spec.slots() * 4, &|rows| {
        let mut bad = 0;
        for row in rows {
            // SAFETY: the row's part of both outputs, which were bound at these sizes; no other task has the row.
            let (slots, count) = unsafe {
                let first = slots.get().add(row * spec.slots());
                (std::slice::from_raw_parts_mut(first, spec.slots()), &mut *counts.get().add(row))
            };
            let (found, bad_ones) = select_row(spec, r, row, slots);
            slots[found..].fill(-1);
            *count = found as i32;
            bad += bad_ones;
        }
        if bad > 0 {
            // SAFETY: the scratch of this launch.
            unsafe { fault(r.scratch, Fault::Id) }.fetch_add(bad, Relaxed);
        }
    });
}

/// Writes the live prefix of a row; how long it is, and how much in it was out of bounds.
fn select_row(
    spec: &SelectionSpec,
    r: &SelectionRegions,
    row: usize,
    slots: &mut [i32],
) -> (usize, u32) {
    let pooled_rows = if spec.is_pooled() { r.rows } else { 0 };
    // SAFETY: operands of this launch, bound at these sizes.
    let (positions, request, table, last): (&[i32], &[i32], &[i32], &[i64]) = unsafe {
        (
            read(r.positions, r.rows * spec.topk),
            read(r.request, r.rows),
            read(r.page_table, r.batch * r.table_width),
            read(r.last_position, pooled_rows),
        )
    };
    let Some(request) = usize::try_from(request[row]).ok().filter(|id| *id < r.batch) else {
        return (0, u32::from(request[row] != -1));
    };
    let table = &table[request * r.table_width..][..r.table_width];
    let last = last.get(row).copied().unwrap_or(-1);
    let positions = &positions[row * spec.topk..][..spec.topk];
    let live = positions.iter().rposition(|position| *position >= 0).map_or(0, |at| at + 1);
    let (mut found, mut bad) = (0, 0);
    let mut put = |slot: Slot| {
        bad += u32::from(slot == Slot::Bad);
        slots[found] = if let Slot::At(slot) = slot { slot } else { -1 };
        found += 1;
    };
    let (size, complete) = (spec.pool_size as u64, spec.complete_pools(last));
    for position in &positions[..live] {
        match u64::try_from(*position) {
            Err(_) => (0..size).for_each(|_| put(Slot::Unused)),
            Ok(pool) if spec.is_pooled() && pool >= complete => {
                (0..size).for_each(|_| put(Slot::Bad));
            }
            Ok(pool) => {
                (pool * size..(pool + 1) * size).for_each(|token| put(spec.slot(token, table)));
            }
        }
    }
    spec.tail(last).for_each(|token| put(spec.slot(token, table)));
    (found, bad)
}
