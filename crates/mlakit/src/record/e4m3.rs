//! `e4m3`: element `i` at byte `i`, as `E4M3(value / kv_scale)` with one positive scale for the whole cache. The quotient is rounded to
//! F32, then to nearest even, and saturates at 448; NaN stays NaN. Value = code x `kv_scale`, in F32.

use super::*;

pub(super) const CODEC: Codec = Codec {
    name: "e4m3",
    group: 1,
    rope: RopePart::Within,
    page_sizes: &[1],
    parts: |layout| Parts::plain(layout.width),
    encode: |_, record, values| group::encode_e4m3(record.data, values, record.kv_scale),
    decode: |_, record, out| group::decode_e4m3(record.data, record.kv_scale, out),
};
