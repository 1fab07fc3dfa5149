//! Tensors on the host, as they lie in a file.

use std::borrow::Cow;
use std::collections::BTreeMap;

use bytemuck::Pod;
use safetensors::Dtype;

/// A tensor: row-major, little-endian.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor<'f> {
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its axes.
    pub shape: Vec<usize>,
    /// Its elements.
    pub bytes: Cow<'f, [u8]>,
}

impl<'f> Tensor<'f> {
    /// A tensor of its own memory.
    pub fn new<T: Pod>(dtype: mlakit::Dtype, shape: Vec<usize>, values: &[T]) -> Self {
        let bytes = Cow::Owned(bytemuck::cast_slice(values).to_vec());
        Self { dtype: file_dtype(dtype), shape, bytes }
    }

    /// Its elements as values; borrowed where they are aligned.
    pub fn values<T: Pod>(&self) -> Cow<'_, [T]> {
        values(&self.bytes)
    }

    /// Dtype and shape as errors and reports write them.
    pub fn kind(&self) -> String {
        format!("{} {:?}", self.dtype, self.shape)
    }
}

/// Bytes as values; borrowed where they are aligned.
pub fn values<T: Pod>(bytes: &[u8]) -> Cow<'_, [T]> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(values) => Cow::Borrowed(values),
        Err(_) => {
            let mut values = vec![T::zeroed(); bytes.len() / size_of::<T>()];
            let whole = values.len() * size_of::<T>();
            bytemuck::cast_slice_mut(&mut values).copy_from_slice(&bytes[..whole]);
            Cow::Owned(values)
        }
    }
}

/// A dtype of an operation as files name it.
pub fn file_dtype(dtype: mlakit::Dtype) -> Dtype {
    match dtype {
        mlakit::Dtype::F32 => Dtype::F32,
        mlakit::Dtype::Bf16 => Dtype::BF16,
        mlakit::Dtype::E4m3 => Dtype::F8_E4M3,
        mlakit::Dtype::I32 => Dtype::I32,
        mlakit::Dtype::U32 => Dtype::U32,
        mlakit::Dtype::I64 => Dtype::I64,
        mlakit::Dtype::U8 => Dtype::U8,
    }
}

/// The tensors of a case, by name.
#[derive(Clone, Debug, Default)]
pub struct Tensors<'f>(BTreeMap<String, Tensor<'f>>);

impl<'f> Tensors<'f> {
    /// Adds one, or replaces it.
    pub fn insert(&mut self, name: impl Into<String>, tensor: Tensor<'f>) {
        self.0.insert(name.into(), tensor);
    }

    /// The tensor of this name.
    pub fn find(&self, name: &str) -> Option<&Tensor<'f>> {
        self.0.get(name)
    }

    /// The elements of a tensor; none where it is absent.
    pub fn values<T: Pod>(&self, name: &str) -> Cow<'_, [T]> {
        self.find(name).map_or(Cow::Borrowed(&[]), Tensor::values)
    }

    /// The first element of a tensor.
    pub fn scalar(&self, name: &str) -> Option<f32> {
        self.values(name).first().copied()
    }

    /// The names.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }
}
