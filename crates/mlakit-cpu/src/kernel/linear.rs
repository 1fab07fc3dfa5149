//! Linear layers: `y[r, o] = sum over k of x[r, k] * w[o, k]`.
//!
//! The lanes are pairs along k, so no operand is packed: an output is a vector of lane sums over
//! whole vectors of k (a shorter end is filled up with zeros), added up in a fixed order at the
//! end. Therefore a row's bits depend on nothing but its own operands.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use super::engine::Engine;
use super::tiles;
use crate::numerics::f32_to_bf16;

/// What a linear layer does with its sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LinearOut {
    /// Stores BF16.
    Bf16,
    /// Stores F32.
    F32,
    /// Adds to the F32 that is there.
    AddF32,
}

/// Which expert's matrix a row uses.
#[derive(Clone, Copy, Debug)]
pub struct Experts<'a> {
    /// The expert of each row; a row with an id outside `0..count` gets zeros (nothing is added
    /// to it) and is counted.
    pub of_row: *const i32,
    /// Experts.
    pub count: usize,
    /// Row `r` reads row `r / rows_per_input` of `x`: top-k rows share one input.
    pub rows_per_input: usize,
    /// The rows in an order in which rows of one expert are neighbours, or null for the natural
    /// order. It decides speed only.
    pub order: *const u32,
    /// Where bad ids are counted, by the task that has output 0.
    pub faults: &'a AtomicU32,
}

/// BF16 `x [rows, in_features]`, BF16 `w [out_features, in_features]` or `[experts, out_features,
/// in_features]`, f32 accumulation.
#[derive(Clone, Copy, Debug)]
pub struct LinearCall<'a> {
    /// Output rows.
    pub rows: usize,
    /// Contracted elements.
    pub in_features: usize,
    /// Outputs of a row.
    pub out_features: usize,
    /// Inputs.
    pub x: *const u16,
    /// Elements from a row of `x` to the next; with `packed` words.
    pub x_stride: usize,
    /// Whether `x` holds F32 in the order of [`packed_words`]; only for instruction sets whose
    /// factors are F32 (`packs_f32`).
    pub packed: bool,
    /// Weights, contiguous.
    pub w: *const u16,
    /// Outputs: BF16 or F32.
    pub y: *mut u8,
    /// Elements from a row of `y` to the next.
    pub y_stride: usize,
    /// What is stored.
    pub out: LinearOut,
    /// Experts, if the weights are those of several.
    pub experts: Option<Experts<'a>>,
}

/// Rows that share a pass over a tile of weights.
const ROW_BLOCK: usize = 24;

/// Outputs of a tile.
const OUTS: usize = 4;

/// Pairs of a pass: a tile's weights stay in the first-level cache while the rows pass by.
const PASS_PAIRS: usize = 512;

/// Computes the outputs `outs` of every row.
///
/// # Safety
/// The call's pointers are valid as its fields say.
#[inline(always)]
pub(super) unsafe fn linear<E: Engine>(e: E, call: &LinearCall<'_>, outs: Range<usize>) {
    // SAFETY: the contract of this function.
    unsafe {
        if call.packed && E::HALVES == 2 {
            all_rows::<E, true>(e, call, outs);
        } else {
            all_rows::<E, false>(e, call, outs);
        }
    }
}

/// Words of a packed row of `width` F32 for vectors of `lanes`: for each `2 * lanes` elements (the
/// last filled up with zeros) first the odd ones, then the even ones.
pub fn packed_words(width: usize, lanes: usize) -> usize {
    width.next_multiple_of(2 * lanes)
}

/// Packs a row; `to` has [`packed_words`].
pub fn pack_row(from: &[f32], to: &mut [f32], lanes: usize) {
    for (from, to) in from.chunks(2 * lanes).zip(to.chunks_exact_mut(2 * lanes)) {
        to.fill(0.0);
        for (i, value) in from.iter().enumerate() {
            to[(1 - i % 2) * lanes + i / 2] = *value;
        }
    }
}

/// # Safety
/// As [`linear`].
#[inline(always)]
unsafe fn all_rows<E: Engine, const PACKED: bool>(e: E, call: &LinearCall<'_>, outs: Range<usize>) {
    let mut done = 0;
    while done < call.rows {
        let mut group = Group { rows: [0; ROW_BLOCK], count: 0, expert: 0 };
        // SAFETY: the contract of this function.
        unsafe {
            done += group.gather(call, done);
            if group.count > 0 {
                group.compute::<E, PACKED>(e, call, outs.clone());
            } else {
                refuse(call, done - 1, outs.clone());
            }
        }
    }
}

/// Rows that use one matrix.
struct Group {
    rows: [usize; ROW_BLOCK],
    count: usize,
    expert: usize,
}

