//! What a caller of the library does himself, with the driver: streams, events, memory, kernels of
//! his own. And a gate: a kernel that runs until the host opens it, so that "in flight" is no
//! matter of timing.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use cudarc::driver::sys;
use mlakit_cuda::{CallerStream, Cuda};

/// `mlakit_gate` runs until the word at `open` is not 0; `mlakit_add` adds 1 to each word of
/// `data`; `mlakit_differ` adds to `count` how many words of `a` and `b` differ; `mlakit_trap` stops
/// the context for good.
const TEXT: &str = "
.version 7.1
.target sm_80
.address_size 64
.visible .entry mlakit_gate(.param .u64 open)
{
    .reg .pred %closed;
    .reg .b32 %word;
    .reg .b64 %at;
    ld.param.u64 %at, [open];
AGAIN:
    ld.volatile.u32 %word, [%at];
    setp.eq.u32 %closed, %word, 0;
    nanosleep.u32 1000;
    @%closed bra AGAIN;
    ret;
}
.visible .entry mlakit_add(.param .u64 data)
{
    .reg .b32 %thread, %word;
    .reg .b64 %at, %offset;
    ld.param.u64 %at, [data];
    mov.u32 %thread, %tid.x;
    mul.wide.u32 %offset, %thread, 4;
    add.u64 %at, %at, %offset;
    ld.u32 %word, [%at];
    add.u32 %word, %word, 1;
    st.u32 [%at], %word;
    ret;
}
.visible .entry mlakit_differ(.param .u64 a, .param .u64 b, .param .u64 words, .param .u64 count)
{
    .reg .pred %end, %same;
    .reg .b32 %block, %threads, %thread, %blocks, %x, %y;
    .reg .b64 %a, %b, %words, %count, %i, %step, %offset, %at;
    ld.param.u64 %a, [a];
    ld.param.u64 %b, [b];
    ld.param.u64 %words, [words];
    ld.param.u64 %count, [count];
    mov.u32 %block, %ctaid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %thread, %tid.x;
    mov.u32 %blocks, %nctaid.x;
    mad.lo.u32 %thread, %block, %threads, %thread;
    mul.lo.u32 %blocks, %blocks, %threads;
    cvt.u64.u32 %i, %thread;
    cvt.u64.u32 %step, %blocks;
NEXT:
    setp.ge.u64 %end, %i, %words;
    @%end bra DONE;
    shl.b64 %offset, %i, 2;
    add.u64 %at, %a, %offset;
    ld.u32 %x, [%at];
    add.u64 %at, %b, %offset;
    ld.u32 %y, [%at];
    add.u64 %i, %i, %step;
    setp.eq.u32 %same, %x, %y;
    @%same bra NEXT;
    red.add.u32 [%count], 1;
    bra NEXT;
DONE:
    ret;
}
.visible .entry mlakit_trap()
{
    trap;
}
\0";

/// Fails the test with the driver's word for it.
#[track_caller]
pub fn ok(result: sys::CUresult) {
    assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
}

/// The primary context, current in this thread, with the kernels.
pub struct Driver {
    module: sys::CUmodule,
}

impl Driver {
    /// The device is open, so the driver works.
    pub fn new(_: &Cuda) -> Self {
        let (mut context, mut module) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the pointers are to live handles; the primary context is retained by the device
        // too.
        unsafe { ok(sys::cuDevicePrimaryCtxRetain(&mut context, 0)) };
        // SAFETY: the context was just retained.
        unsafe { ok(sys::cuCtxSetCurrent(context)) };
        // SAFETY: the text ends with 0.
        unsafe { ok(sys::cuModuleLoadData(&mut module, TEXT.as_ptr().cast())) };
        Self { module }
    }

    /// A stream of the caller's own.
    pub fn stream(&self) -> sys::CUstream {
        let mut stream = std::ptr::null_mut();
        // SAFETY: a context is current, and the pointer is to a live handle.
        unsafe { ok(sys::cuStreamCreate(&mut stream, 1)) };
        stream
    }

