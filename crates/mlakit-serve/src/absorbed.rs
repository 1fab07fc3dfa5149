//! The absorbed projection: what is left of `kv_b_proj` when attention runs on latents.

use half::bf16;
use mlakit::op::projection::absorb;
use mlakit::{Buffer, Category, Device, Error, Lease, Name};

/// Owns W_UK^T and W_UV; the source is the caller's and may be dropped as soon as this exists.
pub struct AbsorbedProjection<D: Device> {
    query: Buffer<bf16, D>,
    value: Buffer<bf16, D>,
    widths: Widths,
}

/// The widths of a layer's heads, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Widths {
    /// Query heads.
    pub heads: usize,
    /// The part of a query head without position.
    pub nope: usize,
    /// A value head.
    pub value: usize,
    /// The cached latent.
    pub rank: usize,
}

impl Widths {
    /// Elements of `kv_b_proj`.
    pub fn elements(&self) -> usize {
        self.heads * (self.nope + self.value) * self.rank
    }
}

impl<D: Device> AbsorbedProjection<D> {
    /// Absorbs `kv_b_proj` `[heads * (nope + value), rank]`.
    ///
    /// # Errors
    /// Another number of elements, or no memory.
    pub fn new(device: &D, owner: &str, widths: Widths, kv_b_proj: &[bf16]) -> Result<Self, Error> {
        let (query, value) = split(widths, kv_b_proj)?;
        let kind = |part: &str| (Category::Weights, Name::from(format!("{owner} {part}")));
        Ok(Self {
            query: Buffer::new(device, kind("w_uk_t"), &query)?,
            value: Buffer::new(device, kind("w_uv"), &value)?,
            widths,
        })
    }

    /// Absorbs other values in place: the addresses stay, so captured graphs replay with them.
    ///
    /// # Errors
    /// Another number of elements, or work in flight that reads the old values.
    pub fn reload(&mut self, kv_b_proj: &[bf16]) -> Result<(), Error> {
        let (query, value) = split(self.widths, kv_b_proj)?;
        self.query.write(&query)?;
        self.value.write(&value)
    }

    /// W_UK^T, `[heads, nope, rank]`.
    pub fn query(&self) -> Lease<bf16, D> {
        self.query.lease()
    }

    /// W_UV, `[heads, rank, value]`.
    pub fn value(&self) -> Lease<bf16, D> {
        self.value.lease()
    }
}

fn split(widths: Widths, kv_b_proj: &[bf16]) -> Result<(Vec<bf16>, Vec<bf16>), Error> {
    let Widths { heads, nope, value, rank } = widths;
    if kv_b_proj.len() != widths.elements() {
        let needed = format!("{} elements", widths.elements());
        return Err(Error::contract("kv_b_proj", needed, kv_b_proj.len()));
    }
    Ok(absorb(kv_b_proj, (heads, nope, value, rank)))
}
