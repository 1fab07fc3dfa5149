//! `nvfp4_368t`: `nvfp4_368` with an F32 scale `s` for the latent of each token.
//!
//! As `nvfp4_368`, and `[292, 296)` is `s`. Value = E2M1 x E4M3 x `s`: the first product is exact, the second is rounded to F32.
//! Writers: `s` = amax of the latent / 2688 (6 x 448), group scale = E4M3(amax / `s` / 6), code = E2M1(value / (scale x `s`)), each
//! quotient and product rounded to F32. A latent of zeros has `s` = 0 and zero codes and scales.

use super::*;

pub(super) const CODEC: Codec = Codec {
    name: "nvfp4_368t",
    encode: |parts, record, values| {
        encode_latent(parts, record.data, values);
        nvfp4_368::encode_rope(parts, record.data, values);
    },
    decode: |parts, record, out| {
        nvfp4_368::decode(parts, record.data, token_scale(parts, record.data), out);
    },
    ..nvfp4_368::CODEC
};

/// Which of the token's scales is the latent's.
const LATENT_SCALE: usize = 1;

/// The latent and its scale.
pub(super) fn encode_latent(parts: &Parts, data: &mut [u8], values: Values<'_>) {
    let latent = values.range(0, 2 * parts.elements.len());
    let unit = group::amax(latent) / (E2m1::MAX * E4m3::MAX);
    if unit > 0.0 {
        nvfp4_432::encode_groups(parts, data, latent, |amax| (amax / unit / E2m1::MAX, unit));
        group::put_f32(&mut data[parts.token_scales.clone()], LATENT_SCALE, unit);
    } else {
        data.fill(0);
    }
}

/// The latent's scale.
pub(super) fn token_scale(parts: &Parts, data: &[u8]) -> f32 {
    group::f32_at(&data[parts.token_scales.clone()], LATENT_SCALE)
}
