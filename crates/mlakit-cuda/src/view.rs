//! What a view of a pool holds for kernels of this device, behind the words of the core.
//!
//! Bytes `[24, 28)`: 1 if there is a tensor map. Bytes `[128, 256)`: the tensor map, over (element
//! of a record, token of a page, page); boxes of 64 elements x [`box_tokens`] x 1, with the swizzle
//! of 128 bytes, zeros outside. It is made of the geometry and of address and strides alone, so
//! `bind` rewrites it with the rest, and no pool is a parameter of a launch. Devices of other
//! capabilities than 9.0 have no kernel that reads it.

use std::ffi::c_void;

use mlakit::paging::{VIEW_BYTES, ViewWords};
use mlakit::{Error, PageGeometry, RecordFormat};

use crate::driver::{Context, TensorMap};

/// Where the mark and the map lie.
const MARK: usize = 24;
const MAP: usize = 128;

/// `CUtensorMapDataType`, `CUtensorMapSwizzle` and `CUtensorMapL2promotion` of cuda.h. Reading ahead
/// by 256 bytes in L2 costs up to 8 % of the stream (docs/kernels/dense-hopper.md).
const BF16: u32 = 9;
const SWIZZLE_128: u32 = 3;
const PROMOTE_128: u32 = 2;

/// What a tensor map takes: addresses and strides of this multiple, strides below this many bytes.
const ALIGN: u64 = 16;
const MOST_STRIDE: u64 = 1 << 40;

/// Tokens of a box: as many of 64, 32 or 16 as divide a page; none for pages of one token.
pub(crate) fn box_tokens(page_size: usize) -> Option<usize> {
    [64, 32, 16].into_iter().find(|tokens| page_size.is_multiple_of(*tokens))
}

/// Adds the mark and the tensor map to a view, where the pool can have one: kernels read others in a
/// slower way.
///
/// # Errors
/// What the driver says of a map that it should make.
pub(crate) fn map(
    context: &Context,
    (geometry, words): (PageGeometry, ViewWords),
    bytes: &mut [u8; VIEW_BYTES],
) -> Result<(), Error> {
    let record_bytes = geometry.record.bytes() as u64;
    let Some(tokens) = box_tokens(geometry.page_size) else { return Ok(()) };
    let strides = [record_bytes, words.page_stride_bytes];
    let fits = |stride: &u64| stride.is_multiple_of(ALIGN) && *stride < MOST_STRIDE;
    let is_mapped = geometry.record.format == RecordFormat::Bf16
        && words.base.is_multiple_of(ALIGN)
        && strides.iter().all(fits)
        && (1..=1 << 31).contains(&words.pages);
    if !is_mapped {
        return Ok(());
    }
    let sizes = [record_bytes / 2, geometry.page_size as u64, words.pages];
    let (boxes, steps) = ([64u32, tokens as u32, 1], [1u32; 3]);
    let mut map = TensorMap([0; 128]);
    let base = words.base as *mut c_void;
    let _current = context.enter()?;
    // SAFETY: the map is aligned and live; the arrays have as many elements as a rank of 3 says (one
    // stride less); the driver looks at no memory behind the device's address.
    let code = unsafe {
        (context.api.tensor_map)(
            &mut map,
            BF16,
            3,
            base,
            sizes.as_ptr(),
            strides.as_ptr(),
            boxes.as_ptr(),
            steps.as_ptr(),
            0,
            SWIZZLE_128,
            PROMOTE_128,
            0,
        )
    };
    context.check("cuTensorMapEncodeTiled", code)?;
    bytes[MARK..MARK + 4].copy_from_slice(&1u32.to_le_bytes());
    bytes[MAP..].copy_from_slice(&map.0);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_divide_pages() {
        let tokens = [1, 16, 32, 48, 64, 80, 256].map(box_tokens);
        let needed = [None, Some(16), Some(32), Some(16), Some(64), Some(16), Some(64)];
        assert_eq!(tokens, needed);
    }
}
