//! Cache record formats: the bytes of one token. Reader, writer and oracle all go through here.
//!
//! A token's bytes lie in one piece, or in two planes of its page: data, then scales (`v4_584`, `index_fp8_132`, `index_mxfp4_68`).
//! [`RecordLayout::planes`] says where. One file a format says what they are; `docs/formats.md` says it once more for other languages.

use serde::{Deserialize, Serialize};

use crate::op::spec::within;
use crate::{E2m1, E4m3, Error, Ue8m0};

mod bf16;
mod e4m3;
mod format;
mod fp8_528;
mod fp8_656;
mod group;
mod index_bf16_256;
mod index_fp8_132;
mod index_mxfp4_68;
mod nvfp4_304;
mod nvfp4_368;
mod nvfp4_368t;
mod nvfp4_432;
mod parts;
mod v41_288;
mod v41_528;
mod v4_584;

pub use format::{RecordFormat, RopePart};
pub use parts::{Parts, Plane, Planes};

/// A record format at a width. Writer and reader of a cache have equal layouts: make one with [`of`](Self::of) (from the widths of
/// latent and rotary part) or [`of_key`](Self::of_key) (from those of key and value).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RecordLayout {
    /// The format.
    pub format: RecordFormat,
    /// Elements of a record: latent, rotary part, and in `bf16` and `e4m3` those that pad it.
    pub width: usize,
    /// How many of them, the last ones, the format keeps apart; 0 where it treats all elements alike.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub rope: usize,
}

fn is_zero(number: &usize) -> bool {
    *number == 0
}

/// The rotary part that a V4 key ends with; such a key is its own value, so the widths of a reader do not tell.
pub const V4_ROPE: usize = 64;

impl RecordLayout {
    /// The record of a latent and a rotary part, or of an index key (`rope` 0).
    pub fn of(format: RecordFormat, latent: usize, rope: usize) -> Self {
        let apart = format.rope() == RopePart::Apart;
        Self { format, width: latent + rope, rope: if apart { rope } else { 0 } }
    }

    /// The record of a key of `qk_width` elements whose first `value_width` are its value: what is behind the value is the rotary part.
    /// Where the value is the whole key, the rotary part of `v4_584` is [`V4_ROPE`].
    pub fn of_key(format: RecordFormat, qk_width: usize, value_width: usize) -> Self {
        let rope = match qk_width.saturating_sub(value_width) {
            0 if format == RecordFormat::V4_584 => V4_ROPE.min(qk_width),
            rope => rope,
        };
        Self::of(format, qk_width - rope, rope)
    }

    /// The same with elements that pad it; only `bf16` and `e4m3` take such ([`check_width`](Self::check_width)).
    pub fn padded(self, record_width: Option<usize>) -> Self {
        Self { width: record_width.unwrap_or(self.width), ..self }
    }

    /// Checks that a `record_width` other than the layout's own is one that the format takes.
    ///
    /// # Errors
    /// [`Error::Contract`] names `record_width`.
    pub fn check_width(self, record_width: Option<usize>) -> Result<(), Error> {
        match record_width {
            Some(width) if width != self.width && !self.format.is_plain() => {
                let name = self.format.name();
                let needed = format!("{}, since {name} takes no padding", self.width);
                Err(Error::contract("record_width", needed, width))
            }
            width => within("record_width", width.unwrap_or(self.width), self.width, MAX_ELEMENTS),
        }
    }

    /// Checks that the format can have these widths, in pages of this size.
    ///
    /// # Errors
    /// [`Error::Contract`] names `record_width`, `record` or `page_size`.
    pub fn check(self, page_size: usize) -> Result<(), Error> {
        let Self { format, width, rope } = self;
        within("record_width", width, 1, MAX_ELEMENTS)?;
        let (name, codec) = (format.name(), format.codec());
        let apart = format.rope() == RopePart::Apart;
        if apart != (rope > 0) || rope >= width {
            let needed = if apart { "with a rotary part" } else { "without a rotary part apart" };
            let given = format!("{width} elements, {rope} of them apart");
            return Err(Error::contract("record", format!("{name} {needed}"), given));
        }
        if !(width - rope).is_multiple_of(codec.group) {
            let needed = format!("a multiple of {} elements in groups for {name}", codec.group);
            return Err(Error::contract("record", needed, width - rope));
        }
        let tiles = page_size > 0 && page_size.is_multiple_of(16) && page_size <= 1 << 16;
        if tiles || codec.page_sizes.contains(&page_size) {
            return Ok(());
        }
        let sizes: Vec<String> = codec.page_sizes.iter().map(usize::to_string).collect();
        let needed = format!("{} or a multiple of 16, at most 65536", sizes.join(", "));
        Err(Error::contract("page_size", needed, page_size))
    }

