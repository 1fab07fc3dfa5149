//! Kernels. Each is written once, over `engine::Engine`, and compiled for every instruction set;
//! [`Kernels`] is the way in.

mod amx;
mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512bf16;
pub(crate) mod dense;
mod engine;
pub(crate) mod indexer;
mod linear;
mod merge;
mod projection;
mod scalar;
pub(crate) mod sparse;
mod store;
mod tiles;
pub mod topk;

use std::ops::Range;

use crate::isa::{Isa, IsaUnavailable};

/// Whether this process may use the tiles of AMX.
#[cfg(target_arch = "x86_64")]
pub(crate) use amx::is_usable as tiles_are_usable;
pub use attention::{
    Attention, BLOCK, Geometry, Lanes, LseBase, OutFormat, Output, Queries, QueryFormat, Sink,
};
pub use dense::{Counted, DenseCall, DenseItem, KeyCache, KeyFormat, Visible};
pub use indexer::{IndexCache, IndexCall, IndexFormat, IndexItem, MAX_ITEM_ROWS};
pub use linear::{Experts, LinearCall, LinearOut, pack_row, packed_words};
pub use merge::MergeCall;
pub use projection::{ProjectionCall, ProjectionTask};
pub use sparse::{List, RecordCache, RecordRows, SparseCall, SparseItem};

/// The kernels of one instruction set. A value proves that the machine has it, or that tiles are emulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernels {
    isa: Isa,
    /// Whether scalar code may be compiled with AVX2 and FMA: the same bits, faster.
    scalar_with_fma: bool,
    /// Whether tiles are those of plain code.
    emulated: bool,
}

