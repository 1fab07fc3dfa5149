//! What this machine is: its processor, its memory.

use std::fs;

use crate::failure::Failure;
use crate::report;

/// Bytes of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Memory {
    /// In all.
    pub total_bytes: usize,
    /// That can be had now without swapping.
    pub available_bytes: usize,
}

/// The memory of this machine, or of the control group that this process is in where that is less;
/// `None` where the system does not say.
pub fn memory() -> Option<Memory> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':').trim().strip_suffix(" kB")?.parse::<usize>().ok()
    };
    let (total, available) = (field("MemTotal")? << 10, field("MemAvailable")? << 10);
    let group = |name: &str| {
        let text = fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok()?;
        text.trim().parse::<usize>().ok()
    };
    let limit = group("memory.max").unwrap_or(total).min(total);
    let room = limit.saturating_sub(group("memory.current").unwrap_or(0));
    let available_bytes = if limit < total { available.min(room) } else { available };
    Some(Memory { total_bytes: limit, available_bytes })
}

/// Refuses work that needs more memory than there is. Systems grant more than they have and end the
/// process when it is used, so this must be asked before.
///
/// # Errors
/// More bytes than are available.
pub fn ensure_memory(what: &str, bytes: usize) -> Result<(), Failure> {
    match memory() {
        Some(memory) if bytes > memory.available_bytes => Err(Failure::input(
            format!(
                "{what}: needs {bytes} bytes ({}), this machine has {} available",
                report::bytes(bytes),
                report::bytes(memory.available_bytes)
            ),
            "use smaller shapes or capacities, or a machine with more memory",
        )),
        _ => Ok(()),
    }
}

/// The name of the processor; `None` where the system does not say.
pub fn processor() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// A feature of the processor that kernels ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Feature {
    /// As compilers name it.
    pub name: &'static str,
    /// Whether this processor has it, and, but for tiles, the system lets it be used.
    pub present: bool,
}

/// The features that some kernel asks for.
pub fn features() -> Vec<Feature> {
    #[cfg(target_arch = "x86_64")]
    {
        macro_rules! feature {
            ($($name:tt),*) => {
                vec![$(Feature { name: $name, present: is_x86_feature_detected!($name) }),*]
            };
        }
        let mut features = feature!(
            "avx2",
            "fma",
            "avx512f",
            "avx512bw",
            "avx512vl",
            "avx512dq",
            "avx512bf16",
            "avx512vbmi"
        );
        features.extend(tiles());
        features
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        Vec::new()
    }
}

/// The tiles of AMX, which the standard library does not detect: bits 24 and 22 of EDX in leaf 7.
#[cfg(target_arch = "x86_64")]
fn tiles() -> [Feature; 2] {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    let word = if __cpuid(0).eax >= 7 { __cpuid_count(7, 0).edx } else { 0 };
    [("amx-tile", 24), ("amx-bf16", 22)]
        .map(|(name, bit)| Feature { name, present: word >> bit & 1 == 1 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_machine_has_everything() {
        assert!(ensure_memory("a byte", 1).is_ok());
        if let Some(memory) = memory() {
            assert!(memory.available_bytes <= memory.total_bytes);
            let failure = ensure_memory("the cache", usize::MAX).unwrap_err();
            assert_eq!(failure.status(), 2);
            assert!(failure.message().starts_with("the cache: needs"));
        }
    }
}
