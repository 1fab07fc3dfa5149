//! `cargo xtask kernels`: every kernel compiles for every architecture within its declared limits.
//!
//! Needs no GPU and no driver, only NVRTC (`pip install nvidia-cuda-nvrtc==13.0.*`; `MLAKIT_NVRTC`
//! names its folder). The work is divided among processes, since the compiler of one process works
//! one at a time. The manifest has a key for each row that says what its code was made of, so that
//! `--changed` compiles only what is not what it was.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use mlakit_cuda::options::NVRTC_VARIABLE;
use mlakit_cuda::{Assembled, Compiler, Source};

use crate::manifest::{Manifest, Row};

/// What to compile, and what to do with the differences.
#[derive(clap::Args)]
pub struct Arguments {
    /// Renews the manifest.
    #[arg(long)]
    write: bool,
    /// Takes the rows of the manifest whose code is still what it was, and compiles the others.
    #[arg(long)]
    changed: bool,
    /// Prints how many `--changed` would compile, and ends.
    #[arg(long)]
    stale: bool,
    /// Only kernels whose title has this in it; compares and writes nothing.
    #[arg(long)]
    only: Option<String>,
    /// The share of one of several processes: its index and their number.
    #[arg(long, hide = true, num_args = 2)]
    share: Option<Vec<usize>>,
}

/// Architectures that the portable kernels are compiled for.
const PORTABLE: [&str; 8] =
    ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a"];

/// Shared memory of a block of a portable kernel, in bytes: what every architecture has.
const PORTABLE_SHARED_BYTES: u32 = 99 << 10;
/// That of a kernel for Hopper.
const HOPPER_SHARED_BYTES: u32 = 227 << 10;

/// One kernel for one architecture.
struct Work {
    source: Source,
    architecture: &'static str,
}

/// Compiles, checks, compares.
pub fn run(arguments: &Arguments) -> Result<(), String> {
    if arguments.stale {
        println!("{}", divide(true)?.1.len());
        return Ok(());
    }
    let (kept, todo) = divide(arguments.changed)?;
    if let Some(share) = &arguments.share {
        return compile_share(arguments, &todo, (share[0], share[1]));
    }
    let start = Instant::now();
    let nvrtc = if todo.is_empty() { Manifest::read()?.nvrtc } else { version(&compiler()?) };
    let (mut rows, failed) =
        if todo.is_empty() { (Vec::new(), 0) } else { compile_all(arguments)? };
    let compiled = rows.len();
    if arguments.only.is_some() {
        rows.iter().for_each(|row| println!("{row:?}"));
        return all_or(failed);
    }
    rows.extend(kept);
    let (total, seconds) = (rows.len(), start.elapsed().as_secs_f64());
    println!("{total} kernels, {compiled} of them compiled by NVRTC {nvrtc} in {seconds:.1} s");
    let settled = settle(arguments, &Manifest { nvrtc, rows: sorted(rows) });
    all_or(failed).and(settled)
}

fn all_or(failed: usize) -> Result<(), String> {
    match failed {
        0 => Ok(()),
        _ => Err("some kernel does not compile, or is beyond its limits".into()),
    }
}

/// What of the manifest still holds, and what is to be compiled.
fn divide(changed: bool) -> Result<(Vec<Row>, Vec<Work>), String> {
    let old = if changed { Manifest::read().ok() } else { None };
    let version = old.as_ref().map(Manifest::compiler).transpose()?;
    let (mut kept, mut todo) = (Vec::new(), Vec::new());
    for source in mlakit_cuda::manifest() {
        for architecture in architectures(&source) {
            let work = Work { source: source.clone(), architecture };
            let key = version.map(|version| work.key(version));
            match key.and_then(|key| old.as_ref()?.row(&key)) {
                Some(row) if work.holds(row) => kept.push(row.clone()),
                _ => todo.push(work),
            }
        }
    }
    Ok((kept, todo))
}

/// Compares with the checked-in manifest, or renews it.
fn settle(arguments: &Arguments, new: &Manifest) -> Result<(), String> {
    let differences = match Manifest::read() {
        Ok(old) => new.differences(&old),
        Err(why) => vec![why],
    };
    differences.iter().for_each(|line| println!("{line}"));
    if arguments.write {
        return new.write();
    }
    match differences.len() {
        0 => Ok(()),
        n => Err(format!(
            "{n} differences from the manifest: `cargo xtask kernels --changed --write` renews it"
        )),
    }
}

fn sorted(mut rows: Vec<Row>) -> Vec<Row> {
    let age = |row: &Row| PORTABLE.iter().position(|name| *name == row.architecture);
    rows.sort_by(|a, b| (&a.kernel, age(a)).cmp(&(&b.kernel, age(b))));
    rows
}

fn compiler() -> Result<Compiler, String> {
    let given = std::env::var_os(NVRTC_VARIABLE).filter(|v| !v.is_empty()).map(PathBuf::from);
    Compiler::load(given.as_deref()).map_err(|error| error.to_string())
}

