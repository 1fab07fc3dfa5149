//! What planning needs to know of a GPU, read from one or known of one that is not here.

use std::ffi::{c_int, c_uint};
use std::fmt;

use crate::driver::{Api, Code};
use crate::options::DenseFamily;
use crate::probe::Unavailable;

/// What planning needs to know of a GPU. Plain data.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Facts {
    /// The driver's name for it.
    pub name: String,
    /// Compute capability, major and minor: (9, 0) is Hopper.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// The most shared memory that a block may ask for, in bytes.
    pub shared_bytes_per_block: u32,
    /// Shared memory of a multiprocessor, in bytes.
    pub shared_bytes_per_multiprocessor: u32,
    /// 32-bit registers of a multiprocessor.
    pub registers_per_multiprocessor: u32,
    /// Bytes of its level-2 cache.
    pub l2_bytes: u64,
    /// The one family of dense attention that its user allows; none: what is best.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dense: Option<DenseFamily>,
}

/// The row of a GPU: name, what it is called, capability, multiprocessors, GiB, MiB of level-2
/// cache.
type Known = (&'static str, &'static str, (u32, u32), u32, u64, u64);

/// GPUs that can be planned for without having one. From the vendor's data sheets and the CUDA
/// programming guide's table of technical specifications by compute capability.
const KNOWN: [Known; 10] = [
    ("a100", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 80, 40),
    ("rtx3090", "NVIDIA GeForce RTX 3090", (8, 6), 82, 24, 6),
    ("rtx4090", "NVIDIA GeForce RTX 4090", (8, 9), 128, 24, 72),
    ("l40s", "NVIDIA L40S", (8, 9), 142, 48, 96),
    ("h100", "NVIDIA H100 80GB HBM3", (9, 0), 132, 80, 50),
    ("h200", "NVIDIA H200", (9, 0), 132, 141, 60),
    ("b200", "NVIDIA B200", (10, 0), 148, 180, 126),
    ("b300", "NVIDIA B300", (10, 3), 148, 270, 126),
    ("rtx5090", "NVIDIA GeForce RTX 5090", (12, 0), 170, 32, 96),
    ("gb10", "NVIDIA GB10", (12, 1), 48, 119, 24),
];

impl Facts {
    /// The names of [`preset`](Self::preset).
    pub const PRESETS: [&'static str; KNOWN.len()] = {
        let mut names = [""; KNOWN.len()];
        let mut i = 0;
        while i < names.len() {
            names[i] = KNOWN[i].0;
            i += 1;
        }
        names
    };

    /// The facts of a GPU that need not be here: one of [`PRESETS`](Self::PRESETS).
    pub fn preset(name: &str) -> Option<Self> {
        let (_, name, capability, multiprocessors, gib, l2_mib) =
            KNOWN.into_iter().find(|known| known.0 == name)?;
        let (block, multiprocessor) = shared_kib(capability);
        Some(Self {
            name: name.into(),
            capability,
            multiprocessors,
            memory_bytes: gib << 30,
            shared_bytes_per_block: block << 10,
            shared_bytes_per_multiprocessor: multiprocessor << 10,
            registers_per_multiprocessor: 1 << 16,
            l2_bytes: l2_mib << 20,
            dense: None,
        })
    }

    /// What NVRTC calls the architecture, with the suffix of its own instructions where it has
    /// some.
    pub fn architecture(&self) -> String {
        architecture(self.capability)
    }

    pub(crate) fn of_device(api: &Api, device: c_int) -> Result<Self, Unavailable> {
        let read = |attribute| attribute_of(api, device, attribute);
        Ok(Self {
            name: name_of(api, device)?,
            capability: (read(CAPABILITY_MAJOR)?, read(CAPABILITY_MINOR)?),
            multiprocessors: read(MULTIPROCESSORS)?,
            memory_bytes: memory_of(api, device)?,
            shared_bytes_per_block: read(SHARED_PER_BLOCK)?,
            shared_bytes_per_multiprocessor: read(SHARED_PER_MULTIPROCESSOR)?,
            registers_per_multiprocessor: read(REGISTERS)?,
            l2_bytes: u64::from(read(L2)?),
            dense: None,
        })
    }
}

