//! The driver's functions, looked up once and all together.
//!
//! The bindings of `cudarc` look a symbol up at its first use and panic if it is missing. Here
//! every function that the device calls is found before the first call, under a signature of this
//! file: a missing one is [`Unavailable::MissingSymbol`], and a result is a plain number, also one
//! that the bindings' enumeration lacks.

mod context;
mod failure;

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys;

pub(crate) use context::Context;
pub(crate) use failure::Code;

use crate::probe::{self, Unavailable};

/// Raw handles, as the driver defines them.
pub(crate) type RawContext = sys::CUcontext;
pub(crate) type RawStream = sys::CUstream;
pub(crate) type RawEvent = sys::CUevent;
pub(crate) type RawModule = sys::CUmodule;
pub(crate) type RawFunction = sys::CUfunction;
pub(crate) type RawGraph = sys::CUgraph;
pub(crate) type RawExecutable = sys::CUgraphExec;
pub(crate) type RawPool = sys::CUmemoryPool;
pub(crate) type RawNode = sys::CUgraphNode;

macro_rules! driver {
    ($($name:ident = $symbol:literal ($($argument:ty),*);)*) => {
        /// The functions. The library stays loaded until the program ends, so they stay valid.
        pub(crate) struct Api {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) -> u32,)*
            /// Bytes of a kernel's parameter; drivers before CUDA 12.4 do not have it.
            pub(crate) param_info: Option<ParamInfo>,
        }

        impl Api {
            fn load() -> Result<Self, Unavailable> {
                Ok(Self {
                    $($name: probe::symbol($symbol)?,)*
                    param_info: probe::symbol("cuFuncGetParamInfo").ok(),
                })
            }
        }
    };
}

/// `CUtensorMap`: opaque, for the copy engine.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct TensorMap(pub(crate) [u8; 128]);

type ParamInfo = unsafe extern "C" fn(RawFunction, usize, *mut usize, *mut usize) -> u32;

driver! {
    error_name = "cuGetErrorName"(u32, *mut *const c_char);
    error_text = "cuGetErrorString"(u32, *mut *const c_char);
    device_get = "cuDeviceGet"(*mut c_int, c_int);
    device_name = "cuDeviceGetName"(*mut c_char, c_int, c_int);
    device_attribute = "cuDeviceGetAttribute"(*mut c_int, c_int, c_int);
    device_memory = "cuDeviceTotalMem_v2"(*mut usize, c_int);
    primary_retain = "cuDevicePrimaryCtxRetain"(*mut RawContext, c_int);
    primary_release = "cuDevicePrimaryCtxRelease_v2"(c_int);
    context_current = "cuCtxGetCurrent"(*mut RawContext);
    context_push = "cuCtxPushCurrent_v2"(RawContext);
    context_pop = "cuCtxPopCurrent_v2"(*mut RawContext);
    context_synchronize = "cuCtxSynchronize"();
    memory_info = "cuMemGetInfo_v2"(*mut usize, *mut usize);
    pool_create = "cuMemPoolCreate"(*mut RawPool, *const sys::CUmemPoolProps);
    pool_destroy = "cuMemPoolDestroy"(RawPool);
    pool_trim = "cuMemPoolTrimTo"(RawPool, usize);
    pool_obtain = "cuMemAllocFromPoolAsync"(*mut u64, usize, RawPool, RawStream);
    memory_free = "cuMemFreeAsync"(u64, RawStream);
    copy_in = "cuMemcpyHtoDAsync_v2"(u64, *const c_void, usize, RawStream);
    copy_out = "cuMemcpyDtoHAsync_v2"(*mut c_void, u64, usize, RawStream);
    stream_create = "cuStreamCreate"(*mut RawStream, c_uint);
    stream_destroy = "cuStreamDestroy_v2"(RawStream);
    stream_synchronize = "cuStreamSynchronize"(RawStream);
    stream_id = "cuStreamGetId"(RawStream, *mut c_ulonglong);
    stream_context = "cuStreamGetCtx"(RawStream, *mut RawContext);
    stream_capturing = "cuStreamIsCapturing"(RawStream, *mut u32);
    stream_wait = "cuStreamWaitEvent"(RawStream, RawEvent, c_uint);
    capture_begin = "cuStreamBeginCapture_v2"(RawStream, u32);
    capture_end = "cuStreamEndCapture"(RawStream, *mut RawGraph);
    event_create = "cuEventCreate"(*mut RawEvent, c_uint);
    event_destroy = "cuEventDestroy_v2"(RawEvent);
    event_record = "cuEventRecord"(RawEvent, RawStream);
    event_query = "cuEventQuery"(RawEvent);
    module_load = "cuModuleLoadData"(*mut RawModule, *const c_void);
    module_unload = "cuModuleUnload"(RawModule);
    module_function = "cuModuleGetFunction"(*mut RawFunction, RawModule, *const c_char);
    function_attribute = "cuFuncGetAttribute"(*mut c_int, c_int, RawFunction);
    function_set = "cuFuncSetAttribute"(RawFunction, c_int, c_int);
    occupancy = "cuOccupancyMaxActiveBlocksPerMultiprocessor"(
        *mut c_int, RawFunction, c_int, usize
    );
    launch = "cuLaunchKernelEx"(
        *const sys::CUlaunchConfig, RawFunction, *mut *mut c_void, *mut *mut c_void
    );
    tensor_map = "cuTensorMapEncodeTiled"(
        *mut TensorMap, u32, u32, *mut c_void, *const u64, *const u64, *const u32, *const u32, u32,
        u32, u32, u32
    );
    graph_nodes = "cuGraphGetNodes"(RawGraph, *mut RawNode, *mut usize);
    graph_node_type = "cuGraphNodeGetType"(RawNode, *mut u32);
    graph_destroy = "cuGraphDestroy"(RawGraph);
    graph_instantiate = "cuGraphInstantiateWithFlags"(*mut RawExecutable, RawGraph, c_ulonglong);
    graph_upload = "cuGraphUpload"(RawExecutable, RawStream);
    graph_launch = "cuGraphLaunch"(RawExecutable, RawStream);
    executable_destroy = "cuGraphExecDestroy"(RawExecutable);
}

/// The driver of this machine, started.
pub(crate) fn api() -> Result<&'static Api, Unavailable> {
    static API: OnceLock<Result<Api, Unavailable>> = OnceLock::new();
    // The probe checks the library, the version and `cuInit` first.
    API.get_or_init(|| probe::probe().and_then(|_| Api::load())).as_ref().map_err(Clone::clone)
}
