//! The devices. This is the only place that lists them.

use std::ffi::OsString;

use mlakit::Device;
use mlakit_cpu::isa::Isa;
use mlakit_cpu::{Cpu, Facts};

use crate::args::{DeviceArgs, DeviceName, MAX_THREADS, whole};
use crate::failure::Failure;

/// The variable that names the instructions of the CPU.
pub const ISA_VARIABLE: &str = "MLAKIT_ISA";
/// The variable that gives the threads of the CPU.
pub const THREADS_VARIABLE: &str = "MLAKIT_THREADS";

/// The environment, read once, at the edge.
#[derive(Clone, Debug, Default)]
pub struct Environment {
    isa: Option<OsString>,
    threads: Option<OsString>,
}

impl Environment {
    /// Of this process. An empty variable is an absent one.
    pub fn read() -> Self {
        let read = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        Self { isa: read(ISA_VARIABLE), threads: read(THREADS_VARIABLE) }
    }
}

/// A device that is there.
pub enum AnyDevice {
    /// The processor.
    Cpu(Cpu),
}

impl AnyDevice {
    /// Its facts.
    pub fn facts(&self) -> AnyFacts {
        match self {
            Self::Cpu(cpu) => AnyFacts::Cpu(cpu.facts().clone()),
        }
    }

    /// Its facts, as text.
    pub fn describe(&self) -> String {
        match self {
            Self::Cpu(cpu) => cpu.facts().to_string(),
        }
    }
}

/// Facts of a device that need not be there.
#[derive(Clone, Debug)]
pub enum AnyFacts {
    /// Of a processor.
    Cpu(Facts),
}

/// What was found out for a device, and where each choice comes from.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Choices {
    /// The instructions.
    pub isa: &'static str,
    /// The flag or variable that names them.
    #[serde(skip)]
    pub isa_from: Option<&'static str>,
    /// Why these.
    pub isa_because: String,
    /// The threads.
    pub threads: usize,
    /// Why so many.
    pub threads_because: String,
}

/// The facts that flags and environment ask for; the rest is what this machine has. They may be
/// those of another machine.
///
/// # Errors
/// A name or a number that is none; a device that has no kernels.
pub fn facts(args: &DeviceArgs, environment: &Environment) -> Result<AnyFacts, Failure> {
    match args.device {
        DeviceName::Cpu => choose(args, environment).map(|(facts, _)| AnyFacts::Cpu(facts)),
        DeviceName::Cuda => Err(cuda_refusal()),
    }
}

/// The device that flags and environment ask for, ready to be used.
///
/// # Errors
/// As [`facts`], and instructions or threads that this machine does not have.
pub fn open(args: &DeviceArgs, environment: &Environment) -> Result<AnyDevice, Failure> {
    match present_facts(args, environment)? {
        AnyFacts::Cpu(facts) => Cpu::new(facts).map(AnyDevice::Cpu).map_err(Failure::from),
    }
}

/// The facts of the device that [`open`] would give, without making it.
///
/// # Errors
/// As [`open`].
pub fn present_facts(args: &DeviceArgs, environment: &Environment) -> Result<AnyFacts, Failure> {
    match args.device {
        DeviceName::Cpu => {
            let (facts, choices) = choose(args, environment)?;
            usable(&facts, &choices)?;
            Ok(AnyFacts::Cpu(facts))
        }
        DeviceName::Cuda => Err(cuda_refusal()),
    }
}

/// Refuses instructions that this processor does not have.
///
/// # Errors
/// The instructions, where they were asked for, and what there is instead.
pub fn usable(facts: &Facts, choices: &Choices) -> Result<(), Failure> {
    let there: Vec<Isa> = Isa::ALL.into_iter().filter(|isa| isa.is_available()).collect();
    among(facts.isa, &there, choices)
}

fn among(isa: Isa, there: &[Isa], choices: &Choices) -> Result<(), Failure> {
    if there.contains(&isa) {
        return Ok(());
    }
    let names: Vec<_> = there.iter().map(|isa| isa.name()).collect();
    let from = choices.isa_from.unwrap_or("the instructions");
    Err(Failure::input(
        format!(
            "{from} {isa}: needed instructions of this processor, which has {}",
            names.join(", ")
        ),
        format!("give one of these or leave it out; `mlakit doctor` shows what {isa} needs"),
    ))
}