/// The entry points of one engine, compiled with its features.
macro_rules! entries {
    ($module:ident, $engine:expr $(, $features:literal)?) => {
        mod $module {
            use super::*;

            /// # Safety
            /// As `Kernels::dense`, on a machine with the features.
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn dense(call: &DenseCall<'_>, item: &DenseItem, scratch: *mut u8) {
                // SAFETY: the contract of this function.
                unsafe { dense::forward($engine, call, item, scratch) }
            }

            /// # Safety
            /// As `Kernels::sparse`, on a machine with the features.
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn sparse(
                call: &SparseCall<'_>,
                item: &SparseItem,
                scratch: *mut u8,
            ) {
                // SAFETY: the contract of this function.
                unsafe { sparse::forward($engine, call, item, scratch) }
            }

            /// # Safety
            /// As `Kernels::index`, on a machine with the features.
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn index(
                call: &IndexCall,
                item: &IndexItem,
                lists: &mut [topk::Candidates<'_>; MAX_ITEM_ROWS],
                scratch: *mut u8,
            ) {
                // SAFETY: the contract of this function.
                unsafe { indexer::forward($engine, call, item, lists, scratch) }
            }

            /// # Safety
            /// On a machine with the features.
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn select(
                list: &mut topk::Candidates<'_>,
                scores: &[f32],
                first: usize,
            ) {
                #[allow(unused_unsafe, reason = "the engine of plain code is always there")]
                // SAFETY: the machine has the features.
                let engine = unsafe { $engine };
                list.push_scores(engine, scores, first);
            }

            /// # Safety
            /// As `Kernels::merge`, on a machine with the features.
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn merge(call: &MergeCall, lanes: Range<usize>) {
                // SAFETY: the contract of this function.
                unsafe { merge::merge($engine, call, lanes) }
            }

            /// # Safety
            /// As `Kernels::linear`, on a machine with the features.
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn linear(call: &LinearCall<'_>, outs: Range<usize>) {
                // SAFETY: the contract of this function.
                unsafe { linear::linear($engine, call, outs) }
            }

            /// # Safety
            /// As `Kernels::project`, on a machine with the features.
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn project(call: &ProjectionCall, task: &ProjectionTask) {
                // SAFETY: the contract of this function.
                unsafe { projection::project($engine, call, task) }
            }

            /// # Safety
            /// As `Kernels::decode_e4m3`, on a machine with the features.
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn decode_e4m3(codes: *const u8, to: *mut u16, count: usize) {
                // SAFETY: the contract of this function.
                unsafe { engine::Engine::decode_e4m3($engine, codes, to, count) }
            }
        }
    };
}

entries!(scalar_entries, scalar::Scalar);
#[cfg(target_arch = "x86_64")]
entries!(scalar_fma_entries, scalar::Scalar, "avx2,fma");
#[cfg(target_arch = "x86_64")]
entries!(avx2_entries, avx2::Avx2::assume(), "avx2,fma");
#[cfg(target_arch = "x86_64")]
entries!(avx512_entries, avx512::Avx512::assume(), "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq");
#[cfg(target_arch = "x86_64")]
entries!(
    avx512bf16_entries,
    avx512bf16::Avx512Bf16::assume(),
    "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi"
);

/// The entry points of attention and indexers on tiles, compiled with the features of the vectors beside them.
macro_rules! tile_entry {
    ($module:ident, $unit:expr $(, $features:literal)?) => {
        mod $module {
            use super::*;

            /// # Safety
            /// As `Kernels::dense`, on a machine with the features and the unit.
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn dense(call: &DenseCall<'_>, item: &DenseItem, scratch: *mut u8) {
                // SAFETY: the contract of this function.
                unsafe { dense::amx::forward(&mut $unit, call, item, scratch) }
            }

            /// # Safety
            /// As `Kernels::sparse`, on a machine with the features and the unit.
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn sparse(
                call: &SparseCall<'_>,
                item: &SparseItem,
                scratch: *mut u8,
            ) {
                // SAFETY: the contract of this function.
                unsafe { sparse::amx::forward(&mut $unit, call, item, scratch) }
            }

            /// # Safety
            /// As `Kernels::index`, on a machine with the features and the unit.
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn index(
                call: &IndexCall,
                item: &IndexItem,
                lists: &mut [topk::Candidates<'_>; MAX_ITEM_ROWS],
                scratch: *mut u8,
            ) {
                // SAFETY: the contract of this function.
                unsafe { indexer::forward_on_tiles(&mut $unit, call, item, lists, scratch) }
            }
        }
    };
}

tile_entry!(emulated_entry, amx::Emulated::new());
#[cfg(target_arch = "x86_64")]
tile_entry!(emulated_fma_entry, amx::Emulated::new(), "avx2,fma");
#[cfg(target_arch = "x86_64")]
tile_entry!(
    amx_entry,
    amx::Amx::assume(),
    "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi"
);

/// Calls an entry point of the instruction set of `$kernels`.
macro_rules! dispatch {
    ($kernels:expr, $entry:ident($($argument:expr),*)) => {{
        // SAFETY: `Kernels::new` found the instruction set on this machine; the rest is the
        // caller's contract.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            match $kernels.vectors() {
                Isa::Scalar if $kernels.scalar_with_fma => {
                    scalar_fma_entries::$entry($($argument),*)
                }
                Isa::Scalar => scalar_entries::$entry($($argument),*),
                Isa::Avx2 => avx2_entries::$entry($($argument),*),
                Isa::Avx512 | Isa::Amx => avx512_entries::$entry($($argument),*),
                Isa::Avx512Bf16 => avx512bf16_entries::$entry($($argument),*),
            }
        }
        // SAFETY: the caller's contract.
        #[cfg(not(target_arch = "x86_64"))]
        unsafe {
            scalar_entries::$entry($($argument),*)
        }
    }};
}

/// Calls an entry point on tiles.
macro_rules! dispatch_tiles {
    ($kernels:expr, $entry:ident($($argument:expr),*)) => {{
        // SAFETY: `Kernels::new` found the instructions and tiles on this machine, or tiles are emulated; the
        // rest is the caller's contract.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            match ($kernels.emulated, $kernels.scalar_with_fma) {
                (false, _) => amx_entry::$entry($($argument),*),
                (true, true) => emulated_fma_entry::$entry($($argument),*),
                (true, false) => emulated_entry::$entry($($argument),*),
            }
        }
        // SAFETY: the caller's contract.
        #[cfg(not(target_arch = "x86_64"))]
        unsafe {
            emulated_entry::$entry($($argument),*)
        }
    }};
}

/// Lanes of the vectors for which an F32 input of a linear layer is packed; `None` where factors are
/// BF16 and an F32 input is the sum of two of them.
pub fn packs_f32(isa: Isa) -> Option<usize> {
    match isa {
        Isa::Avx2 => Some(8),
        Isa::Avx512 | Isa::Amx => Some(16),
        Isa::Scalar | Isa::Avx512Bf16 => None,
    }
}

