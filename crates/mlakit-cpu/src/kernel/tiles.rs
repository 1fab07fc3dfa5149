//! Register tiles: the inner loops of every kernel. Each element of a result is accumulated in one
//! lane by a chain whose order is fixed, so that its bits do not depend on the tile it falls in.

#![expect(clippy::needless_range_loop, reason = "an index names one coordinate of several arrays")]

use std::ops::Range;

use super::engine::Engine;

/// Key rows that [`scores`] multiplies with packed queries.
pub(super) struct ScoreTile {
    /// Packed queries of the panel: for each pair and half, `VECS * W` words.
    pub(super) queries: *const u32,
    /// Pairs along the key width that this pass adds.
    pub(super) pairs: Range<usize>,
    /// Where the scores of the first key of the tile go; one key after another, `stride` f32 apart.
    pub(super) scores: *mut f32,
    pub(super) stride: usize,
    /// Whether the scores start at zero rather than at what is stored.
    pub(super) fresh: bool,
}

/// Scores of `KEYS` keys for `VECS * W` query vectors. The lanes are query vectors; a pair of a key
/// goes to all lanes.
///
/// # Safety
/// Every key is readable for `pairs.end` pairs, the queries for the panel up to `pairs.end`, and
/// the scores are readable and writable for `KEYS` rows of `VECS * W`.
#[inline(always)]
pub(super) unsafe fn scores<E: Engine, const KEYS: usize, const VECS: usize>(
    e: E,
    tile: &ScoreTile,
    keys: *const *const u8,
) {
    let mut acc = [[e.splat(0.0); VECS]; KEYS];
    let mut rows = [std::ptr::null::<u8>(); KEYS];
    // SAFETY: within the contract: `KEYS` keys, score rows and `VECS * W` lanes.
    unsafe {
        for i in 0..KEYS {
            rows[i] = *keys.add(i);
            for v in 0..VECS {
                if !tile.fresh {
                    acc[i][v] = e.load(tile.scores.add(i * tile.stride + v * E::W));
                }
            }
        }
        for pair in tile.pairs.clone() {
            for half in 0..E::HALVES {
                let words = tile.queries.add((pair * E::HALVES + half) * VECS * E::W);
                let mut queries = [e.load_packed(words); VECS];
                for v in 1..VECS {
                    queries[v] = e.load_packed(words.add(v * E::W));
                }
                for i in 0..KEYS {
                    let key = e.splat_key(rows[i], pair, half);
                    for v in 0..VECS {
                        acc[i][v] = e.mac(acc[i][v], key, queries[v]);
                    }
                }
            }
        }
        for i in 0..KEYS {
            for v in 0..VECS {
                e.store(tile.scores.add(i * tile.stride + v * E::W), acc[i][v]);
            }
        }
    }
}

/// The left operand of a [`products`] tile: for each lane a row of pairs. Strides count BF16
/// elements, two of which make a word, because raw rows may begin at any element.
#[derive(Clone, Copy)]
pub(super) struct Left {
    /// The first lane's first pair.
    pub(super) first: *const u16,
    pub(super) lane_stride: usize,
    pub(super) pair_stride: usize,
    /// Used where the operand is packed.
    pub(super) half_stride: usize,
}

/// Rows of the right operand of a [`products`] tile.
pub(super) trait Rows: Copy {
    /// Whether both operands are BF16 of memory, rather than packed words and key rows.
    const RAW: bool;

    /// # Safety
    /// Row `j` exists.
    unsafe fn row(self, j: usize) -> *const u8;
}

/// Key rows anywhere, through a table of addresses; the left operand is packed. Each row is entered
/// `offset` bytes after its address.
#[derive(Clone, Copy)]
pub(super) struct Scattered {
    pub(super) rows: *const *const u8,
    pub(super) offset: usize,
}

/// Rows of a BF16 matrix; the left operand is BF16 too.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    pub(super) first: *const u16,
    pub(super) stride: usize,
}

impl Rows for Scattered {
    const RAW: bool = false;

    #[inline(always)]
    unsafe fn row(self, j: usize) -> *const u8 {
        // SAFETY: the table has an entry for every row that exists.
        let row = unsafe { *self.rows.add(j) };
        // SAFETY: the offset is inside a row.
        unsafe { row.add(self.offset) }
    }
}

impl Rows for Matrix {
    const RAW: bool = true;

    #[inline(always)]
    unsafe fn row(self, j: usize) -> *const u8 {
        // SAFETY: the row exists.
        unsafe { self.first.add(j * self.stride) }.cast()
    }
}

