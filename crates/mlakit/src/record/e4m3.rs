//! `e4m3`: element `i` at byte `i`, as `E4M3(value / scale)` with one positive scale for the whole cache: value = code x scale.

use half::bf16;

use crate::E4m3;

/// Bytes of a record of `width` elements.
pub const fn bytes(width: usize) -> usize {
    width
}

/// Writes the elements: the f32 quotient, rounded to nearest even, saturated at 448.
pub fn encode(record: &mut [u8], values: &[bf16], scale: f32) {
    for (byte, value) in record.iter_mut().zip(values) {
        *byte = E4m3::encode(value.to_f32() / scale);
    }
}
