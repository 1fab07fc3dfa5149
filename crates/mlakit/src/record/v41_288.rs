//! `v41_288`: DeepSeek-V4.1's compressed cache. All elements in E2M1, two a byte, with an E4M3 scale for each 16 (NVFP4 without an
//! outer scale).
//!
//! At 512 elements: `[0, 256)` codes, `[256, 288)` 32 scales.
//! Writers: scale = E4M3(max(amax, 6 x 2^-9) / 6), so at least 2^-9, code = E2M1(value / scale).

use super::*;

pub(super) const CODEC: Codec = Codec {
    name: "v41_288",
    group: nvfp4_432::GROUP,
    rope: RopePart::Within,
    page_sizes: &[1],
    parts: |layout| Parts::packed([layout.width / 2, layout.width / nvfp4_432::GROUP, 0, 0]),
    encode: |parts, record, values| {
        nvfp4_432::encode_latent(parts, record.data, values, |amax| amax.max(FLOOR) / E2m1::MAX);
    },
    decode: |parts, record, out| nvfp4_432::decode_latent(parts, record.data, 1.0, out),
};

/// The least amax: that of the smallest scale.
const FLOOR: f32 = 6.0 / 512.0;
