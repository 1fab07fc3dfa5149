//! Per-head products: `y[r, h, :] = x[r, h, :] @ W[h]`.

use std::ops::Range;

use super::attention::OutFormat;
use super::engine::Engine;
use super::store::store_chunk;
use super::tiles::{self, Left, Matrix};

/// BF16 `x [rows, heads, inner]` times BF16 `weight [heads, inner, outer]`, accumulated in f32 in
/// the order of `inner`, pair by pair.
#[derive(Clone, Copy, Debug)]
pub struct ProjectionCall {
    /// Heads of `x`, `weight` and `y`.
    pub heads: usize,
    /// Contracted elements: even.
    pub inner: usize,
    /// Elements of an output.
    pub outer: usize,
    /// The left operand.
    pub x: *const u16,
    /// Elements of `x` from a head to the next, at least `inner`.
    pub x_head_stride: usize,
    /// Elements of `x` from a row to the next.
    pub x_row_stride: usize,
    /// The matrices.
    pub weight: *const u16,
    /// The output.
    pub y: *mut u8,
    /// Elements of `y` from a head to the next.
    pub y_head_stride: usize,
    /// Elements of `y` from a row to the next.
    pub y_row_stride: usize,
    /// Format of `y`.
    pub format: OutFormat,
}

/// A part of the output of a projection.
#[derive(Clone, Debug)]
pub struct ProjectionTask {
    /// Rows.
    pub rows: Range<usize>,
    /// Heads.
    pub heads: Range<usize>,
    /// Output elements, beginning at a multiple of 32.
    pub columns: Range<usize>,
}

/// Computes a part of the output. An element's bits do not depend on the part.
///
/// # Safety
/// The call's pointers are valid as its fields say, for the task's rows, heads and columns.
#[inline(always)]
pub(super) unsafe fn project<E: Engine>(e: E, call: &ProjectionCall, task: &ProjectionTask) {
    for head in task.heads.clone() {
        for column in task.columns.clone().step_by(2 * E::W) {
            let mut row = task.rows.start;
            while row < task.rows.end {
                let left = task.rows.end - row;
                let place = Place { head, column, end: task.columns.end, row };
                // SAFETY: `left` rows remain.
                row += unsafe {
                    if E::HALVES == 1 && E::REGISTERS >= 32 && left >= 12 {
                        tile::<E, 12>(e, call, place)
                    } else if E::REGISTERS >= 32 && left >= 8 {
                        tile::<E, 8>(e, call, place)
                    } else if left >= 4 {
                        tile::<E, 4>(e, call, place)
                    } else {
                        tile::<E, 1>(e, call, place)
                    }
                };
            }
        }
    }
}

/// The first element of a tile, and where the task's columns end.
#[derive(Clone, Copy)]
struct Place {
    head: usize,
    column: usize,
    end: usize,
    row: usize,
}

/// Computes `2 W` columns of `ROWS` rows and returns `ROWS`.
///
/// # Safety
/// As [`project`].
#[inline(always)]
unsafe fn tile<E: Engine, const ROWS: usize>(e: E, call: &ProjectionCall, place: Place) -> usize {
    let width = place.end - place.column;
    // SAFETY: the head's matrix and the rows of `x` and `y` exist.
    unsafe {
        let rows = Matrix {
            first: call.weight.add(place.head * call.inner * call.outer + place.column),
            stride: call.outer,
        };
        let x = call.x.add(place.row * call.x_row_stride + place.head * call.x_head_stride);
        let left =
            Left { first: x, lane_stride: call.x_row_stride, pair_stride: 2, half_stride: 0 };
        let mut acc = [[e.splat(0.0); 2]; ROWS];
        tiles::products(e, left, rows, 0..call.inner / 2, width, &mut acc);
        for (i, sums) in acc.into_iter().enumerate() {
            let index = (place.row + i) * call.y_row_stride
                + place.head * call.y_head_stride
                + place.column;
            let to = call.y.add(index * call.format.bytes());
            store_chunk(e, e.in_order(sums), to, call.format == OutFormat::F32, width);
        }
    }
    ROWS
}
