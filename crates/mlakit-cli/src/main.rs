//! The program `mlakit`.

use std::process::ExitCode;

fn main() -> ExitCode {
    mlakit_cli::main()
}