impl Kernels {
    /// The kernels of `isa`.
    ///
    /// # Errors
    /// [`IsaUnavailable`] where this machine does not have it.
    pub fn new(isa: Isa) -> Result<Kernels, IsaUnavailable> {
        let isa = Isa::choose(Some(isa))?;
        Ok(Kernels { isa, scalar_with_fma: Isa::Avx2.is_available(), emulated: false })
    }

    /// The kernels of [`Isa::Amx`] over tiles in plain code, on any machine: dense attention has the bits of
    /// AMX, the rest those of [`Isa::Scalar`]. They are slow, for tests and for finding out what another
    /// machine computed.
    pub fn emulated_amx() -> Kernels {
        let scalar_with_fma = Isa::Avx2.is_available();
        Kernels { isa: Isa::Amx, scalar_with_fma, emulated: true }
    }

    /// The instruction set.
    pub fn isa(self) -> Isa {
        self.isa
    }

    /// The instruction set of what is not done on tiles.
    fn vectors(self) -> Isa {
        if self.emulated { Isa::Scalar } else { self.isa }
    }

    /// Bytes of scratch that one worker needs for items of at most `max_rows` rows and `max_heads`
    /// heads. No alignment is needed, no contents are kept or expected.
    pub fn dense_scratch_bytes(
        self,
        geometry: Geometry,
        format: KeyFormat,
        max_rows: usize,
        max_heads: usize,
    ) -> usize {
        if self.isa == Isa::Amx {
            return attention::amx::scratch::bytes(geometry, max_rows, max_heads);
        }
        #[cfg(target_arch = "x86_64")]
        let bytes = match self.vectors() {
            Isa::Scalar | Isa::Amx => dense::scratch_bytes::<scalar::Scalar>,
            Isa::Avx2 => dense::scratch_bytes::<avx2::Avx2>,
            Isa::Avx512 => dense::scratch_bytes::<avx512::Avx512>,
            Isa::Avx512Bf16 => dense::scratch_bytes::<avx512bf16::Avx512Bf16>,
        };
        #[cfg(not(target_arch = "x86_64"))]
        let bytes = dense::scratch_bytes::<scalar::Scalar>;
        bytes(geometry, format, max_rows, max_heads)
    }

    /// Bytes of scratch that one worker of an indexer needs for items of at most `max_rows` rows. No
    /// alignment is needed, no contents are kept or expected.
    pub fn index_scratch_bytes(self, call: &IndexCall, max_rows: usize) -> usize {
        if self.isa == Isa::Amx {
            // The vectors beside tiles have sixteen lanes and multiply pairs, as plain code does.
            return indexer::scratch_bytes::<scalar::Scalar>(call, indexer::Grain::Tiles, max_rows);
        }
        #[cfg(target_arch = "x86_64")]
        let bytes = match self.vectors() {
            Isa::Scalar | Isa::Amx => indexer::scratch_bytes::<scalar::Scalar>,
            Isa::Avx2 => indexer::scratch_bytes::<avx2::Avx2>,
            Isa::Avx512 => indexer::scratch_bytes::<avx512::Avx512>,
            Isa::Avx512Bf16 => indexer::scratch_bytes::<avx512bf16::Avx512Bf16>,
        };
        #[cfg(not(target_arch = "x86_64"))]
        let bytes = indexer::scratch_bytes::<scalar::Scalar>;
        bytes(call, indexer::Grain::Vectors, max_rows)
    }

    /// Query rows that an item of an indexer should have. It decides speed only.
    pub fn index_rows_per_item(self, heads: usize) -> usize {
        (256 / heads.max(1)).clamp(1, MAX_ITEM_ROWS)
    }

