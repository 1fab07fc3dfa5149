//! The log-sum-exp of a partial result, with its base in the type.

use std::marker::PhantomData;

use serde::{Deserialize, Serialize};

use crate::{Dtype, Element};

/// The base of an [`Lse`].
pub trait Base: Copy + Send + Sync + 'static {
    /// ln(base).
    const LN: f32;
    /// The same as a value, for `Spec`s.
    const KIND: LseBase;
}

/// Base e.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Natural {}

/// Base 2.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Base2 {}

impl Base for Natural {
    const LN: f32 = 1.0;
    const KIND: LseBase = LseBase::Natural;
}

impl Base for Base2 {
    const LN: f32 = std::f32::consts::LN_2;
    const KIND: LseBase = LseBase::Base2;
}

/// The base as a value: what a `Spec` says and a file names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LseBase {
    /// Base e.
    #[default]
    Natural,
    /// Base 2.
    Base2,
}

impl LseBase {
    /// ln(base).
    pub fn ln(self) -> f64 {
        match self {
            Self::Natural => 1.0,
            Self::Base2 => std::f64::consts::LN_2,
        }
    }
}

/// log_B of a sum of exponentials. As the element of a tensor it keeps the two bases apart; the host then holds bare `f32`s.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lse<B>(f32, PhantomData<B>);

impl<B: Base> Element for Lse<B> {
    type Raw = f32;
    const DTYPE: Dtype = Dtype::F32;
}

impl<B: Base> Lse<B> {
    /// NaN and +inf of a partial result count as -inf.
    pub fn new(value: f32) -> Self {
        let valid = !value.is_nan() && value != f32::INFINITY;
        Self(if valid { value } else { f32::NEG_INFINITY }, PhantomData)
    }

    /// Of both parts. Only of the same base; change it with [`Lse::to`].
    pub fn merge(self, other: Self) -> Self {
        let top = self.0.max(other.0);
        if top == f32::NEG_INFINITY {
            return self;
        }
        let sum = ((self.0 - top) * B::LN).exp() + ((other.0 - top) * B::LN).exp();
        Self::new(top + sum.ln() / B::LN)
    }

    /// The same value in another base.
    pub fn to<C: Base>(self) -> Lse<C> {
        Lse::new(self.0 * B::LN / C::LN)
    }

    /// The bare number.
    pub fn value(self) -> f32 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bases_agree_and_nothing_weighs_nothing() {
        let (a, b) = (Lse::<Natural>::new(1.5), Lse::<Natural>::new(-0.25));
        let both = a.merge(b).value();
        let other = a.to::<Base2>().merge(b.to::<Base2>()).to::<Natural>().value();
        assert!((both - other).abs() < 1e-6);
        let none = Lse::<Natural>::new(f32::NAN);
        assert_eq!(none.value(), f32::NEG_INFINITY);
        assert_eq!(none.merge(a).value(), a.value());
        assert_eq!(none.merge(none).value(), f32::NEG_INFINITY);
        assert_eq!(Lse::<Base2>::new(f32::INFINITY).value(), f32::NEG_INFINITY);
    }
}
