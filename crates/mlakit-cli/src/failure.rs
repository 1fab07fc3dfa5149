//! What goes wrong, as a user reads it: what happened, and what to do about it.

use std::io::{self, Write};
use std::process::ExitCode;

use serde::Serialize;

/// Why the program ends without a result.
#[derive(Debug, PartialEq, Eq)]
pub struct Failure {
    kind: Kind,
    message: String,
    help: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A file, a flag, a Spec or a refusal: exit status 2.
    Input,
    /// The program or the device computed something wrong: exit status 1.
    Internal,
    /// Whoever read the output has gone: nothing to say to anyone.
    ClosedPipe,
}

/// The object that `--json` prints to stderr.
#[derive(Serialize)]
struct Printed<'f> {
    error: &'f str,
    help: &'f str,
    status: u8,
}

impl Failure {
    /// Something that the user gave cannot be used: `message` names it, what was needed and what
    /// was given.
    pub fn input(message: impl Into<String>, help: impl Into<String>) -> Self {
        Self { kind: Kind::Input, message: message.into(), help: help.into() }
    }

    /// Something that no input should be able to cause.
    pub fn internal(message: impl Into<String>, help: impl Into<String>) -> Self {
        Self { kind: Kind::Internal, message: message.into(), help: help.into() }
    }

    /// Standard output cannot be written to.
    pub fn output(error: &io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            return Self { kind: Kind::ClosedPipe, message: String::new(), help: String::new() };
        }
        Self::internal(
            format!("standard output cannot be written: {error}"),
            "direct it to a file or a terminal that takes it",
        )
    }

    /// The same with `place` before the message, for a file or a flag that an inner error does not
    /// know.
    pub fn within(mut self, place: impl std::fmt::Display) -> Self {
        self.message = format!("{place}: {}", self.message);
        self
    }

    /// What happened.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// What to do.
    pub fn help(&self) -> &str {
        &self.help
    }

    /// 2 where the input is wrong, 1 where the program is, 0 where nobody reads the output any
    /// more.
    pub fn status(&self) -> u8 {
        match self.kind {
            Kind::Input => 2,
            Kind::Internal => 1,
            Kind::ClosedPipe => 0,
        }
    }

    /// Prints it to stderr, as text or as a JSON object, and gives the exit code.
    pub fn report(&self, json: bool) -> ExitCode {
        let status = self.status();
        if self.kind != Kind::ClosedPipe {
            let printed = Printed { error: &self.message, help: &self.help, status };
            let text = match serde_json::to_string(&printed) {
                Ok(object) if json => object,
                _ => format!("error: {}\nhelp: {}", self.message, self.help),
            };
            // A closed stderr leaves the exit status as the only message.
            let _ = writeln!(io::stderr(), "{text}");
        }
        ExitCode::from(status)
    }
}

impl From<mlakit::Error> for Failure {
    fn from(error: mlakit::Error) -> Self {
        use mlakit::Error as E;
        let text = error.to_string();
        match error {
            E::Refused(refusal) => Self::input(
                format!("{}: {}", refusal.what, refusal.because),
                format!("use {}", refusal.instead),
            ),
            E::Contract { what, .. } => {
                Self::input(text, format!("change {what}, or what it must agree with"))
            }
            E::Size { .. } | E::PageGeometry { .. } => {
                Self::input(text, "compare the shapes in the file with the spec's fields")
            }
            E::Unavailable { what, because, instead } => {
                Self::input(format!("{what} is not available: {because}"), instead)
            }
            E::OutOfMemory { .. } => Self::input(text, "use smaller capacities or fewer pages"),
            E::Device { .. } => Self::input(text, "see what `mlakit doctor` finds"),
            E::ProbeMismatch { .. } => Self::internal(
                text,
                "try --isa scalar, and report this with `mlakit doctor --json`",
            ),
            _ => Self::internal(text, "report this with the command that shows it"),
        }
    }
}

impl From<mlakit_model::ConfigError> for Failure {
    fn from(error: mlakit_model::ConfigError) -> Self {
        use mlakit_model::ConfigError as E;
        let help = match error {
            E::Io { .. } => "give a folder that holds a config.json, or the file itself",
            E::NotJson { .. } => "give the config.json of a Hugging Face checkpoint",
            E::Missing { .. } | E::Invalid { .. } => "correct this key of config.json",
            E::Unsupported { .. } => "use a model of one of the supported architectures",
        };
        Self::input(error.to_string(), help)
    }
}

impl From<mlakit_model::Error> for Failure {
    fn from(error: mlakit_model::Error) -> Self {
        use mlakit_model::Error as E;
        match error {
            E::Config(error) => error.into(),
            E::Checkpoint(error) => {
                Self::input(error.to_string(), "check the checkpoint's files against its source")
            }
            E::Tokenizer(error) => {
                Self::input(error.to_string(), "check tokenizer.json and the given text")
            }
            E::Input(error) => Self::input(error.to_string(), "change the named input"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_input_is_2_and_a_wrong_result_is_1() {
        let contract = mlakit::Error::contract("heads", "1 to 16384", 0);
        let failure = Failure::from(contract).within("case.safetensors");
        assert_eq!(failure.status(), 2);
        assert_eq!(failure.message(), "case.safetensors: heads: needed 1 to 16384, given 0");
        let probe = mlakit::Error::ProbeMismatch {
            op: "dense",
            index: 3,
            needed: "1.0".into(),
            given: "2.0".into(),
        };
        assert_eq!(Failure::from(probe).status(), 1);
        let closed = Failure::output(&io::ErrorKind::BrokenPipe.into());
        assert_eq!(closed.status(), 0);
        assert_eq!(Failure::output(&io::ErrorKind::StorageFull.into()).status(), 1);
    }
}
