//! Weights from the checkpoint to the device, one tensor at a time and without a second full copy.

use half::bf16;
use mlakit::{Buffer, Category, Device, Error, Name};

use crate::Weight;
use crate::checkpoint::LinearWeights;

/// Uploads the tensors of one owner.
pub(super) struct Upload<'u, D> {
    pub(super) device: &'u D,
    pub(super) owner: String,
}

impl<D: Device> Upload<'_, D> {
    fn kind(&self, part: &str) -> (Category, Name) {
        (Category::Weights, Name::from(format!("{} {part}", self.owner)))
    }

    /// Matrices under each other in one buffer, BF16.
    pub(super) fn matrices(
        &self,
        part: &str,
        weights: &[Weight<'_>],
    ) -> Result<Buffer<bf16, D>, Error> {
        let elements = weights.iter().map(Weight::elements).sum();
        let mut buffer = Buffer::uninit(self.device, self.kind(part), elements)?;
        let mut first = 0;
        for weight in weights {
            match weight.as_bf16() {
                Some(values) => buffer.write_at(first, values)?,
                None => buffer.write_at(first, &weight.to_bf16())?,
            }
            first += weight.elements();
        }
        Ok(buffer)
    }

    /// A vector, F32.
    pub(super) fn vector(&self, part: &str, weight: &Weight<'_>) -> Result<Buffer<f32, D>, Error> {
        Buffer::new(self.device, self.kind(part), &weight.to_f32())
    }

    /// The biases of linear layers under each other, zeros for one that has none; `None` if no layer has one.
    pub(super) fn biases(
        &self,
        part: &str,
        linears: &[LinearWeights<'_>],
    ) -> Result<Option<Buffer<f32, D>>, Error> {
        if linears.iter().all(|linear| linear.bias.is_none()) {
            return Ok(None);
        }
        let bias = |linear: &LinearWeights<'_>| match &linear.bias {
            Some(bias) => bias.to_f32(),
            None => vec![0.0; linear.weight.shape()[0]],
        };
        let values: Vec<f32> = linears.iter().flat_map(bias).collect();
        Buffer::new(self.device, self.kind(part), &values).map(Some)
    }
}
