//! The caller's streams, and what is enqueued on them.

mod line;
mod lines;

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys;
use mlakit::Error;

pub(crate) use lines::Lines;

use crate::driver::{Context, RawStream};
use crate::module::Kernel;
use line::Line;

/// A stream of the device's own, destroyed when nothing can wait for it any more.
pub(crate) struct OwnStream {
    context: Arc<Context>,
    raw: RawStream,
}

// SAFETY: a stream may be used from any thread.
unsafe impl Send for OwnStream {}
// SAFETY: as above; the driver locks what it must.
unsafe impl Sync for OwnStream {}

impl Drop for OwnStream {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter_lost() {
            // SAFETY: `CallerStream::own` created it, and it is destroyed once; work in flight goes
            // on.
            unsafe { (self.context.api.stream_destroy)(self.raw) };
        }
    }
}

/// What the caller owns and lends: a stream of his, or one of the device's own.
pub struct CallerStream {
    context: Arc<Context>,
    raw: RawStream,
    own: Option<Arc<OwnStream>>,
    key: u64,
}

// SAFETY: a stream may be used from any thread.
unsafe impl Send for CallerStream {}
// SAFETY: as above; the driver locks what it must.
unsafe impl Sync for CallerStream {}

/// The default stream that is another one in each thread.
const PER_THREAD: usize = 2;

impl CallerStream {
    pub(crate) fn own(context: &Arc<Context>) -> Result<Self, Error> {
        let raw = context.new_stream()?;
        let own = Arc::new(OwnStream { context: context.clone(), raw });
        let key = key(context, raw)?;
        Ok(Self { context: context.clone(), raw, own: Some(own), key })
    }

    /// # Safety
    /// `raw` is a stream of the driver (null: the legacy default stream) that stays valid until the
    /// result is dropped and everything enqueued through it is done. While it is attached, nobody
    /// lends it to another device of this process, captures with it, or is capturing with it.
    pub(crate) unsafe fn borrowed(context: &Arc<Context>, raw: RawStream) -> Result<Self, Error> {
        if raw.addr() == PER_THREAD {
            let needed = "a stream, or null for the legacy default stream";
            return Err(Error::contract("stream", needed, "the default stream of each thread"));
        }
        let _current = context.enter()?;
        let mut of = std::ptr::null_mut();
        // SAFETY: the caller's stream is valid, and the pointer is to a live handle.
        let code = unsafe { (context.api.stream_context)(raw, &mut of) };
        context.check("cuStreamGetCtx", code)?;
        if of != context.raw() {
            return Err(Error::Foreign { what: "stream" });
        }
        let key = key(context, raw)?;
        Ok(Self { context: context.clone(), raw, own: None, key })
    }

    pub(crate) fn key(&self) -> u64 {
        self.key
    }

    /// The driver's handle.
    pub fn raw(&self) -> *mut c_void {
        self.raw.cast()
    }

    /// Waits until the stream is empty.
    pub fn synchronize(&self) -> Result<(), Error> {
        let _current = self.context.enter()?;
        // SAFETY: the stream is live.
        let code = unsafe { (self.context.api.stream_synchronize)(self.raw) };
        self.context.check("cuStreamSynchronize", code)
    }

    pub(crate) fn is_of(&self, context: &Arc<Context>) -> bool {
        Arc::ptr_eq(&self.context, context)
    }

    pub(crate) fn is_capturing(&self) -> Result<bool, Error> {
        let _current = self.context.enter()?;
        let mut state = 0;
        // SAFETY: the stream is live, and the pointer is to a live integer.
        let code = unsafe { (self.context.api.stream_capturing)(self.raw, &mut state) };
        self.context.check("cuStreamIsCapturing", code)?;
        Ok(state != 0)
    }
}

/// The driver's number of a stream, which it never gives twice.
fn key(context: &Arc<Context>, raw: RawStream) -> Result<u64, Error> {
    let _current = context.enter()?;
    let mut id = 0;
    // SAFETY: the stream is live, and the pointer is to a live integer.
    let code = unsafe { (context.api.stream_id)(raw, &mut id) };
    context.check("cuStreamGetId", code)?;
    Ok(id)
}

/// A lent stream.
pub struct Queue {
    pub(crate) context: Arc<Context>,
    pub(crate) raw: RawStream,
    line: Arc<Line>,
}

// SAFETY: a stream may be used from any thread.
unsafe impl Send for Queue {}

