//! `v41_528`: DeepSeek-V4.1's window cache. All elements in E4M3 with a UE8M0 byte for each 32 (MXFP8).
//!
//! At 512 elements: `[0, 512)` codes, `[512, 528)` 16 scales.
//! Writers: scale = max(amax, 1e-4) / 448 rounded up to a power of two, code = E4M3(value / scale).

use super::*;

pub(super) const CODEC: Codec = Codec {
    name: "v41_528",
    group: GROUP,
    rope: RopePart::Within,
    page_sizes: &[1],
    parts: |layout| Parts::packed([layout.width, layout.width / GROUP, 0, 0]),
    encode,
    decode,
};

/// Elements that share a scale.
const GROUP: usize = 32;

fn encode(parts: &Parts, record: RecordMut<'_>, values: Values<'_>) {
    record.data.fill(0);
    let (codes, scales) = record.data.split_at_mut(parts.scales.start);
    let groups = codes[parts.elements.clone()].chunks_exact_mut(GROUP).zip(scales);
    for (group, (codes, scale)) in groups.enumerate() {
        group::encode_mxfp8(codes, scale, values.range(group * GROUP, GROUP));
    }
}

fn decode(parts: &Parts, record: Record<'_>, out: &mut [f32]) {
    let groups = out.chunks_mut(GROUP).zip(record.data.chunks(GROUP));
    for ((out, codes), scale) in groups.zip(&record.data[parts.scales.clone()]) {
        group::decode_e4m3(codes, Ue8m0::decode(*scale), out);
    }
}
