//! `bf16`: element `i` of the latent, then of the rotary part, at bytes `[2 i, 2 i + 2)`, little-endian.

use half::bf16;

use super::*;

pub(super) const CODEC: Codec = Codec {
    name: "bf16",
    group: 1,
    rope: RopePart::Within,
    page_sizes: &[1],
    parts: |layout| Parts::plain(2 * layout.width),
    encode: |_, record, values| encode(record.data, values),
    decode: |_, record, out| decode(record.data, out),
};

/// Bit for bit, a NaN's payload included.
pub(super) fn encode(bytes: &mut [u8], values: Values<'_>) {
    for (bytes, value) in bytes.chunks_exact_mut(2).zip(values.iter()) {
        bytes.copy_from_slice(&value.to_le_bytes());
    }
}

pub(super) fn decode(bytes: &[u8], out: &mut [f32]) {
    for (value, bytes) in out.iter_mut().zip(bytes.chunks_exact(2)) {
        *value = bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
    }
}
