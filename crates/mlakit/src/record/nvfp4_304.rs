//! `nvfp4_304`: the latent of `nvfp4_368t` without a rotary part (GLM-5.3 Flash).
//!
//! At 512 elements: `[0, 256)` codes, `[256, 288)` 32 scales, `[288, 292)` zero, `[292, 296)` the token's scale, `[296, 304)` zero.

use super::*;

pub(super) const CODEC: Codec = Codec {
    name: "nvfp4_304",
    rope: RopePart::Absent,
    encode: |parts, record, values| nvfp4_368t::encode_latent(parts, record.data, values),
    decode: |parts, record, out| {
        let scale = nvfp4_368t::token_scale(parts, record.data);
        nvfp4_432::decode_latent(parts, record.data, scale, out);
    },
    ..nvfp4_368::CODEC
};
