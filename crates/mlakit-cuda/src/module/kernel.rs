//! A loaded kernel.

use std::ffi::{CString, c_int};
use std::sync::Arc;

use mlakit::Error;

use super::{Resources, Source};
use crate::driver::{Context, RawFunction, RawModule};

/// Attributes of `cuFuncGetAttribute`.
const SHARED_BYTES: c_int = 1;
const LOCAL_BYTES: c_int = 3;
const REGISTERS: c_int = 4;
/// To be set above 48 KiB of dynamic shared memory.
const MOST_DYNAMIC_SHARED_BYTES: c_int = 8;

/// A loaded kernel. Cloning it names the same; the code is unloaded with the last.
#[derive(Clone)]
pub struct Kernel(Arc<Loaded>);

pub(super) struct Loaded {
    /// Unloads the code.
    _module: Module,
    function: RawFunction,
    title: String,
    threads: u32,
    resources: Resources,
    blocks_per_multiprocessor: u32,
    /// Bytes of the entry's parameter, where the driver says it.
    param_bytes: Option<usize>,
}

// SAFETY: module and function may be used from any thread.
unsafe impl Send for Loaded {}
// SAFETY: as above; nothing of them changes.
unsafe impl Sync for Loaded {}

/// Code in a context, unloaded when it is dropped. The core drops it when no launch of it runs.
struct Module {
    context: Arc<Context>,
    raw: RawModule,
}

impl Drop for Module {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter_lost() {
            // SAFETY: `load` made it, and it is unloaded once.
            unsafe { (self.context.api.module_unload)(self.raw) };
        }
    }
}

impl Kernel {
    /// Loads code (a cubin, or PTX text that ends with 0), finds the entry and reads its resources.
    ///
    /// # Errors
    /// Code that the driver does not take, and a kernel that has local memory.
    pub(crate) fn load(
        context: &Arc<Context>,
        source: &Source,
        code: &[u8],
    ) -> Result<Self, Error> {
        let _current = context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the context is current, `code` is a whole image (a cubin's length is in it, a
        // text ends with 0), and the pointer is to a live handle.
        let loaded = unsafe { (context.api.module_load)(&mut raw, code.as_ptr().cast()) };
        context.check("cuModuleLoadData", loaded)?;
        let module = Module { context: context.clone(), raw };
        let function = module.function(source)?;
        let resources = module.resources(function, source)?;
        if resources.local_bytes > 0 {
            return Err(Error::Device {
                call: "load a kernel",
                message: format!(
                    "{} has {} bytes of local memory a thread: such kernels are refused",
                    source.title(),
                    resources.local_bytes
                ),
            });
        }
        let blocks_per_multiprocessor = module.occupancy(function, source)?;
        Ok(Self(Arc::new(Loaded {
            param_bytes: module.param_bytes(function),
            _module: module,
            function,
            title: source.title(),
            threads: source.threads,
            resources,
            blocks_per_multiprocessor,
        })))
    }

    /// What it takes of a multiprocessor.
    pub(crate) fn resources(&self) -> Resources {
        self.0.resources
    }

    /// Blocks that run on one multiprocessor side by side.
    pub(crate) fn blocks_per_multiprocessor(&self) -> u32 {
        self.0.blocks_per_multiprocessor
    }

    /// Entry and macros.
    pub(crate) fn title(&self) -> &str {
        &self.0.title
    }

    pub(crate) fn threads(&self) -> u32 {
        self.0.threads
    }

    pub(crate) fn dynamic_shared_bytes(&self) -> u32 {
        self.0.resources.dynamic_shared_bytes
    }

    pub(crate) fn function(&self) -> RawFunction {
        self.0.function
    }

    /// That a launch's parameter has the size of the entry's.
    pub(crate) fn expect_params(&self, given: usize) -> Result<(), Error> {
        match self.0.param_bytes {
            Some(needed) if needed != given => Err(Error::Device {
                call: "launch",
                message: format!(
                    "{} takes a parameter of {needed} bytes, given are {given}",
                    self.0.title
                ),
            }),
            _ => Ok(()),
        }
    }

    pub(super) fn downgrade(&self) -> std::sync::Weak<Loaded> {
        Arc::downgrade(&self.0)
    }

    pub(super) fn upgrade(loaded: &std::sync::Weak<Loaded>) -> Option<Self> {
        loaded.upgrade().map(Self)
    }
}

impl Module {
    fn function(&self, source: &Source) -> Result<RawFunction, Error> {
        let name = CString::new(source.entry)
            .map_err(|_| Error::contract("entry", "a name", source.entry))?;
        let mut function = std::ptr::null_mut();
        let find = self.context.api.module_function;
        // SAFETY: the module is live, the name ends with 0, the pointer is to a live handle.
        let code = unsafe { find(&mut function, self.raw, name.as_ptr()) };
        self.context.check("cuModuleGetFunction", code)?;
        Ok(function)
    }

    fn resources(&self, function: RawFunction, source: &Source) -> Result<Resources, Error> {
        let read = |attribute| {
            let mut value = 0;
            let read = self.context.api.function_attribute;
            // SAFETY: the function is live, and the pointer is to a live integer.
            let code = unsafe { read(&mut value, attribute, function) };
            self.context.check("cuFuncGetAttribute", code)?;
            Ok::<u32, Error>(value.try_into().unwrap_or(0))
        };
        let dynamic = source.dynamic_shared_bytes;
        if dynamic > 48 << 10 {
            let set = self.context.api.function_set;
            // SAFETY: the function is live.
            let code = unsafe { set(function, MOST_DYNAMIC_SHARED_BYTES, dynamic as c_int) };
            self.context.check("cuFuncSetAttribute", code)?;
        }
        Ok(Resources {
            registers: read(REGISTERS)?,
            static_shared_bytes: read(SHARED_BYTES)?,
            dynamic_shared_bytes: dynamic,
            local_bytes: read(LOCAL_BYTES)?,
        })
    }

    fn occupancy(&self, function: RawFunction, source: &Source) -> Result<u32, Error> {
        let (mut blocks, dynamic) = (0, source.dynamic_shared_bytes as usize);
        let ask = self.context.api.occupancy;
        // SAFETY: the function is live, and the pointer is to a live integer.
        let code = unsafe { ask(&mut blocks, function, source.threads as c_int, dynamic) };
        self.context.check("cuOccupancyMaxActiveBlocksPerMultiprocessor", code)?;
        Ok(blocks.try_into().unwrap_or(0))
    }

    /// The bytes of the first parameter; nothing where the driver is older than the question.
    fn param_bytes(&self, function: RawFunction) -> Option<usize> {
        let (mut offset, mut bytes) = (0, 0);
        // SAFETY: the function is live, and both pointers are to live integers.
        let code = unsafe { (self.context.api.param_info?)(function, 0, &mut offset, &mut bytes) };
        (code == 0).then_some(bytes)
    }
}
