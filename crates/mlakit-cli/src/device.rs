//! The devices. This is the only place that lists them.

use std::ffi::OsString;

use mlakit::{Device, Error};
use mlakit_cpu::isa::Isa;
use mlakit_cpu::{Cpu, Facts};
use mlakit_cuda::{Cuda, Facts as GpuFacts, Options as GpuOptions};

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
    gpu: GpuOptions,
}

impl Environment {
    /// Of this process. An empty variable is an absent one.
    pub fn read() -> Self {
        let read = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let gpu = GpuOptions::from_environment();
        Self { isa: read(ISA_VARIABLE), threads: read(THREADS_VARIABLE), gpu }
    }
}

/// A device that is there.
pub enum AnyDevice {
    /// The processor.
    Cpu(Cpu),
    /// A GPU.
    Cuda(Cuda),
}

impl AnyDevice {
    /// Its facts.
    pub fn facts(&self) -> AnyFacts {
        match self {
            Self::Cpu(cpu) => AnyFacts::Cpu(cpu.facts().clone()),
            Self::Cuda(gpu) => AnyFacts::Cuda(gpu.facts().clone()),
        }
    }

    /// Its facts, as text.
    pub fn describe(&self) -> String {
        match self {
            Self::Cpu(cpu) => cpu.facts().to_string(),
            Self::Cuda(gpu) => gpu.facts().to_string(),
        }
    }
}

/// Facts of a device that need not be there.
#[derive(Clone, Debug)]
pub enum AnyFacts {
    /// Of a processor.
    Cpu(Facts),
    /// Of a GPU.
    Cuda(GpuFacts),
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

/// What flags and environment name.
enum Named {
    /// A processor, here or elsewhere.
    Cpu(Facts),
    /// A GPU that need not be here.
    Gpu(GpuFacts),
    /// A GPU that must be.
    PresentGpu,
}

/// The facts that flags and environment ask for; the rest is what this machine has. They may be
/// those of another machine: of a GPU, where `gpu` names one.
///
/// # Errors
/// As [`check_names`]; a GPU that is neither here nor named.
pub fn facts(
    args: &DeviceArgs,
    gpu: Option<&str>,
    environment: &Environment,
) -> Result<AnyFacts, Failure> {
    match named(args, gpu, environment)? {
        Named::Cpu(facts) => Ok(AnyFacts::Cpu(facts)),
        Named::Gpu(facts) => Ok(AnyFacts::Cuda(facts)),
        Named::PresentGpu => {
            open_gpu(args, environment).map(|gpu| AnyFacts::Cuda(gpu.facts().clone()))
        }
    }
}

/// Checks what flags and environment say of a device, for commands that need none.
///
/// # Errors
/// A name or a number that is none; flags that contradict each other.
pub fn check_names(
    args: &DeviceArgs,
    gpu: Option<&str>,
    environment: &Environment,
) -> Result<(), Failure> {
    named(args, gpu, environment).map(drop)
}

fn named(
    args: &DeviceArgs,
    gpu: Option<&str>,
    environment: &Environment,
) -> Result<Named, Failure> {
    match (args.device, gpu) {
        (Some(DeviceName::Cpu), Some(_)) => Err(Failure::input(
            "--gpu: needed --device cuda, given --device cpu",
            "leave one of them out; --gpu alone means --device cuda",
        )),
        (_, Some(name)) => {
            only_of_the_cpu(args, "--gpu")?;
            if args.ordinal.is_some() {
                return Err(Failure::input(
                    "--ordinal: needed a GPU of this machine, given --gpu, which names any",
                    "leave one of them out",
                ));
            }
            preset(name).map(Named::Gpu)
        }
        (Some(DeviceName::Cuda), None) => {
            only_of_the_cpu(args, "--device cuda").map(|()| Named::PresentGpu)
        }
        (Some(DeviceName::Cpu) | None, None) => {
            choose(args, environment).map(|(facts, _)| Named::Cpu(facts))
        }
    }
}

/// Of a GPU by name; capitals are as good.
fn preset(name: &str) -> Result<GpuFacts, Failure> {
    GpuFacts::preset(&name.to_ascii_lowercase()).ok_or_else(|| {
        let known = GpuFacts::PRESETS.join(", ");
        Failure::input(format!("--gpu {name:?}: needed one of {known}"), "correct the name")
    })
}

/// Opens the GPU that the flags ask for.
///
/// # Errors
/// No driver, no such GPU, flags of the CPU.
pub fn open_gpu(args: &DeviceArgs, environment: &Environment) -> Result<Cuda, Failure> {
    only_of_the_cpu(args, "--device cuda")?;
    let ordinal = args.ordinal.unwrap_or(0);
    Cuda::with(GpuOptions { ordinal, ..environment.gpu.clone() }).map_err(|error| match error {
        Error::Unavailable { what, because, instead } => Failure::input(
            format!("--device cuda: {what} is not available: {because}"),
            format!(
                "{instead} (--device cpu); `mlakit plan --op NAME --spec JSON --gpu h200` plans \
                 for a GPU that is not here"
            ),
        ),
        other => Failure::from(other),
    })
}

/// Refuses flags that say nothing of a GPU.
fn only_of_the_cpu(args: &DeviceArgs, given: &str) -> Result<(), Failure> {
    let isa = args.isa.as_ref().map(|_| "--isa");
    match isa.or(args.threads.map(|_| "--threads")) {
        None => Ok(()),
        Some(flag) => Err(Failure::input(
            format!("{flag}: needed --device cpu, given {given}"),
            "leave one of them out",
        )),
    }
}

/// The device that flags and environment ask for, ready to be used.
///
/// # Errors
/// As [`facts`], and instructions or threads that this machine does not have.
pub fn open(args: &DeviceArgs, environment: &Environment) -> Result<AnyDevice, Failure> {
    match args.name() {
        DeviceName::Cpu => {
            let facts = cpu_facts(args, environment)?;
            Cpu::new(facts).map(AnyDevice::Cpu).map_err(Failure::from)
        }
        DeviceName::Cuda => open_gpu(args, environment).map(AnyDevice::Cuda),
    }
}

/// What of this processor is used.
fn cpu_facts(args: &DeviceArgs, environment: &Environment) -> Result<Facts, Failure> {
    let (facts, choices) = choose(args, environment)?;
    usable(&facts, &choices)?;
    Ok(facts)
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
        format!("give one of these, or leave it out; `mlakit doctor` shows what {isa} needs"),
    ))
}

