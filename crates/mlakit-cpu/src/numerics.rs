//! The scalar arithmetic that defines what kernels compute: BF16 rounding, the BF16 pair product,
//! the exponential and the logarithm.

/// The value of BF16 bits.
#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The BF16 nearest to `x`, ties to even; NaN stays NaN (quiet).
#[inline(always)]
pub fn f32_to_bf16(x: f32) -> u16 {
    (round_to_bf16(x) >> 16) as u16
}

/// The bits of `x` rounded to BF16, in the upper half of a word; the lower half is undefined.
#[inline(always)]
pub(crate) fn round_to_bf16(x: f32) -> u32 {
    let bits = x.to_bits();
    if x.is_nan() {
        return bits | 0x0040_0000;
    }
    bits + 0x7fff + ((bits >> 16) & 1)
}

/// `x` with a denormal replaced by the zero of its sign.
#[inline(always)]
pub(crate) fn flush(x: f32) -> f32 {
    // A comparison, not `is_subnormal`, so that sixteen of them become one vector instruction.
    if x.abs() < f32::MIN_POSITIVE { f32::from_bits(x.to_bits() & 0x8000_0000) } else { x }
}

/// `acc + a1 * b1 + a0 * b0`, the upper halves of the pairs first, each step a fused multiply-add
/// rounded to nearest even, denormal inputs and results flushed: what `vdpbf16ps` does to a lane.
#[inline(always)]
pub fn dot_pair(acc: f32, a: u32, b: u32) -> f32 {
    let odd = |pair: u32| flush(f32::from_bits(pair & 0xffff_0000));
    let even = |pair: u32| flush(f32::from_bits(pair << 16));
    let first = flush(odd(a).mul_add(odd(b), flush(acc)));
    flush(even(a).mul_add(even(b), first))
}

/// Coefficients of `2^f = 1 + c1 f + ... + c6 f^6` for |f| <= 1/2, found by minimising the largest
/// relative error (3e-9 before the rounding of the coefficients), in rising order from c1.
pub(crate) const EXP2_POLYNOMIAL: [f32; 6] = [
    f32::from_bits(0x3f31_7218),
    f32::from_bits(0x3e75_fdf0),
    f32::from_bits(0x3d63_576f),
    f32::from_bits(0x3c1d_951f),
    f32::from_bits(0x3aaf_a1c0),
    f32::from_bits(0x3922_049d),
];

/// Below this `exp2` is 0, so that no result is denormal.
pub(crate) const EXP2_FLOOR: f32 = -125.0;

/// `2^x` for `x <= 127`, within 1.5 ulp; 0 below -125, and 2^0 is exactly 1. NaN stays NaN.
///
/// The nearest integer is split off, the rest goes through [`EXP2_POLYNOMIAL`] by Horner's rule
/// with fused multiply-adds, and the integer is added to the exponent.
#[inline(always)]
pub fn exp2(x: f32) -> f32 {
    if x.is_nan() {
        return x;
    }
    if x < EXP2_FLOOR {
        return 0.0;
    }
    let whole = x.round_ties_even();
    let rest = x - whole;
    let mut value = EXP2_POLYNOMIAL[5];
    for term in (0..5).rev() {
        value = value.mul_add(rest, EXP2_POLYNOMIAL[term]);
    }
    value = value.mul_add(rest, 1.0);
    f32::from_bits(value.to_bits().wrapping_add((whole as i32 as u32) << 23))
}

/// 1/3, 1/5, ..., 1/23.
const ODD_RECIPROCALS: [f64; 11] = {
    let mut table = [0.0; 11];
    let mut term = 0;
    while term < 11 {
        table[term] = 1.0 / (2 * term + 3) as f64;
        term += 1;
    }
    table
};

