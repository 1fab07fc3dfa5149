//! The selection of a step: one set of tensors, that of the last layer with an indexer. The layers behind it that share it read it.

use half::bf16;
use mlakit::{Buffer, Device, Error, Lease};

use crate::spec::IndexSpec;
use crate::workspace::{Making, Part};

/// What is selected, and what indexers work with, at a row capacity.
pub struct Selection<D: Device> {
    query_wide: Option<Buffer<f32, D>>,
    query: Buffer<bf16, D>,
    key_raw: Buffer<f32, D>,
    key_wide: Buffer<f32, D>,
    key: Buffer<bf16, D>,
    head_weights: Buffer<f32, D>,
    gate: Buffer<f32, D>,
    pool_slots: Buffer<i64, D>,
    positions: Buffer<i32, D>,
    counts: Buffer<i32, D>,
    slots: Buffer<i32, D>,
    slot_counts: Buffer<i32, D>,
}

/// The set for one step's rows, as leases. `I` heads of `D` elements, `T` keys that a row selects at most.
pub struct IndexTensors<D> {
    /// `[rows, I, D]` before rotation, where something rotates.
    pub query_wide: Option<Lease<f32, D>>,
    /// `[rows, I, D]`.
    pub query: Lease<bf16, D>,
    /// `[rows, D]`, before the norm.
    pub key_raw: Lease<f32, D>,
    /// `[rows, D]`, normalised.
    pub key_wide: Lease<f32, D>,
    /// `[rows, D]`: what the cache stores.
    pub key: Lease<bf16, D>,
    /// `[rows, I]`.
    pub head_weights: Lease<f32, D>,
    /// `[rows, D]`, where keys are pooled.
    pub gate: Lease<f32, D>,
    /// `[rows]`: where the key of the pool goes that a row completes, where keys are pooled.
    pub pool_slots: Lease<i64, D>,
    /// `[rows, T]`: the selected keys.
    pub positions: Lease<i32, D>,
    /// `[rows]`.
    pub counts: Lease<i32, D>,
    /// `[rows, tokens]`: the slots of their tokens, where keys are pooled.
    pub slots: Lease<i32, D>,
    /// `[rows]`.
    pub slot_counts: Lease<i32, D>,
}

impl<D: Device> Selection<D> {
    pub(crate) fn new(made: &Making<'_, D>, spec: &IndexSpec) -> Result<Self, Error> {
        let IndexSpec { heads, width, .. } = *spec;
        let pooled = |width: usize| if spec.pool.is_some() { width } else { 0 };
        let wide = (spec.rope > 0).then_some(heads * width);
        Ok(Self {
            query_wide: wide.map(|wide| made.tensor("index query, wide", wide)).transpose()?,
            query: made.tensor("index query", heads * width)?,
            key_raw: made.tensor("index key, raw", width)?,
            key_wide: made.tensor("index key, wide", width)?,
            key: made.tensor("index key", width)?,
            head_weights: made.tensor("index head weights", heads)?,
            gate: made.tensor("index key gate", pooled(width))?,
            pool_slots: made.tensor("index pool slots", pooled(1))?,
            positions: made.tensor("selected positions", spec.selected_keys())?,
            counts: made.tensor("selected counts", 1)?,
            slots: made.tensor("selected slots", pooled(spec.selected()))?,
            slot_counts: made.tensor("selected slot counts", pooled(1))?,
        })
    }

    /// The positions of the first `rows` rows of `capacity`.
    pub(crate) fn read(&self, (rows, capacity): (usize, usize)) -> Result<Vec<i32>, Error> {
        let mut positions = vec![0; self.positions.len() / capacity * rows];
        self.positions.read_into(0, &mut positions)?;
        Ok(positions)
    }

    pub(crate) fn rows(&self, part: &Part) -> Result<IndexTensors<D>, Error> {
        Ok(IndexTensors {
            query_wide: self.query_wide.as_ref().map(|wide| part.of(wide)).transpose()?,
            query: part.of(&self.query)?,
            key_raw: part.of(&self.key_raw)?,
            key_wide: part.of(&self.key_wide)?,
            key: part.of(&self.key)?,
            head_weights: part.of(&self.head_weights)?,
            gate: part.of(&self.gate)?,
            pool_slots: part.of(&self.pool_slots)?,
            positions: part.of(&self.positions)?,
            counts: part.of(&self.counts)?,
            slots: part.of(&self.slots)?,
            slot_counts: part.of(&self.slot_counts)?,
        })
    }
}
