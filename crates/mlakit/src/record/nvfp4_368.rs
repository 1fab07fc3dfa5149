//! `nvfp4_368`: the latent of `nvfp4_432`, then the rotary part in E4M3 with an F32 scale of its own (`KV_FP8_ROPE`).
//!
//! At 512 + 64 elements: `[0, 256)` codes, `[256, 288)` 32 scales, `[288, 292)` the rotary part's scale, `[292, 304)` zero, `[304, 368)`
//! rotary part. Writers: that scale = amax / 448, code = E4M3(value / scale); where it is 0 the codes are zero.

use super::*;

pub(super) const CODEC: Codec = Codec {
    name: "nvfp4_368",
    parts: |layout| nvfp4_432::parts(layout, layout.rope),
    encode,
    decode: |parts, record, out| decode(parts, record.data, 1.0, out),
    ..nvfp4_432::CODEC
};

/// Which of the token's scales is the rotary part's.
const ROPE_SCALE: usize = 0;

fn encode(parts: &Parts, record: RecordMut<'_>, values: Values<'_>) {
    nvfp4_432::encode_latent(parts, record.data, values, |amax| amax / E2m1::MAX);
    encode_rope(parts, record.data, values);
}

/// The rotary part and its scale.
pub(super) fn encode_rope(parts: &Parts, data: &mut [u8], values: Values<'_>) {
    let rope = values.range(2 * parts.elements.len(), parts.rope.len());
    let scale = group::amax(rope) / E4m3::MAX;
    if scale > 0.0 {
        group::put_f32(&mut data[parts.token_scales.clone()], ROPE_SCALE, scale);
        group::encode_e4m3(&mut data[parts.rope.clone()], rope, scale);
    }
}

/// All elements; the latent is multiplied by `token_scale`.
pub(super) fn decode(parts: &Parts, data: &[u8], token_scale: f32, out: &mut [f32]) {
    let (latent, rope) = out.split_at_mut((2 * parts.elements.len()).min(out.len()));
    nvfp4_432::decode_latent(parts, data, token_scale, latent);
    let scale = group::f32_at(&data[parts.token_scales.clone()], ROPE_SCALE);
    group::decode_e4m3(&data[parts.rope.clone()], scale, rope);
}