fn version(compiler: &Compiler) -> String {
    let (major, minor) = compiler.version();
    format!("{major}.{minor}")
}

/// Divides the work among processes; says how many of them failed at some kernel.
fn compile_all(arguments: &Arguments) -> Result<(Vec<Row>, usize), String> {
    let processes = std::thread::available_parallelism().map_or(1, usize::from);
    let spawn = |index| spawn(arguments, (index, processes));
    let children: Vec<Child> = (0..processes).map(spawn).collect::<Result<_, _>>()?;
    let (mut rows, mut failed) = (Vec::new(), 0);
    for child in children {
        let output = child.wait_with_output().map_err(|e| format!("a process: {e}"))?;
        failed += usize::from(!output.status.success());
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let parsed = text.lines().map(serde_json::from_str::<Row>);
        rows.extend(parsed.collect::<Result<Vec<_>, _>>().map_err(|e| format!("a process: {e}"))?);
    }
    Ok((rows, failed))
}

fn spawn(arguments: &Arguments, (index, processes): (usize, usize)) -> Result<Child, String> {
    let this = std::env::current_exe().map_err(|e| e.to_string())?;
    let mut child = Command::new(this);
    child.args(["kernels", "--share", &index.to_string(), &processes.to_string()]);
    if arguments.changed {
        child.arg("--changed");
    }
    if let Some(only) = &arguments.only {
        child.args(["--only", only]);
    }
    child.stdout(Stdio::piped()).spawn().map_err(|e| format!("a process: {e}"))
}

/// Prints a row for each kernel of the share, as JSON.
fn compile_share(
    arguments: &Arguments,
    todo: &[Work],
    (index, processes): (usize, usize),
) -> Result<(), String> {
    let compiler = compiler()?;
    let only = arguments.only.as_deref().unwrap_or("");
    let wanted = todo.iter().filter(|work| work.source.title().contains(only));
    let mut failed = 0;
    for work in wanted.skip(index).step_by(processes) {
        match work.compile(&compiler) {
            Ok(row) => println!("{}", serde_json::to_string(&row).map_err(|e| e.to_string())?),
            Err(why) => {
                failed += 1;
                eprintln!("{} {}: {why}", work.architecture, work.source.title());
            }
        }
    }
    match failed {
        0 => Ok(()),
        n => Err(format!("{n} kernels failed")),
    }
}

/// A file is of an architecture and an operation: `portable_dense`, `hopper_dense`.
fn architectures(source: &Source) -> &'static [&'static str] {
    if is_hopper(source) { &["sm_90a"] } else { &PORTABLE }
}

fn is_hopper(source: &Source) -> bool {
    source.family.starts_with("hopper")
}

impl Work {
    fn key(&self, compiler: (u32, u32)) -> String {
        self.source.key(self.architecture, compiler)[..16].to_owned()
    }

    /// Whether a row of this code keeps what is declared now.
    fn holds(&self, row: &Row) -> bool {
        let found = Assembled {
            registers: row.registers,
            static_shared_bytes: row.static_shared_bytes,
            ..Assembled::default()
        };
        row.threads == self.source.threads
            && row.dynamic_shared_bytes == self.source.dynamic_shared_bytes
            && row.kernel == self.source.title()
            && self.check(found).is_ok()
    }

    /// That the code keeps the declared limits.
    fn check(&self, found: Assembled) -> Result<(), String> {
        let source = &self.source;
        let most_shared =
            if is_hopper(source) { HOPPER_SHARED_BYTES } else { PORTABLE_SHARED_BYTES };
        let shared = found.static_shared_bytes + source.dynamic_shared_bytes;
        let limits = [
            ("registers", found.registers, source.registers),
            ("bytes of stack", found.stack_bytes, 0),
            ("bytes of spill stores", found.spill_store_bytes, 0),
            ("bytes of spill loads", found.spill_load_bytes, 0),
            ("bytes of shared memory", shared, most_shared),
        ];
        match limits.into_iter().find(|(_, given, most)| given > most) {
            None => Ok(()),
            Some((what, given, most)) => {
                Err(format!("{given} {what}, declared are at most {most}"))
            }
        }
    }

    fn compile(&self, compiler: &Compiler) -> Result<Row, String> {
        let (source, architecture) = (&self.source, self.architecture);
        let compiled = compiler.compile(source, architecture, true).map_err(|e| e.to_string())?;
        let found = Assembled::read(&compiled.log).map_err(|e| e.to_string())?;
        self.check(found)?;
        Ok(Row {
            kernel: source.title(),
            architecture: architecture.to_owned(),
            key: self.key(compiler.version()),
            threads: source.threads,
            registers: found.registers,
            static_shared_bytes: found.static_shared_bytes,
            dynamic_shared_bytes: source.dynamic_shared_bytes,
        })
    }
}
