//! `index_fp8_132`: an index key in E4M3 with one F32 scale, page-planar: the codes of all tokens of a page, then their scales.
//!
//! At 128 elements: a page is `page_size` x 128 bytes, then `page_size` x 4.
//! Writers: scale = max(amax, 1e-4) / 448 rounded up to a power of two, code = E4M3(value / scale). Readers take any F32 scale.

use super::*;

pub(super) const CODEC: Codec = Codec {
    name: "index_fp8_132",
    // So that scales are aligned.
    group: 4,
    rope: RopePart::Absent,
    page_sizes: &[1],
    parts: |layout| Parts::planar([layout.width, 0], (4, 4)),
    encode: |_, record, values| {
        let scale = Ue8m0::decode(group::mxfp8_scale(group::amax(values)));
        group::put_f32(record.scales, 0, scale);
        group::encode_e4m3(record.data, values, scale);
    },
    decode: |_, record, out| {
        group::decode_e4m3(record.data, group::f32_at(record.scales, 0), out);
    },
};