/// The `i`-th row in the order of the call.
///
/// # Safety
/// `i` is below the rows.
#[inline(always)]
unsafe fn row_at(call: &LinearCall<'_>, i: usize) -> usize {
    match call.experts {
        // SAFETY: the order has an entry for each row.
        Some(experts) if !experts.order.is_null() => unsafe { *experts.order.add(i) as usize },
        _ => i,
    }
}

/// The matrix of a row, or nothing where its expert's id is bad.
///
/// # Safety
/// The row exists.
#[inline(always)]
unsafe fn expert_of(call: &LinearCall<'_>, row: usize) -> Option<usize> {
    match call.experts {
        None => Some(0),
        Some(experts) => {
            // SAFETY: every row has an expert.
            let id = unsafe { *experts.of_row.add(row) };
            usize::try_from(id).ok().filter(|&id| id < experts.count)
        }
    }
}

/// Treats a row whose expert's id is bad.
///
/// # Safety
/// As [`linear`].
#[inline(always)]
unsafe fn refuse(call: &LinearCall<'_>, i: usize, outs: Range<usize>) {
    // SAFETY: `i` is below the rows.
    let row = unsafe { row_at(call, i) };
    for out in outs.clone() {
        // SAFETY: the output exists.
        unsafe { put(call, row, out, 0.0) };
    }
    if let (Some(experts), 0) = (call.experts, outs.start) {
        experts.faults.fetch_add(1, Ordering::Relaxed);
    }
}

/// Stores or adds one sum.
///
/// # Safety
/// The output exists.
#[inline(always)]
unsafe fn put(call: &LinearCall<'_>, row: usize, out: usize, sum: f32) {
    let index = row * call.y_stride + out;
    // SAFETY: the output exists.
    unsafe {
        match call.out {
            LinearOut::Bf16 => *call.y.cast::<u16>().add(index) = f32_to_bf16(sum),
            LinearOut::F32 => *call.y.cast::<f32>().add(index) = sum,
            LinearOut::AddF32 => *call.y.cast::<f32>().add(index) += sum,
        }
    }
}

impl Group {
    /// Takes neighbours from position `from` on that use one matrix, and returns how many positions
    /// are dealt with: 1 and an empty group where the first has a bad id.
    ///
    /// # Safety
    /// `from` is below the rows.
    #[inline(always)]
    unsafe fn gather(&mut self, call: &LinearCall<'_>, from: usize) -> usize {
        let mut i = from;
        while i < call.rows && self.count < ROW_BLOCK {
            // SAFETY: `i` is below the rows.
            let row = unsafe { row_at(call, i) };
            // SAFETY: the row exists.
            match unsafe { expert_of(call, row) } {
                Some(expert) if self.count == 0 || expert == self.expert => {
                    self.expert = expert;
                    self.rows[self.count] = row;
                    self.count += 1;
                    i += 1;
                }
                None if self.count == 0 => return 1,
                _ => break,
            }
        }
        i - from
    }

    /// # Safety
    /// As [`linear`].
    #[inline(always)]
    unsafe fn compute<E: Engine, const PACKED: bool>(
        &self,
        e: E,
        call: &LinearCall<'_>,
        outs: Range<usize>,
    ) {
        let matrix = self.expert * call.out_features * call.in_features;
        let mut out = outs.start;
        while out < outs.end {
            let left = outs.end - out;
            // SAFETY: `left` outputs remain; the expert has a matrix.
            out += unsafe {
                let w = call.w.add(matrix + out * call.in_features);
                // The sums of a tile are as many as its rows may be: a decode step has few, and must not clear and copy those of many.
                match self.count {
                    1 if left >= 2 * OUTS => {
                        self.tile::<E, PACKED, { 2 * OUTS }, 1>(e, call, out, w)
                    }
                    1 | 2 if left >= OUTS => self.tile::<E, PACKED, OUTS, 2>(e, call, out, w),
                    1 | 2 => self.tile::<E, PACKED, 1, 2>(e, call, out, w),
                    _ if left >= OUTS => self.tile::<E, PACKED, OUTS, ROW_BLOCK>(e, call, out, w),
                    _ => self.tile::<E, PACKED, 1, ROW_BLOCK>(e, call, out, w),
                }
            };
        }
    }

