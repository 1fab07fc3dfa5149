//! NVRTC, found when it is first needed and never linked.

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};

use libloading::Library;
use mlakit::Error;

use super::Source;

/// A program of the compiler.
type Program = *mut std::ffi::c_void;

/// What a compilation gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// Code for exactly the architecture that was asked for.
    pub cubin: Vec<u8>,
    /// What the compiler said.
    pub log: String,
}

macro_rules! functions {
    ($($name:ident = $symbol:literal ($($argument:ty),*);)*) => {
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) -> c_int,)*
            error_text: unsafe extern "C" fn(c_int) -> *const c_char,
        }

        impl Functions {
            fn find(library: &Library) -> Result<Self, String> {
                Ok(Self {
                    $($name: find(library, $symbol)?,)*
                    error_text: find(library, "nvrtcGetErrorString")?,
                })
            }
        }
    };
}

functions! {
    version = "nvrtcVersion"(*mut c_int, *mut c_int);
    create = "nvrtcCreateProgram"(
        *mut Program, *const c_char, *const c_char, c_int, *const *const c_char,
        *const *const c_char
    );
    destroy = "nvrtcDestroyProgram"(*mut Program);
    compile = "nvrtcCompileProgram"(Program, c_int, *const *const c_char);
    log_size = "nvrtcGetProgramLogSize"(Program, *mut usize);
    log = "nvrtcGetProgramLog"(Program, *mut c_char);
    cubin_size = "nvrtcGetCUBINSize"(Program, *mut usize);
    cubin = "nvrtcGetCUBIN"(Program, *mut c_char);
}

/// A function of the library. `F` must be its signature.
fn find<F: Copy>(library: &Library, symbol: &str) -> Result<F, String> {
    const { assert!(size_of::<F>() == size_of::<*const ()>()) };
    // SAFETY: `F` is a function pointer with the signature that NVRTC documents for `symbol`.
    let found = unsafe { library.get::<F>(symbol.as_bytes()) };
    found.map(|function| *function).map_err(|_| format!("it has no function {symbol}"))
}

/// The compiler, loaded.
pub struct Compiler {
    functions: Functions,
    version: (u32, u32),
    from: PathBuf,
    /// Keeps the functions valid. Dropped before what it needs.
    _library: Library,
    _builtins: Vec<Library>,
}

/// Where a library of this name may be, beside the places that the loader knows.
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
const FOLDERS: [&str; 2] = ["/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib"];

/// What every compilation says to the compiler, besides architecture and macros.
pub(super) const FLAGS: [&str; 3] = ["--std=c++17", "--device-as-default-execution-space", "-w"];

impl Compiler {
    /// Loads NVRTC: `given`, a library or the folder that has it, or else what the loader finds by
    /// the usual names, or else the toolkit's usual folders.
    ///
    /// # Errors
    /// `Unavailable`, with what was tried and what to install.
    pub fn load(given: Option<&Path>) -> Result<Self, Error> {
        let mut tried = Vec::new();
        for path in candidates(given) {
            match Self::open(&path) {
                Ok(compiler) => return Ok(compiler),
                Err(why) => tried.push(format!("{}: {why}", path.display())),
            }
        }
        Err(Error::Unavailable {
            what: "NVRTC, the compiler of the CUDA kernels,",
            because: tried.join("; "),
            instead: "install it (the CUDA toolkit has it, and so has \
                `pip install nvidia-cuda-nvrtc==13.0.*`), or set MLAKIT_NVRTC to libnvrtc.so or \
                its folder"
                .into(),
        })
    }

    /// Compiles for an architecture (`sm_90a`); `verbose`, the log has the assembler's resources.
    ///
    /// # Errors
    /// `Device`, with the compiler's log.
    pub fn compile(
        &self,
        source: &Source,
        architecture: &str,
        verbose: bool,
    ) -> Result<Compiled, Error> {
        let failed = |message: String| Error::Device {
            call: "nvrtcCompileProgram",
            message: format!("{} for {architecture}: {message}", source.title()),
        };
        let program = self.program(source).map_err(failed)?;
        let options = options(source, architecture, verbose).map_err(failed)?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let count = pointers.len() as c_int;
        // SAFETY: the program is live, and the options are texts that live until the call returns.
        let code = unsafe { (self.functions.compile)(program.raw, count, pointers.as_ptr()) };
        let log = program.log();
        self.check(code).map_err(|why| failed(format!("{why}\n{log}")))?;
        let cubin = program.cubin().map_err(failed)?;
        Ok(Compiled { cubin, log })
    }

    /// Major and minor.
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// The library.
    pub fn path(&self) -> &Path {
        &self.from
    }