/// Adds `sum over j of left[lane][j] * rows[j][..2 W]` to `acc[lane]` for `LANES` left rows. The
/// vector lanes are the elements of a row (in the order of [`Engine::zip_rows`]); a pair of the
/// left operand goes to all lanes. `width` below `2 W` reads only so many elements of each row.
///
/// # Safety
/// The left operand is readable for `LANES` rows and `pairs`; rows `2 * pairs.start` to `2 *
/// pairs.end` exist and are readable for `min(width, 2 W)` elements.
#[inline(always)]
pub(super) unsafe fn products<E: Engine, R: Rows, const LANES: usize>(
    e: E,
    left: Left,
    rows: R,
    pairs: Range<usize>,
    width: usize,
    acc: &mut [[E::V; 2]; LANES],
) {
    // Two loops rather than a test inside one.
    if width >= 2 * E::W {
        let mut sums = *acc;
        for pair in pairs {
            // SAFETY: the pair's rows exist.
            let [even, odd] = unsafe { [rows.row(2 * pair), rows.row(2 * pair + 1)] };
            // SAFETY: the left operand has the pair and the rows are wide enough.
            unsafe { multiply::<E, R, LANES>(e, left, pair, [even, odd], &mut sums) };
        }
        *acc = sums;
    } else {
        let bytes = if R::RAW { 2 } else { E::KEY_BYTES };
        let mut wide = [[0_f32; 32]; 2];
        let mut sums = *acc;
        for pair in pairs {
            for (odd, copy) in wide.iter_mut().enumerate() {
                // SAFETY: the pair's rows exist and have `width` elements, fewer than a copy.
                unsafe {
                    let row = rows.row(2 * pair + odd);
                    std::ptr::copy_nonoverlapping(row, copy.as_mut_ptr().cast(), width * bytes);
                }
            }
            let copies = [wide[0].as_ptr().cast(), wide[1].as_ptr().cast()];
            // SAFETY: the left operand has the pair and a copy has 32 >= 2 W elements.
            unsafe { multiply::<E, R, LANES>(e, left, pair, copies, &mut sums) };
        }
        *acc = sums;
    }
}

/// Adds one pair of rows.
///
/// # Safety
/// The left operand has the pair; both rows are readable for `2 W` elements.
#[inline(always)]
unsafe fn multiply<E: Engine, R: Rows, const LANES: usize>(
    e: E,
    left: Left,
    pair: usize,
    rows: [*const u8; 2],
    sums: &mut [[E::V; 2]; LANES],
) {
    for half in 0..E::HALVES {
        // SAFETY: both rows are readable for `2 W` elements.
        let values = unsafe {
            if R::RAW {
                e.zip_rows(rows[0].cast(), rows[1].cast(), half)
            } else {
                e.zip_keys(rows[0], rows[1], half)
            }
        };
        for (lane, sum) in sums.iter_mut().enumerate() {
            // SAFETY: the left operand has the lane and the pair.
            let factor = unsafe {
                let word = left.first.add(lane * left.lane_stride + pair * left.pair_stride);
                if R::RAW {
                    e.splat_pair(word.cast(), half)
                } else {
                    e.splat_packed(word.add(half * left.half_stride).cast())
                }
            };
            sum[0] = e.mac(sum[0], factor, values[0]);
            sum[1] = e.mac(sum[1], factor, values[1]);
        }
    }
}

/// Adds the dot products of `ROWS` rows with `OUTS` rows over `pairs` to `acc`, one vector of lane
/// sums each. The lanes are pairs along the contracted axis.
///
/// # Safety
/// Every row of both operands is readable for whole vectors of `W` pairs that cover `pairs`, which
/// begins and ends at multiples of `W`. With `PACKED` the left rows are words that `Engine::pack` made:
/// for each `W` pairs, `W` words a half.
#[inline(always)]
pub(super) unsafe fn dots<E: Engine, const PACKED: bool, const ROWS: usize, const OUTS: usize>(
    e: E,
    x: &[*const u16; ROWS],
    w: &[*const u16; OUTS],
    pairs: Range<usize>,
    acc: &mut [[E::V; OUTS]; ROWS],
) {
    let mut sums = *acc;
    for pair in pairs.step_by(E::W) {
        // SAFETY: within the rows.
        unsafe {
            // All halves of the left rows are kept, so that each right row is loaded once.
            let mut left = [[e.load_pairs(w[0].cast::<u32>().add(pair), 0); 2]; ROWS];
            for row in 0..ROWS {
                for half in 0..E::HALVES {
                    let words = x[row].cast::<u32>();
                    left[row][half] = if PACKED {
                        e.load_packed(words.add(pair * E::HALVES + half * E::W))
                    } else {
                        e.load_pairs(words.add(pair), half)
                    };
                }
            }
            for out in 0..OUTS {
                for half in 0..E::HALVES {
                    let right = e.load_pairs(w[out].cast::<u32>().add(pair), half);
                    for row in 0..ROWS {
                        sums[row][out] = e.mac(sums[row][out], left[row][half], right);
                    }
                }
            }
        }
    }
    *acc = sums;
}
