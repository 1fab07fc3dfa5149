//! What can go wrong when a checkpoint runs on a device.

use mlakit_serve::PoolError;

/// Why a checkpoint does not run, or stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The checkpoint itself.
    #[error(transparent)]
    Checkpoint(#[from] crate::Error),
    /// The device.
    #[error(transparent)]
    Device(#[from] mlakit::Error),
    /// The cache.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// A part of the architecture that the device path does not run.
    #[error("{what}: {because}; {instead}")]
    Unsupported {
        /// What the checkpoint has.
        what: String,
        /// Why it cannot be run.
        because: String,
        /// What to do instead.
        instead: String,
    },
    /// An input that does not fit.
    #[error("{what}: needed {needed}, given {given}")]
    Input {
        /// The input.
        what: &'static str,
        /// What was needed.
        needed: String,
        /// What was given.
        given: String,
    },
}

impl From<crate::CheckpointError> for DecodeError {
    fn from(error: crate::CheckpointError) -> Self {
        Self::Checkpoint(error.into())
    }
}
