//! Device memory, and host copies to and from it.
//!
//! Memory comes from a pool of this device's own, by stream-ordered allocation on a stream that
//! carries nothing else. `cuMemFree` would wait for all work of the context: then letting go of one
//! tensor would wait for whatever runs, and would never return behind a stream that waits for the
//! host. Here a free is enqueued on a stream that is empty, for memory that the core has found
//! idle, so it is neither waited for nor too early. The pool keeps nothing: its release threshold
//! is 0, so that whenever the memory stream is waited for, which each allocation and each large
//! free does, what is unused goes back to the system and `cuMemGetInfo` follows the ledger (in the
//! driver's steps of 2 MiB or more).

use std::ffi::c_void;
use std::sync::{Arc, Mutex};

use mlakit::{Error, Region};

use crate::driver::{Code, Context};

/// From this size on freed memory goes back to the system at once; below, with the next allocation.
const RETURNED_FROM_BYTES: usize = 1 << 20;

/// One allocation, or memory whose owner is outside. Dropping it frees it, or drops the owner.
pub struct Memory {
    context: Arc<Context>,
    address: u64,
    bytes: usize,
    /// Behind a lock, so that memory is `Sync` whatever the owner is.
    owner: Option<Mutex<Box<dyn Send>>>,
}

impl Memory {
    /// Obtains memory of unknown contents, aligned to 256 bytes at least, as every allocation of
    /// the driver.
    pub(crate) fn obtain(context: &Arc<Context>, bytes: usize) -> Result<Self, Error> {
        let _current = context.enter()?;
        let none = || Error::OutOfMemory { what: "device".into(), bytes };
        if context.allocation_fails() {
            return Err(none());
        }
        let mut address = 0;
        let (pool, stream) = (context.pool, context.memory_stream);
        // SAFETY: the context is current, pool and stream are its own, the pointer is to a live
        // integer.
        let code = unsafe { (context.api.pool_obtain)(&mut address, bytes.max(1), pool, stream) };
        if Code(code) == Code::OUT_OF_MEMORY {
            return Err(none());
        }
        context.check("cuMemAllocFromPoolAsync", code)?;
        let memory = Self { context: context.clone(), address, bytes, owner: None };
        memory.context.settle_memory()?; // from here on it may be used on any stream
        Ok(memory)
    }

    /// Memory from outside.
    ///
    /// # Safety
    /// `bytes` bytes at `address` are memory that this context's kernels may read and write, until
    /// `owner` is dropped.
    pub(crate) unsafe fn foreign(
        context: &Arc<Context>,
        (address, bytes): (u64, usize),
        owner: Box<dyn Send>,
    ) -> Self {
        Self { context: context.clone(), address, bytes, owner: Some(Mutex::new(owner)) }
    }

    /// Where it begins.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.owner.is_some() || self.context.is_lost() {
            return; // the owner frees it; the memory of a lost context is gone with it
        }
        let Ok(_current) = self.context.enter() else { return };
        // SAFETY: `obtain` allocated it, it is freed once, and the core drops it when no work uses
        // it.
        let code =
            unsafe { (self.context.api.memory_free)(self.address, self.context.memory_stream) };
        // A destructor has no one to tell; a sticky error is remembered and told by the next call.
        let freed = self.context.check("cuMemFreeAsync", code);
        if freed.is_ok() && self.bytes >= RETURNED_FROM_BYTES {
            let _ = self.context.settle_memory();
        }
    }
}

impl Context {
    /// Waits for the memory stream, which holds allocations and frees alone. The driver takes this
    /// as the occasion to give back what the pool does not use.
    pub(crate) fn settle_memory(&self) -> Result<(), Error> {
        // SAFETY: the stream is this context's own.
        let code = unsafe { (self.api.stream_synchronize)(self.memory_stream) };
        self.check("cuStreamSynchronize", code)
    }

    /// Gives everything that the pool does not use back to the system.
    pub(crate) fn trim(&self) -> Result<(), Error> {
        let _current = self.enter()?;
        self.settle_memory()?;
        // SAFETY: the pool is this context's own.
        let code = unsafe { (self.api.pool_trim)(self.pool, 0) };
        self.check("cuMemPoolTrimTo", code)
    }

    /// Copies from the host and waits for it.
    pub(crate) fn copy_in(&self, to: Region, bytes: &[u8]) -> Result<(), Error> {
        if bytes.is_empty() {
            return Ok(());
        }
        let _current = self.enter()?;
        let (from, stream) = (bytes.as_ptr().cast::<c_void>(), self.copy_stream);
        // SAFETY: the core makes regions from live allocations, passes no more bytes than the
        // region has, and has checked that nothing else uses it now; the host's bytes live until
        // the copy is waited for.
        let code = unsafe { (self.api.copy_in)(to.address(), from, bytes.len(), stream) };
        let copied = self.check("cuMemcpyHtoDAsync", code);
        self.settle_copies().and(copied)
    }

    /// Copies to the host and waits for it.
    pub(crate) fn copy_out(&self, from: Region, bytes: &mut [u8]) -> Result<(), Error> {
        if bytes.is_empty() {
            return Ok(());
        }
        let _current = self.enter()?;
        let (to, len) = (bytes.as_mut_ptr().cast::<c_void>(), bytes.len());
        // SAFETY: as in `copy_in`; nothing writes the region now.
        let code = unsafe { (self.api.copy_out)(to, from.address(), len, self.copy_stream) };
        let copied = self.check("cuMemcpyDtoHAsync", code);
        self.settle_copies().and(copied)
    }

    /// Also after an error, so that no copy outlives the host's bytes.
    fn settle_copies(&self) -> Result<(), Error> {
        // SAFETY: the stream is this context's own.
        let code = unsafe { (self.api.stream_synchronize)(self.copy_stream) };
        self.check("cuStreamSynchronize", code)
    }
}
