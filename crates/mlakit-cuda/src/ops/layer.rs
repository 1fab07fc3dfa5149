//! What the layer operations share: how their kernels are named, compiled and launched.

use mlakit::op::layer::Float;
use mlakit::{Device, Error};

use crate::device::Cuda;
use crate::module::Source;
use crate::stream::Grid;

/// Elements of a group: what a thread takes at a time (`GROUP` in `layer_common.cuh`).
pub(super) const GROUP: usize = 8;

/// What every kernel of a layer operation begins with.
pub(super) const COMMON: &str = include_str!("../../kernels/layer_common.cuh");

/// The value of a switch of a kernel.
pub(super) fn switch(on: bool) -> String {
    u32::from(on).to_string()
}

/// The switch that says whether a tensor is F32.
pub(super) fn is_f32(float: Float) -> String {
    switch(float == Float::F32)
}

/// A kernel without dynamic shared memory.
pub(super) fn source(
    (family, entry): (&'static str, &'static str),
    text: &'static [&'static str],
    defines: Vec<(&'static str, String)>,
    (threads, registers): (u32, u32),
) -> Source {
    Source { family, entry, text, defines, threads, dynamic_shared_bytes: 0, registers }
}

/// A grid of so many blocks in a row, which may begin before its predecessor has ended.
///
/// # Errors
/// More blocks than a grid has: tensors that no device holds.
pub(super) fn grid(device: &Cuda, blocks: usize) -> Result<Grid, Error> {
    let most = i32::MAX as u32;
    let blocks = u32::try_from(blocks).ok().filter(|blocks| *blocks <= most).ok_or_else(|| {
        Error::Contract {
            what: "blocks",
            needed: format!("at most {most}"),
            given: blocks.to_string(),
        }
    })?;
    let programmatic = device.facts().capability >= (9, 0);
    Ok(Grid { blocks: [blocks, 1, 1], cluster: 1, cooperative: false, programmatic })
}

/// A count as kernels take it.
pub(super) fn wide(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
