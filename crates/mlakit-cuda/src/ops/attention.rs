//! What the attention kernels share.

use mlakit::{LseBase, RecordFormat, Region};

/// What every portable attention kernel begins with.
pub(super) const COMMON: &str = include_str!("../../kernels/common.cuh");

/// A scale's address where there is one, else null: the kernel takes 1.
pub(super) fn scale(wanted: bool, region: Region) -> u64 {
    if wanted { region.address() } else { 0 }
}

/// The factor that brings a base-2 logarithm to a base.
pub(super) fn from_base_2(base: LseBase) -> f32 {
    match base {
        LseBase::Natural => std::f32::consts::LN_2,
        LseBase::Base2 => 1.0,
    }
}

/// The base-2 logarithm of a base.
pub(super) fn log2_of(base: LseBase) -> f32 {
    match base {
        LseBase::Natural => std::f32::consts::LOG2_E,
        LseBase::Base2 => 1.0,
    }
}

/// The switch of a kernel that says whether records are E4M3.
pub(super) fn is_e4m3(record: RecordFormat) -> bool {
    record == RecordFormat::E4m3
}

/// Blocks of a grid, which a `Spec` or a GPU has bounded.
pub(super) fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// A number that a `Spec` or an operand has bounded, as kernels take it.
pub(super) fn int(number: usize) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}
