//! Element types of tensors, and the arithmetic of the narrow formats.

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
    pub const fn decode(byte: u8) -> f32 {
        E4M3_VALUES[byte as usize]
    }

    /// The nearest byte, ties to even; beyond 448 it saturates, NaN stays NaN.
    pub const fn encode(value: f32) -> u8 {
        let bits = value.to_bits();
        let (sign, magnitude) = ((bits >> 24) as u8 & 0x80, bits & 0x7fff_ffff);
        if magnitude > 0x7f80_0000 {
            return sign | 0x7f;
        }
        if magnitude >= Self::MAX.to_bits() {
            return sign | 0x7e;
        }
        if magnitude < SMALLEST_NORMAL.to_bits() {
            // Steps of 2^-9: 2^14 + x has exactly this spacing, so the sum rounds x to nearest even.
            let steps = (f32::from_bits(magnitude) + SPACED_BY_2_TO_MINUS_9).to_bits();
            return sign | (steps - SPACED_BY_2_TO_MINUS_9.to_bits()) as u8;
        }
        // 20 of 23 mantissa bits go; a carry into the exponent is the next code, and 448 was above.
        let rounded = magnitude + 0x7_ffff + (magnitude >> 20 & 1);
        sign | ((rounded >> 20) - ((127 - 7) << 3)) as u8
    }
}

/// The smallest E4M3 that is no subnormal: 2^-6.
const SMALLEST_NORMAL: f32 = 1.0 / 64.0;
/// The F32 from which on neighbours are 2^-9 apart: 2^14.
const SPACED_BY_2_TO_MINUS_9: f32 = 16384.0;

const E4M3_VALUES: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (exponent, mantissa) = (byte as u32 >> 3 & 15, byte as u32 & 7);
        let magnitude = if exponent == 0 {
            mantissa as f32 / 512.0
        } else if exponent == 15 && mantissa == 7 {
            f32::NAN
        } else {
            f32::from_bits(((exponent + 127 - 7) << 23) | (mantissa << 20))
        };
        values[byte] = if byte < 128 { magnitude } else { -magnitude };
        byte += 1;
    }
    values
};

/// The arithmetic of 4-bit floats, E2M1 (OCP MX): 1 sign, 2 exponent bits (bias 1), 1 mantissa bit; 0, 0.5, 1, 1.5, 2, 3, 4, 6 and
/// their negatives, no infinity, no NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum E2m1 {}

impl E2m1 {
    /// The largest value.
    pub const MAX: f32 = 6.0;

    /// The value of the low four bits, exact.
    pub const fn decode(code: u8) -> f32 {
        E2M1_VALUES[(code & 15) as usize]
    }

    /// The nearest code, ties to even; beyond 6 it saturates, NaN becomes 6 (as `cvt.satfinite.e2m1x2` does).
    pub const fn encode(value: f32) -> u8 {
        let (sign, magnitude) = ((value.to_bits() >> 28) as u8 & 8, value.abs());
        if magnitude.is_nan() {
            return 7;
        }
        // Halfway points belong to the even code.
        let code = if magnitude <= 0.25 {
            0
        } else if magnitude < 0.75 {
            1
        } else if magnitude <= 1.25 {
            2
        } else if magnitude < 1.75 {
            3
        } else if magnitude <= 2.5 {
            4
        } else if magnitude < 3.5 {
            5
        } else if magnitude <= 5.0 {
            6
        } else {
            7
        };
        sign | code
    }
}

const E2M1_VALUES: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// The arithmetic of 8-bit scales, UE8M0 (OCP MX): byte `b` is 2^(b - 127), `0xff` is NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ue8m0 {}

impl Ue8m0 {
    /// The value of a byte, exact.
    pub const fn decode(byte: u8) -> f32 {
        match byte {
            0 => f32::from_bits(1 << 22),
            255 => f32::NAN,
            _ => f32::from_bits((byte as u32) << 23),
        }
    }

