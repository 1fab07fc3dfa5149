//! Procedural numbers of the reference vectors: weights that are a function of their name.
//!
//! Every value is exact in BF16, F16 and F32, so one expected result serves every precision.

use half::bf16;

/// The seed of all published vectors.
pub const SEED: u64 = 20_261_130;

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// 64-bit FNV-1a of a name.
pub fn fnv1a64(name: &str) -> u64 {
    name.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
    })
}

/// Signed byte `index` of the sequence called `name`: the top byte of a splitmix64 step.
pub fn byte(name_hash: u64, seed: u64, index: u64) -> i8 {
    let base = name_hash ^ seed.wrapping_mul(GOLDEN);
    let mut z = base.wrapping_add(index).wrapping_add(GOLDEN);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^= z >> 31;
    (z >> 56) as u8 as i8
}

/// From a signed byte to a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `byte * 2^(exponent - 7)`: in [-2^exponent, 2^exponent).
    Uniform {
        /// Power of two of the bound.
        exponent: i32,
    },
    /// `1 + floor(byte / 4) / 128`: in [0.75, 1.25).
    Norm,
}

/// The first `count` values of the tensor called `name`, flat and row-major.
pub fn values(name: &str, seed: u64, kind: Kind, count: usize) -> impl Iterator<Item = bf16> {
    let hash = fnv1a64(name);
    (0..count as u64).map(move |index| {
        let byte = byte(hash, seed, index);
        bf16::from_f32(match kind {
            Kind::Uniform { exponent } => f32::from(byte) * ((exponent - 7) as f32).exp2(),
            Kind::Norm => 1.0 + f32::from(byte >> 2) / 128.0,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_check_values() {
        let cases: [(&str, u64, [i8; 8]); 4] = [
            ("x", 0xaf63_f54c_8602_1707, [-41, 87, 37, 24, 27, 26, 65, 23]),
            ("ids.prefill", 0x6b06_f10e_41b7_70eb, [4, -71, 64, 108, -122, 68, 108, -95]),
            ("full_v3_h128.x", 0x3a0b_251d_1e7b_1590, [75, 41, 120, -93, -50, -3, 41, -40]),
            (
                "full_v3_h128.kv_b_proj.weight",
                0xc916_01a0_9f1c_9f24,
                [5, -69, -91, 101, 24, -19, 125, 71],
            ),
        ];
        for (name, hash, bytes) in cases {
            assert_eq!(fnv1a64(name), hash, "{name}");
            let found: Vec<i8> = (0..8).map(|i| byte(hash, SEED, i)).collect();
            assert_eq!(found, bytes, "{name}");
        }
    }

    #[test]
    fn kinds() {
        let uniform = Kind::Uniform { exponent: 1 };
        let first: Vec<f32> = values("full_v3_h128.x", SEED, uniform, 4).map(f32::from).collect();
        assert_eq!(first, [1.171_875, 0.640_625, 1.875, -1.453_125]);
        let hash = fnv1a64("n");
        for (index, value) in values("n", SEED, Kind::Norm, 256).enumerate() {
            let expected = 1.0 + (f32::from(byte(hash, SEED, index as u64)) / 4.0).floor() / 128.0;
            assert_eq!(value.to_f32(), expected);
        }
    }
}
