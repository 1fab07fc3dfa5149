//! `v4_584`: DeepSeek-V4's page-planar record. The plane of data has, for each token, a latent in E4M3 and the rotary part in BF16; the
//! plane of scales behind it has a UE8M0 byte for each 64 elements of the latent, padded with zeros to a multiple of 8 bytes.
//!
//! At 448 + 64 elements: 576 bytes of data, `[0, 448)` codes and `[448, 576)` rotary part, then 8 bytes of scales, 7 of them used. A page
//! is `page_size` x 576 bytes, then `page_size` x 8; engines round its stride up to a multiple of 576 or do not.
//! Writers: scale = max(amax, 1e-4) / 448 rounded up to a power of two, code = E4M3(value / scale).

use super::*;

pub(super) const CODEC: Codec = Codec {
    name: "v4_584",
    group: GROUP,
    rope: RopePart::Apart,
    // Pages of the layers that compress 128 tokens to one have 2 records.
    page_sizes: &[1, 2],
    parts: |layout| {
        let (latent, rope) = (layout.width - layout.rope, layout.rope);
        let scales = latent / GROUP;
        Parts::planar([latent, 2 * rope], (scales, scales.next_multiple_of(8)))
    },
    encode,
    decode,
};

/// Elements that share a scale.
const GROUP: usize = 64;

fn encode(parts: &Parts, record: RecordMut<'_>, values: Values<'_>) {
    let latent = parts.elements.len();
    record.scales.fill(0);
    let groups = record.data[..latent].chunks_exact_mut(GROUP).zip(record.scales);
    for (group, (codes, scale)) in groups.enumerate() {
        group::encode_mxfp8(codes, scale, values.range(group * GROUP, GROUP));
    }
    bf16::encode(&mut record.data[parts.rope.clone()], values.range(latent, parts.rope.len() / 2));
}

fn decode(parts: &Parts, record: Record<'_>, out: &mut [f32]) {
    let latent = parts.elements.len();
    let (low, rope) = out.split_at_mut(latent.min(out.len()));
    let groups = low.chunks_mut(GROUP).zip(record.data[..latent].chunks(GROUP));
    for ((out, codes), scale) in groups.zip(record.scales) {
        group::decode_e4m3(codes, Ue8m0::decode(*scale), out);
    }
    bf16::decode(&record.data[parts.rope.clone()], rope);
}