    /// The smallest power of two that is not below a value; between 2^-127 and 2^127. NaN stays NaN.
    pub const fn ceil(value: f32) -> u8 {
        let bits = value.to_bits();
        if value.is_nan() {
            return 0xff;
        }
        if value <= Self::decode(0) {
            return 0;
        }
        let up = (bits >> 23) + (bits & 0x7f_ffff != 0) as u32;
        if up > 254 { 254 } else { up as u8 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The code that rounding to nearest even means: by looking at all values, in f64, ties to the even code, as the formats define
    /// it, and the last code for all beyond it. `codes` are the non-negative ones, ascending.
    fn nearest(value: f32, codes: &[f32]) -> u8 {
        let magnitude = f64::from(value.abs().min(codes[codes.len() - 1]));
        let distance = |code: &usize| (f64::from(codes[*code]) - magnitude).abs();
        let even = |code: &usize| code % 2;
        (0..codes.len())
            .min_by(|a, b| distance(a).total_cmp(&distance(b)).then(even(a).cmp(&even(b))))
            .unwrap() as u8
    }

    /// Every BF16, and around every code and every middle of two the F32s next to it.
    fn inputs(codes: &[f32]) -> impl Iterator<Item = f32> {
        let middles = codes.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
        let special: Vec<f32> = codes.iter().copied().chain(middles).collect();
        let around = special.into_iter().flat_map(|value| {
            let bits = value.to_bits();
            [bits.saturating_sub(1), bits, bits + 1].map(f32::from_bits)
        });
        let every = (0..0x7f80u16).map(|bits| bf16::from_bits(bits).to_f32());
        around.chain(every).flat_map(|value| [value, -value])
    }

    #[test]
    fn e4m3_is_the_nearest_value() {
        let codes: Vec<f32> = (0..0x7f).map(E4m3::decode).collect();
        assert!(codes.is_sorted() && codes[0] == 0.0 && codes[0x7e] == 448.0);
        for value in inputs(&codes) {
            let sign = if value.is_sign_negative() { 0x80 } else { 0 };
            assert_eq!(E4m3::encode(value), sign | nearest(value, &codes), "{value:e}");
        }
        assert_eq!([f32::NAN, -f32::NAN].map(E4m3::encode), [0x7f, 0xff]);
        assert_eq!([f32::INFINITY, f32::NEG_INFINITY].map(E4m3::encode), [0x7e, 0xfe]);
    }

    #[test]
    fn e4m3_values_are_those_of_the_format() {
        for byte in 0..=255u8 {
            let (sign, exponent, mantissa) = (byte >> 7, byte >> 3 & 15, f64::from(byte & 7));
            let magnitude = match exponent {
                0 => mantissa / 8.0 * 2f64.powi(-6),
                _ => (1.0 + mantissa / 8.0) * 2f64.powi(i32::from(exponent) - 7),
            };
            let value = E4m3::decode(byte);
            if byte & 0x7f == 0x7f {
                assert!(value.is_nan());
                continue;
            }
            assert_eq!(f64::from(value.abs()), magnitude, "{byte:#x}");
            assert_eq!(value.is_sign_negative(), sign == 1, "{byte:#x}");
            assert_eq!(E4m3::encode(value), byte);
        }
    }

    #[test]
    fn e2m1_is_the_nearest_value() {
        let codes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for value in inputs(&codes) {
            let sign = if value.is_sign_negative() { 8 } else { 0 };
            assert_eq!(E2m1::encode(value), sign | nearest(value, &codes), "{value:e}");
        }
        for code in 0..16u8 {
            let value = E2m1::decode(code);
            assert_eq!(value.abs(), codes[usize::from(code & 7)]);
            assert_eq!(E2m1::encode(value), code);
            assert_eq!(E2m1::decode(code | 0xf0), value, "the high bits are another's");
        }
        assert_eq!([f32::INFINITY, f32::NEG_INFINITY].map(E2m1::encode), [7, 15]);
        assert_eq!([f32::NAN, -f32::NAN].map(E2m1::encode), [7, 7]);
    }

    #[test]
    fn ue8m0_is_the_power_of_two_above() {
        for byte in 0..255u8 {
            let value = Ue8m0::decode(byte);
            assert_eq!(f64::from(value), 2f64.powi(i32::from(byte) - 127));
            assert_eq!(Ue8m0::ceil(value), byte);
            let above = f32::from_bits(value.to_bits() + 1);
            assert_eq!(Ue8m0::ceil(above), (byte + 1).min(254), "{byte}");
            let below = f32::from_bits(value.to_bits() - 1);
            assert_eq!(Ue8m0::ceil(below), byte, "{byte}");
        }
        assert!(Ue8m0::decode(255).is_nan());
        assert_eq!([0.0, -1.0, f32::from_bits(1)].map(Ue8m0::ceil), [0; 3]);
        assert_eq!([f32::MAX, f32::INFINITY].map(Ue8m0::ceil), [254; 2]);
        assert_eq!(Ue8m0::ceil(f32::NAN), 255);
    }
}
