//! Where a kernel comes from: memory, disk, or the compiler.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use mlakit::Error;

use super::cache::{self, Cache, Found};
use super::compiler::Compiler;
use super::kernel::Loaded;
use super::{Kernel, Source};
use crate::driver::Context;

/// The kernels of one device.
pub(crate) struct Store {
    architecture: String,
    nvrtc: Option<PathBuf>,
    compiler: OnceLock<Result<Compiler, Error>>,
    disk: Option<Cache>,
    /// Weak: code lives as long as something prepared uses it.
    loaded: Mutex<HashMap<String, Weak<Loaded>>>,
}

impl Store {
    pub(crate) fn new(architecture: String, nvrtc: Option<PathBuf>, disk: Option<Cache>) -> Self {
        let (compiler, loaded) = Default::default();
        Self { architecture, nvrtc, compiler, disk, loaded }
    }

    /// The kernel, compiled only if it has to be.
    pub(crate) fn kernel(&self, context: &Arc<Context>, source: &Source) -> Result<Kernel, Error> {
        // The compiler's version decides code, so entries of the disk are found only where it is
        // there.
        let compiler = self.compiler()?;
        let code = cache::key(source, &self.architecture, compiler.version());
        let place = (source.threads, source.dynamic_shared_bytes);
        let key = format!("{code} {place:?}");
        if let Some(kernel) = self.table().get(&key).and_then(Kernel::upgrade) {
            return Ok(kernel);
        }
        let kernel = self.obtain(context, source, &code)?;
        let mut table = self.table();
        table.retain(|_, kernel| kernel.strong_count() > 0);
        table.insert(key, kernel.downgrade());
        Ok(kernel)
    }

    /// What is loaded now.
    pub(crate) fn loaded(&self) -> Vec<Kernel> {
        self.table().values().filter_map(Kernel::upgrade).collect()
    }

    /// The compiler, loaded when it is first asked for.
    pub(crate) fn compiler(&self) -> Result<&Compiler, Error> {
        let load = || Compiler::load(self.nvrtc.as_deref());
        self.compiler.get_or_init(load).as_ref().map_err(Clone::clone)
    }

    fn obtain(&self, context: &Arc<Context>, source: &Source, key: &str) -> Result<Kernel, Error> {
        let found = self.disk.as_ref().map(|disk| (disk, disk.read(source, key)));
        if let Some((disk, Found::Code(code))) = found {
            match Kernel::load(context, source, &code) {
                Ok(kernel) => return Ok(kernel),
                Err(error @ Error::Lost { .. }) => return Err(error),
                Err(error) => disk.drop_entry(source, key, &error.to_string()),
            }
        }
        let compiled = self.compiler()?.compile(source, &self.architecture, false)?;
        let kernel = Kernel::load(context, source, &compiled.cubin)?;
        if let Some(disk) = &self.disk {
            disk.write(source, key, &compiled.cubin);
        }
        Ok(kernel)
    }

    fn table(&self) -> std::sync::MutexGuard<'_, HashMap<String, Weak<Loaded>>> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
