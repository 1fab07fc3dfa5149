//! Element types of tensors, and the arithmetic of the 8-bit format.

use std::fmt;

use half::bf16;
use serde::{Deserialize, Serialize};

/// The type of the elements of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Dtype {
    F32,
    Bf16,
    E4m3,
    I32,
    U32,
    I64,
    U8,
}

impl Dtype {
    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::E4m3 | Self::U8 => 1,
            Self::Bf16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::I64 => 8,
        }
    }

    /// The name as safetensors writes it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::Bf16 => "BF16",
            Self::E4m3 => "F8_E4M3",
            Self::I32 => "I32",
            Self::U32 => "U32",
            Self::I64 => "I64",
            Self::U8 => "U8",
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A type of element. `Raw` is how the host holds one: a marker such as [`E4m3`] or `Lse<Natural>` keeps tensors of the same bytes
/// apart without any conversion.
pub trait Element: 'static {
    /// The host's representation.
    type Raw: bytemuck::Pod + Default + PartialEq + fmt::Debug + Send + Sync;
    /// What it is called in files and errors.
    const DTYPE: Dtype;
}

macro_rules! element {
    ($($kind:ty, $raw:ty, $dtype:ident;)*) => {
        $(impl Element for $kind {
            type Raw = $raw;
            const DTYPE: Dtype = Dtype::$dtype;
        })*
    };
}

element! {
    f32, f32, F32;
    bf16, bf16, Bf16;
    E4m3, u8, E4m3;
    i32, i32, I32;
    u32, u32, U32;
    i64, i64, I64;
    u8, u8, U8;
}

/// Marks tensors of 8-bit floats, E4M3 without infinities (OCP OFP8): 1 sign, 4 exponent bits (bias 7), 3 mantissa bits; the largest
/// value is 448, `0x7f` and `0xff` are NaN. The host holds the byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum E4m3 {}

impl E4m3 {
    /// The largest finite value.
    pub const MAX: f32 = 448.0;

    /// The value of a byte, exact.
    pub fn decode(byte: u8) -> f32 {
        let sign = if byte & 0x80 == 0 { 1.0 } else { -1.0 };
        let (exponent, mantissa) = ((byte >> 3) & 15, f32::from(byte & 7));
        match (exponent, byte & 7) {
            (15, 7) => f32::NAN,
            (0, _) => sign * mantissa * 2f32.powi(-9),
            _ => sign * (1.0 + mantissa / 8.0) * 2f32.powi(i32::from(exponent) - 7),
        }
    }

    /// The nearest byte, ties to even; beyond 448 it saturates, NaN stays NaN.
    pub fn encode(value: f32) -> u8 {
        let sign = if value.is_sign_negative() { 0x80 } else { 0 };
        let magnitude = value.abs();
        if value.is_nan() {
            return sign | 0x7f;
        }
        if magnitude >= Self::MAX {
            return sign | 0x7e;
        }
        // Below 2^-6 the spacing is 2^-9; above it is 2^(e-3). Scaling by a power of two is exact in f32 here.
        let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(-6);
        let steps = (magnitude * 2f32.powi(3 - exponent)).round_ties_even() as i32;
        // `steps` is 0..=16; 16 carries into the next exponent by itself because the code is contiguous.
        sign | (((exponent + 6) << 3) + steps).min(0x7e) as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_round_trips() {
        for byte in 0..=255u8 {
            let value = E4m3::decode(byte);
            if value.is_nan() {
                assert_eq!(E4m3::encode(value) & 0x7f, 0x7f);
            } else {
                assert_eq!(E4m3::encode(value), byte, "{value}");
            }
        }
    }

    #[test]
    fn halfway_goes_to_even_and_large_saturates() {
        for code in 0..0x7eu8 {
            let (low, high) = (E4m3::decode(code), E4m3::decode(code + 1));
            let middle = (low + high) / 2.0;
            assert_eq!(E4m3::encode(middle), code + (code & 1), "between {low} and {high}");
            assert_eq!(E4m3::encode(f32::from_bits(middle.to_bits() - 1)), code);
            assert_eq!(E4m3::encode(f32::from_bits(middle.to_bits() + 1)), code + 1);
        }
        assert_eq!(E4m3::encode(1e9), 0x7e);
        assert_eq!(E4m3::encode(f32::NEG_INFINITY), 0xfe);
    }
}
