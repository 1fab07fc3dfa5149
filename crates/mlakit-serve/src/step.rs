//! What a layer is given in a step: operands that change, and caches.

use mlakit::paging::CacheMut;
use mlakit::{Cache, Error, Input, Lease};

/// What changes from step to step, and where it lies.
pub struct StepInputs<D> {
    /// F32 `[rows, hidden]`, normalised.
    pub hidden: Input<'static, f32, D>,
    /// `[rows]`: rotary positions.
    pub positions: Input<'static, i32, D>,
    /// `[rows]`: where each row's record goes.
    pub slots: Input<'static, i64, D>,
    /// `[batch, width]`.
    pub page_table: Input<'static, i32, D>,
    /// `[batch]`, this step's tokens included.
    pub kv_lens: Input<'static, i32, D>,
    /// `[batch + 1]`.
    pub q_offsets: Input<'static, i32, D>,
    /// `[1]`, where the record is scaled.
    pub kv_scale: Option<Input<'static, f32, D>>,
    /// What sparse layers need beside.
    pub keys: StepKeys<D>,
}

/// What sparse layers need beside; nothing of it where all layers attend to all keys.
pub struct StepKeys<D> {
    /// No row of the step sees more keys than are selected, so layers that can attend to all of them.
    pub all_selected: bool,
    /// `[rows]`: the request of each row, a row of the page table; -1 for padding.
    pub request: Option<Input<'static, i32, D>>,
    /// The keys of layers with a list from outside.
    pub listed: Option<Listed<D>>,
    /// Where index keys are pooled.
    pub pooled: Option<PooledInputs<D>>,
}

/// A list of keys for each row.
pub struct Listed<D> {
    /// `[rows, T]`: positions of the row's request.
    pub positions: Input<'static, i32, D>,
    /// `[rows]`.
    pub counts: Input<'static, i32, D>,
}

/// What layers with pooled index keys need.
pub struct PooledInputs<D> {
    /// `[rows]`: the place of each row's token in its request; negative for padding.
    pub last_position: Input<'static, i64, D>,
    /// `[batch]`: complete pools of a request, those that this step completes included.
    pub pools: Input<'static, i32, D>,
    /// `[batch]`: which ring is the request's.
    pub states: Input<'static, i32, D>,
}

impl<D> Default for StepKeys<D> {
    fn default() -> Self {
        Self { all_selected: false, request: None, listed: None, pooled: None }
    }
}

impl<D> Clone for StepKeys<D> {
    fn clone(&self) -> Self {
        Self {
            all_selected: self.all_selected,
            request: self.request.clone(),
            listed: self.listed.clone(),
            pooled: self.pooled.clone(),
        }
    }
}

impl<D> Clone for Listed<D> {
    fn clone(&self) -> Self {
        Self { positions: self.positions.clone(), counts: self.counts.clone() }
    }
}

impl<D> Clone for PooledInputs<D> {
    fn clone(&self) -> Self {
        let Self { last_position, pools, states } = self;
        let (pools, states) = (pools.clone(), states.clone());
        Self { last_position: last_position.clone(), pools, states }
    }
}

impl<D> StepInputs<D> {
    /// Pages of a row of the page table.
    pub(crate) fn table_width(&self) -> usize {
        self.page_table.len() / self.kv_lens.len().max(1)
    }

    /// The request of each row.
    pub(crate) fn request(&self) -> Result<Input<'static, i32, D>, Error> {
        let request = self.keys.request.clone();
        request.ok_or_else(|| Error::contract("request", "one for a sparse layer", "none"))
    }
}

impl<D> Clone for StepInputs<D> {
    fn clone(&self) -> Self {
        Self {
            hidden: self.hidden.clone(),
            positions: self.positions.clone(),
            slots: self.slots.clone(),
            page_table: self.page_table.clone(),
            kv_lens: self.kv_lens.clone(),
            q_offsets: self.q_offsets.clone(),
            kv_scale: self.kv_scale.clone(),
            keys: self.keys.clone(),
        }
    }
}

/// The cache of one layer, as the operations of a step take it: bound, or whatever a graph's view will be bound to.
pub struct LayerCache<D> {
    /// For attention.
    pub read: Cache<'static, D>,
    /// For the writer.
    pub write: CacheMut<'static, D>,
    /// Index keys, where the layer has an indexer.
    pub index: Option<IndexCache<D>>,
}

/// The index keys of one layer.
pub struct IndexCache<D> {
    /// For the indexer.
    pub read: Cache<'static, D>,
    /// For the writer.
    pub write: CacheMut<'static, D>,
    /// F32 `[requests, pool size, 2, width]`: where keys are pooled, those of each request's last tokens and their gates.
    pub ring: Option<Lease<f32, D>>,
}
