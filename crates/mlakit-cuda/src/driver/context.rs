//! The context of one device: what all its memory, streams and code live in.

use std::ffi::{c_int, c_uint};
use std::marker::PhantomData;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use cudarc::driver::sys;
use mlakit::Error;

use super::{Api, Code, RawContext, RawPool, RawStream, api};
use crate::facts::{self, Facts};
use crate::probe::Unavailable;

/// A stream that does not wait for the legacy default stream, nor that for it.
pub(crate) const NON_BLOCKING: c_uint = 1;

/// The primary context of a device, retained, with the pool that memory comes from and two streams
/// that only this crate knows.
pub(crate) struct Context {
    pub(crate) api: &'static Api,
    raw: RawContext,
    device: c_int,
    pub(crate) pool: RawPool,
    /// Allocates and frees; holds nothing else, so waiting for it is short.
    pub(crate) memory_stream: RawStream,
    /// Carries host copies.
    pub(crate) copy_stream: RawStream,
    lost: OnceLock<String>,
    /// The allocation that fails, counted down to 1; 0 is none. For tests.
    failing_allocation: AtomicUsize,
}

// SAFETY: the handles are the driver's, which may be used from any thread.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks what it must.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the primary context of a device.
    pub(crate) fn new(ordinal: u32) -> Result<(Self, Facts), Error> {
        let api = api()?;
        let device = device(api, ordinal)?;
        let facts = Facts::of_device(api, device)?;
        if facts::attribute_of(api, device, facts::MEMORY_POOLS)? == 0 {
            return Err(Unavailable::NoMemoryPools { device: facts.name }.into());
        }
        let mut raw = std::ptr::null_mut();
        // SAFETY: the device came from the driver, and the pointer is to a live handle.
        let code = unsafe { (api.primary_retain)(&mut raw, device) };
        let mut context = Self {
            api,
            raw,
            device,
            pool: std::ptr::null_mut(),
            memory_stream: std::ptr::null_mut(),
            copy_stream: std::ptr::null_mut(),
            lost: OnceLock::new(),
            failing_allocation: AtomicUsize::new(0),
        };
        if code != 0 {
            context.raw = std::ptr::null_mut(); // nothing to give back
            context.check("cuDevicePrimaryCtxRetain", code)?;
        }
        // One by one: what is there is given back if the next fails.
        context.pool = context.new_pool()?;
        context.memory_stream = context.new_stream()?;
        context.copy_stream = context.new_stream()?;
        Ok((context, facts))
    }

    fn new_pool(&self) -> Result<RawPool, Error> {
        let _current = self.enter()?;
        let location = sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: self.device,
        };
        let properties = sys::CUmemPoolProps {
            allocType: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            handleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            location,
            win32SecurityAttributes: std::ptr::null_mut(),
            maxSize: 0, // as much as there is
            usage: 0,
            reserved: [0; 54],
        };
        let mut pool = std::ptr::null_mut();
        // SAFETY: the properties are of the driver's layout; both pointers are to live values.
        let code = unsafe { (self.api.pool_create)(&mut pool, &properties) };
        self.check("cuMemPoolCreate", code)?;
        Ok(pool)
    }

    /// A stream that does not block others.
    pub(crate) fn new_stream(&self) -> Result<RawStream, Error> {
        let _current = self.enter()?;
        let mut stream = std::ptr::null_mut();
        // SAFETY: this context is current, and the pointer is to a live handle.
        let code = unsafe { (self.api.stream_create)(&mut stream, NON_BLOCKING) };
        self.check("cuStreamCreate", code)?;
        Ok(stream)
    }

    /// Makes this context current for the calls of this thread while the result lives.
    ///
    /// # Errors
    /// `Lost` once the context is lost.
    pub(crate) fn enter(&self) -> Result<Current<'_>, Error> {
        match self.lost.get() {
            Some(because) => Err(Error::Lost { because: because.clone() }),
            None => self.enter_lost(),
        }
    }

    /// The same for what can be done in a lost context as well: giving things back.
    pub(crate) fn enter_lost(&self) -> Result<Current<'_>, Error> {
        let mut now = std::ptr::null_mut();
        // SAFETY: the pointer is to a live handle.
        let code = unsafe { (self.api.context_current)(&mut now) };
        if code == 0 && now == self.raw {
            return Ok(Current { context: self, pushed: false, thread: PhantomData });
        }
        // SAFETY: the context is retained while this value lives.
        let code = unsafe { (self.api.context_push)(self.raw) };
        self.check("cuCtxPushCurrent", code)?;
        Ok(Current { context: self, pushed: true, thread: PhantomData })
    }

    /// A result of the driver as ours; a sticky one is remembered.
    pub(crate) fn check(&self, call: &'static str, code: u32) -> Result<(), Error> {
        let failed = Code(code);
        if code == 0 {
            return Ok(());
        }
        let message = failed.text(self.api);
        if failed.is_sticky() {
            let because = self.lost.get_or_init(|| format!("{call}: {message}"));
            return Err(Error::Lost { because: because.clone() });
        }
        Err(Error::Device { call, message })
    }

    /// Whether a sticky error was seen.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.get().is_some()
    }

    pub(crate) fn raw(&self) -> RawContext {
        self.raw
    }

    /// Free and all bytes of the device, as its driver counts.
    pub(crate) fn memory_info(&self) -> Result<(usize, usize), Error> {
        let _current = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: this context is current, and both pointers are to live integers.
        let code = unsafe { (self.api.memory_info)(&mut free, &mut total) };
        self.check("cuMemGetInfo", code)?;
        Ok((free, total))
    }

    /// The n-th allocation from now on, from 1, finds no memory.
    pub(crate) fn fail_allocation(&self, nth: usize) {
        self.failing_allocation.store(nth, SeqCst);
    }

    /// Whether this allocation is the one that was told to fail.
    pub(crate) fn allocation_fails(&self) -> bool {
        let step = |n: usize| n.checked_sub(1);
        self.failing_allocation.fetch_update(SeqCst, SeqCst, step) == Ok(1)
    }
}

