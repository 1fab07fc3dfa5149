//! What an operation of multi-head latent attention is, on any device: declared, planned, prepared, bound, run, replayed.
//!
//! One rule carries the memory. Every allocation is owned by exactly one object. A use of it is *numbered*: [`Stream`] gives each
//! submission the next number of its stream and, before anything is enqueued, writes that number into a control block
//! beside every allocation that the work touches. The owner's destructor compares those numbers with what the device has
//! finished; what is not finished moves to `retiring`. So nothing depends on a guard that is dropped in time, on a borrow
//! that lasts until the work is done, or on a reference count per launch. This crate does nothing unsafe: the only `unsafe` in it is
//! in the declaration of [`Device`], which is a promise that others make (and in the simulated devices, which make it).
//!
//! Reading order: [`clock`] (numbers, epochs), [`memory`] (one owner per allocation), [`device`] (what a device must
//! offer), [`op`] (Spec, Plan, Prepared, Bound), [`paging`], [`graph`].
// Two places say otherwise: `device`, where the promise of a device is declared, and `sim`, which makes it. And the model of the
// protocol under loom, which is no part of the library. `tests/no_unsafe.rs` counts them.
#![cfg_attr(not(all(test, loom)), deny(unsafe_code))]

pub mod census;
pub mod clock;
pub mod device;
pub mod element;
pub mod error;
pub mod geometry;
pub mod graph;
pub mod keeper;
pub mod lse;
pub mod memory;
pub mod op;
pub mod paging;
pub mod record;
pub mod scratch;
#[cfg(feature = "sim")]
pub mod sim;
pub mod splits;
pub mod stream;

pub use census::{Category, Census};
pub use clock::{Access, Reporter, Ticket};
pub use device::{Choice, Device, Pass, Runs};
pub use element::{Dtype, E2m1, E4m3, Element, Ue8m0};
pub use error::{Error, Name, Refusal};
pub use geometry::Geometry;
pub use graph::{Graph, Key, Recorder, Slot, SlotMut, Slots, Submission, ViewKey};
pub use keeper::{Counts, Keeper};
pub use lse::{Base2, Lse, LseBase, Natural};
pub use memory::{Buffer, Foreign, Input, Lease, Output, Region, Uses};
pub use op::{Bound, Op, Plan, Prepared, Probe, ProbeCache, Runner, Warm};
pub use paging::{Cache, CacheMut, PageGeometry, Pages, PoolView};
pub use record::{RecordFormat, RecordLayout, RopePart};
pub use scratch::{Lane, Scratch};
pub use splits::Splits;
pub use stream::{Mark, Stream};
