//! Typed errors: which contract, what was needed, what was given.

use std::fmt;
use std::sync::Arc;

/// The name of an owner or an operand in errors and in the ledger. Cloning one allocates nothing.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Arc<str>);

impl Name {
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for Name {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl From<String> for Name {
    fn from(text: String) -> Self {
        Self(text.into())
    }
}

impl PartialEq<str> for Name {
    fn eq(&self, other: &str) -> bool {
        &*self.0 == other
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Everything that can go wrong. None of these leaves memory in doubt.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The device cannot run this `Spec`.
    Refused(Refusal),
    /// A value of a `Spec` or an operand breaks its contract.
    Contract {
        /// The field or operand.
        what: &'static str,
        /// What was needed.
        needed: String,
        /// What was given.
        given: String,
    },
    /// The thing that was leased has been released (or replaced) since.
    StaleEpoch {
        /// The epoch of the lease.
        held: u64,
        /// The epoch now.
        current: u64,
    },
    /// The host wants to touch memory that enqueued work still uses.
    InFlight {
        /// The name of the allocation.
        what: Name,
    },
    /// Another stream (or the host) uses it and no order between the two was declared.
    Busy {
        /// The name of the operand.
        what: Name,
    },
    /// The device is frozen and this `Spec` was not prepared.
    Frozen {
        /// The missing `Spec`.
        spec: String,
    },
    /// A buffer, slot or lane is too small, or too much was written to it.
    Size {
        /// The name of the operand.
        what: Name,
        /// Bytes needed.
        needed: usize,
        /// Bytes given.
        given: usize,
    },
    /// A pool of another page geometry.
    PageGeometry {
        /// The geometry that the view or the `Spec` was made for.
        needed: String,
        /// The geometry of the pool.
        given: String,
    },
    /// An output shares bytes with another operand (leases and foreign memory; borrows cannot get here).
    Overlap {
        /// The output.
        output: &'static str,
        /// The other operand.
        other: &'static str,
    },
    /// A view that no pool is bound to.
    Unbound,
    /// An operand of another device, or a key of another graph.
    Foreign {
        /// The name of the operand.
        what: &'static str,
    },
    /// The check of a probe failed: the device computes something else than the `Spec` says.
    ProbeMismatch {
        /// The operation.
        op: &'static str,
        /// The first element that differs.
        index: usize,
        /// What the oracle says.
        needed: String,
        /// What the device computed.
        given: String,
    },
    /// More streams attached, or left with work in flight, than the device tracks.
    TooManyStreams,
    /// The stream is lent already: it is attached, and the `Stream` lives (or was leaked).
    StreamLent,
    /// The device has no memory left for this.
    OutOfMemory {
        /// Who asked.
        what: Name,
        /// Bytes asked for.
        bytes: usize,
    },
    /// Something that the machine lacks: a driver, a compiler.
    Unavailable {
        /// What is not there.
        what: &'static str,
        /// What was found instead, and where it was looked for.
        because: String,
        /// What to install or to use.
        instead: String,
    },
    /// The device broke down for good, by a fault in a kernel for instance. No later call succeeds; nothing is in flight any more,
    /// so that owners can be dropped.
    Lost {
        /// What broke it.
        because: String,
    },
    /// The device itself failed, or is not there.
    Device {
        /// What was tried.
        call: &'static str,
        /// What it said.
        message: String,
    },
}

impl Error {
    /// A broken contract.
    pub fn contract(
        what: &'static str,
        needed: impl fmt::Display,
        given: impl fmt::Display,
    ) -> Self {
        Self::Contract { what, needed: needed.to_string(), given: given.to_string() }
    }
}

/// Why a device cannot run a `Spec`, and what to use instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What was asked.
    pub what: String,
    /// Because of what it cannot be.
    pub because: String,
    /// What to use instead.
    pub instead: String,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(r) => write!(f, "{}: {}; use {}", r.what, r.because, r.instead),
            Self::Contract { what, needed, given } => {
                write!(f, "{what}: needed {needed}, given {given}")
            }
            Self::StaleEpoch { held, current } => {
                write!(f, "the lease is of epoch {held}, now it is {current}: bind again")
            }
            Self::InFlight { what } => {
                write!(
                    f,
                    "{what} is used by work in flight: wait for the stream, or write in stream order"
                )
            }
            Self::Busy { what } => write!(
                f,
                "{what} is used by another stream or by the host, and no order between the two was declared"
            ),
            Self::Frozen { spec } => write!(f, "the device is frozen and {spec} was not prepared"),
            Self::Size { what, needed, given } => {
                write!(f, "{what}: needed {needed} bytes, given {given}")
            }
            Self::PageGeometry { needed, given } => {
                write!(f, "page geometry: needed {needed}, given {given}")
            }
            Self::Overlap { output, other } => {
                write!(f, "the output {output} shares bytes with {other}")
            }
            Self::Unbound => f.write_str("no pool is bound to the view"),
            Self::Foreign { what } => {
                write!(f, "{what} belongs to another device, graph or preparation")
            }
            Self::ProbeMismatch { op, index, needed, given } => write!(
                f,
                "the probe of {op} differs at element {index}: needed {needed}, the device computed {given}"
            ),
            Self::TooManyStreams => f.write_str("more streams in use than the device tracks"),
            Self::StreamLent => {
                f.write_str("the stream is lent already: use the `Stream` that it was attached as")
            }
            Self::OutOfMemory { what, bytes } => {
                write!(f, "out of memory: {what} asked for {bytes} bytes")
            }
            Self::Unavailable { what, because, instead } => {
                write!(f, "{what} is not available: {because}; {instead}")
            }
            Self::Lost { because } => {
                write!(
                    f,
                    "the device is lost: {because}; nothing can be run on it until the program starts anew"
                )
            }
            Self::Device { call, message } => write!(f, "{call}: {message}"),
        }
    }
}

impl std::error::Error for Error {}