    /// Enqueues a kernel of one block.
    pub fn launch(&self, name: &str, stream: sys::CUstream, threads: u32, parameter: Option<u64>) {
        let name = std::ffi::CString::new(name).unwrap();
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is live, and the name ends with 0.
        unsafe { ok(sys::cuModuleGetFunction(&mut function, self.module, name.as_ptr())) };
        let mut parameter = parameter.unwrap_or(0);
        let mut parameters = [std::ptr::from_mut(&mut parameter).cast::<c_void>()];
        let none = std::ptr::null_mut();
        // SAFETY: the kernels take one address, or nothing, and the address is of live memory.
        let launched = unsafe {
            let at = parameters.as_mut_ptr();
            sys::cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, stream, at, none)
        };
        ok(launched);
    }

    /// How many of the words of two pieces of memory differ. Nothing else uses them meanwhile.
    pub fn differing(&self, a: u64, b: u64, words: usize) -> u32 {
        let count = self.memory(4);
        let mut function = std::ptr::null_mut();
        let name = c"mlakit_differ".as_ptr();
        // SAFETY: the module is live, and the name ends with 0.
        unsafe { ok(sys::cuModuleGetFunction(&mut function, self.module, name)) };
        let mut parameters = [a, b, words as u64, count];
        let mut at = parameters.each_mut().map(|p| std::ptr::from_mut(p).cast::<c_void>());
        let none = std::ptr::null_mut();
        // SAFETY: the kernel takes three addresses of live memory and a number.
        let launched = unsafe {
            sys::cuLaunchKernel(
                function,
                1024,
                1,
                1,
                256,
                1,
                1,
                0,
                none,
                at.as_mut_ptr(),
                none.cast(),
            )
        };
        ok(launched);
        let differing = self.read(count, 1)[0];
        // SAFETY: `memory` allocated it, and it is freed once.
        unsafe { ok(sys::cuMemFree_v2(count)) };
        differing
    }

    /// Copies words on the device. Nothing else uses them meanwhile.
    pub fn copy(&self, to: u64, from: u64, words: usize) {
        // SAFETY: both are live memory of as many words.
        unsafe { ok(sys::cuMemcpyDtoD_v2(to, from, 4 * words)) };
        self.settle();
    }

    /// Fills memory with one word. Nothing else uses it meanwhile.
    pub fn fill(&self, at: u64, word: u32, words: usize) {
        // SAFETY: it is live memory of as many words.
        unsafe { ok(sys::cuMemsetD32_v2(at, word, words)) };
        self.settle();
    }

    /// Waits for the legacy default stream, on which copies and fills run.
    fn settle(&self) {
        // SAFETY: a context is current.
        unsafe { ok(sys::cuStreamSynchronize(std::ptr::null_mut())) };
    }

    /// Makes the second stream wait for all that the first was given.
    pub fn order(&self, first: sys::CUstream, second: sys::CUstream) {
        let mut event = std::ptr::null_mut();
        // SAFETY: a context is current, and the pointer is to a live handle.
        unsafe { ok(sys::cuEventCreate(&mut event, 2)) };
        // SAFETY: both handles are live.
        unsafe { ok(sys::cuEventRecord(event, first)) };
        // SAFETY: both handles are live.
        unsafe { ok(sys::cuStreamWaitEvent(second, event, 0)) };
        // SAFETY: it is destroyed once; the driver keeps what is still to happen.
        unsafe { ok(sys::cuEventDestroy_v2(event)) };
    }

    /// Memory of the caller's own, zeroed.
    pub fn memory(&self, bytes: usize) -> u64 {
        let mut address = 0;
        // SAFETY: a context is current, and the pointer is to a live integer.
        unsafe { ok(sys::cuMemAlloc_v2(&mut address, bytes)) };
        // SAFETY: the memory was just allocated.
        unsafe { ok(sys::cuMemsetD8_v2(address, 0, bytes)) };
        // SAFETY: a context is current.
        unsafe { ok(sys::cuCtxSynchronize()) };
        address
    }

    /// The words at an address.
    pub fn read(&self, address: u64, words: usize) -> Vec<u32> {
        let mut into = vec![0u32; words];
        let (to, bytes) = (into.as_mut_ptr().cast(), 4 * words);
        // SAFETY: the memory is live and has these words, and nothing is in flight.
        unsafe { ok(sys::cuMemcpyDtoH_v2(to, address, bytes)) };
        into
    }
}

/// The handle of a lent stream.
pub fn raw(caller: &CallerStream) -> sys::CUstream {
    caller.raw().cast()
}

/// A kernel that runs on a stream until it is opened; dropping it opens it.
pub struct Gate {
    word: *mut AtomicU32,
}

// SAFETY: the word is an atomic of pinned memory.
unsafe impl Sync for Gate {}

impl Gate {
    /// Closes a stream.
    pub fn new(driver: &Driver, stream: sys::CUstream) -> Self {
        let mut word = std::ptr::null_mut();
        // SAFETY: a context is current, and the pointer is to a live pointer.
        unsafe { ok(sys::cuMemHostAlloc(&mut word, 4, 2)) };
        let word = word.cast::<AtomicU32>();
        // SAFETY: the memory was just obtained.
        unsafe { word.write(AtomicU32::new(0)) };
        let mut address = 0;
        // SAFETY: the memory was mapped, and the pointer is to a live integer.
        unsafe { ok(sys::cuMemHostGetDevicePointer_v2(&mut address, word.cast(), 0)) };
        driver.launch("mlakit_gate", stream, 1, Some(address));
        Self { word }
    }

    /// Lets the stream go on.
    pub fn open(&self) {
        // SAFETY: the word is never freed: the kernel may still read it.
        unsafe { (*self.word).store(1, SeqCst) };
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
    }
}

/// Memory of the caller's own as the owner of foreign memory: freed when the library lets go of it.
pub struct Owned {
    pub address: u64,
    pub freed: std::sync::Arc<AtomicU32>,
}

impl Drop for Owned {
    fn drop(&mut self) {
        self.freed.fetch_add(1, SeqCst);
        let mut context = std::ptr::null_mut();
        // SAFETY: the pointer is to a live handle.
        unsafe { ok(sys::cuDevicePrimaryCtxRetain(&mut context, 0 as c_int)) };
        // SAFETY: the context was just retained.
        unsafe { ok(sys::cuCtxSetCurrent(context)) };
        // SAFETY: `Driver::memory` allocated it, and it is freed once.
        unsafe { ok(sys::cuMemFree_v2(self.address)) };
    }
}
