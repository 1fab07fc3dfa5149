//! What the CUDA driver of this machine offers, found without linking it and without a panic.
//!
//! The bindings call through symbols that are looked up at their first use and panic if one is
//! missing. So every symbol is looked up here first, under a signature of this file: a result is
//! then a plain number, also one that the bindings' enumeration lacks.

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::fmt;

use cudarc::driver::sys;

/// The oldest driver that is accepted, as the driver counts: 1000 x major + 10 x minor. CUDA 12.0
/// is the first with the tensor maps that the kernels load tiles through
/// (`cuTensorMapEncodeTiled`).
pub const OLDEST_DRIVER: DriverVersion = DriverVersion(12_000);

/// A version of the driver's interface, as the driver counts: 1000 x major + 10 x minor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DriverVersion(pub i32);

impl fmt::Display for DriverVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

/// A driver that works, and at least one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaFound {
    /// The newest CUDA that the driver runs.
    pub driver: DriverVersion,
    /// The devices, by ordinal.
    pub devices: Vec<CudaDevice>,
}

/// One device, as the driver describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaDevice {
    /// The driver's name for it.
    pub name: String,
    /// Compute capability, major and minor: 9.0 is Hopper.
    pub compute_capability: (i32, i32),
    /// Bytes of its memory.
    pub memory_bytes: usize,
    /// Streaming multiprocessors.
    pub multiprocessors: i32,
}

/// Why CUDA cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unavailable {
    /// No library of the driver's name can be loaded.
    #[error("no CUDA driver is installed: {searched} cannot be loaded")]
    NoLibrary {
        /// The names that were tried.
        searched: String,
    },
    /// A library was loaded that is not a driver, or one that lacks a function.
    #[error("the CUDA driver has no function {symbol}")]
    MissingSymbol {
        /// The function.
        symbol: &'static str,
    },
    /// The driver is older than [`OLDEST_DRIVER`].
    #[error("the driver runs CUDA {given}, needed is {OLDEST_DRIVER} or newer")]
    DriverTooOld {
        /// What it runs.
        given: DriverVersion,
    },
    /// The driver works and sees no device.
    #[error("the CUDA driver finds no device")]
    NoDevice,
    /// The device gives memory in another way than this crate obtains it.
    #[error("{device} has no stream-ordered memory pools")]
    NoMemoryPools {
        /// Its name.
        device: String,
    },
    /// A call failed.
    #[error("{call} failed with code {code} ({name})")]
    Failed {
        /// The function.
        call: &'static str,
        /// The driver's result.
        code: u32,
        /// The driver's name for it.
        name: String,
    },
}

impl From<Unavailable> for mlakit::Error {
    fn from(reason: Unavailable) -> Self {
        let instead = match reason {
            Unavailable::NoLibrary { .. } | Unavailable::MissingSymbol { .. } => {
                "install NVIDIA's driver, or use the CPU"
            }
            Unavailable::DriverTooOld { .. } => "install a newer driver, or use the CPU",
            _ => "use the CPU",
        };
        let (what, because) = ("the CUDA device", reason.to_string());
        Self::Unavailable { what, because, instead: instead.into() }
    }
}

/// What of the driver is not a success.
const NO_DEVICE: u32 = 100;

/// Attributes of `cuDeviceGetAttribute`.
const MULTIPROCESSOR_COUNT: c_int = 16;
const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
const COMPUTE_CAPABILITY_MINOR: c_int = 76;

/// Loads the driver, starts it, and lists the devices. Creates no context.
///
/// # Errors
/// [`Unavailable`] for the first thing that is missing.
pub fn probe() -> Result<CudaFound, Unavailable> {
    let driver = Driver::load()?;
    let version = driver.version()?;
    if version < OLDEST_DRIVER {
        return Err(Unavailable::DriverTooOld { given: version });
    }
    driver.start()?;
    let devices: Vec<CudaDevice> =
        (0..driver.count()?).map(|ordinal| driver.device(ordinal)).collect::<Result<_, _>>()?;
    if devices.is_empty() {
        return Err(Unavailable::NoDevice);
    }
    Ok(CudaFound { driver: version, devices })
}

type Init = unsafe extern "C" fn(c_uint) -> u32;
type ToInt = unsafe extern "C" fn(*mut c_int) -> u32;
type DeviceGet = unsafe extern "C" fn(*mut c_int, c_int) -> u32;
type DeviceName = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> u32;
type DeviceAttribute = unsafe extern "C" fn(*mut c_int, c_int, c_int) -> u32;
type DeviceMemory = unsafe extern "C" fn(*mut usize, c_int) -> u32;
type ErrorName = unsafe extern "C" fn(u32, *mut *const c_char) -> u32;

/// The functions that the probe needs. The library stays loaded until the program ends, so they
/// stay valid.
struct Driver {
    init: Init,
    version: ToInt,
    count: ToInt,
    device: DeviceGet,
    name: DeviceName,
    attribute: DeviceAttribute,
    memory: DeviceMemory,
    error_name: ErrorName,
}

