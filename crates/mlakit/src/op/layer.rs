//! What the layer operations share: tensors of either float dtype, records with gaps, the order of
//! scores, and numbers for probes.

use std::cmp::Ordering;

use half::bf16;
use serde::{Deserialize, Serialize};

use super::spec::Scalar;
use crate::memory::Uses;
use crate::{Dtype, Error, Input, Op, Output, Probe, Region, Runs, Warm};

/// The most elements of a row of a layer operation; the widest in use are the rows of vocabulary
/// logits.
pub const MAX_ROW_WIDTH: usize = 1 << 20;

/// The most experts of a layer.
pub const MAX_EXPERTS: usize = 1 << 14;

/// The dtype of a tensor that may be BF16 or F32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Float {
    Bf16,
    F32,
}

impl Float {
    /// As an element type.
    pub fn dtype(self) -> Dtype {
        match self {
            Self::Bf16 => Dtype::Bf16,
            Self::F32 => Dtype::F32,
        }
    }

    /// The nearest number of this dtype, ties to even.
    pub fn round(self, value: f64) -> f32 {
        match self {
            Self::Bf16 => bf16::from_f64(value).to_f32(),
            Self::F32 => value as f32,
        }
    }
}

/// A tensor that is read, in its dtype.
pub enum FloatInput<'a, D> {
    /// BF16.
    Bf16(Input<'a, bf16, D>),
    /// F32.
    F32(Input<'a, f32, D>),
}

/// A tensor that is written, in its dtype.
pub enum FloatOutput<'a, D> {
    /// BF16.
    Bf16(Output<'a, bf16, D>),
    /// F32.
    F32(Output<'a, f32, D>),
}

impl<'a, D> FloatInput<'a, D> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Bf16(input) => input.len(),
            Self::F32(input) => input.len(),
        }
    }

    pub(crate) fn declare(
        self,
        what: &'static str,
        (float, needed): (Float, usize),
        uses: &mut Uses<'a>,
    ) -> Result<Region, Error> {
        match (self, float) {
            (Self::Bf16(input), Float::Bf16) => uses.input(what, input, needed),
            (Self::F32(input), Float::F32) => uses.input(what, input, needed),
            (Self::Bf16(_), _) => Err(Error::contract(what, "F32", "BF16")),
            (Self::F32(_), _) => Err(Error::contract(what, "BF16", "F32")),
        }
    }
}

impl<'a, D> FloatOutput<'a, D> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Bf16(output) => output.len(),
            Self::F32(output) => output.len(),
        }
    }

    pub(crate) fn declare(
        self,
        what: &'static str,
        (float, needed): (Float, usize),
        uses: &mut Uses<'a>,
    ) -> Result<Region, Error> {
        match (self, float) {
            (Self::Bf16(output), Float::Bf16) => uses.output(what, output, needed),
            (Self::F32(output), Float::F32) => uses.output(what, output, needed),
            (Self::Bf16(_), _) => Err(Error::contract(what, "F32", "BF16")),
            (Self::F32(_), _) => Err(Error::contract(what, "BF16", "F32")),
        }
    }
}

/// The order of scores: larger first, -0 equals 0, NaN last (below -inf). With a stable sort, or
/// where the smaller index wins what is equal here, this is the order of every selection in this
/// crate.
pub fn descending(a: f32, b: f32) -> Ordering {
    match (a.is_nan(), b.is_nan()) {
        (false, false) => b.partial_cmp(&a).unwrap_or(Ordering::Equal),
        (a_is_nan, b_is_nan) => a_is_nan.cmp(&b_is_nan),
    }
}

/// Elements from the first of `records` to the last, which needs no gap behind it.
pub(crate) fn strided_elements(records: usize, stride: usize, width: usize) -> usize {
    match records {
        0 => 0,
        _ => (records - 1) * stride + width,
    }
}

/// The dtype of what a layer passes on, where a `Spec` does not say.
pub(crate) fn narrow() -> Float {
    Float::Bf16
}

/// The factor that changes nothing.
pub(crate) fn one() -> Scalar {
    Scalar::try_from(1.0).expect("1 is finite")
}

/// A pseudo-random whole number from 0 to `below - 1`: the finaliser of SplitMix64.
pub(crate) fn pick(i: usize, below: usize) -> usize {
    let mut z = (i as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) % below as u64) as usize
}

/// A pseudo-random multiple of 1/8 from -1 to 1, exact in BF16.
pub(crate) fn eighths(i: usize) -> f32 {
    pick(i, 17) as f32 / 8.0 - 1.0
}

/// Records of `width` values set `stride` apart with `gap` between them, and none behind the last:
/// as short as an operand may be.
pub(crate) fn with_gaps<T: Copy>(values: &[T], (width, stride): (usize, usize), gap: T) -> Vec<T> {
    let mut strided = vec![gap; strided_elements(values.len() / width, stride, width)];
    for (to, from) in strided.chunks_mut(stride).zip(values.chunks_exact(width)) {
        to[..width].copy_from_slice(from);
    }
    strided
}

