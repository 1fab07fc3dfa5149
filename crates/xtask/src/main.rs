//! Tasks of the repository, as `cargo xtask TASK`.

mod bundle;
mod kernels;
mod manifest;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Tasks of the mlakit repository.
#[derive(Parser)]
#[command(name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Builds the device suite and the program into a folder that runs where there is no Rust.
    Bundle(bundle::Arguments),
    /// Compiles every CUDA kernel for every architecture and compares with the checked-in manifest.
    Kernels(kernels::Arguments),
}

fn main() -> ExitCode {
    let done = match Arguments::parse().task {
        Task::Bundle(arguments) => bundle::run(&arguments),
        Task::Kernels(arguments) => kernels::run(&arguments),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("error: {why}");
            ExitCode::FAILURE
        }
    }
}

/// The root of the repository.
fn root() -> std::path::PathBuf {
    let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().and_then(std::path::Path::parent).unwrap_or(here).to_owned()
}
