//! Rotary frequencies, YaRN, and the softmax scale that goes with it.
//!
//! Frequencies are computed in f32 with the roundings of the reference code of transformers, and
//! an angle is the f32 product `f32(position) * f32(inverse frequency)`: a table built in another
//! precision differs by 1e-2 in cosine at position 1,000,000. The f64 reference uses this same
//! angle and takes its exact cosine.

use std::f64::consts::PI;

/// How positions become angles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeParameters {
    /// Base of the geometric series of frequencies.
    pub theta: f64,
    /// Extension of the context by YaRN.
    pub yarn: Option<Yarn>,
}

/// Parameters of YaRN (arXiv 2309.00071), with the names of `config.json`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// Context extension.
    pub factor: f64,
    /// Positions before the extension.
    pub original_max_position_embeddings: usize,
    /// Turns in the original context above which a frequency is kept.
    pub beta_fast: f64,
    /// Turns below which a frequency is divided by `factor`.
    pub beta_slow: f64,
    /// Temperature of cosine and sine; absent and 0 are the same.
    pub mscale: Option<f64>,
    /// Temperature that is taken out of them again and put into the softmax scale.
    pub mscale_all_dim: Option<f64>,
    /// Overrides the factor of cosine and sine.
    pub attention_factor: Option<f64>,
    /// The ends of the ramp are whole indices.
    pub truncate: bool,
}

/// YaRN's temperature: 1 up to a factor of 1, else `0.1 * mscale * ln(factor) + 1`.
pub fn yarn_mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

/// Factor of the scores of heads of `qk_head_dim` elements (before absorption): the inverse root
/// of the width, times the squared temperature where `rope` has YaRN with `mscale_all_dim`.
pub fn softmax_scale(qk_head_dim: usize, rope: Option<&RopeParameters>) -> f64 {
    let plain = 1.0 / (qk_head_dim as f64).sqrt();
    let yarn = rope.and_then(|rope| rope.yarn);
    match yarn.and_then(|yarn| yarn.mscale_all_dim.map(|all| yarn_mscale(yarn.factor, all))) {
        Some(mscale) => plain * mscale * mscale,
        None => plain,
    }
}

/// Inverse frequencies of one rope part, and the factor of cosine and sine.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    inverse_frequencies: Vec<f32>,
    attention_factor: f64,
}

impl RopeTable {
    /// The table for a rope part of `width` elements, an even number.
    pub fn new(parameters: &RopeParameters, width: usize) -> Self {
        let plain: Vec<f32> = (0..width / 2)
            .map(|j| parameters.theta.powf(f64::from((2 * j) as f32 / width as f32)) as f32)
            .collect();
        match parameters.yarn {
            None => Self {
                inverse_frequencies: plain.iter().map(|power| 1.0 / power).collect(),
                attention_factor: 1.0,
            },
            Some(yarn) => Self {
                inverse_frequencies: yarn_frequencies(&yarn, parameters.theta, &plain),
                attention_factor: attention_factor(&yarn),
            },
        }
    }

    /// One inverse frequency a rotary pair.
    pub fn inverse_frequencies(&self) -> &[f32] {
        &self.inverse_frequencies
    }

    /// Factor of cosine and sine.
    pub fn attention_factor(&self) -> f64 {
        self.attention_factor
    }

    /// Angle of pair `pair` at `position`, in radians.
    pub fn angle(&self, position: usize, pair: usize) -> f32 {
        position as f32 * self.inverse_frequencies[pair]
    }

    /// Cosine and sine of pair `pair` at `position`, both times the attention factor.
    pub fn cos_sin(&self, position: usize, pair: usize) -> (f64, f64) {
        let (sin, cos) = f64::from(self.angle(position, pair)).sin_cos();
        (cos * self.attention_factor, sin * self.attention_factor)
    }
}

/// Explicit, else the quotient of the two temperatures, else the temperature of 1.
fn attention_factor(yarn: &Yarn) -> f64 {
    match (yarn.attention_factor, yarn.mscale, yarn.mscale_all_dim) {
        (Some(factor), _, _) => factor,
        (None, Some(mscale), Some(all)) => {
            yarn_mscale(yarn.factor, mscale) / yarn_mscale(yarn.factor, all)
        }
        (None, _, _) => yarn_mscale(yarn.factor, 1.0),
    }
}

