//! The end of an item: normalised outputs and log-sum-exps.

use super::call::{DenseCall, DenseItem, LseBase, OutFormat};
use super::scratch::Area;
use crate::kernel::engine::Engine;
use crate::kernel::store::store_chunk;
use crate::numerics::log2;

/// Writes the result of every lane: accumulator times `value_scale / sum`, and the log-sum-exp.
///
/// # Safety
/// `area` holds the item's finished state; the item's output is writable.
#[inline(always)]
pub(super) unsafe fn finish<E: Engine>(e: E, call: &DenseCall<'_>, item: &DenseItem, area: &Area) {
    for lane in 0..area.size.lanes {
        // SAFETY: the area has the lane.
        let (max, sum) = unsafe { (*area.max.add(lane), *area.sum.add(lane)) };
        let index = index_of_lane(call, item, lane);
        // SAFETY: the output has the lane's row and head.
        unsafe {
            if sum == 0.0 {
                write_nothing(call, item, index);
            } else {
                *item.out.lse.add(index) = log_sum_exp(max, sum, item.out.lse_base);
                write_values(e, call, item, area, lane, call.value_scale / sum);
            }
        }
    }
}

/// Writes the result of an item of which no row sees a key.
///
/// # Safety
/// The item's output is writable.
pub(super) unsafe fn nothing(call: &DenseCall<'_>, item: &DenseItem) {
    for lane in 0..item.rows.len() * item.heads.len() {
        // SAFETY: the output has the lane's row and head.
        unsafe { write_nothing(call, item, index_of_lane(call, item, lane)) };
    }
}

/// The index of a lane's (row, head) in the output.
#[inline(always)]
fn index_of_lane(call: &DenseCall<'_>, item: &DenseItem, lane: usize) -> usize {
    let (row, head) = (lane / item.heads.len(), lane % item.heads.len());
    row * call.geometry.heads + item.heads.start + head
}

/// The log-sum-exp of scores whose maximum, to base 2, is `max` and whose weights sum to `sum`.
pub(crate) fn log_sum_exp(max: f32, sum: f32, base: LseBase) -> f32 {
    if !(sum > 0.0 && sum < f32::INFINITY) {
        return f32::NAN;
    }
    // Rounded to f32 in base 2 whatever the base, as a partial result is, so that a row has the same bits with one split and after a merge.
    let two = (f64::from(max) + log2(f64::from(sum))) as f32;
    match base {
        LseBase::Two => two,
        LseBase::Natural => (f64::from(two) * std::f64::consts::LN_2) as f32,
    }
}

/// # Safety
/// The item's output has the index.
unsafe fn write_nothing(call: &DenseCall<'_>, item: &DenseItem, index: usize) {
    let bytes = call.geometry.value_width * item.out.format.bytes();
    // SAFETY: the output has the index; zero bytes are 0.0 in both formats.
    unsafe {
        item.out.values.add(index * bytes).write_bytes(0, bytes);
        *item.out.lse.add(index) = f32::NEG_INFINITY;
    }
}

/// # Safety
/// `area` has the lane; the item's output has its row and head.
#[inline(always)]
unsafe fn write_values<E: Engine>(
    e: E,
    call: &DenseCall<'_>,
    item: &DenseItem,
    area: &Area,
    lane: usize,
    factor: f32,
) {
    let width = call.geometry.value_width;
    let format = item.out.format;
    let start = index_of_lane(call, item, lane) * width;
    let factor = e.splat(factor);
    for offset in (0..width).step_by(2 * E::W) {
        // SAFETY: the accumulators have the lane and are padded to whole chunks; the output has
        // the elements that are stored.
        unsafe {
            let from = area.outs.add(lane * area.size.out_stride + offset);
            let chunk = e.in_order([e.load(from), e.load(from.add(E::W))]);
            let chunk = [e.mul(chunk[0], factor), e.mul(chunk[1], factor)];
            let to = item.out.values.add((start + offset) * format.bytes());
            store_chunk(e, chunk, to, format == OutFormat::F32, width - offset);
        }
    }
}
