//! Scores as whole numbers of the same order: the larger score is the larger number, -0 is 0, and NaN
//! lies below everything.

/// The number of a score.
#[inline(always)]
pub fn ordered(score: f32) -> i32 {
    // -0 + 0 is +0; nothing else changes.
    let bits = (score + 0.0).to_bits() as i32;
    let number = bits ^ ((bits >> 31) as u32 >> 1) as i32;
    if score.is_nan() { NAN } else { number }
}

/// The score of a number, with one NaN for all and no -0.
#[inline(always)]
pub fn score_of(number: i32) -> f32 {
    if number == NAN {
        return f32::NAN;
    }
    f32::from_bits((number ^ ((number >> 31) as u32 >> 1) as i32) as u32)
}

/// The number of NaN.
pub(super) const NAN: i32 = i32::MIN;

/// The number of -inf, the next above that of NaN that a score has.
pub(super) const LOWEST: i32 = (f32::NEG_INFINITY.to_bits() ^ 0x7fff_ffff) as i32;

#[cfg(test)]
mod tests {
    use super::*;
    use std::cmp::Ordering;

    const INTERESTING: [f32; 14] = [
        f32::NEG_INFINITY,
        f32::MIN,
        -1.0,
        -f32::MIN_POSITIVE,
        -1e-45,
        -0.0,
        0.0,
        1e-45,
        f32::MIN_POSITIVE,
        1.0,
        1.0000001,
        f32::MAX,
        f32::INFINITY,
        f32::NAN,
    ];

    #[test]
    fn numbers_are_ordered_as_scores() {
        for a in INTERESTING {
            for b in INTERESTING {
                let needed = mlakit::op::layer::descending(b, a);
                assert_eq!(ordered(a).cmp(&ordered(b)), needed, "{a} {b}");
            }
        }
        assert_eq!(ordered(-f32::NAN), ordered(f32::from_bits(0x7f80_0001)));
        assert_eq!(ordered(f32::NEG_INFINITY), LOWEST);
        assert_eq!(ordered(-0.0).cmp(&ordered(0.0)), Ordering::Equal);
    }

    #[test]
    fn scores_come_back() {
        for score in INTERESTING {
            let back = score_of(ordered(score));
            assert!(back == score || (back.is_nan() && score.is_nan()), "{score} {back}");
        }
    }
}
