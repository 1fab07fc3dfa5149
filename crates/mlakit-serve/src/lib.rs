//! The owners of latent-attention memory: layers, absorbed projections, the cache pool. Generic over the device; names none.

pub mod absorbed;
pub mod indexer;
pub mod layer;
pub mod pool;
mod preparing;
pub mod selection;
pub mod spec;
pub mod step;
pub mod workspace;

pub use absorbed::{AbsorbedProjection, Widths};
pub use indexer::{IndexWeights, LayerIndexer, PoolWeights};
pub use layer::{LayerWeights, MlaDevice, MlaLayer};
pub use pool::{KvPool, PoolError};
pub use selection::{IndexTensors, Selection};
pub use spec::{CacheSpec, Capacity, IndexSpec, KeyRule, LayerSpec, PooledKeys};
pub use step::{IndexCache, LayerCache, Listed, PooledInputs, StepInputs, StepKeys};
pub use workspace::{Tensors, Workspace};