    /// Bytes of a token, over both planes.
    pub fn bytes(self) -> usize {
        let parts = self.parts();
        parts.data_bytes + parts.scales_bytes
    }

    /// What a token's bytes are, within its pieces of the planes.
    pub fn parts(self) -> Parts {
        (self.format.codec().parts)(self)
    }

    /// Where a token's bytes are in a page.
    pub fn planes(self, page_size: usize) -> Planes {
        let Parts { data_bytes, scales_bytes, .. } = self.parts();
        Planes {
            data: Plane { first: 0, stride: data_bytes, bytes: data_bytes },
            scales: Plane {
                first: page_size * data_bytes,
                stride: scales_bytes,
                bytes: scales_bytes,
            },
        }
    }

    /// The first `out.len()` elements of a token, at most all, from its bytes in the two planes. `kv_scale` is that of the cache and
    /// counts only where the format has one.
    pub fn decode(self, data: &[u8], scales: &[u8], kv_scale: f32, out: &mut [f32]) {
        let record = Record { data, scales, kv_scale };
        (self.format.codec().decode)(&self.parts(), record, out);
    }

    /// Writes a token's bytes. `values` are all elements; `bf16` and `e4m3` take fewer, and then keep the bytes behind.
    pub fn encode(self, data: &mut [u8], scales: &mut [u8], values: &[half::bf16], kv_scale: f32) {
        self.encode_parts(data, scales, [values, &[]], kv_scale);
    }

    /// The same of elements in two pieces, latent and rotary part.
    pub fn encode_parts(
        self,
        data: &mut [u8],
        scales: &mut [u8],
        values: [&[half::bf16]; 2],
        kv_scale: f32,
    ) {
        let values = Values(values);
        debug_assert!(values.len() == self.width || self.format.is_plain());
        let record = RecordMut { data, scales, kv_scale };
        (self.format.codec().encode)(&self.parts(), record, values);
    }
}

/// Elements of a record at most.
const MAX_ELEMENTS: usize = 1 << 16;

/// What a format is; each file of this folder has one.
struct Codec {
    name: &'static str,
    /// Elements that share a scale; 1 where none do.
    group: usize,
    rope: RopePart,
    /// Page sizes beside the multiples of 16.
    page_sizes: &'static [usize],
    parts: fn(RecordLayout) -> Parts,
    encode: fn(&Parts, RecordMut<'_>, Values<'_>),
    decode: fn(&Parts, Record<'_>, &mut [f32]),
}

/// The bytes of a token that is read.
#[derive(Clone, Copy)]
struct Record<'r> {
    data: &'r [u8],
    scales: &'r [u8],
    kv_scale: f32,
}

/// The bytes of a token that is written.
struct RecordMut<'r> {
    data: &'r mut [u8],
    scales: &'r mut [u8],
    kv_scale: f32,
}

/// The elements of a token, in two pieces.
#[derive(Clone, Copy)]
struct Values<'v>([&'v [half::bf16]; 2]);

impl<'v> Values<'v> {
    fn len(self) -> usize {
        self.0[0].len() + self.0[1].len()
    }

    fn iter(self) -> impl Iterator<Item = half::bf16> + Clone + 'v {
        self.0.into_iter().flatten().copied()
    }

    /// Elements `first..first + count`.
    fn range(self, first: usize, count: usize) -> Self {
        let cut = |piece: &'v [half::bf16], first: usize, end: usize| {
            &piece[first.min(piece.len())..end.min(piece.len())]
        };
        let (end, latent) = (first + count, self.0[0].len());
        let rope = cut(self.0[1], first.saturating_sub(latent), end.saturating_sub(latent));
        Self([cut(self.0[0], first, end), rope])
    }

    fn f32s(self) -> impl Iterator<Item = f32> + Clone + 'v {
        self.iter().map(half::bf16::to_f32)
    }
}

#[cfg(test)]
mod tests;
