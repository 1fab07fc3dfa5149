//! Tile registers: what kernels need of a matrix unit, the unit of AMX, and one in plain code.
//!
//! A tile is 16 rows of 64 bytes. [`TileUnit::dot`] multiplies an A tile (16 rows of 32 BF16 along the
//! contracted axis) with a B tile (16 rows of 16 *pairs*: row k holds elements 2k and 2k + 1 of each of 16
//! columns) and adds to a C tile (16 rows of 16 f32). The arithmetic of one element of C is that of
//! `tdpbf16ps`: the even and the odd elements of the 32 products are two chains of fused multiply-adds that
//! begin at zero, the two sums are added, and their sum is added to C; every step is rounded to nearest
//! even, denormal inputs and results count as zero. So an element depends on its row of A, its column of B
//! and its own accumulator alone, and a product with zero weights and finite values adds +0.

mod emulated;
#[cfg(target_arch = "x86_64")]
mod hardware;
#[cfg(test)]
mod tests;

use super::engine::Engine;

pub(super) use emulated::Emulated;
#[cfg(target_arch = "x86_64")]
pub(super) use hardware::Amx;
#[cfg(target_arch = "x86_64")]
pub(crate) use hardware::is_usable;

/// Rows of a tile, and its 32-bit words a row.
pub(super) const TILE: usize = 16;

/// 32-bit words of a tile.
pub(super) const TILE_WORDS: usize = TILE * TILE;

/// BF16 elements of the contracted axis that a product covers.
pub(super) const DEPTH: usize = 2 * TILE;

/// Bytes of a row of a tile.
pub(super) const ROW_BYTES: usize = 64;

/// Eight tile registers, and the vector work that lays operands out for them. Registers are named by
/// constants below 8.
pub(super) trait TileUnit {
    /// The vectors that work beside the tiles: 16 lanes, pairs in one step.
    type E: Engine;

    /// The vectors.
    fn engine(&self) -> Self::E;

    /// Makes all registers full tiles; their contents are undefined.
    fn configure(&mut self);

    /// Ends the use of the registers.
    fn release(&mut self);

    /// Clears tile `T`.
    /// # Safety
    /// The registers are configured.
    unsafe fn zero<const T: usize>(&mut self);

    /// Loads tile `T`: rows of 64 bytes, `stride` bytes apart, at any alignment.
    /// # Safety
    /// The registers are configured; `from` is readable for 16 rows.
    unsafe fn load<const T: usize>(&mut self, from: *const u8, stride: usize);

    /// Stores tile `T`.
    /// # Safety
    /// The registers are configured; `to` is writable for 16 rows.
    unsafe fn store<const T: usize>(&mut self, to: *mut u8, stride: usize);

    /// Adds the product of tiles `A` and `B` to tile `C`.
    /// # Safety
    /// The registers are configured.
    unsafe fn dot<const C: usize, const A: usize, const B: usize>(&mut self);

    /// Makes row `k` of two B tiles of 32 elements of two rows, in the order that [`Engine::in_order`]
    /// undoes.
    /// # Safety
    /// Both rows are readable for 32 BF16, both places writable for 16 words.
    unsafe fn zip(&self, rows: [*const u16; 2], to: [*mut u32; 2]);

    /// Rounds softmax weights (no denormals; what becomes of NaN is undefined) of two keys to BF16 and stores
    /// them as pairs.
    /// # Safety
    /// `to` is writable for 16 words.
    unsafe fn store_weights(
        &self,
        to: *mut u32,
        even: <Self::E as Engine>::V,
        odd: <Self::E as Engine>::V,
    );

    /// Transposes 16 rows of 16 words.
    /// # Safety
    /// Every row is readable for 16 words at any alignment; `to` is writable for 256.
    unsafe fn transpose(&self, rows: &[*const u32; TILE], to: *mut u32);
}

/// Sixteen rows, `stride` bytes apart.
#[inline(always)]
pub(super) fn rows_from(first: *const u8, stride: usize) -> [*const u32; TILE] {
    let mut rows = [std::ptr::null(); TILE];
    for (i, row) in rows.iter_mut().enumerate() {
        *row = first.wrapping_add(i * stride).cast();
    }
    rows
}
