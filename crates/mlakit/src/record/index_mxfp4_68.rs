//! `index_mxfp4_68`: an index key in E2M1, two elements a byte, with a UE8M0 byte for each 32 (MXFP4), page-planar: the codes of all
//! tokens of a page, then their scales.
//!
//! At 128 elements: a page is `page_size` x 64 bytes, then `page_size` x 4.
//! Writers: scale = max(amax, 6 x 2^-126) / 6 rounded up to a power of two, code = E2M1(value / scale).

use super::*;

pub(super) const CODEC: Codec = Codec {
    name: "index_mxfp4_68",
    group: GROUP,
    rope: RopePart::Absent,
    page_sizes: &[1],
    parts: |layout| {
        let scales = layout.width / GROUP;
        Parts::planar([layout.width / 2, 0], (scales, scales))
    },
    encode,
    decode,
};

/// Elements that share a scale.
const GROUP: usize = 32;

fn encode(_: &Parts, record: RecordMut<'_>, values: Values<'_>) {
    let groups = record.data.chunks_exact_mut(GROUP / 2).zip(record.scales);
    for (group, (codes, scale)) in groups.enumerate() {
        let values = values.range(group * GROUP, GROUP);
        *scale = group::mxfp4_scale(group::amax(values));
        group::encode_e2m1(codes, values, Ue8m0::decode(*scale));
    }
}

fn decode(_: &Parts, record: Record<'_>, out: &mut [f32]) {
    let groups = out.chunks_mut(GROUP).zip(record.data.chunks(GROUP / 2));
    for ((out, codes), scale) in groups.zip(record.scales) {
        group::decode_e2m1(codes, Ue8m0::decode(*scale), out);
    }
}
