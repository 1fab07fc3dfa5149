//! `writer` on the host, byte by byte.

use half::bf16;

use super::spec::WriterSpec;

/// The operands on the host.
#[derive(Clone, Copy, Debug)]
pub struct WriterCase<'a> {
    /// `[N, latent_width]`, or keys `[N, key_width]`.
    pub latent: &'a [bf16],
    /// `[N, rope_width]`; empty where there is none.
    pub rope: &'a [bf16],
    /// `[M]`.
    pub slots: &'a [i64],
    /// From one page to the next.
    pub page_stride_bytes: usize,
    /// The scale of the cache; 1 where the record has none.
    pub kv_scale: f32,
}

/// Writes into `cache`, all pages raw; returns how many slots were out of the pool. Of two tokens for one slot the later stays.
pub fn oracle(spec: &WriterSpec, case: &WriterCase<'_>, cache: &mut [u8]) -> u32 {
    let (layout, planes) = (spec.pages().record, spec.pages().planes());
    let [first, rope] = spec.widths();
    let pages = (cache.len() / case.page_stride_bytes) as u64;
    let mut skipped = 0;
    for (row, slot) in case.slots.iter().enumerate() {
        let Ok(slot) = u64::try_from(*slot) else { continue };
        let (page, offset) = (slot / spec.page_size as u64, slot % spec.page_size as u64);
        if page >= pages {
            skipped += 1;
            continue;
        }
        let values = [&case.latent[row * first..][..first], &case.rope[row * rope..][..rope]];
        let page = &mut cache[page as usize * case.page_stride_bytes..];
        planes.encode(layout, (page, offset as usize), values, case.kv_scale);
    }
    skipped
}
