//! The keys of a block: where they lie, and as which rows they are multiplied.

use std::ops::Range;

use super::call::{IndexCall, IndexFormat, IndexItem};
use super::scratch::Area;
use crate::kernel::engine::Engine;
use crate::kernel::topk::BLOCK;

/// One block of keys.
pub(super) struct Block {
    /// The position of key 0: a multiple of [`BLOCK`].
    pub(super) start: usize,
    /// Key rows; zeros where a key is not there.
    pub(super) rows: [*const u8; BLOCK],
    /// What the score of each key is multiplied by.
    pub(super) factors: [f32; BLOCK],
    /// Bit `j` is set where key `j` is there.
    pub(super) present: u64,
    scales: [*const u8; BLOCK],
}

impl Block {
    /// Looks up the positions `keys`, all of one block.
    ///
    /// # Safety
    /// The item's page table covers `keys`.
    #[inline(always)]
    pub(super) unsafe fn locate(
        call: &IndexCall,
        item: &IndexItem,
        keys: Range<usize>,
        nowhere: *const u8,
    ) -> Block {
        let (cache, start) = (&call.cache, keys.start / BLOCK * BLOCK);
        let (rows, factors) = ([nowhere; BLOCK], [1.0; BLOCK]);
        let mut block = Block { start, rows, factors, present: 0, scales: [nowhere; BLOCK] };
        let mut position = keys.start;
        while position < keys.end {
            let (page, token) = (position / cache.page_size, position % cache.page_size);
            let run = (cache.page_size - token).min(keys.end - position);
            // SAFETY: the table covers the position.
            let id = unsafe { *item.page_table.add(page) };
            if let Some(id) = usize::try_from(id).ok().filter(|id| *id < cache.pages) {
                // 64-bit: a cache is larger than 2^31 bytes.
                let base = cache.base.wrapping_add((id as u64 * cache.page_stride_bytes) as usize);
                for i in 0..run {
                    let key = position - start + i;
                    block.rows[key] = base.wrapping_add((token + i) * cache.data_stride);
                    let scale = cache.scales_first + (token + i) * cache.scales_stride;
                    block.scales[key] = base.wrapping_add(scale);
                    block.present |= 1 << key;
                }
            }
            position += run;
        }
        block
    }

    /// Makes rows of the keys `keys`, counted from the block's start, filled up with zeros.
    ///
    /// # Safety
    /// The keys that are there are readable; `area` was laid out for the call.
    #[inline(always)]
    pub(super) unsafe fn make_rows<E: Engine>(
        &mut self,
        e: E,
        call: &IndexCall,
        area: &Area,
        keys: Range<usize>,
    ) {
        let missing = 2 * area.size.pairs - call.width;
        for key in keys {
            if self.present >> key & 1 == 0 {
                continue;
            }
            let row = area.key_rows.wrapping_add(key * area.size.row_bytes);
            let (codes, scales) = (self.rows[key], self.scales[key]);
            // SAFETY: the key is there, with its scales, and the area has a row of its width.
            unsafe {
                match call.cache.format {
                    IndexFormat::Bf16 => e.row_of_bf16(codes, row, call.width),
                    IndexFormat::E4m3 => {
                        e.row_of_e4m3(codes, row, call.width);
                        let scale = f32::from_bits(scales.cast::<u32>().read_unaligned());
                        if scale.is_sign_negative() {
                            turn_sign::<E>(row, call.width);
                        }
                        self.factors[key] = scale.abs();
                    }
                    IndexFormat::E2m1 => row_of_e2m1::<E>(codes, scales, row, call.width),
                }
            }
            // SAFETY: the row has what fills it up, behind its elements.
            unsafe { row.add(call.width * E::KEY_BYTES).write_bytes(0, missing * E::KEY_BYTES) };
            self.rows[key] = row;
        }
    }
}

/// Turns the sign of every element of a row.
///
/// # Safety
/// The row has `width` elements.
unsafe fn turn_sign<E: Engine>(row: *mut u8, width: usize) {
    for i in 0..width {
        // Little-endian: the sign is in the last byte.
        let at = i * E::KEY_BYTES + E::KEY_BYTES - 1;
        // SAFETY: a byte of element `i < width`.
        unsafe { *row.add(at) ^= 0x80 };
    }
}

/// Elements that share a scale.
const SHARED: usize = 32;

/// The values of two codes in a byte.
static PAIRS: [[f32; 2]; 256] = {
    let values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let mut pairs = [[0.0; 2]; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut half = 0;
        while half < 2 {
            let code = byte >> (4 * half);
            let sign = if code & 8 == 0 { 1.0 } else { -1.0 };
            pairs[byte][half] = sign * values[code & 7];
            half += 1;
        }
        byte += 1;
    }
    pairs
};

/// 2^(code - 127); NaN for the last code.
#[inline(always)]
fn power(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        code => f32::from_bits(u32::from(code) << 23),
    }
}

/// Makes a row of E2M1 codes and their scales. Every product is a BF16 number.
///
/// # Safety
/// `codes` is readable for `width / 2` bytes, `scales` for `width / 32`, `row` writable for `width`
/// elements; `width` is a multiple of 32.
#[inline(always)]
unsafe fn row_of_e2m1<E: Engine>(codes: *const u8, scales: *const u8, row: *mut u8, width: usize) {
    for group in 0..width / SHARED {
        // SAFETY: the group is one of the key's.
        let (codes, scale) = unsafe {
            let codes = codes.add(group * SHARED / 2).cast::<[u8; SHARED / 2]>().read();
            (codes, power(*scales.add(group)))
        };
        let mut values = [[0.0_f32; 2]; SHARED / 2];
        for (values, code) in values.iter_mut().zip(codes) {
            *values = PAIRS[code as usize];
        }
        for pair in &mut values {
            for value in pair {
                *value *= scale;
            }
        }
        let to = row.wrapping_add(group * SHARED * E::KEY_BYTES);
        if E::KEY_BYTES == 4 {
            // SAFETY: the row has the group's elements; both are 32 f32.
            unsafe { to.cast::<[[f32; 2]; SHARED / 2]>().write_unaligned(values) };
        } else {
            let mut narrow = [0_u16; SHARED];
            for (narrow, value) in narrow.iter_mut().zip(values.as_flattened()) {
                *narrow = (value.to_bits() >> 16) as u16;
            }
            // SAFETY: the row has the group's elements.
            unsafe { to.cast::<[u16; SHARED]>().write_unaligned(narrow) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mlakit::{RecordFormat, RecordLayout};

    /// Every byte of codes with every scale, against the record.
    #[test]
    fn rows_of_e2m1_are_what_the_record_says() {
        let layout = RecordLayout::of(RecordFormat::IndexMxfp4_68, 512, 0);
        let codes: Vec<u8> = (0..=255).collect();
        for scale in 0..=255 {
            let scales = [scale; 16];
            let mut needed = vec![0.0; 512];
            layout.decode(&codes, &scales, 1.0, &mut needed);
            let mut row = vec![0_u8; 1024];
            // SAFETY: codes, scales and row are of a key of 512 elements, two bytes each.
            unsafe {
                row_of_e2m1::<crate::kernel::scalar::Scalar>(
                    codes.as_ptr(),
                    scales.as_ptr(),
                    row.as_mut_ptr(),
                    512,
                );
            }
            for (bytes, needed) in row.chunks_exact(2).zip(needed) {
                let given = half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
                let same = given == needed || (given.is_nan() && needed.is_nan());
                assert!(same, "scale {scale}: given {given}, needed {needed}");
            }
        }
    }
}
