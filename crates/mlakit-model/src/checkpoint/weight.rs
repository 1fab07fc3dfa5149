//! Views of stored tensors.

use half::{bf16, f16};

use crate::error::CheckpointError;

/// A floating-point dtype that weights are stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// IEEE single.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
}

impl Dtype {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}

/// A tensor of the checkpoint: its bytes stay where they are (mapped file, embedded file).
/// Row-major and little-endian; the bytes need not be aligned for the dtype.
#[derive(Clone, Copy, Debug)]
pub struct Weight<'a> {
    name: &'a str,
    dtype: Dtype,
    dims: [usize; 3],
    rank: u8,
    bytes: &'a [u8],
}

impl<'a> Weight<'a> {
    /// A view; the caller has checked that rank is at most 3 and that the bytes fill the shape.
    pub(super) fn new(name: &'a str, dtype: Dtype, shape: &[usize], bytes: &'a [u8]) -> Self {
        let mut dims = [1; 3];
        dims[..shape.len()].copy_from_slice(shape);
        Self { name, dtype, dims, rank: shape.len() as u8, bytes }
    }

    /// The name without the prefix `model.`.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// The stored dtype.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The shape; for a matrix [out, in].
    pub fn shape(&self) -> &[usize] {
        &self.dims[..usize::from(self.rank)]
    }

    /// The stored bytes.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.bytes.len() / self.dtype.bytes()
    }

    /// The stored elements, where they are BF16, aligned, and this machine is little-endian.
    pub fn as_bf16(&self) -> Option<&'a [bf16]> {
        if self.dtype != Dtype::Bf16 || cfg!(target_endian = "big") {
            return None;
        }
        bytemuck::try_cast_slice(self.bytes).ok()
    }

    /// The elements as f64, exactly.
    pub fn to_f64(&self) -> Vec<f64> {
        self.convert(f64::from, f64::from, f64::from)
    }

    /// The elements as f32, exactly.
    pub fn to_f32(&self) -> Vec<f32> {
        self.convert(|value| value, f32::from, f32::from)
    }

    /// The elements as BF16, rounded to nearest even where they are wider.
    pub fn to_bf16(&self) -> Vec<bf16> {
        self.convert(bf16::from_f32, |value| value, |value| bf16::from_f32(f32::from(value)))
    }

    /// The matrix `index` of a stack of matrices [count, out, in].
    pub(super) fn matrix(&self, index: usize) -> Self {
        let bytes = self.bytes.len() / self.dims[0];
        Self {
            dims: [self.dims[1], self.dims[2], 1],
            rank: 2,
            bytes: &self.bytes[index * bytes..(index + 1) * bytes],
            ..*self
        }
    }

    /// Rows `begin..end` of a matrix.
    pub(super) fn rows(&self, begin: usize, end: usize) -> Self {
        let row_bytes = self.bytes.len() / self.dims[0];
        Self {
            dims: [end - begin, self.dims[1], 1],
            bytes: &self.bytes[begin * row_bytes..end * row_bytes],
            ..*self
        }
    }

    fn convert<T>(
        &self,
        single: impl Fn(f32) -> T,
        brain: impl Fn(bf16) -> T,
        half: impl Fn(f16) -> T,
    ) -> Vec<T> {
        let pairs = || self.bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
        match self.dtype {
            Dtype::F32 => self
                .bytes
                .chunks_exact(4)
                .map(|b| single(f32::from_le_bytes([b[0], b[1], b[2], b[3]])))
                .collect(),
            Dtype::Bf16 => pairs().map(|b| brain(bf16::from_le_bytes(b))).collect(),
            Dtype::F16 => pairs().map(|b| half(f16::from_le_bytes(b))).collect(),
        }
    }
}

/// The dtype of a safetensors file, where weights may have it.
pub(super) fn weight_dtype(
    tensor: &str,
    dtype: safetensors::Dtype,
) -> Result<Dtype, CheckpointError> {
    match dtype {
        safetensors::Dtype::F32 => Ok(Dtype::F32),
        safetensors::Dtype::BF16 => Ok(Dtype::Bf16),
        safetensors::Dtype::F16 => Ok(Dtype::F16),
        other => {
            Err(CheckpointError::Dtype { tensor: tensor.to_string(), given: other.to_string() })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dtypes_convert_from_unaligned_bytes() {
        let mut bytes = vec![0_u8];
        for value in [1.5_f32, -0.0, f32::INFINITY, 1.0 + f32::EPSILON] {
            bytes.extend(value.to_le_bytes());
        }
        let weight = Weight::new("w", Dtype::F32, &[2, 2], &bytes[1..]);
        assert_eq!(weight.to_f32(), [1.5, -0.0, f32::INFINITY, 1.0 + f32::EPSILON]);
        assert_eq!(weight.to_bf16()[3], bf16::ONE);
        assert_eq!(weight.to_f64()[3], 1.0 + f64::from(f32::EPSILON));
        let halves = f16::from_f32(0.375).to_le_bytes();
        let weight = Weight::new("h", Dtype::F16, &[1], &halves);
        assert_eq!((weight.to_f64(), weight.to_bf16()), (vec![0.375], vec![bf16::from_f32(0.375)]));
    }

    #[test]
    fn parts_of_stacks_are_views() {
        let bytes: Vec<u8> = (0..24).flat_map(|i| bf16::from_f32(i as f32).to_le_bytes()).collect();
        let stack = Weight::new("s", Dtype::Bf16, &[2, 4, 3], &bytes);
        let part = stack.matrix(1).rows(2, 4);
        assert_eq!(part.shape(), [2, 3]);
        assert_eq!(part.to_f32(), [18.0, 19.0, 20.0, 21.0, 22.0, 23.0]);
    }
}
