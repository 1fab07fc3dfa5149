//! Exact selection of the best scores of a stream, in memory that does not grow with it.
//!
//! A row's scores come in blocks of 64 positions in ascending order and go into a list of candidates.
//! When the list is full it is cut down to the best `topk`, and from then on only what beats the worst
//! of those gets in. Cutting is exact: the worst of the best is found by counting digits of the scores
//! (`select`), and what stays keeps its order, so that the list is always ascending in position and
//! nothing is sorted. Of equal scores the smaller position stays, because it came first.
//!
//! With room for `2 topk` candidates a stream in rising order, the worst, is cut once every `topk`
//! scores, each cut passing over `2 topk` candidates a few times.

mod list;
mod order;
mod select;

pub(super) use list::BLOCK;
pub use list::{Candidates, capacity, list_bytes};
pub use order::{ordered, score_of};
