//! `mlakit doctor`: what was found on this machine, what is used of it, and why.

use mlakit_cpu::isa::Isa;
use serde::Serialize;

use crate::args::{DeviceArgs, DeviceName, DoctorArgs};
use crate::device::{self, Choices, Environment};
use crate::failure::Failure;
use crate::machine::{self, Feature, Memory};
use crate::op::OPERATIONS;
use crate::report::{self, Report};

/// What was found.
#[derive(Clone, Debug, Serialize)]
struct Found {
    version: &'static str,
    operations: Vec<&'static str>,
    processor: Option<String>,
    processors: usize,
    memory: Option<Memory>,
    features: Vec<Feature>,
    instruction_sets: Vec<InstructionSet>,
    /// What of the processor a command would use; absent where flags or variables ask for what is
    /// not here.
    used: Option<Choices>,
    cuda: Cuda,
    /// Why a command with these flags and variables would be refused.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    problems: Vec<Problem>,
}

/// Something that a command would be refused for.
#[derive(Clone, Debug, Serialize)]
struct Problem {
    error: String,
    help: String,
}

impl From<Failure> for Problem {
    fn from(failure: Failure) -> Self {
        // What another command sends its user here for is in this report.
        let help = failure.help().split("; `mlakit doctor`").next().unwrap_or_default();
        Self { error: failure.message().to_owned(), help: help.to_owned() }
    }
}

/// One instruction set that kernels are compiled for.
#[derive(Clone, Debug, Serialize)]
struct InstructionSet {
    name: &'static str,
    available: bool,
    used: bool,
    because: String,
}

/// What was found of CUDA.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
enum Cuda {
    Found { driver: String, devices: Vec<Gpu>, used: bool, because: String, compiler: String },
    Unavailable { used: bool, because: String },
}

#[derive(Clone, Debug, Serialize)]
struct Gpu {
    name: String,
    compute_capability: String,
    memory_bytes: usize,
    multiprocessors: i32,
}

impl Report for Found {
    fn lines(&self) -> Vec<String> {
        let unknown = || "unknown".to_owned();
        let memory = self.memory.map(|memory| {
            let [all, left] = [memory.total_bytes, memory.available_bytes].map(report::bytes);
            format!("{all}, {left} available")
        });
        let used = |of: fn(&Choices) -> String| match &self.used {
            Some(choices) => of(choices),
            None => "none: what was asked for is not here".to_owned(),
        };
        let head = report::pairs(&[
            ("mlakit", self.version.to_owned()),
            ("operations", self.operations.join(", ")),
            ("processor", self.processor.clone().unwrap_or_else(unknown)),
            ("processors", self.processors.to_string()),
            ("memory", memory.unwrap_or_else(unknown)),
            ("instructions used", used(|used| format!("{}: {}", used.isa, used.isa_because))),
            ("threads used", used(|used| format!("{}: {}", used.threads, used.threads_because))),
        ]);
        let sets = self.instruction_sets.iter().map(|set| {
            let verdict = match (set.used, set.available) {
                (true, _) => "used",
                (false, true) => "available",
                (false, false) => "not available",
            };
            vec![set.name.to_owned(), verdict.to_owned(), set.because.clone()]
        });
        let sets = report::table(&["instructions", "", "because"], &[], sets.collect());
        let mut lines = vec![head, sets, self.cuda.line()];
        for Problem { error, help } in &self.problems {
            lines.push(format!("problem: {error}\n   help: {help}"));
        }
        lines
    }
}

impl Cuda {
    fn line(&self) -> String {
        match self {
            Self::Unavailable { because, .. } => format!("CUDA is not used: {because}"),
            Self::Found { driver, devices, because, used, compiler } => {
                let rows = devices.iter().map(|gpu| {
                    vec![
                        gpu.name.clone(),
                        gpu.compute_capability.clone(),
                        report::bytes(gpu.memory_bytes),
                        gpu.multiprocessors.to_string(),
                    ]
                });
                let header = ["GPU", "capability", "memory", "multiprocessors"];
                let gpus = report::table(&header, &[2, 3], rows.collect());
                let verdict = if *used { "used" } else { "not used" };
                let compiler = format!("kernels are compiled by {compiler}");
                format!("CUDA driver {driver} is {verdict}: {because}\n{gpus}\n{compiler}")
            }
        }
    }
}

/// `mlakit doctor`. What is missing, or asked for in vain, is part of the result.
pub fn command(args: &DoctorArgs, environment: &Environment) -> impl Report + use<> {
    let mut problems = Vec::new();
    let mut note = |failure: Failure| problems.push(Problem::from(failure));
    let gpu = match args.device.name() {
        DeviceName::Cpu => None,
        DeviceName::Cuda => device::open_gpu(&args.device, environment).map_err(&mut note).ok(),
    };
    if args.device.name() == DeviceName::Cpu {
        device::only_of_a_gpu(&args.device).unwrap_or_else(&mut note);
    }
    // What of the processor would be used; the flag of a GPU says nothing of it.
    let cpu = DeviceArgs { device: None, ordinal: None, ..args.device.clone() };
    let used = device::choose(&cpu, environment).and_then(|(facts, choices)| {
        device::usable(&facts, &choices).map(|()| (facts.isa, choices))
    });
    let (isa, used) = used.map_err(&mut note).ok().unzip();
    let features = machine::features();
    let because = |isa_of_row| {
        let asked = used.as_ref().map(|used: &Choices| used.isa_because.as_str());
        let using = Use { isa, because: asked.unwrap_or_default(), fastest: Isa::detect() };
        because(isa_of_row, &using, &features)
    };
    let set = |of: Isa| InstructionSet {
        name: of.name(),
        available: of.is_available(),
        used: isa == Some(of),
        because: because(of),
    };
    Found {
        version: env!("CARGO_PKG_VERSION"),
        operations: OPERATIONS.iter().map(|operation| operation.name).collect(),
        processor: machine::processor(),
        processors: std::thread::available_parallelism().map_or(1, usize::from),
        memory: machine::memory(),
        instruction_sets: Isa::ALL.map(set).into(),
        features,
        used,
        cuda: cuda(gpu.as_ref(), args.device.name()),
        problems,
    }
}

