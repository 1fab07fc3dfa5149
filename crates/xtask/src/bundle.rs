//! `cargo xtask bundle`: what a machine with a GPU and without Rust needs, in one folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// Where to.
#[derive(clap::Args)]
pub struct Arguments {
    /// The folder; what is in it under the same names is replaced.
    #[arg(default_value = "dist/bundle")]
    folder: PathBuf,
}

/// The most bytes of the folder.
const MOST_BYTES: u64 = 24 << 20;

/// Builds, strips, lists the tests, and adds up.
pub fn run(arguments: &Arguments) -> Result<(), String> {
    let folder = crate::root().join(&arguments.folder);
    fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let suite = build(&["test", "--release", "-p", "mlakit-cuda", "--test", "device", "--no-run"])?;
    // The checkpoint that the program embeds by default lies beside the bundle.
    let program = ["build", "--release", "-p", "mlakit-cli", "--bin", "mlakit"];
    let program = build(&[&program[..], &["--no-default-features"]].concat())?;
    let suite_to = folder.join("device-suite");
    strip(&suite, &suite_to)?;
    strip(&program, &folder.join("mlakit"))?;
    fs::write(folder.join("tests.txt"), list(&suite_to)?).map_err(|e| format!("tests.txt: {e}"))?;
    let script = crate::root().join("scripts/gpu-suite");
    fs::copy(&script, folder.join("gpu-suite")).map_err(|e| format!("gpu-suite: {e}"))?;
    let bytes = bytes_of(&folder)?;
    println!("{}: {bytes} bytes", folder.display());
    if bytes > MOST_BYTES {
        return Err(format!("the bundle has {bytes} bytes, at most {MOST_BYTES} are allowed"));
    }
    Ok(())
}

/// Runs cargo and finds the one program that it made.
fn build(arguments: &[&str]) -> Result<PathBuf, String> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(arguments).args(["--message-format=json-render-diagnostics"]);
    let output = cargo
        .current_dir(crate::root())
        .stderr(std::process::Stdio::inherit())
        .output()
        .map_err(|e| format!("cargo: {e}"))?;
    if !output.status.success() {
        return Err(format!("cargo {} failed", arguments.join(" ")));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let messages = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut programs = messages.filter_map(|m| Some(PathBuf::from(m["executable"].as_str()?)));
    programs.next_back().ok_or_else(|| format!("cargo {} made no program", arguments.join(" ")))
}

fn strip(from: &Path, to: &Path) -> Result<(), String> {
    let done = Command::new("strip").arg("-o").arg(to).arg(from).status();
    match done {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("strip {}: {status}", from.display())),
        Err(error) => Err(format!("strip: {error}")),
    }
}

/// The names of the suite's tests, one a line, sorted.
fn list(suite: &Path) -> Result<String, String> {
    let output = Command::new(suite)
        .args(["--list", "--format", "terse"])
        .output()
        .map_err(|e| format!("{}: {e}", suite.display()))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut names: Vec<_> = text.lines().filter_map(|line| line.strip_suffix(": test")).collect();
    names.sort_unstable();
    if names.is_empty() {
        return Err("the suite lists no test".into());
    }
    Ok(names.join("\n") + "\n")
}

fn bytes_of(folder: &Path) -> Result<u64, String> {
    let entries = fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    entries
        .map(|entry| {
            let metadata = entry.and_then(|entry| entry.metadata());
            metadata.map(|m| m.len()).map_err(|e| format!("{}: {e}", folder.display()))
        })
        .sum()
}