/// The base-2 logarithm of a positive finite `x`, within 2 ulp of f64, from fixed operations only:
/// its bits do not depend on a platform's mathematical library.
pub fn log2(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut exponent = ((bits >> 52) & 0x7ff) as i64 - 1023;
    let mut mantissa = f64::from_bits((bits & 0x000f_ffff_ffff_ffff) | (1023 << 52));
    if mantissa > std::f64::consts::SQRT_2 {
        mantissa *= 0.5;
        exponent += 1;
    }
    // ln(m) = 2 artanh(t) = 2 (t + t^3/3 + t^5/5 + ...), t = (m-1)/(m+1), |t| < 0.1716.
    let t = (mantissa - 1.0) / (mantissa + 1.0);
    let square = t * t;
    let mut series = 0.0;
    for reciprocal in ODD_RECIPROCALS.iter().rev() {
        series = series * square + reciprocal;
    }
    let ln = 2.0 * t + 2.0 * t * (series * square);
    exponent as f64 + ln * std::f64::consts::LOG2_E
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounding_agrees_with_half_on_every_kind_of_value() {
        let mut seed = 0x1234_5678_u32;
        for step in 0..2_000_000_u32 {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let bits = if step < 65536 { step << 16 | (step & 1) << 15 } else { seed };
            let x = f32::from_bits(bits);
            let expected = half::bf16::from_f32(x);
            assert_eq!(f32_to_bf16(x), expected.to_bits(), "of {bits:#x}");
        }
    }

    #[test]
    fn the_pair_product_flushes_and_orders() {
        let bf16 = |x: f32| u32::from(f32_to_bf16(x));
        let pair = |even: f32, odd: f32| bf16(odd) << 16 | bf16(even);
        assert_eq!(dot_pair(1.0, pair(2.0, 3.0), pair(5.0, 7.0)), 32.0);
        // The odd product is added first: 2^24 + 1 is lost to rounding, then the 1 + 0 is too.
        let big = 16_777_216.0;
        assert_eq!(dot_pair(0.0, pair(1.0, big), pair(1.0, 1.0)), big);
        assert_eq!(dot_pair(-big, pair(1.0, big), pair(1.0, 1.0)), 1.0);
        assert_eq!(dot_pair(-big, pair(big, 1.0), pair(1.0, 1.0)), 1.0);
        let denormal = 1_u32;
        assert_eq!(dot_pair(0.0, denormal, pair(1.0, 0.0)).to_bits(), 0);
        let tiny = pair(f32::MIN_POSITIVE, 0.0);
        assert_eq!(dot_pair(0.0, tiny, pair(0.5, 0.0)).to_bits(), 0);
        assert_eq!(dot_pair(-0.0, pair(-0.0, -0.0), pair(1.0, 1.0)).to_bits(), 1 << 31);
    }

    #[test]
    fn the_exponential_is_accurate_and_exact_at_integers() {
        let mut worst = 0.0_f64;
        for step in 0..2_000_000 {
            let x = -125.0 + step as f32 * 1.0e-4;
            let expected = f64::from(x).exp2();
            let ulp = 2_f64.powi((f64::from(x).floor() as i32) - 23);
            worst = worst.max((f64::from(exp2(x)) - expected).abs() / ulp);
        }
        assert!(worst < 1.5, "worst error {worst} ulp");
        for power in -125..=127 {
            assert_eq!(exp2(power as f32), 2_f32.powi(power));
        }
        assert_eq!(exp2(-125.001), 0.0);
        assert_eq!(exp2(f32::NEG_INFINITY), 0.0);
        assert!(exp2(f32::NAN).is_nan());
    }

    #[test]
    fn the_logarithm_is_accurate() {
        let mut worst = 0.0_f64;
        for step in 0..200_000_u64 {
            let x = f64::from_bits(0x3fe0_0000_0000_0000 + step * 0x0000_0400_1357_9bdf);
            let expected = x.log2();
            let error = (log2(x) - expected).abs() / expected.abs().max(1e-3);
            worst = worst.max(error);
        }
        assert!(worst < 2e-13, "worst relative error {worst}");
        for power in [-30, 0, 1, 17] {
            assert_eq!(log2(2_f64.powi(power)), f64::from(power));
        }
    }
}
