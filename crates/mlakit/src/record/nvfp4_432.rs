//! `nvfp4_432`: a latent in E2M1, two elements a byte, with an E4M3 scale for each 16, then the rotary part in BF16 (`nvfp4_ds_mla`).
//!
//! At 512 + 64 elements: `[0, 256)` codes, `[256, 288)` 32 scales, `[288, 304)` zero, `[304, 432)` rotary part.
//! Writers: scale = E4M3(amax / 6), code = E2M1(value / scale); a group whose scale is 0 has zero codes.

use super::*;

pub(super) const CODEC: Codec = Codec {
    name: "nvfp4_432",
    group: GROUP,
    rope: RopePart::Apart,
    page_sizes: &[1],
    parts: |layout| parts(layout, 2 * layout.rope),
    encode,
    decode,
};

/// Elements that share a scale.
pub(super) const GROUP: usize = 16;
/// Bytes for scales of the token; those that a format does not use are zero.
const TOKEN_SCALES: usize = 16;

/// Those of all `nvfp4` records.
pub(super) fn parts(layout: RecordLayout, rope_bytes: usize) -> Parts {
    let latent = layout.width - layout.rope;
    Parts::packed([latent / 2, latent / GROUP, TOKEN_SCALES, rope_bytes])
}

/// The latent, with group scales `E4M3(scale(amax))`, and zeros in all bytes that are no codes or scales.
pub(super) fn encode_latent(
    parts: &Parts,
    data: &mut [u8],
    values: Values<'_>,
    scale: impl Fn(f32) -> f32,
) {
    encode_groups(parts, data, values, |amax| (scale(amax), 1.0));
}

/// The same where a group's scale counts in units: `scale` gives the scale before its rounding, and its unit.
pub(super) fn encode_groups(
    parts: &Parts,
    data: &mut [u8],
    values: Values<'_>,
    scale: impl Fn(f32) -> (f32, f32),
) {
    data.fill(0);
    let (codes, scales) = data.split_at_mut(parts.scales.start);
    let groups = codes[parts.elements.clone()].chunks_exact_mut(GROUP / 2).zip(scales);
    for (group, (codes, byte)) in groups.enumerate() {
        let values = values.range(group * GROUP, GROUP);
        let (scale, unit) = scale(group::amax(values));
        *byte = E4m3::encode(scale);
        group::encode_e2m1(codes, values, E4m3::decode(*byte) * unit);
    }
}

/// Code x scale, exact, x `token_scale`.
pub(super) fn decode_latent(parts: &Parts, data: &[u8], token_scale: f32, out: &mut [f32]) {
    let groups = out.chunks_mut(GROUP).zip(data.chunks(GROUP / 2));
    for ((out, codes), scale) in groups.zip(&data[parts.scales.clone()]) {
        group::decode_e2m1(codes, E4m3::decode(*scale), out);
        out.iter_mut().for_each(|value| *value *= token_scale);
    }
}

fn encode(parts: &Parts, record: RecordMut<'_>, values: Values<'_>) {
    let latent = 2 * parts.elements.len();
    encode_latent(parts, record.data, values, |amax| amax / E2m1::MAX);
    bf16::encode(&mut record.data[parts.rope.clone()], values.range(latent, parts.rope.len() / 2));
}

fn decode(parts: &Parts, record: Record<'_>, out: &mut [f32]) {
    let (latent, rope) = out.split_at_mut((2 * parts.elements.len()).min(out.len()));
    decode_latent(parts, record.data, 1.0, latent);
    bf16::decode(&record.data[parts.rope.clone()], rope);
}