impl Driver {
    fn load() -> Result<Self, Unavailable> {
        // SAFETY: loading the vendor's driver runs its constructors, which is what asking for CUDA
        // means; the check loads and unloads it and touches nothing of this program.
        if !unsafe { sys::is_culib_present() } {
            return Err(Unavailable::NoLibrary { searched: "libcuda.so or libcuda.so.1".into() });
        }
        Ok(Self {
            init: symbol("cuInit")?,
            version: symbol("cuDriverGetVersion")?,
            count: symbol("cuDeviceGetCount")?,
            device: symbol("cuDeviceGet")?,
            name: symbol("cuDeviceGetName")?,
            attribute: symbol("cuDeviceGetAttribute")?,
            memory: symbol("cuDeviceTotalMem_v2")?,
            error_name: symbol("cuGetErrorName")?,
        })
    }

    fn version(&self) -> Result<DriverVersion, Unavailable> {
        let mut version = 0;
        // SAFETY: the signature is the driver's, and the pointer is to a live integer.
        let code = unsafe { (self.version)(&mut version) };
        self.check("cuDriverGetVersion", code).map(|()| DriverVersion(version))
    }

    fn start(&self) -> Result<(), Unavailable> {
        // SAFETY: the signature is the driver's; its only argument must be 0.
        let code = unsafe { (self.init)(0) };
        self.check("cuInit", code)
    }

    fn count(&self) -> Result<c_int, Unavailable> {
        let mut count = 0;
        // SAFETY: the signature is the driver's, and the pointer is to a live integer.
        let code = unsafe { (self.count)(&mut count) };
        self.check("cuDeviceGetCount", code).map(|()| count)
    }

    fn device(&self, ordinal: c_int) -> Result<CudaDevice, Unavailable> {
        let mut device = 0;
        // SAFETY: the signature is the driver's, and the pointer is to a live integer.
        let code = unsafe { (self.device)(&mut device, ordinal) };
        self.check("cuDeviceGet", code)?;
        let major = self.attribute(COMPUTE_CAPABILITY_MAJOR, device)?;
        let minor = self.attribute(COMPUTE_CAPABILITY_MINOR, device)?;
        Ok(CudaDevice {
            name: self.device_name(device)?,
            compute_capability: (major, minor),
            memory_bytes: self.device_memory(device)?,
            multiprocessors: self.attribute(MULTIPROCESSOR_COUNT, device)?,
        })
    }

    fn attribute(&self, attribute: c_int, device: c_int) -> Result<i32, Unavailable> {
        let mut value = 0;
        // SAFETY: the signature is the driver's, the pointer is to a live integer, the device came
        // from the driver.
        let code = unsafe { (self.attribute)(&mut value, attribute, device) };
        self.check("cuDeviceGetAttribute", code).map(|()| value)
    }

    fn device_memory(&self, device: c_int) -> Result<usize, Unavailable> {
        let mut bytes = 0;
        // SAFETY: the signature is the driver's, the pointer is to a live integer, the device came
        // from the driver.
        let code = unsafe { (self.memory)(&mut bytes, device) };
        self.check("cuDeviceTotalMem_v2", code).map(|()| bytes)
    }

    fn device_name(&self, device: c_int) -> Result<String, Unavailable> {
        let mut name = [0u8; 256];
        let room = name.len() as c_int;
        // SAFETY: the signature is the driver's, and it writes at most `room` bytes, which the
        // array has.
        let code = unsafe { (self.name)(name.as_mut_ptr().cast(), room, device) };
        self.check("cuDeviceGetName", code)?;
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        Ok(String::from_utf8_lossy(&name[..end]).into_owned())
    }

    fn check(&self, call: &'static str, code: u32) -> Result<(), Unavailable> {
        match code {
            0 => Ok(()),
            NO_DEVICE => Err(Unavailable::NoDevice),
            code => Err(Unavailable::Failed { call, code, name: self.result_name(code) }),
        }
    }

    fn result_name(&self, code: u32) -> String {
        let mut text = std::ptr::null();
        // SAFETY: the signature is the driver's, and the pointer is to a live pointer.
        let known = unsafe { (self.error_name)(code, &mut text) };
        if known != 0 || text.is_null() {
            return "unknown".into();
        }
        // SAFETY: on success the driver stores a pointer to a text of its own that lives as long as
        // the library and ends with 0.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// A function of the driver. `F` must be its signature; results are declared as `u32`, the width of
/// the driver's enumeration.
pub(crate) fn symbol<F: Copy>(name: &'static str) -> Result<F, Unavailable> {
    const { assert!(size_of::<F>() == size_of::<*const ()>()) };
    // SAFETY: the library is present, so this loads it once and cannot fail for want of it.
    let library = unsafe { sys::culib() };
    // SAFETY: `F` is a function pointer of the size of an address, with the signature that the
    // driver documents for `name`.
    let found = unsafe { library.get::<F>(name.as_bytes()) };
    found.map(|function| *function).map_err(|_| Unavailable::MissingSymbol { symbol: name })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_answers_and_never_panics() {
        match probe() {
            Ok(found) => {
                assert!(found.driver >= OLDEST_DRIVER);
                assert!(found.devices.iter().all(|device| device.memory_bytes > 0));
            }
            Err(reason) => assert!(!reason.to_string().is_empty()),
        }
        assert_eq!(probe(), probe());
    }

    #[test]
    fn versions_read_as_people_write_them() {
        assert_eq!(DriverVersion(12_080).to_string(), "12.8");
        assert_eq!(DriverVersion(13_000).to_string(), "13.0");
        assert!(DriverVersion(11_080) < OLDEST_DRIVER);
        let old = Unavailable::DriverTooOld { given: DriverVersion(11_040) };
        assert_eq!(old.to_string(), "the driver runs CUDA 11.4, needed is 12.0 or newer");
    }
}
