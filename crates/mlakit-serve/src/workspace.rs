//! The tensors between the operations of a layer: one set, used by all layers one after the other.

use half::bf16;
use mlakit::{Buffer, Category, Device, Element, Error, Lease, Lse, Name, Natural};

use crate::layer::LayerSpec;

/// The set, at a row capacity.
pub struct Workspace<D: Device> {
    rows: usize,
    down: Buffer<f32, D>,
    query_latent: Buffer<f32, D>,
    q: Buffer<bf16, D>,
    latent: Buffer<bf16, D>,
    rope: Buffer<bf16, D>,
    query: Buffer<bf16, D>,
    attended: Buffer<bf16, D>,
    lse: Buffer<Lse<Natural>, D>,
    values: Buffer<f32, D>,
}

/// The set for one step's rows, as leases.
pub struct Tensors<D> {
    /// `[rows, down_width]`: query latent, cached latent and rope key before norm and rotation.
    pub down: Lease<f32, D>,
    /// `[rows, query_rank]`, normalised.
    pub query_latent: Lease<f32, D>,
    /// `[rows, heads, nope + rope]`.
    pub q: Lease<bf16, D>,
    /// `[rows, rank]`, normalised: what the cache stores.
    pub latent: Lease<bf16, D>,
    /// `[rows, rope]`, rotated: what the cache stores.
    pub rope: Lease<bf16, D>,
    /// `[rows, heads, rank + rope]`: the absorbed query.
    pub query: Lease<bf16, D>,
    /// `[rows, heads, rank]`.
    pub attended: Lease<bf16, D>,
    /// `[rows, heads]`.
    pub lse: Lease<Lse<Natural>, D>,
    /// `[rows, heads, value]`.
    pub values: Lease<f32, D>,
}

impl<D: Device> Workspace<D> {
    /// For layers of this shape.
    ///
    /// # Errors
    /// No memory.
    pub fn new(device: &D, spec: &LayerSpec) -> Result<Self, Error> {
        let (rows, heads) = (spec.capacity.rows, spec.heads);
        let made = Making { device, rows };
        Ok(Self {
            rows,
            down: made.tensor("down", spec.down_width())?,
            query_latent: made.tensor("query latent", spec.query_rank.unwrap_or(0))?,
            q: made.tensor("q", heads * (spec.nope + spec.rope))?,
            latent: made.tensor("latent", spec.rank)?,
            rope: made.tensor("rope key", spec.rope)?,
            query: made.tensor("absorbed query", heads * spec.cache_width())?,
            attended: made.tensor("latent result", heads * spec.rank)?,
            lse: made.tensor("lse", heads)?,
            values: made.tensor("values", heads * spec.value)?,
        })
    }

    /// The first `rows` rows of each.
    ///
    /// # Errors
    /// More rows than there is capacity for.
    pub fn rows(&self, rows: usize) -> Result<Tensors<D>, Error> {
        let part = Part { rows, capacity: self.rows };
        Ok(Tensors {
            down: part.of(&self.down)?,
            query_latent: part.of(&self.query_latent)?,
            q: part.of(&self.q)?,
            latent: part.of(&self.latent)?,
            rope: part.of(&self.rope)?,
            query: part.of(&self.query)?,
            attended: part.of(&self.attended)?,
            lse: part.of(&self.lse)?,
            values: part.of(&self.values)?,
        })
    }
}

struct Making<'m, D> {
    device: &'m D,
    rows: usize,
}

impl<D: Device> Making<'_, D> {
    fn tensor<T: Element>(&self, name: &'static str, width: usize) -> Result<Buffer<T, D>, Error> {
        let kind = (Category::Tensors, Name::from(name));
        Buffer::uninit(self.device, kind, self.rows.saturating_mul(width))
    }
}

struct Part {
    rows: usize,
    capacity: usize,
}

impl Part {
    fn of<T: Element, D: Device>(&self, buffer: &Buffer<T, D>) -> Result<Lease<T, D>, Error> {
        buffer.lease().part(0..buffer.len() / self.capacity * self.rows)
    }
}
