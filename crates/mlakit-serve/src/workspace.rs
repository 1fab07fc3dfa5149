//! The tensors between the operations of a layer: one set, used by all layers one after the other.

use half::bf16;
use mlakit::{Buffer, Category, Device, Element, Error, Lease, Lse, Name, Natural};

use crate::selection::{IndexTensors, Selection};
use crate::spec::LayerSpec;

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
    gates: Buffer<f32, D>,
    gated: Buffer<f32, D>,
    selection: Option<Selection<D>>,
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
    /// `[rows, heads * value / gate span]`, where there is a gate.
    pub gates: Lease<f32, D>,
    /// `[rows, heads, value]`, where there is a gate.
    pub gated: Lease<f32, D>,
    /// Where some layer has an indexer.
    pub selection: Option<IndexTensors<D>>,
}

impl<D: Device> Workspace<D> {
    /// For layers of this shape.
    ///
    /// # Errors
    /// No memory.
    pub fn new(device: &D, spec: &LayerSpec) -> Result<Self, Error> {
        let (rows, heads) = (spec.capacity.rows, spec.heads);
        let made = Making { device, rows };
        let gated = |width: usize| if spec.gate_span.is_some() { width } else { 0 };
        let gates = spec.heads * spec.value / spec.gate_span.unwrap_or(1);
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
            gates: made.tensor("gates", gated(gates))?,
            gated: made.tensor("gated values", gated(heads * spec.value))?,
            selection: match spec.keys.indexer() {
                Some(index) => Some(Selection::new(&made, index)?),
                None => None,
            },
        })
    }

    /// The keys that the last indexer selected for the first `rows` rows, I32 `[rows, T]`, where there is an indexer; nothing else.
    ///
    /// # Errors
    /// More rows than there is capacity for; work in flight.
    pub fn selected(&self, rows: usize) -> Result<Vec<i32>, Error> {
        self.selection.as_ref().map_or(Ok(Vec::new()), |set| set.read((rows, self.rows)))
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
            gates: part.of(&self.gates)?,
            gated: part.of(&self.gated)?,
            selection: self.selection.as_ref().map(|set| set.rows(&part)).transpose()?,
        })
    }
}

/// Makes tensors of so many rows.
pub(crate) struct Making<'m, D> {
    device: &'m D,
    rows: usize,
}

impl<D: Device> Making<'_, D> {
    pub(crate) fn tensor<T: Element>(
        &self,
        name: &'static str,
        width: usize,
    ) -> Result<Buffer<T, D>, Error> {
        let kind = (Category::Tensors, Name::from(name));
        Buffer::uninit(self.device, kind, self.rows.saturating_mul(width))
    }
}

/// Some of the rows.
pub(crate) struct Part {
    rows: usize,
    capacity: usize,
}

impl Part {
    pub(crate) fn of<T: Element, D: Device>(
        &self,
        buffer: &Buffer<T, D>,
    ) -> Result<Lease<T, D>, Error> {
        buffer.lease().part(0..buffer.len() / self.capacity * self.rows)
    }
}