/// Refuses flags that say nothing of a processor.
///
/// # Errors
/// `--ordinal`.
pub fn only_of_a_gpu(args: &DeviceArgs) -> Result<(), Failure> {
    let Some(ordinal) = args.ordinal else { return Ok(()) };
    Err(Failure::input(
        format!("--ordinal {ordinal}: needed --device cuda, given --device cpu"),
        "add --device cuda, or leave it out",
    ))
}

/// The facts of the CPU with the reason of each.
///
/// # Errors
/// A name or a number that is none.
pub fn choose(args: &DeviceArgs, environment: &Environment) -> Result<(Facts, Choices), Failure> {
    only_of_a_gpu(args)?;
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
            Failure::input(
                format!("{from}: {error}"),
                "correct the name, or leave it out; `mlakit doctor` shows what is here",
            )
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

#[cfg(test)]
mod tests {
    use super::*;

    fn args(isa: Option<&str>, threads: Option<usize>) -> DeviceArgs {
        DeviceArgs { device: None, isa: isa.map(Into::into), threads, ordinal: None }
    }

    #[test]
    fn flags_come_before_the_environment() {
        let environment = Environment {
            isa: Some("avx2".into()),
            threads: Some("3".into()),
            ..Environment::default()
        };
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
    fn flags_of_the_other_device_are_refused() {
        let on = |name, isa, threads| DeviceArgs { device: Some(name), ..args(isa, threads) };
        let cuda = |isa, threads| on(DeviceName::Cuda, isa, threads);
        let environment = Environment::default();
        for (args, gpu, flag) in [
            (cuda(Some("avx2"), None), Some("h200"), "--isa: needed --device cpu"),
            (cuda(None, Some(2)), None, "--threads: needed --device cpu"),
            (cuda(None, None), Some("abacus"), "--gpu \"abacus\": needed one of a100, "),
            (DeviceArgs { ordinal: Some(1), ..args(None, None) }, None, "--ordinal 1: needed"),
            (
                DeviceArgs { ordinal: Some(1), ..cuda(None, None) },
                Some("h200"),
                "--ordinal: needed a GPU of this machine",
            ),
            (on(DeviceName::Cpu, None, None), Some("h200"), "--gpu: needed --device cuda"),
            (args(Some("avx2"), None), Some("h200"), "--isa: needed --device cpu, given --gpu"),
            (args(Some("avx9"), None), None, "--isa: unknown instruction set"),
        ] {
            let failure = facts(&args, gpu, &environment).unwrap_err();
            assert!(failure.message().starts_with(flag), "{}", failure.message());
            assert_eq!(failure.status(), 2);
        }
        for name in ["h200", "H200"] {
            for args in [cuda(None, None), args(None, None)] {
                let facts = facts(&args, Some(name), &environment).unwrap();
                assert!(matches!(facts, AnyFacts::Cuda(facts) if facts.capability == (9, 0)));
            }
        }
    }

    #[test]
    fn a_wrong_variable_is_named() {
        for (isa, threads, name) in [
            ("sse9", "1", ISA_VARIABLE),
            ("avx2", "0", THREADS_VARIABLE),
            ("avx2", "many", THREADS_VARIABLE),
            ("avx2", "99999999999999999999", THREADS_VARIABLE),
        ] {
            let environment = Environment {
                isa: Some(isa.into()),
                threads: Some(threads.into()),
                ..Environment::default()
            };
            let failure = choose(&args(None, None), &environment).unwrap_err();
            assert!(failure.message().contains(name), "{}", failure.message());
            assert_eq!(failure.status(), 2);
        }
    }
}