/// A probe in the dtype that a `Spec` names.
pub(crate) enum FloatProbe<'w, D> {
    Bf16(Probe<'w, bf16, D>),
    F32(Probe<'w, f32, D>),
}

impl<'w, D> FloatProbe<'w, D> {
    pub(crate) fn new<O: Op>(
        warm: &mut Warm<'w, O, D>,
        float: Float,
        values: &[f32],
    ) -> Result<Self, Error>
    where
        D: Runs<O>,
    {
        Ok(match float {
            Float::F32 => Self::F32(warm.probe::<f32>(values)?),
            Float::Bf16 => {
                let values: Vec<bf16> = values.iter().copied().map(bf16::from_f32).collect();
                Self::Bf16(warm.probe::<bf16>(&values)?)
            }
        })
    }

    pub(crate) fn input(&self) -> FloatInput<'_, D> {
        match self {
            Self::Bf16(probe) => FloatInput::Bf16(probe.into()),
            Self::F32(probe) => FloatInput::F32(probe.into()),
        }
    }

    pub(crate) fn output(&mut self) -> FloatOutput<'_, D> {
        match self {
            Self::Bf16(probe) => FloatOutput::Bf16(probe.into()),
            Self::F32(probe) => FloatOutput::F32(probe.into()),
        }
    }

    pub(crate) fn read<O: Op>(&self, warm: &mut Warm<'w, O, D>) -> Result<Vec<f32>, Error>
    where
        D: Runs<O>,
    {
        match self {
            Self::Bf16(probe) => Ok(warm.read(probe)?.into_iter().map(bf16::to_f32).collect()),
            Self::F32(probe) => warm.read(probe),
        }
    }
}

/// Whether a BF16 result is that of the oracle. The last rounding is half a unit of 2^-8; F32
/// arithmetic before it may move a value across the middle between two BF16 numbers, so a whole
/// unit is allowed. `floor` is the error of F32 terms that cancel.
pub(crate) fn same_bf16(floor: f64) -> impl Fn(&f64, &f64) -> bool {
    move |needed, given| needed == given || (needed - given).abs() <= needed.abs() / 256.0 + floor
}

/// What tests of operands need: a plan and tensors of a simulated device.
#[cfg(all(test, feature = "sim"))]
pub(crate) mod operands {
    use crate::scratch::{FAULT_BYTES, Layout};
    use crate::sim::AtOnce;
    use crate::{Buffer, Category, Choice, Device, Element, Error, Lane, Op, Plan};

    pub(crate) fn device() -> AtOnce {
        AtOnce::new(1)
    }

    pub(crate) fn plan<O: Op>(spec: O::Spec) -> Plan<O> {
        let scratch = Layout::new(Vec::new()).unwrap();
        Plan { spec, choice: Choice::default(), scratch, planned_for: String::new() }
    }

    pub(crate) fn tensor<T: Element, D: Device>(device: &D, len: usize) -> Buffer<T, D> {
        Buffer::zeroed(device, (Category::Tensors, "operand"), len).unwrap()
    }

    pub(crate) fn lane<D: Device>(device: &D) -> Lane<D> {
        Lane::new(device, "lane", &[FAULT_BYTES]).unwrap()
    }

    /// The operand that was refused.
    pub(crate) fn refused<R: std::fmt::Debug>(result: Result<R, Error>) -> String {
        match result {
            Err(Error::Contract { what, .. }) => what.to_owned(),
            Err(Error::Size { what, .. }) => what.as_str().to_owned(),
            other => panic!("{other:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_are_ordered_with_nan_last() {
        let mut scores = [f32::NAN, f32::NEG_INFINITY, -0.0, 2.0, 0.0, f32::INFINITY];
        scores.sort_by(|a, b| descending(*a, *b));
        let bits = |v: f32| v.to_bits();
        assert_eq!(
            scores[..5].iter().copied().map(bits).collect::<Vec<_>>(),
            [f32::INFINITY, 2.0, -0.0, 0.0, f32::NEG_INFINITY].map(bits)
        );
        assert!(scores[5].is_nan());
    }

    #[test]
    fn gaps_lie_between_records_and_not_behind_the_last() {
        assert_eq!(with_gaps(&[1, 2, 3, 4], (2, 3), 9), [1, 2, 9, 3, 4]);
        assert_eq!(with_gaps(&[1, 2], (2, 2), 9), [1, 2]);
        assert!(with_gaps::<i32>(&[], (2, 3), 9).is_empty());
    }

    #[test]
    fn rounding_is_to_nearest_even() {
        assert_eq!(Float::Bf16.round(1.0 + 1.0 / 256.0), 1.0);
        assert_eq!(Float::Bf16.round(1.0 + 3.0 / 256.0), 1.0 + 4.0 / 256.0);
        assert_eq!(Float::F32.round(0.1), 0.1);
    }
}