/// Between the ends of a ramp over the pairs, from kept frequencies to divided ones.
fn yarn_frequencies(yarn: &Yarn, theta: f64, powers: &[f32]) -> Vec<f32> {
    let (low, high) = ramp(yarn, theta, 2 * powers.len());
    powers
        .iter()
        .enumerate()
        .map(|(pair, &power)| {
            let kept = 1.0 / power;
            let divided = 1.0 / (yarn.factor as f32 * power);
            let share = ((pair as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
            let keep = 1.0 - share;
            divided * (1.0 - keep) + kept * keep
        })
        .collect()
}

/// Ends of the ramp: the pairs that turn `beta_fast` and `beta_slow` times in the original context.
fn ramp(yarn: &Yarn, theta: f64, width: usize) -> (f64, f64) {
    let length = yarn.original_max_position_embeddings as f64;
    let pair_of =
        |turns: f64| width as f64 * (length / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln());
    let (mut low, mut high) = (pair_of(yarn.beta_fast), pair_of(yarn.beta_slow));
    if yarn.truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(width as f64 - 1.0));
    if low == high {
        high += 0.001;
    }
    (low, high)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v3() -> RopeParameters {
        RopeParameters {
            theta: 10_000.0,
            yarn: Some(Yarn {
                factor: 40.0,
                original_max_position_embeddings: 4096,
                beta_fast: 32.0,
                beta_slow: 1.0,
                mscale: Some(1.0),
                mscale_all_dim: Some(1.0),
                attention_factor: None,
                truncate: true,
            }),
        }
    }

    #[test]
    fn softmax_scales_of_released_models() {
        assert!((softmax_scale(192, Some(&v3())) - 0.135_233_78).abs() < 1e-8);
        let mut small4 = v3();
        small4.yarn.as_mut().unwrap().factor = 128.0;
        assert!((softmax_scale(128, Some(&small4)) - 0.194_969_49).abs() < 1e-8);
        assert_eq!(softmax_scale(64, None), 0.125);
        let mut without = v3();
        without.yarn.as_mut().unwrap().mscale_all_dim = None;
        assert_eq!(softmax_scale(64, Some(&without)), 0.125);
        let mut unextended = v3();
        unextended.yarn.as_mut().unwrap().factor = 1.0;
        assert_eq!(softmax_scale(64, Some(&unextended)), 0.125);
    }

    #[test]
    fn attention_factors() {
        let mut rope = v3();
        assert_eq!(RopeTable::new(&rope, 64).attention_factor(), 1.0);
        let yarn = rope.yarn.as_mut().unwrap();
        yarn.mscale_all_dim = None;
        assert!((attention_factor(yarn) - 1.368_887_9).abs() < 1e-7);
        yarn.mscale = Some(0.707);
        yarn.mscale_all_dim = Some(1.0);
        assert!((attention_factor(yarn) - 1.260_803_8 / 1.368_887_9).abs() < 1e-6);
        yarn.attention_factor = Some(0.5);
        assert_eq!(attention_factor(yarn), 0.5);
    }

    /// The ramp of DeepSeek-V3 runs from pair 10 to pair 23 of 32.
    #[test]
    fn yarn_keeps_fast_pairs_and_divides_slow_ones() {
        let rope = v3();
        assert_eq!(ramp(&rope.yarn.unwrap(), rope.theta, 64), (10.0, 23.0));
        let yarn = RopeTable::new(&rope, 64);
        let plain = RopeTable::new(&RopeParameters { yarn: None, ..rope }, 64);
        for (pair, (a, b)) in
            yarn.inverse_frequencies().iter().zip(plain.inverse_frequencies()).enumerate()
        {
            let ratio = b / a;
            match pair {
                0..=10 => assert_eq!(ratio, 1.0, "pair {pair}"),
                23.. => assert!((ratio - 40.0).abs() < 1e-4, "pair {pair}: {ratio}"),
                _ => assert!(ratio > 1.0 && ratio < 40.0, "pair {pair}: {ratio}"),
            }
        }
    }

    #[test]
    fn a_ramp_of_no_length_is_a_step_and_truncation_can_be_off() {
        let mut yarn = v3().yarn.unwrap();
        yarn.beta_slow = yarn.beta_fast;
        yarn.truncate = false;
        let (low, high) = ramp(&yarn, 10_000.0, 64);
        assert_eq!(high - low, (low + 0.001) - low);
        assert!(low.fract() != 0.0);
        let table = RopeTable::new(&RopeParameters { theta: 1e4, yarn: Some(yarn) }, 64);
        assert!(table.inverse_frequencies().iter().all(|f| f.is_finite() && *f > 0.0));
    }

    #[test]
    fn angles_are_f32_products() {
        let table = RopeTable::new(&RopeParameters { theta: 10_000.0, yarn: None }, 8);
        assert_eq!(table.inverse_frequencies(), [1.0, 0.1, 0.01, 0.001]);
        assert_eq!(table.angle(163_840, 1), 163_840.0_f32 * 0.1_f32);
        let (cos, sin) = table.cos_sin(163_840, 1);
        assert!((cos * cos + sin * sin - 1.0).abs() < 1e-15);
    }
}
