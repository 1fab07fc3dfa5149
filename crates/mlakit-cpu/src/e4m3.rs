//! FP8 E4M3FN: 1 sign bit, 4 exponent bits with bias 7, 3 mantissa bits. Largest finite 448; the
//! codes 0x7f and 0xff are NaN; there is no infinity.

/// The E4M3 code nearest to `x`, ties to even, saturating at 448; infinities saturate, NaN is kept.
#[inline]
pub fn encode(x: f32) -> u8 {
    let bits = x.to_bits();
    let sign = (bits >> 24) as u8 & 0x80;
    let magnitude = bits & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        return sign | 0x7f;
    }
    // 464 is half way between 448 and the 480 that the NaN code would be: it saturates too.
    if magnitude >= 448.0_f32.to_bits() {
        return sign | 0x7e;
    }
    if magnitude < SMALLEST_NORMAL.to_bits() {
        // Multiples of 2^-9. Adding 2^14 leaves an f32 whose unit in the last place is 2^-9, so
        // the addition itself rounds to nearest even.
        let rounded = f32::from_bits(magnitude) + 16384.0;
        return sign | (rounded.to_bits() & 0x0f) as u8;
    }
    let rounded = magnitude + 0x0007_ffff + ((magnitude >> 20) & 1);
    sign | ((rounded >> 20) - (120 << 3)) as u8
}

/// The BF16 bits of an E4M3 code, exact; NaN becomes the quiet NaN of its sign.
#[inline(always)]
pub fn decode(code: u8) -> u16 {
    BF16_OF_CODE[code as usize]
}

/// The value of an E4M3 code, exact.
#[inline(always)]
pub fn decode_f32(code: u8) -> f32 {
    crate::numerics::bf16_to_f32(decode(code))
}

/// The smallest normal value, 2^-6.
const SMALLEST_NORMAL: f32 = 0.015625;

/// BF16 bits of all codes.
pub(crate) static BF16_OF_CODE: [u16; 256] = {
    let mut table = [0; 256];
    let mut code = 0;
    while code < 256 {
        table[code] = bf16_of(code as u8);
        code += 1;
    }
    table
};

const fn bf16_of(code: u8) -> u16 {
    let sign = ((code & 0x80) as u16) << 8;
    let exponent = (code >> 3) as u16 & 15;
    let mantissa = code as u16 & 7;
    if code & 0x7f == 0x7f {
        return sign | 0x7fc0;
    }
    if exponent > 0 {
        return sign | (exponent + 120) << 7 | mantissa << 4;
    }
    if mantissa == 0 {
        return sign;
    }
    // mantissa * 2^-9, normalised: the leading bit of the mantissa is bit `top`.
    let top = 15 - mantissa.leading_zeros() as u16;
    sign | (127 - 9 + top) << 7 | (mantissa << (7 - top)) & 0x7f
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value by the definition of the format.
    fn by_definition(code: u8) -> f64 {
        let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
        let exponent = i32::from(code >> 3 & 15);
        let mantissa = f64::from(code & 7);
        match (exponent, code & 7) {
            (15, 7) => f64::NAN,
            (0, _) => sign * mantissa / 8.0 * 2_f64.powi(-6),
            _ => sign * (1.0 + mantissa / 8.0) * 2_f64.powi(exponent - 7),
        }
    }

    #[test]
    fn every_code_decodes_to_its_value_and_encodes_to_itself() {
        for code in 0..=255_u8 {
            let value = decode_f32(code);
            let expected = by_definition(code);
            if expected.is_nan() {
                assert!(value.is_nan());
            } else {
                assert_eq!(f64::from(value), expected, "code {code:#x}");
                assert_eq!(value.is_sign_negative(), code & 0x80 != 0);
            }
            assert_eq!(encode(value), code);
        }
    }

    /// The nearest code by search: the even one of two at equal distance.
    fn nearest(x: f32) -> u8 {
        let sign = if x.is_sign_negative() { 0x80 } else { 0 };
        if x.is_nan() {
            return sign | 0x7f;
        }
        let magnitude = f64::from(x.abs()).min(448.0);
        let distance = |code: u8| (by_definition(code) - magnitude).abs();
        let best = (0..0x7f_u8)
            .min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1))));
        sign | best.unwrap()
    }

    #[test]
    fn every_bf16_encodes_to_the_nearest_code() {
        for bits in 0..=u16::MAX {
            let x = crate::numerics::bf16_to_f32(bits);
            assert_eq!(encode(x), nearest(x), "of bf16 {bits:#x} = {x}");
        }
    }

    #[test]
    fn midpoints_and_their_neighbours_encode_to_the_nearest_code() {
        for code in 0..0x7e_u8 {
            let middle = ((by_definition(code) + by_definition(code + 1)) / 2.0) as f32;
            for x in [middle.next_down(), middle, middle.next_up()] {
                assert_eq!(encode(x), nearest(x), "of {x}");
                assert_eq!(encode(-x), nearest(-x), "of -{x}");
            }
        }
        for x in [448.0, 463.9, 464.0, 465.0, 1e30, f32::INFINITY] {
            assert_eq!(encode(x), 0x7e);
            assert_eq!(encode(-x), 0xfe);
        }
        assert_eq!(encode(f32::MIN_POSITIVE / 8.0), 0);
    }
}
