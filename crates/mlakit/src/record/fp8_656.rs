//! `fp8_656`: a latent in E4M3 with an F32 scale for each 128 elements, then the rotary part in BF16 (vLLM's `fp8_ds_mla`, FlashMLA).
//!
//! At 512 + 64 elements: `[0, 512)` codes, `[512, 528)` 4 scales, `[528, 656)` rotary part.
//! Writers: scale = max(amax / 448, 1e-4) rounded up to a power of two, code = E4M3(value / scale). Readers take any F32 scale.

use super::*;

pub(super) const CODEC: Codec = Codec {
    name: "fp8_656",
    group: GROUP,
    rope: RopePart::Apart,
    page_sizes: &[1],
    parts: |layout| {
        let latent = layout.width - layout.rope;
        Parts::packed([latent, latent / GROUP * 4, 0, 2 * layout.rope])
    },
    encode,
    decode,
};

/// Elements that share a scale.
const GROUP: usize = 128;

/// The latent of `fp8_528` is the same.
pub(super) fn encode(parts: &Parts, record: RecordMut<'_>, values: Values<'_>) {
    record.data.fill(0);
    let latent = parts.elements.len();
    for (group, first) in (0..latent).step_by(GROUP).enumerate() {
        let values = values.range(first, GROUP);
        let scale = scale(group::amax(values));
        group::encode_e4m3(&mut record.data[first..first + GROUP], values, scale);
        group::put_f32(&mut record.data[parts.scales.clone()], group, scale);
    }
    bf16::encode(&mut record.data[parts.rope.clone()], values.range(latent, parts.rope.len() / 2));
}

pub(super) fn decode(parts: &Parts, record: Record<'_>, out: &mut [f32]) {
    let (latent, rope) = out.split_at_mut(parts.elements.len().min(out.len()));
    for (group, out) in latent.chunks_mut(GROUP).enumerate() {
        let scale = group::f32_at(&record.data[parts.scales.clone()], group);
        group::decode_e4m3(&record.data[group * GROUP..], scale, out);
    }
    bf16::decode(&record.data[parts.rope.clone()], rope);
}

/// The scale that writers give a group.
fn scale(amax: f32) -> f32 {
    Ue8m0::decode(Ue8m0::ceil((amax / E4m3::MAX).max(1e-4)))
}