/// The facts of the CPU with the reason of each.
///
/// # Errors
/// A name or a number that is none.
pub fn choose(args: &DeviceArgs, environment: &Environment) -> Result<(Facts, Choices), Failure> {
    let (isa, isa_from) = isa(args, environment)?;
    let (threads, threads_because) = threads(args, environment)?;
    let isa_because = match isa_from {
        Some(from) => format!("{from} says so"),
        None => "the fastest that this processor has".into(),
    };
    let choices = Choices { isa: isa.name(), isa_from, isa_because, threads, threads_because };
    Ok((Facts { isa, threads }, choices))
}

/// The instructions, and the flag or variable that names them.
fn isa(
    args: &DeviceArgs,
    environment: &Environment,
) -> Result<(Isa, Option<&'static str>), Failure> {
    let parse = |name: &str, from: &'static str| {
        name.parse::<Isa>().map(|isa| (isa, Some(from))).map_err(|error| {
            Failure::input(format!("{from}: {error}"), "see what `mlakit doctor` finds")
        })
    };
    match (&args.isa, &environment.isa) {
        (Some(name), _) => parse(name, "--isa"),
        (None, Some(name)) => parse(&name.to_string_lossy(), ISA_VARIABLE),
        (None, None) => Ok((Isa::detect(), None)),
    }
}

fn threads(args: &DeviceArgs, environment: &Environment) -> Result<(usize, String), Failure> {
    match (args.threads, &environment.threads) {
        (Some(threads), _) => Ok((threads, "--threads says so".into())),
        (None, Some(text)) => {
            let threads = whole::<1, MAX_THREADS>(&text.to_string_lossy());
            threads.map(|n| (n, format!("{THREADS_VARIABLE} says so"))).map_err(|why| {
                let given = text.to_string_lossy();
                Failure::input(
                    format!("{THREADS_VARIABLE}: {why}, given {given:?}"),
                    "correct the variable or remove it",
                )
            })
        }
        (None, None) => {
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            Ok((threads.min(MAX_THREADS), "the processors that this process may use".into()))
        }
    }
}

/// Why `--device cuda` cannot be had.
pub fn cuda_refusal() -> Failure {
    let message = match mlakit_cuda::probe() {
        Ok(found) => format!(
            "--device cuda: the CUDA kernels are not part of this version yet (found {})",
            found.devices.first().map_or("no device", |device| &device.name)
        ),
        Err(reason) => format!("--device cuda: {reason}"),
    };
    Failure::input(message, "use --device cpu")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(isa: Option<&str>, threads: Option<usize>) -> DeviceArgs {
        DeviceArgs { device: DeviceName::Cpu, isa: isa.map(Into::into), threads }
    }

    #[test]
    fn flags_come_before_the_environment() {
        let environment = Environment { isa: Some("avx2".into()), threads: Some("3".into()) };
        let (facts, choices) = choose(&args(None, None), &environment).unwrap();
        assert_eq!((facts.isa, facts.threads), (Isa::Avx2, 3));
        assert_eq!(choices.isa_because, "MLAKIT_ISA says so");
        let (facts, choices) = choose(&args(Some("scalar"), Some(5)), &environment).unwrap();
        assert_eq!((facts.isa, facts.threads), (Isa::Scalar, 5));
        assert_eq!(choices.threads_because, "--threads says so");
    }

    #[test]
    fn instructions_that_are_not_there_are_refused() {
        let try_isa = |isa: &str, there: &[Isa]| {
            let (facts, choices) =
                choose(&args(Some(isa), Some(1)), &Environment::default()).unwrap();
            among(facts.isa, there, &choices)
        };
        let there = [Isa::Scalar, Isa::Avx2];
        assert!(try_isa("avx2", &there).is_ok());
        let failure = try_isa("avx512", &there).unwrap_err();
        assert_eq!(failure.status(), 2);
        assert!(failure.message().starts_with("--isa avx512: "), "{}", failure.message());
        assert!(failure.message().ends_with("which has scalar, avx2"), "{}", failure.message());
    }

    #[test]
    fn a_wrong_variable_is_named() {
        for (isa, threads, name) in [
            ("sse9", "1", ISA_VARIABLE),
            ("avx2", "0", THREADS_VARIABLE),
            ("avx2", "many", THREADS_VARIABLE),
            ("avx2", "99999999999999999999", THREADS_VARIABLE),
        ] {
            let environment = Environment { isa: Some(isa.into()), threads: Some(threads.into()) };
            let failure = choose(&args(None, None), &environment).unwrap_err();
            assert!(failure.message().contains(name), "{}", failure.message());
            assert_eq!(failure.status(), 2);
        }
    }
}
