//! The program `mlakit`, as a library: `main.rs` calls [`main`], tests call the rest.
//!
//! Every command reads its input completely before it starts, ends with a
//! [`Report`](report::Report) or a [`Failure`], and prints one of them. [`device`] is the only
//! place that lists devices; what runs is generic over them.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::error::ErrorKind;

pub mod args;
pub mod bench;
pub mod case;
pub mod check;
pub mod device;
pub mod doctor;
mod failure;
pub mod machine;
pub mod model;
pub mod op;
pub mod plan;
pub mod progress;
pub mod report;

pub use failure::Failure;

use args::{Args, Command};
use device::Environment;

/// Runs the program with the arguments of this process.
pub fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().collect();
    match Args::read(&words) {
        Ok(args) => {
            let json = args.output.format() == args::Format::Json;
            run(&args).unwrap_or_else(|failure| failure.report(json))
        }
        Err(error) => usage(&error, &words),
    }
}

/// Runs one command and prints its result; the exit code is 1 where the result is a check that
/// failed.
fn run(args: &Args) -> Result<ExitCode, Failure> {
    let (environment, format) = (Environment::read(), args.output.format());
    match &args.command {
        Command::Run(args) => {
            report::print(&model::run::command(args, &environment, format)?, format)?;
        }
        Command::Layer(args) => {
            report::print(&model::layer::command(args, &environment, format)?, format)?;
        }
        Command::Eval(args) => {
            report::print(&model::eval::command(args, &environment, format)?, format)?;
        }
        Command::Op(args) => report::print(&op::command(args, &environment)?, format)?,
        Command::Plan(args) => report::print(&plan::command(args, &environment)?, format)?,
        Command::Bench(args) => report::print(&bench::command(args, &environment)?, format)?,
        Command::Doctor(args) => report::print(&doctor::command(args, &environment), format)?,
        Command::Check(args) => {
            let checked = check::command(args, &environment)?;
            report::print(&checked, format)?;
            return Ok(ExitCode::from(u8::from(!checked.ok())));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints what is wrong with the words, or help that was asked for. No words at all get the help,
/// as an error.
fn usage(error: &clap::Error, words: &[OsString]) -> ExitCode {
    let json = asks_for_json(words);
    let asked = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    match args::explain(error, words) {
        Some((message, help)) => Failure::input(message, help).report(json),
        None if json && !asked => {
            Failure::input("needed a command, given none", "see `mlakit --help`").report(true)
        }
        None => {
            // Printing fails only where nobody reads.
            let _ = error.print();
            ExitCode::from(if asked { 0 } else { 2 })
        }
    }
}

/// Whether arguments that could not be parsed ask for JSON.
fn asks_for_json(words: &[OsString]) -> bool {
    let is = |word: &OsString, text: &str| word.to_str() == Some(text);
    let pair = |pair: &[OsString]| is(&pair[0], "--format") && is(&pair[1], "json");
    words.iter().any(|word| is(word, "--json") || is(word, "--format=json"))
        || words.windows(2).any(pair)
}
