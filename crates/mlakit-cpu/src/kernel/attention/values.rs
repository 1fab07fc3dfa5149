//! Weights times values of a block, for all rows alike or row by row.

use std::ops::Range;

use super::call::{Attention, BLOCK, Lanes};
use super::scratch::Area;
use crate::kernel::engine::Engine;
use crate::kernel::tiles::{self, Left, Scattered};

/// Adds values row by row, each over its own pairs of keys.
///
/// # Safety
/// As [`add_values`]; lane bounds are written.
#[inline(always)]
pub(in crate::kernel) unsafe fn add_values_by_row<E: Engine>(
    e: E,
    (attention, lanes): (&Attention, &Lanes),
    area: &Area,
    rows: &mut [*const u8; BLOCK],
) {
    let heads = lanes.heads.len();
    for row in 0..lanes.rows.len() {
        let first = row * heads;
        // SAFETY: the bounds have an entry for each lane.
        let keys = unsafe { *area.lane_lo.add(first) as usize..*area.lane_hi.add(first) as usize };
        if keys.is_empty() {
            continue;
        }
        let pairs = keys.start / 2..keys.end.div_ceil(2);
        // The other key of a pair at an odd end may be one that this row must not see.
        let hidden = [2 * pairs.start, 2 * pairs.end - 1];
        let kept = hidden.map(|key| rows[key]);
        for key in hidden {
            if !keys.contains(&key) {
                rows[key] = area.zeros;
            }
        }
        // SAFETY: the contract of this function.
        unsafe { add_values(e, attention, area, (first..first + heads, pairs), rows.as_ptr()) };
        for (key, row) in hidden.into_iter().zip(kept) {
            rows[key] = row;
        }
    }
}

/// Shrinks the accumulators of `lanes` by their factor and adds weights times values of some pairs
/// of keys.
///
/// # Safety
/// `area` holds packed weights of the pairs; `rows` names their readable rows.
#[inline(always)]
pub(in crate::kernel) unsafe fn add_values<E: Engine>(
    e: E,
    attention: &Attention,
    area: &Area,
    (lanes, pairs): (Range<usize>, Range<usize>),
    rows: *const *const u8,
) {
    let width = attention.geometry.value_width;
    for offset in (0..width).step_by(2 * E::W) {
        let values = Values {
            rows: Scattered { rows, offset: offset * E::KEY_BYTES },
            offset,
            pairs: pairs.clone(),
            width: width - offset,
        };
        let mut lane = lanes.start;
        while lane < lanes.end {
            let left = lanes.end - lane;
            // SAFETY: `left` lanes remain.
            lane += unsafe {
                if E::REGISTERS >= 32 && left >= 12 && left != 16 {
                    values.add::<E, 12>(e, area, lane)
                } else if E::REGISTERS >= 32 && left >= 8 {
                    values.add::<E, 8>(e, area, lane)
                } else if E::REGISTERS < 32 && left >= 6 && left != 8 {
                    values.add::<E, 6>(e, area, lane)
                } else if left >= 4 {
                    values.add::<E, 4>(e, area, lane)
                } else {
                    values.add::<E, 1>(e, area, lane)
                }
            };
        }
    }
}

/// A chunk of `2 W` value elements of a block.
struct Values {
    rows: Scattered,
    /// The chunk's first element.
    offset: usize,
    pairs: Range<usize>,
    /// Elements of the value from the chunk's first on.
    width: usize,
}

impl Values {
    /// Adds the chunk to `LANES` lanes from `lane` on and returns `LANES`.
    ///
    /// # Safety
    /// As [`add_values`].
    #[inline(always)]
    unsafe fn add<E: Engine, const LANES: usize>(&self, e: E, area: &Area, lane: usize) -> usize {
        let Area { size, .. } = *area;
        let left = Left {
            // SAFETY: the weights have the lane.
            first: unsafe { area.weights.add(lane) }.cast(),
            lane_stride: 2,
            pair_stride: 2 * E::HALVES * size.lane_stride,
            half_stride: 2 * size.lane_stride,
        };
        // SAFETY: the accumulators have the lanes and are padded to whole chunks.
        unsafe {
            let out = area.outs.add(lane * size.out_stride + self.offset);
            let mut acc = [[e.splat(0.0); 2]; LANES];
            for (i, sums) in acc.iter_mut().enumerate() {
                let factor = e.splat(*area.factor.add(lane + i));
                sums[0] = e.mul(e.load(out.add(i * size.out_stride)), factor);
                sums[1] = e.mul(e.load(out.add(i * size.out_stride + E::W)), factor);
            }
            tiles::products(e, left, self.rows, self.pairs.clone(), self.width, &mut acc);
            for (i, sums) in acc.into_iter().enumerate() {
                e.store(out.add(i * size.out_stride), sums[0]);
                e.store(out.add(i * size.out_stride + E::W), sums[1]);
            }
        }
        LANES
    }
}
