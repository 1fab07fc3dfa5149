//! What formats with scales share: the largest magnitude of a group, and codes of values divided by a scale.

use super::Values;
use crate::{E2m1, E4m3, Ue8m0};

/// The largest magnitude. NaN does not count; an infinity counts as the largest BF16 value, so that scales stay finite.
pub(super) fn amax(values: Values<'_>) -> f32 {
    const LARGEST: f32 = f32::from_bits(0x7f7f_0000);
    values
        .f32s()
        .fold(0.0, |top, value| if value.abs() > top { value.abs() } else { top })
        .min(LARGEST)
}

/// The power of two that is the scale of a group in E4M3, for `v4_584`, `v41_528`, `index_fp8_132`: max(amax, 1e-4) / 448, rounded up.
pub(super) fn mxfp8_scale(amax: f32) -> u8 {
    Ue8m0::ceil(amax.max(1e-4) / E4m3::MAX)
}

/// The power of two that is the scale of a group in E2M1: max(amax, 6 x 2^-126) / 6, rounded up.
pub(super) fn mxfp4_scale(amax: f32) -> u8 {
    Ue8m0::ceil((amax / E2m1::MAX).max(f32::MIN_POSITIVE))
}

/// A group in E4M3 and its scale.
pub(super) fn encode_mxfp8(codes: &mut [u8], scale: &mut u8, values: Values<'_>) {
    *scale = mxfp8_scale(amax(values));
    encode_e4m3(codes, values, Ue8m0::decode(*scale));
}

/// `E4M3(value / scale)`.
pub(super) fn encode_e4m3(codes: &mut [u8], values: Values<'_>, scale: f32) {
    for (code, value) in codes.iter_mut().zip(values.f32s()) {
        *code = E4m3::encode(value / scale);
    }
}

/// Code x scale, for as many as `out` takes.
pub(super) fn decode_e4m3(codes: &[u8], scale: f32, out: &mut [f32]) {
    for (value, code) in out.iter_mut().zip(codes) {
        *value = E4m3::decode(*code) * scale;
    }
}

/// `E2M1(value / scale)`, two a byte, the even element low; all zero where the scale is.
pub(super) fn encode_e2m1(codes: &mut [u8], values: Values<'_>, scale: f32) {
    if scale == 0.0 {
        return codes.fill(0);
    }
    let mut values = values.f32s().map(|value| E2m1::encode(value / scale));
    for byte in codes {
        let low = values.next().unwrap_or(0);
        *byte = low | values.next().unwrap_or(0) << 4;
    }
}

/// Code x scale, for as many as `out` takes.
pub(super) fn decode_e2m1(codes: &[u8], scale: f32, out: &mut [f32]) {
    for (pair, byte) in out.chunks_mut(2).zip(codes) {
        for (value, code) in pair.iter_mut().zip([byte & 15, byte >> 4]) {
            *value = E2m1::decode(code) * scale;
        }
    }
}

/// An F32 of a record.
pub(super) fn f32_at(bytes: &[u8], index: usize) -> f32 {
    f32::from_le_bytes(std::array::from_fn(|byte| bytes[4 * index + byte]))
}

/// Writes an F32 of a record.
pub(super) fn put_f32(bytes: &mut [u8], index: usize, value: f32) {
    bytes[4 * index..4 * index + 4].copy_from_slice(&value.to_le_bytes());
}
