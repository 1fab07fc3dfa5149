//! Compiled code: what to compile, what came of it, and where it is kept.
//!
//! A kernel is looked for in memory, then in the cache on disk, then it is compiled. All of that
//! happens in `prepare`; `run` finds a loaded function.

pub(crate) mod cache;
pub(crate) mod compiler;
mod digest;
mod kernel;
pub(crate) mod log;
pub(crate) mod store;

pub use kernel::Kernel;

/// What to compile: embedded sources, one after the other, specialised by macros.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Names the manifest row and the cache entry: `portable_dense`.
    pub family: &'static str,
    /// The `extern "C" __global__` function.
    pub entry: &'static str,
    /// The sources, in this order, without any `#include`: the compiler has no headers.
    pub text: &'static [&'static str],
    /// Macros with their values, from the `Spec`.
    pub defines: Vec<(&'static str, String)>,
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub dynamic_shared_bytes: u32,
    /// The most registers that a thread may use. A declared limit: the kernel keeps it by
    /// `__launch_bounds__`, and CI compares.
    pub registers: u32,
}

impl Source {
    /// The whole text.
    pub(crate) fn program(&self) -> String {
        self.text.join("\n")
    }

    /// SHA-256 in hexadecimal digits over everything that decides the code: text, macros, flags,
    /// entry, architecture and the compiler's version.
    pub fn key(&self, architecture: &str, compiler: (u32, u32)) -> String {
        cache::key(self, architecture, compiler)
    }

    /// Names this specialisation in errors and in the manifest: entry and macros.
    pub fn title(&self) -> String {
        let defines = self.defines.iter().map(|(name, value)| format!(" {name}={value}"));
        format!("{}:{}{}", self.family, self.entry, defines.collect::<String>())
    }
}

/// A kernel that is loaded.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct LoadedKernel {
    /// Entry and macros.
    pub title: String,
    /// What it takes of a multiprocessor.
    pub resources: Resources,
    /// Blocks that run on one multiprocessor side by side.
    pub blocks_per_multiprocessor: u32,
}

/// What a loaded kernel takes of a multiprocessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Resources {
    /// 32-bit registers of a thread.
    pub registers: u32,
    /// Static shared memory of a block, in bytes.
    pub static_shared_bytes: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub dynamic_shared_bytes: u32,
    /// Local memory of a thread, in bytes: always 0, since a kernel that has some is refused.
    pub local_bytes: u32,
}