/// As NVRTC takes it: `sm_90a`.
pub(crate) fn architecture((major, minor): (u32, u32)) -> String {
    let suffix = if major >= 9 { "a" } else { "" };
    format!("sm_{major}{minor}{suffix}")
}

/// KiB of shared memory of a block and of a multiprocessor.
fn shared_kib(capability: (u32, u32)) -> (u32, u32) {
    match capability {
        (8, 0) => (163, 164),
        (8, _) | (12, _) => (99, 100),
        _ => (227, 228),
    }
}

impl fmt::Display for Facts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, multiprocessors) = (&self.name, self.multiprocessors);
        write!(f, "cuda ({name}, {}, {multiprocessors} multiprocessors", self.architecture())?;
        match self.dense {
            None => write!(f, ")"),
            Some(family) => write!(f, ", dense attention: {} alone)", family.name()),
        }
    }
}

/// Attributes of `cuDeviceGetAttribute`.
const MULTIPROCESSORS: c_int = 16;
const L2: c_int = 38;
const CAPABILITY_MAJOR: c_int = 75;
const CAPABILITY_MINOR: c_int = 76;
const SHARED_PER_MULTIPROCESSOR: c_int = 81;
const REGISTERS: c_int = 82;
const SHARED_PER_BLOCK: c_int = 97;

/// Whether memory comes from pools.
pub(crate) const MEMORY_POOLS: c_int = 115;

pub(crate) fn attribute_of(
    api: &Api,
    device: c_int,
    attribute: c_int,
) -> Result<c_uint, Unavailable> {
    let mut value = 0;
    // SAFETY: the signature is the driver's, the pointer is to a live integer, the device came from
    // the driver.
    let code = unsafe { (api.device_attribute)(&mut value, attribute, device) };
    check(api, "cuDeviceGetAttribute", code)?;
    Ok(value.try_into().unwrap_or(0))
}

fn memory_of(api: &Api, device: c_int) -> Result<u64, Unavailable> {
    let mut bytes = 0usize;
    // SAFETY: as in `attribute_of`.
    let code = unsafe { (api.device_memory)(&mut bytes, device) };
    check(api, "cuDeviceTotalMem_v2", code)?;
    Ok(bytes as u64)
}

fn name_of(api: &Api, device: c_int) -> Result<String, Unavailable> {
    let mut name = [0u8; 256];
    let room = name.len() as c_int;
    // SAFETY: the signature is the driver's, and it writes at most `room` bytes, which the array
    // has.
    let code = unsafe { (api.device_name)(name.as_mut_ptr().cast(), room, device) };
    check(api, "cuDeviceGetName", code)?;
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    Ok(String::from_utf8_lossy(&name[..end]).into_owned())
}

fn check(api: &Api, call: &'static str, code: u32) -> Result<(), Unavailable> {
    match code {
        0 => Ok(()),
        code => Err(Unavailable::Failed { call, code, name: Code(code).text(api) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_is_known_by_its_architecture() {
        let names = Facts::PRESETS.map(|name| Facts::preset(name).unwrap().architecture());
        let needed = "sm_80 sm_86 sm_89 sm_89 sm_90a sm_90a sm_100a sm_103a sm_120a sm_121a";
        assert_eq!(names.join(" "), needed);
        assert_eq!(Facts::preset("abacus"), None);
        let h200 = Facts::preset("h200").unwrap();
        assert_eq!(h200.to_string(), "cuda (NVIDIA H200, sm_90a, 132 multiprocessors)");
        assert_eq!(h200.shared_bytes_per_block, 232_448);
        assert_eq!(Facts::preset("a100").unwrap().shared_bytes_per_block, 166_912);
    }
}
