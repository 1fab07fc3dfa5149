//! Query vectors as tiles read them.

use super::call::{Attention, Lanes, QueryFormat};
use super::scratch::Area;
use crate::e4m3;
use crate::kernel::engine::Engine;
use crate::numerics::bf16_to_f32;

/// Lanes of the panel that begins at lane `lane`: two vectors, or one at the end.
#[inline(always)]
pub(super) fn panel_lanes<E: Engine>(lane_stride: usize, lane: usize) -> usize {
    (2 * E::W).min(lane_stride - lane)
}

/// Packs the item's queries: for each panel of lanes, for each pair and half, one word a lane.
/// Lanes that fill up the last vector get zeros.
///
/// # Safety
/// `area` was laid out for the item; the queries are readable.
#[inline(always)]
pub(in crate::kernel) unsafe fn pack_queries<E: Engine>(
    _e: E,
    attention: &Attention,
    lanes: &Lanes,
    area: &Area,
) {
    let Area { size, .. } = *area;
    let pairs = size.pairs;
    let mut lane = 0;
    while lane < size.lane_stride {
        let panel_lanes = panel_lanes::<E>(size.lane_stride, lane);
        // SAFETY: the panel lies inside the packed queries.
        let panel = unsafe { area.queries.add(lane * pairs * E::HALVES) };
        for column in 0..panel_lanes {
            let live = lane + column < size.lanes;
            let vector = query_vector(attention, lanes, lane + column);
            for pair in 0..pairs {
                // SAFETY: the vector is one of the call's queries.
                let word = if live { unsafe { query_pair(attention, vector, pair) } } else { 0 };
                for half in 0..E::HALVES {
                    let at = (pair * E::HALVES + half) * panel_lanes + column;
                    // SAFETY: inside the panel.
                    unsafe { *panel.add(at) = E::pack(word, half) };
                }
            }
        }
        lane += panel_lanes;
    }
}

/// The number of a lane's query vector.
#[inline(always)]
pub(super) fn query_vector(attention: &Attention, lanes: &Lanes, lane: usize) -> usize {
    let (row, head) = (lane / lanes.heads.len(), lane % lanes.heads.len());
    (lanes.rows.start + row) * attention.geometry.heads + lanes.heads.start + head
}

/// Two neighbouring elements of a query vector as BF16.
///
/// # Safety
/// The vector and the pair exist.
#[inline(always)]
pub(super) unsafe fn query_pair(attention: &Attention, vector: usize, pair: usize) -> u32 {
    let index = vector * attention.geometry.qk_width + 2 * pair;
    // SAFETY: a BF16 query has two bytes an element.
    let bf16 =
        || unsafe { attention.queries.base.cast::<u16>().add(index).cast::<[u16; 2]>().read() };
    let elements = match attention.queries.format {
        QueryFormat::Bf16 => bf16(),
        QueryFormat::E4m3 => {
            // SAFETY: an E4M3 query has a byte an element.
            let codes = unsafe { attention.queries.base.add(index).cast::<[u8; 2]>().read() };
            codes.map(e4m3::decode)
        }
        QueryFormat::Bf16AsE4m3 { q_scale } => {
            bf16().map(|x| e4m3::decode(e4m3::encode(bf16_to_f32(x) / q_scale)))
        }
    };
    u32::from(elements[1]) << 16 | u32::from(elements[0])
}