/// What an instruction set asks for.
fn needs(isa: Isa) -> &'static [&'static str] {
    const ALL: [&str; 10] = [
        "avx2",
        "fma",
        "avx512f",
        "avx512bw",
        "avx512vl",
        "avx512dq",
        "avx512bf16",
        "avx512vbmi",
        "amx-tile",
        "amx-bf16",
    ];
    match isa {
        Isa::Scalar => &[],
        Isa::Avx2 => ALL.split_at(2).0,
        Isa::Avx512 => ALL.split_at(6).0,
        Isa::Avx512Bf16 => ALL.split_at(8).0,
        Isa::Amx => &ALL,
    }
}

/// What the processor lacks; of AMX also the leave to use its tiles, for which the system is asked.
fn missing(isa: Isa, features: &[Feature]) -> Vec<&'static str> {
    let has = |name: &&&str| features.iter().any(|f| f.name == **name && f.present);
    let mut missing: Vec<_> = needs(isa).iter().filter(|name| !has(name)).copied().collect();
    if isa == Isa::Amx && missing.is_empty() && !isa.is_available() {
        missing.push("the system's leave to use tiles");
    }
    missing
}

/// What is used, why, and what would be if nothing were asked for.
struct Use<'u> {
    isa: Option<Isa>,
    because: &'u str,
    fastest: Isa,
}

fn because(isa: Isa, used: &Use<'_>, features: &[Feature]) -> String {
    let missing = missing(isa, features);
    if !missing.is_empty() {
        return format!("the processor lacks {}", missing.join(", "));
    }
    match used.isa {
        None => "not what was asked for".to_owned(),
        Some(same) if same == isa => used.because.to_owned(),
        Some(fastest) if fastest == used.fastest => format!("{fastest} is faster here"),
        Some(asked) => format!("{asked} was asked for"),
    }
}

fn cuda(open: Option<&mlakit_cuda::Cuda>, asked: DeviceName) -> Cuda {
    match mlakit_cuda::probe() {
        Err(reason) => Cuda::Unavailable { used: false, because: reason.to_string() },
        Ok(found) => {
            let gpu = |device: &mlakit_cuda::CudaDevice| {
                let (major, minor) = device.compute_capability;
                Gpu {
                    name: device.name.clone(),
                    compute_capability: format!("{major}.{minor}"),
                    memory_bytes: device.memory_bytes,
                    multiprocessors: device.multiprocessors,
                }
            };
            Cuda::Found {
                driver: found.driver.to_string(),
                devices: found.devices.iter().map(gpu).collect(),
                used: open.is_some(),
                because: match (open, asked) {
                    (Some(gpu), _) => {
                        format!("--device cuda says so; {}", mlakit::Device::facts(gpu))
                    }
                    (None, DeviceName::Cuda) => "what was asked for is not here".into(),
                    (None, DeviceName::Cpu) => {
                        "the CPU is the default; --device cuda uses it".into()
                    }
                },
                compiler: compiler(open),
            }
        }
    }
}

/// The compiler of the kernels, which is looked for when a GPU is used.
fn compiler(open: Option<&mlakit_cuda::Cuda>) -> String {
    match open.map(mlakit_cuda::Cuda::compiler) {
        None => "NVRTC, which --device cuda looks for".into(),
        Some(Ok(compiler)) => {
            let (major, minor) = compiler.version();
            format!("NVRTC {major}.{minor}")
        }
        Some(Err(error)) => format!("nothing: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The reasons given here are those by which the device itself decides.
    #[test]
    fn what_is_missing_decides_what_is_available() {
        let features = machine::features();
        for isa in Isa::ALL {
            assert_eq!(missing(isa, &features).is_empty(), isa.is_available(), "{isa}");
        }
        let using = |isa| Use { isa: Some(isa), because: "why", fastest: Isa::Avx512 };
        let lacks = because(Isa::Avx512, &using(Isa::Scalar), &[]);
        assert!(lacks.starts_with("the processor lacks avx2, fma, avx512f"), "{lacks}");
        let scalar = |used| because(Isa::Scalar, &using(used), &features);
        assert_eq!(scalar(Isa::Avx512), "avx512 is faster here");
        assert_eq!(scalar(Isa::Avx512Bf16), "avx512bf16 was asked for");
        assert_eq!(scalar(Isa::Scalar), "why");
        let lacks = because(Isa::Amx, &using(Isa::Scalar), &[]);
        assert!(lacks.ends_with("amx-tile, amx-bf16"), "{lacks}");
    }
}