    fn open(path: &Path) -> Result<Self, String> {
        let builtins = builtins_beside(path);
        // SAFETY: loading the vendor's compiler runs its constructors, which is what asking for it
        // means.
        let library = unsafe { Library::new(path) }.map_err(|error| error.to_string())?;
        let functions = Functions::find(&library)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both pointers are to live integers.
        let code = unsafe { (functions.version)(&mut major, &mut minor) };
        if code != 0 {
            return Err(format!("nvrtcVersion failed with code {code}"));
        }
        let version = (major as u32, minor as u32);
        let from = path.to_owned();
        Ok(Self { functions, version, from, _library: library, _builtins: builtins })
    }

    fn program(&self, source: &Source) -> Result<Running<'_>, String> {
        let text = CString::new(source.program()).map_err(|e| e.to_string())?;
        let name = CString::new(format!("{}.cu", source.family)).map_err(|e| e.to_string())?;
        let (mut raw, none) = (std::ptr::null_mut(), std::ptr::null());
        let (create, text, name) = (self.functions.create, text.as_ptr(), name.as_ptr());
        // SAFETY: both texts live until the call returns, which copies them; there are no headers.
        let code = unsafe { create(&mut raw, text, name, 0, none, none) };
        self.check(code)?;
        Ok(Running { compiler: self, raw })
    }

    fn check(&self, code: c_int) -> Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the function takes any code.
        let text = unsafe { (self.functions.error_text)(code) };
        if text.is_null() {
            return Err(format!("code {code}"));
        }
        // SAFETY: the library's texts are its own, live as long as it does, and end with 0.
        Err(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    }
}

/// A program, destroyed when it is dropped.
struct Running<'c> {
    compiler: &'c Compiler,
    raw: Program,
}

type SizeOf = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type BytesOf = unsafe extern "C" fn(Program, *mut c_char) -> c_int;

impl Running<'_> {
    fn log(&self) -> String {
        let functions = &self.compiler.functions;
        let bytes = self.bytes(functions.log_size, functions.log).unwrap_or_default();
        String::from_utf8_lossy(&bytes).trim_end_matches(['\0', '\n']).to_owned()
    }

    fn cubin(&self) -> Result<Vec<u8>, String> {
        self.bytes(self.compiler.functions.cubin_size, self.compiler.functions.cubin)
    }

    fn bytes(&self, size: SizeOf, read: BytesOf) -> Result<Vec<u8>, String> {
        let mut len = 0;
        // SAFETY: the program is live, and the pointer is to a live integer.
        let code = unsafe { size(self.raw, &mut len) };
        self.compiler.check(code)?;
        let mut bytes = vec![0u8; len];
        // SAFETY: the program is live and stores as many bytes as it said.
        let code = unsafe { read(self.raw, bytes.as_mut_ptr().cast()) };
        self.compiler.check(code)?;
        Ok(bytes)
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        // SAFETY: `program` created it, and it is destroyed once.
        unsafe { (self.compiler.functions.destroy)(&mut self.raw) };
    }
}

/// The compiler loads a second library by its bare name, which the loader finds in its own places,
/// or if it is loaded already: so that of the compiler's folder is, where there is one (a Python
/// package's is in no other place).
fn builtins_beside(path: &Path) -> Vec<Library> {
    let is_builtins = |path: &PathBuf| {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        name.is_some_and(|name| name.starts_with("libnvrtc-builtins.so"))
    };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let entries = folder.and_then(|folder| std::fs::read_dir(folder).ok());
    let paths = entries.into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    // SAFETY: it is a part of the vendor's compiler, which is about to be loaded.
    let load = |path: PathBuf| unsafe { Library::new(path) }.ok();
    paths.filter(is_builtins).filter_map(load).collect()
}

fn candidates(given: Option<&Path>) -> Vec<PathBuf> {
    match given {
        Some(folder) if folder.is_dir() => NAMES.iter().map(|name| folder.join(name)).collect(),
        Some(library) => vec![library.to_owned()],
        None => {
            let usual = FOLDERS.iter().flat_map(|f| NAMES.map(|name| Path::new(f).join(name)));
            NAMES.iter().map(PathBuf::from).chain(usual).collect()
        }
    }
}

fn options(source: &Source, architecture: &str, verbose: bool) -> Result<Vec<CString>, String> {
    let defines = source.defines.iter().map(|(name, value)| format!("-D{name}={value}"));
    let all = FLAGS
        .iter()
        .map(|flag| (*flag).to_owned())
        .chain([format!("--gpu-architecture={architecture}")])
        .chain(verbose.then(|| "--ptxas-options=-v".to_owned()))
        .chain(defines);
    all.map(|option| CString::new(option).map_err(|e| e.to_string())).collect()
}
