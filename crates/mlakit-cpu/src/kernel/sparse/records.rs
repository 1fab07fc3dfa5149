//! From the bytes of a record to a key row.
//!
//! A key row holds what the format says an element is, in F32 (exact) or, where the machine multiplies BF16
//! pairs, rounded to BF16: exact too unless the record has an F32 scale that is no power of two.

use mlakit::{E2m1, RecordFormat, RecordLayout, Ue8m0};

use crate::e4m3;
use crate::kernel::engine::Engine;

/// How the records of a format become key rows.
#[derive(Clone, Copy, Debug)]
pub struct RecordRows {
    /// Elements alike, one section after the other.
    sections: [Section; 2],
    /// Whether a record is a row of BF16 as it lies.
    is_bf16: bool,
    /// Bytes of a token's data that are read.
    pub(super) data_bytes: usize,
    /// Whether its scales are in a plane of their own.
    pub(super) planar: bool,
}

/// Elements alike.
#[derive(Clone, Copy, Debug)]
struct Section {
    elements: usize,
    /// The first byte in the token's data.
    first: usize,
    code: Code,
    scale: Scale,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Code {
    Bf16,
    E4m3,
    /// Two a byte, the even element low.
    E2m1,
}

/// What codes are multiplied by.
#[derive(Clone, Copy, Debug)]
enum Scale {
    One,
    /// Of the cache.
    Cache(f32),
    /// An F32 of the token's data.
    Token {
        at: usize,
    },
    /// One for each `group` elements, and perhaps an F32 of the token after it.
    Groups {
        kind: GroupScale,
        at: usize,
        group: usize,
        token: Option<usize>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GroupScale {
    F32,
    Ue8m0,
    E4m3,
}

impl RecordRows {
    /// The first `qk_width` elements of records. `cache_scale` multiplies codes of a scaled cache, where
    /// nothing else does.
    pub fn new(layout: RecordLayout, qk_width: usize, cache_scale: Option<f32>) -> RecordRows {
        let parts = layout.parts();
        let rope = layout.rope;
        let latent = qk_width - rope;
        let section = |elements, first, code, scale| Section { elements, first, code, scale };
        let (first, at) = (parts.elements.start, parts.scales.start);
        let groups = |kind, bytes: usize, token: Option<usize>| {
            let group = latent / (parts.scales.len() / bytes).max(1);
            Scale::Groups { kind, at, group, token }
        };
        let token = |index: usize| parts.token_scales.start + 4 * index;
        let cache = cache_scale.map_or(Scale::One, Scale::Cache);
        let (code, scale) = match layout.format {
            RecordFormat::E4m3 => (Code::E4m3, cache),
            RecordFormat::Fp8_656 | RecordFormat::Fp8_528 => {
                (Code::E4m3, groups(GroupScale::F32, 4, None))
            }
            RecordFormat::V4_584 | RecordFormat::V41_528 => {
                (Code::E4m3, groups(GroupScale::Ue8m0, 1, None))
            }
            RecordFormat::V41_288 | RecordFormat::Nvfp4_432 | RecordFormat::Nvfp4_368 => {
                (Code::E2m1, groups(GroupScale::E4m3, 1, None))
            }
            RecordFormat::Nvfp4_368t | RecordFormat::Nvfp4_304 => {
                (Code::E2m1, groups(GroupScale::E4m3, 1, Some(token(1))))
            }
            RecordFormat::Bf16
            | RecordFormat::IndexBf16_256
            | RecordFormat::IndexFp8_132
            | RecordFormat::IndexMxfp4_68 => (Code::Bf16, Scale::One),
        };
        let (rope_code, rope_scale) = match layout.format {
            RecordFormat::Nvfp4_368 | RecordFormat::Nvfp4_368t => {
                (Code::E4m3, Scale::Token { at: token(0) })
            }
            _ => (Code::Bf16, Scale::One),
        };
        let plain = layout.format.is_plain();
        let plain_bytes = qk_width * if code == Code::Bf16 { 2 } else { 1 };
        RecordRows {
            sections: [
                section(latent, first, code, scale),
                section(rope, parts.rope.start, rope_code, rope_scale),
            ],
            is_bf16: layout.format == RecordFormat::Bf16,
            data_bytes: if plain { plain_bytes } else { parts.data_bytes },
            planar: parts.scales_bytes > 0,
        }
    }

    /// Whether tiles read records where they lie.
    pub(super) const fn in_place<E: Engine>(&self) -> bool {
        self.is_bf16 && E::KEY_BYTES == 2
    }

    /// Makes the key row of a record.
    ///
    /// # Safety
    /// `data` and `scales` are readable as the layout says; `row` is writable for the elements, rounded up
    /// to whole vectors.
    #[inline(always)]
    pub(super) unsafe fn make<E: Engine>(
        &self,
        e: E,
        [data, scales]: [*const u8; 2],
        row: *mut u8,
    ) {
        let scales = if self.planar { scales } else { data };
        let mut to = row;
        for section in &self.sections {
            // SAFETY: the contract of this function.
            unsafe { section.make(e, [data, scales], to) };
            to = to.wrapping_add(section.elements * E::KEY_BYTES);
        }
    }
}

/// Codes that are turned to BF16 together: a multiple of every group.
const CHUNK: usize = 128;

impl Section {
    /// # Safety
    /// As [`RecordRows::make`], from the section's first element on.
    #[inline(always)]
    unsafe fn make<E: Engine>(&self, e: E, [data, scales]: [*const u8; 2], row: *mut u8) {
        let codes = data.wrapping_add(self.first);
        // SAFETY: the contract of this function.
        unsafe {
            match (self.code, self.scale) {
                (Code::Bf16, Scale::One) if E::KEY_BYTES == 4 => {
                    return e.row_of_bf16(codes, row, self.elements);
                }
                (Code::Bf16, Scale::One) => {
                    return std::ptr::copy_nonoverlapping(codes, row, 2 * self.elements);
                }
                (Code::E4m3, Scale::One) => return e.row_of_e4m3(codes, row, self.elements),
                _ => {}
            }
        }
        let mut first = 0;
        while first < self.elements {
            let count = CHUNK.min(self.elements - first);
            let mut chunk = [0_u16; CHUNK];
            // SAFETY: the section has the codes; the chunk has room for them.
            unsafe { self.decode(e, codes, first, &mut chunk[..count]) };
            let to = row.wrapping_add(first * E::KEY_BYTES);
            // SAFETY: the contract of this function; what is beyond `count` is zero.
            unsafe { self.scale_chunk(e, (&chunk, first, count), [data, scales], to) };
            first += count;
        }
    }

    /// Codes from element `first` on, as BF16.
    ///
    /// # Safety
    /// The section has so many codes.
    #[inline(always)]
    unsafe fn decode<E: Engine>(&self, e: E, codes: *const u8, first: usize, to: &mut [u16]) {
        // SAFETY: the contract of this function.
        unsafe {
            match self.code {
                Code::Bf16 => {
                    let from = codes.add(2 * first);
                    std::ptr::copy_nonoverlapping(from, to.as_mut_ptr().cast(), 2 * to.len());
                }
                Code::E4m3 => e.decode_e4m3(codes.add(first), to.as_mut_ptr(), to.len()),
                Code::E2m1 => {
                    for (pair, place) in to.chunks_exact_mut(2).enumerate() {
                        let byte = *codes.add(first / 2 + pair);
                        place.copy_from_slice(&E2M1_PAIRS[byte as usize]);
                    }
                }
            }
        }
    }

    /// Multiplies the codes of a chunk by their scales and writes them to the row.
    ///
    /// # Safety
    /// As [`Section::make`].
    #[inline(always)]
    unsafe fn scale_chunk<E: Engine>(
        &self,
        e: E,
        (chunk, first, count): (&[u16; CHUNK], usize, usize),
        [data, scales]: [*const u8; 2],
        row: *mut u8,
    ) {
        let (group, token) = match self.scale {
            Scale::Groups { group, token, .. } => (group, token),
            _ => (CHUNK, None),
        };
        // SAFETY: the token has the scale.
        let token = token.map(|at| unsafe { f32_at(data.add(at)) });
        let mut begin = 0;
        while begin < count {
            let end = (begin + group).min(count);
            // SAFETY: the group has a scale.
            let scale = e.splat(unsafe { self.scale_of((first + begin) / group, [data, scales]) });
            for i in (begin..end).step_by(E::W) {
                // SAFETY: the chunk is whole vectors, and so is the row.
                unsafe {
                    let mut value = e.mul(e.load_bf16(chunk.as_ptr().add(i)), scale);
                    if let Some(token) = token {
                        value = e.mul(value, e.splat(token));
                    }
                    if E::KEY_BYTES == 4 {
                        e.store(row.cast::<f32>().add(i), value);
                    } else {
                        e.store_bf16(row.cast::<u16>().add(i), value);
                    }
                }
            }
            begin = end;
        }
    }

    /// The scale of group `group`.
    ///
    /// # Safety
    /// The token has it.
    #[inline(always)]
    unsafe fn scale_of(&self, group: usize, [data, scales]: [*const u8; 2]) -> f32 {
        // SAFETY: the contract of this function.
        unsafe {
            match self.scale {
                Scale::One => 1.0,
                Scale::Cache(scale) => scale,
                Scale::Token { at } => f32_at(data.add(at)),
                Scale::Groups { kind, at, .. } => match kind {
                    GroupScale::F32 => f32_at(scales.add(at + 4 * group)),
                    GroupScale::Ue8m0 => Ue8m0::decode(*scales.add(at + group)),
                    GroupScale::E4m3 => e4m3::decode_f32(*scales.add(at + group)),
                },
            }
        }
    }
}

/// # Safety
/// Readable for 4 bytes.
#[inline(always)]
unsafe fn f32_at(from: *const u8) -> f32 {
    // SAFETY: the contract of this function.
    f32::from_le_bytes(unsafe { from.cast::<[u8; 4]>().read() })
}

/// The BF16 bits of both codes of a byte.
static E2M1_PAIRS: [[u16; 2]; 256] = {
    let mut pairs = [[0; 2]; 256];
    let mut byte = 0;
    while byte < 256 {
        pairs[byte] = [bits(byte as u8), bits(byte as u8 >> 4)];
        byte += 1;
    }
    pairs
};

/// Exact: a code has one bit behind the first.
const fn bits(code: u8) -> u16 {
    (E2m1::decode(code).to_bits() >> 16) as u16
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use mlakit::RopePart;

    use super::*;
    use crate::isa::Isa;
    use crate::kernel::scalar::Scalar;
    use crate::numerics::{bf16_to_f32, f32_to_bf16};

    /// Layouts of every record of attention, at the widths of models and at small ones.
    fn layouts() -> Vec<RecordLayout> {
        let mut layouts = Vec::new();
        for format in RecordFormat::ALL.into_iter().filter(|format| !format.is_index()) {
            let widths: &[(usize, usize)] = match format.rope() {
                RopePart::Apart if format == RecordFormat::V4_584 => &[(512, 512), (192, 128)],
                RopePart::Apart => &[(576, 512), (154, 128)],
                RopePart::Absent => &[(512, 512), (128, 128)],
                RopePart::Within if format.is_plain() => &[(576, 512), (66, 34)],
                RopePart::Within => &[(512, 512), (96, 64)],
            };
            for (qk, value) in widths {
                layouts.push(RecordLayout::of_key(format, *qk, *value));
            }
        }
        layouts
    }

    /// A record of any bytes at all but NaN scales, and what its elements are.
    fn record(layout: RecordLayout, seed: u64, kv_scale: f32) -> ([Vec<u8>; 2], Vec<f32>) {
        let parts = layout.parts();
        let mut state = seed;
        let mut number = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            ((state >> 33) % 4096) as f32 / 1024.0 - 2.0
        };
        let values: Vec<bf16> = (0..layout.width).map(|_| bf16::from_f32(number())).collect();
        let mut bytes = [vec![0; parts.data_bytes], vec![0; parts.scales_bytes]];
        let [data, scales] = &mut bytes;
        layout.encode(data, scales, &values, kv_scale);
        let mut needed = vec![0.0; layout.width];
        layout.decode(data, scales, kv_scale, &mut needed);
        (bytes, needed)
    }

    fn made<E: Engine>(e: E, rows: &RecordRows, bytes: &[Vec<u8>; 2], width: usize) -> Vec<f32> {
        let mut row = vec![0xff_u8; (width + 16) * E::KEY_BYTES];
        let at = [bytes[0].as_ptr(), bytes[1].as_ptr()];
        // SAFETY: the record has its bytes, the row is a vector longer than the elements.
        unsafe { rows.make(e, at, row.as_mut_ptr()) };
        let element = |i: usize| match E::KEY_BYTES {
            4 => f32::from_le_bytes(row[4 * i..4 * i + 4].try_into().unwrap()),
            _ => bf16_to_f32(u16::from_le_bytes(row[2 * i..2 * i + 2].try_into().unwrap())),
        };
        (0..width).map(element).collect()
    }

    #[track_caller]
    fn same(what: &str, given: &[f32], needed: &[f32]) {
        for (i, (g, n)) in given.iter().zip(needed).enumerate() {
            assert_eq!(g.to_bits(), n.to_bits(), "{what}: element {i} is {g}, needed {n}");
        }
    }

    /// Rows of F32 are what the format says, rows of BF16 that, rounded.
    #[test]
    fn rows_are_what_the_format_says() {
        for layout in layouts() {
            for seed in 0..20 {
                let (bytes, needed) = record(layout, seed, 0.37);
                let what = format!("{layout:?} seed {seed}");
                let rows = RecordRows::new(layout, layout.width, Some(0.37));
                let rounded: Vec<f32> =
                    needed.iter().map(|v| bf16_to_f32(f32_to_bf16(*v))).collect();
                if !rows.in_place::<Scalar>() {
                    same(&what, &made(Scalar, &rows, &bytes, layout.width), &rounded);
                }
                #[cfg(target_arch = "x86_64")]
                if Isa::Avx2.is_available() {
                    // SAFETY: the machine has the instructions.
                    let e = unsafe { crate::kernel::avx2::Avx2::assume() };
                    same(&what, &made(e, &rows, &bytes, layout.width), &needed);
                }
            }
        }
    }

    /// Without a scale of the cache rows of a scaled record are codes.
    #[test]
    fn codes_without_a_scale() {
        let layout = RecordLayout::of_key(RecordFormat::E4m3, 66, 34);
        let (bytes, _) = record(layout, 3, 0.37);
        let rows = RecordRows::new(layout, 66, None);
        let codes: Vec<f32> = bytes[0].iter().map(|code| e4m3::decode_f32(*code)).collect();
        same("codes", &made(Scalar, &rows, &bytes, 66), &codes);
    }

    /// Fewer elements than a padded record has.
    #[test]
    fn what_pads_a_record_is_not_read() {
        for format in RecordFormat::PLAIN {
            let layout = RecordLayout::of_key(format, 66, 34).padded(Some(80));
            let (bytes, needed) = record(layout, 4, 1.0);
            let rows = RecordRows::new(layout, 66, None);
            let given = made(Scalar, &rows, &bytes, 66);
            same(format.name(), &given, &needed[..66]);
            assert_eq!(rows.data_bytes, 66 * layout.bytes() / 80);
        }
    }
}