    /// Scores the keys of an item and adds them to the candidates of its rows; `lists` beyond the
    /// item's rows are not looked at. A score's bits do not depend on the item.
    ///
    /// # Safety
    /// The pointers of `call` and `item` are valid as their fields say, and `scratch` is writable for
    /// [`Kernels::index_scratch_bytes`] and used by this worker alone.
    pub unsafe fn index(
        self,
        call: &IndexCall,
        item: &IndexItem,
        lists: &mut [topk::Candidates<'_>; MAX_ITEM_ROWS],
        scratch: *mut u8,
    ) {
        if self.isa == Isa::Amx {
            return dispatch_tiles!(self, index(call, item, lists, scratch));
        }
        dispatch!(self, index(call, item, lists, scratch))
    }

    /// Adds scores of the positions from `first` on to a list of candidates.
    pub fn select(self, list: &mut topk::Candidates<'_>, scores: &[f32], first: usize) {
        dispatch!(self, select(list, scores, first))
    }

    /// Query rows that an item should have, so that its accumulators stay in the second-level cache
    /// and each key that is read serves many query vectors. It decides speed only.
    pub fn dense_rows_per_item(self, heads: usize) -> usize {
        (128 / heads.max(1)).max(1)
    }

    /// Computes one item of a dense attention call.
    ///
    /// # Safety
    /// The pointers of `call` and `item` are valid as their fields say, the output is not used by
    /// another thread during the call, and `scratch` is writable for
    /// [`Kernels::dense_scratch_bytes`] and used by this worker alone. The geometry holds what its
    /// fields say; rows and heads of the item exist and are not empty.
    pub unsafe fn dense(self, call: &DenseCall<'_>, item: &DenseItem, scratch: *mut u8) {
        if self.isa == Isa::Amx {
            return dispatch_tiles!(self, dense(call, item, scratch));
        }
        dispatch!(self, dense(call, item, scratch))
    }

    /// Bytes of scratch that one worker needs for items of at most `max_heads` heads of sparse
    /// attention. No alignment is needed, no contents are kept or expected.
    pub fn sparse_scratch_bytes(self, geometry: Geometry, max_heads: usize) -> usize {
        if self.isa == Isa::Amx {
            return attention::amx::scratch::bytes(geometry, 1, max_heads);
        }
        #[cfg(target_arch = "x86_64")]
        let bytes = match self.vectors() {
            Isa::Scalar | Isa::Amx => sparse::scratch_bytes::<scalar::Scalar>,
            Isa::Avx2 => sparse::scratch_bytes::<avx2::Avx2>,
            Isa::Avx512 => sparse::scratch_bytes::<avx512::Avx512>,
            Isa::Avx512Bf16 => sparse::scratch_bytes::<avx512bf16::Avx512Bf16>,
        };
        #[cfg(not(target_arch = "x86_64"))]
        let bytes = sparse::scratch_bytes::<scalar::Scalar>;
        bytes(geometry, max_heads)
    }

    /// Computes one item of a sparse attention call.
    ///
    /// # Safety
    /// The pointers of `call` and `item` are valid as their fields say, the output is not used by
    /// another thread during the call, and `scratch` is writable for
    /// [`Kernels::sparse_scratch_bytes`] and used by this worker alone. The geometry holds what its
    /// fields say; the item has one row, and its heads exist and are not empty.
    pub unsafe fn sparse(self, call: &SparseCall<'_>, item: &SparseItem, scratch: *mut u8) {
        if self.isa == Isa::Amx {
            return dispatch_tiles!(self, sparse(call, item, scratch));
        }
        dispatch!(self, sparse(call, item, scratch))
    }

    /// Merges the partials of the (row, head) pairs `lanes`, numbered `row * heads + head`.
    ///
    /// # Safety
    /// The pointers of `call` are valid as its fields say for `lanes`, and those outputs are not
    /// used by another thread during the call.
    pub unsafe fn merge(self, call: &MergeCall, lanes: Range<usize>) {
        dispatch!(self, merge(call, lanes))
    }

    /// Computes the outputs `outs` of every row of a linear layer. A row's bits depend only on its
    /// operands.
    ///
    /// # Safety
    /// The pointers of `call` are valid as its fields say, and those outputs are not used by
    /// another thread during the call.
    pub unsafe fn linear(self, call: &LinearCall<'_>, outs: Range<usize>) {
        dispatch!(self, linear(call, outs))
    }

    /// Computes a part of a per-head projection. An element's bits do not depend on the part.
    ///
    /// # Safety
    /// The pointers of `call` are valid as its fields say for the task, and those outputs are not
    /// used by another thread during the call.
    pub unsafe fn project(self, call: &ProjectionCall, task: &ProjectionTask) {
        dispatch!(self, project(call, task))
    }

    /// Decodes E4M3 codes to BF16, exactly.
    ///
    /// # Safety
    /// `codes` is readable and `to` writable for `count` elements.
    pub unsafe fn decode_e4m3(self, codes: *const u8, to: *mut u16, count: usize) {
        dispatch!(self, decode_e4m3(codes, to, count))
    }
}