    /// Computes `N` outputs of every row of the group, at most `B`, and returns `N`.
    ///
    /// # Safety
    /// `w` is the first of `N` rows of weights.
    #[inline(always)]
    unsafe fn tile<E: Engine, const PACKED: bool, const N: usize, const B: usize>(
        &self,
        e: E,
        call: &LinearCall<'_>,
        out: usize,
        w: *const u16,
    ) -> usize {
        // SAFETY: `N` rows of weights.
        let w: [*const u16; N] = std::array::from_fn(|i| unsafe { w.add(i * call.in_features) });
        let mut x = [std::ptr::null(); B];
        let shared = call.experts.map_or(1, |experts| experts.rows_per_input);
        for (x, row) in x.iter_mut().zip(self.rows).take(self.count) {
            // SAFETY: the input row exists.
            *x = unsafe {
                match PACKED {
                    true => call.x.cast::<u32>().add(row / shared * call.x_stride).cast(),
                    false => call.x.add(row / shared * call.x_stride),
                }
            };
        }
        let mut sums = [[e.splat(0.0); N]; B];
        let whole = call.in_features / (2 * E::W) * E::W;
        let mut pair = 0;
        while pair < whole {
            let pairs = pair..(pair + PASS_PAIRS).min(whole);
            pair = pairs.end;
            // SAFETY: whole vectors below `in_features`.
            unsafe { self.pass::<E, PACKED, N>(e, &x, &w, pairs, &mut sums) };
        }
        // SAFETY: the elements from the whole vectors' end to `in_features` exist.
        unsafe { self.end::<E, PACKED, N>(e, &x, &w, 2 * whole..call.in_features, &mut sums) };
        for (row, sums) in self.rows.iter().zip(&sums).take(self.count) {
            for (i, sum) in sums.iter().enumerate() {
                // SAFETY: the output exists.
                unsafe { put(call, *row, out + i, e.sum(*sum)) };
            }
        }
        N
    }

    /// Adds `pairs` to the sums of every row.
    ///
    /// # Safety
    /// As [`tiles::dots`].
    #[inline(always)]
    unsafe fn pass<E: Engine, const PACKED: bool, const N: usize>(
        &self,
        e: E,
        x: &[*const u16],
        w: &[*const u16; N],
        pairs: Range<usize>,
        sums: &mut [[E::V; N]],
    ) {
        let mut row = 0;
        while row < self.count {
            let left = self.count - row;
            let (x, sums) = (&x[row..], &mut sums[row..]);
            // SAFETY: the contract of this function.
            row += unsafe {
                if E::HALVES == 1 && left >= 6 {
                    some_rows::<E, PACKED, 6, N>(e, x, w, pairs.clone(), sums)
                } else if E::REGISTERS >= 32 && left >= 4 {
                    some_rows::<E, PACKED, 4, N>(e, x, w, pairs.clone(), sums)
                } else if left >= 2 {
                    some_rows::<E, PACKED, 2, N>(e, x, w, pairs.clone(), sums)
                } else {
                    some_rows::<E, PACKED, 1, N>(e, x, w, pairs.clone(), sums)
                }
            };
        }
    }

    /// Adds the last elements, fewer than a vector of pairs, filled up with zeros.
    ///
    /// # Safety
    /// Every row has the elements.
    #[inline(always)]
    unsafe fn end<E: Engine, const PACKED: bool, const N: usize>(
        &self,
        e: E,
        x: &[*const u16],
        w: &[*const u16; N],
        elements: Range<usize>,
        sums: &mut [[E::V; N]],
    ) {
        if elements.is_empty() {
            return;
        }
        let fill = |row: *const u16| {
            let mut copy = [0_u16; 32];
            // SAFETY: the row has the elements, fewer than a copy.
            unsafe {
                let from = row.add(elements.start);
                std::ptr::copy_nonoverlapping(from, copy.as_mut_ptr(), elements.len());
            }
            copy
        };
        let w = w.map(fill);
        let w: [*const u16; N] = std::array::from_fn(|i| w[i].as_ptr());
        for (x, sums) in x.iter().zip(sums).take(self.count) {
            let mut one = [*sums];
            // SAFETY: a copy holds a whole vector of pairs, and packed rows are filled up to one.
            unsafe {
                if PACKED {
                    let x = x.cast::<u32>().add(elements.start).cast();
                    tiles::dots::<E, true, 1, N>(e, &[x], &w, 0..E::W, &mut one);
                } else {
                    let x = fill(*x);
                    tiles::dots::<E, false, 1, N>(e, &[x.as_ptr()], &w, 0..E::W, &mut one);
                }
            }
            *sums = one[0];
        }
    }
}

/// Adds `pairs` to the sums of the first `ROWS` rows and returns `ROWS`.
///
/// # Safety
/// As [`tiles::dots`].
#[inline(always)]
unsafe fn some_rows<E: Engine, const PACKED: bool, const ROWS: usize, const N: usize>(
    e: E,
    x: &[*const u16],
    w: &[*const u16; N],
    pairs: Range<usize>,
    sums: &mut [[E::V; N]],
) -> usize {
    let x: &[*const u16; ROWS] = x.first_chunk().expect("that many rows remain");
    let sums: &mut [[E::V; N]; ROWS] = sums.first_chunk_mut().expect("that many rows remain");
    // SAFETY: the contract of this function.
    unsafe { tiles::dots::<E, PACKED, ROWS, N>(e, x, w, pairs, sums) };
    ROWS
}
