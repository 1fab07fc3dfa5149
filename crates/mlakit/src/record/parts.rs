//! Where the bytes of a token are: in its page, and among themselves.

use std::ops::Range;

use half::bf16;

use super::RecordLayout;

/// The planes of a page, in bytes from its beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planes {
    /// Elements, and scales where there is only one plane.
    pub data: Plane,
    /// Scales; of 0 bytes where they are with the data.
    pub scales: Plane,
}

impl Planes {
    /// Writes the token at `offset` of a page, its elements in two pieces; as [`RecordLayout::encode_parts`].
    pub fn encode(
        self,
        layout: RecordLayout,
        (page, offset): (&mut [u8], usize),
        values: [&[bf16]; 2],
        kv_scale: f32,
    ) {
        let (data, scales) = page.split_at_mut(self.scales.first);
        let data = &mut data[self.data.token(offset)];
        let scales = match self.scales.bytes {
            0 => &mut [],
            bytes => &mut scales[offset * self.scales.stride..][..bytes],
        };
        layout.encode_parts(data, scales, values, kv_scale);
    }

    /// The first `out.len()` elements of the token at `offset` of a page; as [`RecordLayout::decode`].
    pub fn decode(
        self,
        layout: RecordLayout,
        (page, offset): (&[u8], usize),
        kv_scale: f32,
        out: &mut [f32],
    ) {
        let [data, scales] = self.token(page, offset);
        layout.decode(data, scales, kv_scale, out);
    }

    /// The bytes of the token at `offset` of a page: data, then scales.
    pub fn token(self, page: &[u8], offset: usize) -> [&[u8]; 2] {
        [self.data, self.scales].map(|plane| &page[plane.token(offset)])
    }
}

/// One plane of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plane {
    /// Its first byte.
    pub first: usize,
    /// From one token to the next.
    pub stride: usize,
    /// Bytes of a token.
    pub bytes: usize,
}

impl Plane {
    /// The bytes of the token at `offset` of a page.
    pub fn token(self, offset: usize) -> Range<usize> {
        let first = self.first + offset * self.stride;
        first..first + self.bytes
    }
}

/// What the bytes of a token are. Ranges are in bytes from where the token's data begins; `scales` from where its scales begin, if
/// these are in a plane of their own. What no range covers is zero.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    /// Elements that are not kept apart.
    pub elements: Range<usize>,
    /// A scale for each group of them.
    pub scales: Range<usize>,
    /// F32 scales of the whole token: that of the rotary part, then that of the latent, each where the format has it.
    pub token_scales: Range<usize>,
    /// Elements that are kept apart.
    pub rope: Range<usize>,
    /// Bytes in the plane of data.
    pub data_bytes: usize,
    /// Bytes in the plane of scales; 0 where there is only one plane.
    pub scales_bytes: usize,
}

/// Parts of packed records begin at multiples of this.
const ALIGNMENT: usize = 16;

impl Parts {
    /// A record of elements alone.
    pub(super) fn plain(bytes: usize) -> Self {
        Self { elements: 0..bytes, data_bytes: bytes, ..Self::default() }
    }

    /// A record in one piece; every part begins at a multiple of 16 bytes.
    pub(super) fn packed([elements, scales, token_scales, rope]: [usize; 4]) -> Self {
        let mut end = 0;
        let mut part = |bytes: usize| {
            let first = end;
            end = (first + bytes).next_multiple_of(ALIGNMENT);
            first..first + bytes
        };
        let [elements, scales] = [part(elements), part(scales)];
        let [token_scales, rope] = [part(token_scales), part(rope)];
        Self { elements, scales, token_scales, rope, data_bytes: end, scales_bytes: 0 }
    }

    /// A record in two planes.
    pub(super) fn planar(
        [elements, rope]: [usize; 2],
        (scales, scales_bytes): (usize, usize),
    ) -> Self {
        Self {
            elements: 0..elements,
            scales: 0..scales,
            rope: elements..elements + rope,
            data_bytes: elements + rope,
            scales_bytes,
            ..Self::default()
        }
    }
}
