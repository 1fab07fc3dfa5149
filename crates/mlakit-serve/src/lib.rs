//! The owners of latent-attention memory: layers, absorbed projections, the cache pool. Generic over the device; names none.

pub mod absorbed;
pub mod layer;
pub mod pool;
pub mod workspace;

pub use absorbed::{AbsorbedProjection, Widths};
pub use layer::{
    CacheSpec, Capacity, LayerCache, LayerSpec, LayerWeights, MlaDevice, MlaLayer, StepInputs,
};
pub use pool::{KvPool, PoolError};
pub use workspace::{Tensors, Workspace};