/// The context is current while this lives; then what was current before is again.
pub(crate) struct Current<'c> {
    context: &'c Context,
    pushed: bool,
    /// What is current belongs to a thread.
    thread: PhantomData<*const ()>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: this value pushed the context on the stack of this thread, which it cannot
            // leave.
            unsafe { (self.context.api.context_pop)(&mut popped) };
        }
    }
}

/// Nothing of the device is left: everything that lives in it holds it.
impl Drop for Context {
    fn drop(&mut self) {
        if self.raw.is_null() {
            return;
        }
        if let Ok(_current) = self.enter_lost() {
            for stream in [self.memory_stream, self.copy_stream] {
                if !stream.is_null() {
                    // SAFETY: the stream is this value's own, and nothing uses it any more.
                    unsafe { (self.api.stream_destroy)(stream) };
                }
            }
            if !self.pool.is_null() {
                // SAFETY: the pool is this value's own, and every allocation of it has been freed,
                // since each holds this context.
                unsafe { (self.api.pool_destroy)(self.pool) };
            }
        }
        // SAFETY: retained once by `new`.
        unsafe { (self.api.primary_release)(self.device) };
    }
}

fn device(api: &Api, ordinal: u32) -> Result<c_int, Unavailable> {
    let mut device = 0;
    let ordinal = c_int::try_from(ordinal).map_err(|_| Unavailable::NoDevice)?;
    // SAFETY: the signature is the driver's, and the pointer is to a live integer.
    match unsafe { (api.device_get)(&mut device, ordinal) } {
        0 => Ok(device),
        code => {
            let name = Code(code).text(api);
            Err(Unavailable::Failed { call: "cuDeviceGet", code, name })
        }
    }
}
