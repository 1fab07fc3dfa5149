//! Named scratch regions, their layout, and the lane: the memory that all operations of one sequence share.

use serde::Serialize;

use crate::memory::Uses;
use crate::{Buffer, Category, Device, Error, Name, Op, Output, Plan, Region};

/// Alignment of allocations and scratch regions, in bytes.
pub const ALIGN: usize = 256;

/// Bytes at the head of a lane: the fault block. Word `i` (u32, little-endian) counts [`FAULT_NAMES`]`[i]`; the words behind them are
/// the device's, zero when nothing runs in the lane (CUDA: where the blocks of a launch meet).
pub const FAULT_BYTES: usize = 256;

/// What the words of a fault block count.
pub const FAULT_NAMES: [&str; 3] = ["ids out of the pool", "lengths clamped", "offsets clamped"];

/// The index of the words of a fault block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A page id, slot or expert out of its bounds.
    Id = 0,
    /// A length beyond what the page table covers, or negative.
    Length = 1,
    /// A query offset that decreases or lies beyond the rows.
    Offset = 2,
}

/// One named region of scratch, as an operation or a device declares it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RegionSpec {
    /// What it holds.
    pub name: &'static str,
    /// Its size.
    pub bytes: usize,
}

impl RegionSpec {
    /// A region.
    pub fn new(name: &'static str, bytes: usize) -> Self {
        Self { name, bytes }
    }
}

/// Regions in a row behind the fault block, each aligned to [`ALIGN`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    regions: Vec<RegionSpec>,
    offsets: Vec<usize>,
    bytes: usize,
}

impl Layout {
    /// Lays out `regions`; `None` if the sum does not fit a `usize`.
    pub(crate) fn new(regions: Vec<RegionSpec>) -> Option<Self> {
        let mut end = FAULT_BYTES;
        let mut offsets = Vec::with_capacity(regions.len());
        for region in &regions {
            offsets.push(end);
            end = end.checked_add(region.bytes)?.checked_next_multiple_of(ALIGN)?;
        }
        Some(Self { regions, offsets, bytes: end })
    }

    /// The regions.
    pub fn regions(&self) -> &[RegionSpec] {
        &self.regions
    }

    /// Bytes of all, fault block included.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The region of this name in a lane; empty if there is none.
    pub fn find(&self, lane: Region, name: &str) -> Region {
        let index = self.regions.iter().position(|region| region.name == name);
        let part = index.and_then(|i| lane.part(self.offsets[i], self.regions[i].bytes));
        part.unwrap_or(Region::EMPTY)
    }
}

/// Memory that all operations of one sequence share; it begins with the fault block.
pub struct Lane<D: Device>(Buffer<u8, D>);

/// An operation's share of a lane.
pub struct Scratch<'a, D>(pub(crate) Output<'a, u8, D>);

impl<D: Device> Lane<D> {
    /// A lane for operations that need at most these bytes each (see [`Plan::scratch_bytes`]).
    pub fn new(device: &D, owner: impl Into<Name>, bytes: &[usize]) -> Result<Self, Error> {
        let bytes = bytes.iter().copied().max().unwrap_or(0).max(FAULT_BYTES);
        let mut lane = Buffer::uninit(device, (Category::Scratch, owner), bytes)?;
        lane.write(&[0; FAULT_BYTES])?;
        Ok(Self(lane))
    }

    /// What the kernels have skipped or clamped so far, by [`Fault`].
    pub fn faults(&self) -> Result<[u32; FAULT_NAMES.len()], Error> {
        let mut bytes = [0; 4 * FAULT_NAMES.len()];
        self.0.read_into(0, &mut bytes)?;
        let word = |i: usize| u32::from_le_bytes([0, 1, 2, 3].map(|b| bytes[4 * i + b]));
        Ok(std::array::from_fn(word))
    }

    /// Sets the counts to zero.
    pub fn clear_faults(&mut self) -> Result<(), Error> {
        self.0.write(&[0; FAULT_BYTES])
    }

    /// Fills everything behind the fault block with a byte; a test shows with it that no operation reads what it did not write.
    pub fn poison(&mut self, byte: u8) -> Result<(), Error> {
        let behind = self.0.len() - FAULT_BYTES;
        self.0.write_at(FAULT_BYTES, &vec![byte; behind])
    }

    /// Bytes.
    pub fn bytes(&self) -> usize {
        self.0.len()
    }

    /// A right to it for graphs and for layers that several sequences share.
    pub fn lease(&self) -> Scratch<'static, D> {
        Scratch(Output::from(&self.0.lease()))
    }
}

impl<'a, D: Device> From<&'a mut Lane<D>> for Scratch<'a, D> {
    fn from(lane: &'a mut Lane<D>) -> Self {
        Self(Output::from(&mut lane.0))
    }
}

impl<'a> Uses<'a> {
    /// Declares the scratch that `plan` names.
    pub fn scratch<O: Op, D>(
        &mut self,
        scratch: Scratch<'a, D>,
        plan: &Plan<O>,
    ) -> Result<Region, Error> {
        self.relied("scratch", scratch.0, plan.scratch_bytes())
    }
}