/// Of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grid {
    /// Blocks in x, y and z: at most 2^31 - 1, 65,535 and 65,535. A grid with none launches
    /// nothing.
    pub(crate) blocks: [u32; 3],
    /// Blocks of a cluster, in x; 1: none.
    pub(crate) cluster: u32,
    /// All blocks run at once, so that they may wait for each other.
    pub(crate) cooperative: bool,
    /// It may start before its predecessor has ended; the kernel waits with `griddepcontrol.wait`.
    pub(crate) programmatic: bool,
}

impl Grid {
    /// Blocks in x, nothing else.
    pub(crate) fn of(blocks: u32) -> Self {
        Self { blocks: [blocks, 1, 1], cluster: 1, cooperative: false, programmatic: false }
    }
}

/// Blocks in y and z.
const MOST_BLOCKS: u32 = 65_535;

impl Queue {
    /// Enqueues a kernel, or records it while the stream is capturing.
    ///
    /// # Errors
    /// Parameters that are not as large as the kernel's, a grid that the device does not take, and
    /// what the driver says. Nothing is enqueued then.
    ///
    /// # Safety
    /// `params` is the entry's one by-value parameter, laid out as the kernel has it, and every
    /// address in it is of a region of this launch.
    pub(crate) unsafe fn launch<P: Copy>(
        &mut self,
        kernel: &Kernel,
        grid: Grid,
        params: &P,
    ) -> Result<(), Error> {
        let [x, y, z] = grid.blocks;
        if x == 0 || y == 0 || z == 0 {
            return Ok(());
        }
        if x > i32::MAX as u32 || y > MOST_BLOCKS || z > MOST_BLOCKS {
            let needed = "at most 2147483647 x 65535 x 65535 blocks";
            return Err(Error::contract("grid", needed, format!("{x} x {y} x {z}")));
        }
        kernel.expect_params(size_of::<P>())?;
        let _current = self.context.enter()?;
        let mut attributes = Attributes::of(grid);
        let config = attributes.config(self.raw, grid.blocks, kernel);
        let mut params = [std::ptr::from_ref(params).cast_mut().cast::<c_void>()];
        let none = std::ptr::null_mut();
        // SAFETY: configuration and attributes live until the call returns, the function is loaded
        // and of this context, and the driver copies as many bytes of the parameter as the kernel
        // declares, which `expect_params` compared.
        let code = unsafe {
            (self.context.api.launch)(&config, kernel.function(), params.as_mut_ptr(), none)
        };
        self.context.check("cuLaunchKernelEx", code)
    }

    /// Waits until the stream is empty.
    pub(crate) fn synchronize(&self) -> Result<(), Error> {
        let _current = self.context.enter()?;
        // SAFETY: the stream is live while it is lent.
        let code = unsafe { (self.context.api.stream_synchronize)(self.raw) };
        self.context.check("cuStreamSynchronize", code)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.line.close();
    }
}

/// The attributes of a launch, in place.
struct Attributes {
    list: [sys::CUlaunchAttribute; 3],
    len: usize,
}

impl Attributes {
    fn of(grid: Grid) -> Self {
        use sys::CUlaunchAttributeID as Id;
        let nothing = sys::CUlaunchAttribute {
            id: Id::CU_LAUNCH_ATTRIBUTE_IGNORE,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { pad: [0; 64] },
        };
        let mut attributes = Self { list: [nothing; 3], len: 0 };
        if grid.cluster > 1 {
            let dim =
                sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: grid.cluster, y: 1, z: 1 };
            let value = sys::CUlaunchAttributeValue { clusterDim: dim };
            attributes.push(Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value);
        }
        if grid.cooperative {
            let value = sys::CUlaunchAttributeValue { cooperative: 1 };
            attributes.push(Id::CU_LAUNCH_ATTRIBUTE_COOPERATIVE, value);
        }
        if grid.programmatic {
            let value = sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 };
            attributes.push(Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, value);
        }
        attributes
    }

    fn push(&mut self, id: sys::CUlaunchAttributeID, value: sys::CUlaunchAttributeValue) {
        self.list[self.len] = sys::CUlaunchAttribute { id, pad: [0; 4], value };
        self.len += 1;
    }

    /// Valid while `self` stays where it is.
    fn config(
        &mut self,
        stream: RawStream,
        [x, y, z]: [u32; 3],
        kernel: &Kernel,
    ) -> sys::CUlaunchConfig {
        sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: kernel.threads(),
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: kernel.dynamic_shared_bytes(),
            hStream: stream,
            attrs: self.list.as_mut_ptr(),
            numAttrs: self.len as u32,
        }
    }
}
