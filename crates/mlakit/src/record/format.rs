//! The names of the formats.

use serde::{Deserialize, Serialize};

use super::*;

/// How the elements of a token lie in the cache. The number of a name is the bytes of a token at the usual geometry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecordFormat {
    /// Two bytes an element, exact.
    #[default]
    Bf16,
    /// One byte an element and one scale for the whole cache.
    E4m3,
    /// E4M3 latent with an F32 scale for each 128 elements, BF16 rotary part.
    Fp8_656,
    /// The same without a rotary part.
    Fp8_528,
    /// E4M3 latent with a power of two for each 64 elements in a plane of their own, BF16 rotary part, all of it value.
    V4_584,
    /// E4M3 with a power of two for each 32 elements.
    V41_528,
    /// E2M1 with an E4M3 scale for each 16 elements.
    V41_288,
    /// E2M1 latent with an E4M3 scale for each 16 elements, BF16 rotary part.
    Nvfp4_432,
    /// The same with an E4M3 rotary part that has an F32 scale.
    Nvfp4_368,
    /// The same, and an F32 scale for the latent of the token.
    Nvfp4_368t,
    /// E2M1 with an E4M3 scale for each 16 elements and an F32 scale for the token; no rotary part.
    Nvfp4_304,
    /// An index key, exact.
    IndexBf16_256,
    /// An index key in E4M3 with an F32 scale that is a power of two, in a plane of their own.
    IndexFp8_132,
    /// An index key in E2M1 with a power of two for each 32 elements, in a plane of their own.
    IndexMxfp4_68,
}

/// What a format does with the rotary part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePart {
    /// Stores it like the latent.
    Within,
    /// Stores it in its own way, and must have one.
    Apart,
    /// Has none.
    Absent,
}

impl RecordFormat {
    /// All formats.
    pub const ALL: [Self; 14] = [
        Self::Bf16,
        Self::E4m3,
        Self::Fp8_656,
        Self::Fp8_528,
        Self::V4_584,
        Self::V41_528,
        Self::V41_288,
        Self::Nvfp4_432,
        Self::Nvfp4_368,
        Self::Nvfp4_368t,
        Self::Nvfp4_304,
        Self::IndexBf16_256,
        Self::IndexFp8_132,
        Self::IndexMxfp4_68,
    ];

    /// Those in which each element is by itself, which all attention reads; records of these may be padded.
    pub const PLAIN: [Self; 2] = [Self::Bf16, Self::E4m3];

    /// Its name in files and on the command line.
    pub fn name(self) -> &'static str {
        self.codec().name
    }

    /// The format of this name.
    pub fn parse(name: &str) -> Result<Self, Error> {
        let names = || Self::ALL.map(Self::name).join(", ");
        let found = Self::ALL.into_iter().find(|format| format.name() == name);
        found.ok_or_else(|| Error::contract("record", format!("one of {}", names()), name))
    }

    /// Whether values are stored divided by a scale of the whole cache.
    pub fn is_scaled(self) -> bool {
        self == Self::E4m3
    }

    /// Whether it is one of [`PLAIN`](Self::PLAIN).
    pub fn is_plain(self) -> bool {
        Self::PLAIN.contains(&self)
    }

    /// Whether a record is the key of an indexer.
    pub fn is_index(self) -> bool {
        matches!(self, Self::IndexBf16_256 | Self::IndexFp8_132 | Self::IndexMxfp4_68)
    }

    /// What it does with the rotary part.
    pub fn rope(self) -> RopePart {
        self.codec().rope
    }

    /// Checks that a token of these widths can be stored: a rotary part where the format must have one, none where it cannot.
    ///
    /// # Errors
    /// [`Error::Contract`] names `record` and says which formats are fit.
    pub fn check_parts(self, latent: usize, rope: usize) -> Result<(), Error> {
        let needed = match self.rope() {
            RopePart::Apart if rope == 0 => "a record without a rotary part (fp8_528, nvfp4_304)",
            RopePart::Absent if rope > 0 => "a record with a rotary part (fp8_656, nvfp4_368)",
            _ => return Ok(()),
        };
        let given = format!("{} for a token of {latent} + {rope} elements", self.name());
        Err(Error::contract("record", needed, given))
    }

    /// The same for attention over keys of `qk_width` elements whose first `value_width` are their value; index keys are refused.
    ///
    /// # Errors
    /// [`Error::Contract`] names `record` and says which formats are fit.
    pub fn check_key(self, qk_width: usize, value_width: usize) -> Result<(), Error> {
        if self.is_index() {
            let needed = "a record of attention, not an index key";
            return Err(Error::contract("record", needed, self.name()));
        }
        let rope = match (self, qk_width.saturating_sub(value_width)) {
            (Self::V4_584, 0) => V4_ROPE,
            (_, rope) => rope,
        };
        self.check_parts(value_width, rope)
    }

    pub(super) fn codec(self) -> &'static Codec {
        match self {
            Self::Bf16 => &bf16::CODEC,
            Self::E4m3 => &e4m3::CODEC,
            Self::Fp8_656 => &fp8_656::CODEC,
            Self::Fp8_528 => &fp8_528::CODEC,
            Self::V4_584 => &v4_584::CODEC,
            Self::V41_528 => &v41_528::CODEC,
            Self::V41_288 => &v41_288::CODEC,
            Self::Nvfp4_432 => &nvfp4_432::CODEC,
            Self::Nvfp4_368 => &nvfp4_368::CODEC,
            Self::Nvfp4_368t => &nvfp4_368t::CODEC,
            Self::Nvfp4_304 => &nvfp4_304::CODEC,
            Self::IndexBf16_256 => &index_bf16_256::CODEC,
            Self::IndexFp8_132 => &index_fp8_132::CODEC,
            Self::IndexMxfp4_68 => &index_mxfp4_68::CODEC,
        }
    }
}
