//! The command line.

use std::path::PathBuf;

use clap::{
    Args as Group, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum, error::ErrorKind,
};
use mlakit::op::merge::Partial;
use mlakit::{RecordFormat, Splits};
use serde::Serialize;

/// Multi-head latent attention: runs, plans and checks its operations.
#[derive(Debug, Parser)]
#[command(name = "mlakit", version, arg_required_else_help = true, max_term_width = 100)]
pub struct Args {
    /// How results are printed.
    #[command(flatten)]
    pub output: OutputArgs,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

impl Args {
    /// Reads the command line. A negative number after a flag is its value, and refused as such.
    ///
    /// # Errors
    /// What clap says, of wrong words and of help that was asked for.
    pub fn read(words: &[std::ffi::OsString]) -> Result<Self, clap::Error> {
        let mut command = Self::whole_command();
        let matches = command.try_get_matches_from_mut(words)?;
        Self::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
    }

    fn whole_command() -> clap::Command {
        let numbers = |command: clap::Command| {
            command.mut_args(|arg| match arg.get_action().takes_values() {
                true => arg.allow_negative_numbers(true),
                false => arg,
            })
        };
        numbers(Self::command()).mut_subcommands(numbers)
    }
}

/// What is wrong with a command line, in one line, and what to do about it; `None` where clap's own
/// text is the answer: help or the version.
pub fn explain(error: &clap::Error, words: &[std::ffi::OsString]) -> Option<(String, String)> {
    use ErrorKind as E;
    match error.kind() {
        E::DisplayHelp | E::DisplayVersion | E::DisplayHelpOnMissingArgumentOrSubcommand => None,
        _ => {
            let text = error.render().to_string();
            let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
            let (mut message, mut help) = (Vec::new(), Vec::new());
            for line in lines {
                if line.starts_with("Usage:") || line.starts_with("For more information") {
                    break;
                }
                match line.strip_prefix("tip: ") {
                    Some(tip) => help.push(tip.to_owned()),
                    None => message.push(line.strip_prefix("error: ").unwrap_or(line).to_owned()),
                }
            }
            let names = Args::command();
            let name = words.iter().skip(1).find_map(|word| names.find_subcommand(word));
            let name = name.map_or(String::new(), |command| format!(" {}", command.get_name()));
            help.push(format!("see `mlakit{name} --help`"));
            Some((message.join(" "), help.join("; ")))
        }
    }
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Continue texts with a checkpoint
    Run(RunArgs),
    /// Run one operation on the inputs of a case file
    Op(OpArgs),
    /// Run one attention layer of a checkpoint on the inputs of a file
    Layer(LayerArgs),
    /// Measure the bits per byte of a text
    Eval(EvalArgs),
    /// Show what an operation or a model needs; needs no device
    Plan(PlanArgs),
    /// Compare this device with the oracle
    Check(CheckArgs),
    /// Time dense decode
    Bench(BenchArgs),
    /// Show what was found on this machine, and what is used of it
    Doctor(DoctorArgs),
}

/// How results are printed.
#[derive(Clone, Copy, Debug, Group)]
pub struct OutputArgs {
    /// How to print results
    #[arg(long, global = true, value_enum, default_value = "table", conflicts_with = "json")]
    format: Format,
    /// Short for --format json
    #[arg(long, global = true)]
    json: bool,
}

impl OutputArgs {
    /// What was asked for.
    pub fn format(self) -> Format {
        if self.json { Format::Json } else { self.format }
    }
}

/// A form of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    Table,
    /// For programs: one object.
    Json,
}

/// The device and what of it to use.
#[derive(Clone, Debug, Group)]
pub struct DeviceArgs {
    /// The device that runs it [default: cpu]
    #[arg(long, value_enum)]
    pub device: Option<DeviceName>,
    /// Threads of the CPU, instead of MLAKIT_THREADS or every processor there is
    #[arg(long, value_name = "N", value_parser = whole::<1, MAX_THREADS>)]
    pub threads: Option<usize>,
    /// Instructions of the CPU, instead of MLAKIT_ISA or the best there are [scalar, avx2, avx512,
    /// avx512bf16, amx]
    #[arg(long, value_name = "NAME")]
    pub isa: Option<String>,
    /// Which GPU, as the driver counts [default: 0]
    #[arg(long, value_name = "N")]
    pub ordinal: Option<u32>,
}

impl DeviceArgs {
    /// The device; the CPU where no flag names one.
    pub fn name(&self) -> DeviceName {
        self.device.unwrap_or(DeviceName::Cpu)
    }
}

/// Threads at most.
pub const MAX_THREADS: usize = 1024;

/// A device by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceName {
    /// This machine's processor.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

/// `mlakit op`.
#[derive(Debug, Group)]
pub struct OpArgs {
    /// The operation: dense, sparse, indexer, selection, merge, writer or projection
    pub operation: String,
    /// The case file
    #[arg(long, value_name = "IN.safetensors")]
    pub case: PathBuf,
    /// Where its outputs go
    #[arg(long, value_name = "OUT.safetensors")]
    pub out: PathBuf,
    /// Capture it once, replay it N times, and compare each replay with the eager run, bit by bit
    #[arg(long, value_name = "N", value_parser = whole::<1, 1_000_000>, conflicts_with = "oracle")]
    pub replay: Option<usize>,
    /// Run the f64 oracle instead of a device
    #[arg(long)]
    pub oracle: bool,
    /// The device.
    #[command(flatten)]
    pub device: DeviceArgs,
}

/// `mlakit plan`.
#[derive(Debug, Group)]
#[command(group = clap::ArgGroup::new("what").required(true).args(["op", "config"]))]
pub struct PlanArgs {
    /// Plan an operation: dense, sparse, indexer, selection, merge, writer or projection
    #[arg(long, value_name = "NAME", requires = "spec")]
    pub op: Option<String>,
    /// Its Spec: a JSON object, or @ and the file that holds it
    #[arg(long, value_name = "JSON|@FILE", requires = "op")]
    pub spec: Option<String>,
    /// Plan for a GPU that need not be here, by name: h200, a100, ...; means --device cuda
    #[arg(long, value_name = "NAME")]
    pub gpu: Option<String>,
    /// Plan a model: its config.json, or the folder that holds it
    #[arg(long, value_name = "PATH", conflicts_with = "spec")]
    pub config: Option<PathBuf>,
    /// Query heads of a layer, instead of the config's
    #[arg(long, value_name = "N", conflicts_with = "op", value_parser = whole::<1, 65_536>)]
    pub heads: Option<usize>,
    /// Devices that share the weights; each keeps the whole latent cache
    #[arg(long, value_name = "N", conflicts_with = "op", value_parser = whole::<1, 4096>)]
    pub tp: Option<usize>,
    /// Memory of each device, in GiB
    #[arg(long, value_name = "GIB", conflicts_with = "op", value_parser = gibibytes)]
    pub memory_gib: Option<f64>,
    /// Bits of every stored weight [default: as the config says, else 16]
    #[arg(long, value_name = "N", conflicts_with = "op", value_parser = whole::<1, 64>)]
    pub weight_bits: Option<usize>,
    /// The record format of the cache [default: bf16]
    #[arg(long, value_name = "FORMAT", conflicts_with = "op", value_parser = record)]
    pub record: Option<RecordFormat>,
    /// The record format of the index keys [default: index_bf16_256]
    #[arg(long, value_name = "FORMAT", conflicts_with = "op", value_parser = index_record)]
    pub index_record: Option<RecordFormat>,
    /// Tokens of a page: 1 or a multiple of 16 [default: 64]
    #[arg(long, value_name = "N", conflicts_with = "op", value_parser = page_size)]
    pub page_size: Option<usize>,
    /// The device that it is planned for; it need not be there.
    #[command(flatten)]
    pub device: DeviceArgs,
}

/// `mlakit check`.
#[derive(Debug, Group)]
pub struct CheckArgs {
    /// Only a part of the cases, in a second or two
    #[arg(long)]
    pub quick: bool,
    /// Only the cases of this operation
    #[arg(long, value_name = "NAME")]
    pub op: Option<String>,
    /// The device.
    #[command(flatten)]
    pub device: DeviceArgs,
}

/// What `mlakit bench` times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchOp {
    /// Attention over every key.
    Dense,
    /// Attention over the keys that rows select.
    Sparse,
}

/// `mlakit bench`.
#[derive(Debug, Group)]
pub struct BenchArgs {
    /// The operation
    #[arg(long, value_enum, default_value = "dense")]
    pub op: BenchOp,
    /// With --op sparse: tokens that each row selects
    #[arg(long, value_name = "N", default_value = "2048", value_parser = whole::<1, { 1 << 24 }>)]
    pub selected: usize,
    /// Query heads, one or several
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "16,128")]
    #[arg(value_parser = whole::<1, 16_384>)]
    pub heads: Vec<usize>,
    /// Cached tokens of a request, one or several
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "4096,32768")]
    #[arg(value_parser = whole::<1, { 1 << 30 }>)]
    pub tokens: Vec<usize>,
    /// Query rows of a request
    #[arg(long, value_name = "N", default_value = "1", value_parser = whole::<1, 65_536>)]
    pub rows: usize,
    /// Requests
    #[arg(long, value_name = "N", default_value = "1", value_parser = whole::<1, 65_536>)]
    pub batch: usize,
    /// Elements of a query and a key
    #[arg(long, value_name = "N", default_value = "576", value_parser = whole::<2, 8192>)]
    pub qk_width: usize,
    /// Elements of a value
    #[arg(long, value_name = "N", default_value = "512", value_parser = whole::<2, 8192>)]
    pub value_width: usize,
    /// Tokens of a page: 1 or a multiple of 16
    #[arg(long, value_name = "N", default_value = "64", value_parser = page_size)]
    pub page_size: usize,
    /// The record format of the cache
    #[arg(long, value_name = "FORMAT", default_value = "bf16", value_parser = record)]
    pub record: RecordFormat,
    /// The dtype of split results [bf16, f32]
    #[arg(long, value_name = "DTYPE", default_value = "bf16", value_parser = partial)]
    pub partial: Partial,
    /// How a row's keys are divided: auto, a number, or fixed:TOKENS
    #[arg(long, value_name = "SPLITS", default_value = "auto", value_parser = splits)]
    pub splits: Splits,
    /// Timed runs of each shape
    #[arg(long, value_name = "N", default_value = "25", value_parser = whole::<1, 100_000>)]
    pub samples: usize,
    /// The device.
    #[command(flatten)]
    pub device: DeviceArgs,
}

/// `mlakit doctor`.
#[derive(Debug, Group)]
pub struct DoctorArgs {
    /// The device that would be used.
    #[command(flatten)]
    pub device: DeviceArgs,
}

/// `mlakit run`.
#[derive(Debug, Group)]
pub struct RunArgs {
    /// The prompts; several are generated together
    #[arg(value_name = "PROMPT")]
    pub prompts: Vec<String>,
    /// One more prompt; may be repeated
    #[arg(long = "prompt", value_name = "TEXT")]
    pub more_prompts: Vec<String>,
    /// The model: a folder of a Hugging Face checkpoint, instead of the embedded one
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Tokens to generate for each prompt
    #[arg(long, value_name = "N", default_value = "128", value_parser = whole::<1, { 1 << 24 }>)]
    pub tokens: usize,
    /// 0 takes the most likely token; above it, tokens are drawn
    #[arg(long, value_name = "T", default_value = "0", value_parser = at_least_zero)]
    pub temperature: f32,
    /// What the draws begin from
    #[arg(long, value_name = "N", default_value = "0", value_parser = seed)]
    pub seed: u64,
    /// The record format of the cache
    #[arg(long, value_name = "FORMAT", default_value = "bf16", value_parser = record)]
    pub record: RecordFormat,
    /// The record format of the index keys
    #[arg(long, value_name = "FORMAT", default_value = "index_bf16_256", value_parser = index_record)]
    pub index_record: RecordFormat,
    /// The dtype of split results [bf16, f32]
    #[arg(long, value_name = "DTYPE", default_value = "bf16", value_parser = partial)]
    pub partial: Partial,
    /// How a row's keys are divided: auto, a number, or fixed:TOKENS
    #[arg(long, value_name = "SPLITS", default_value = "auto", value_parser = splits)]
    pub splits: Splits,
    /// Whether sparse layers select their keys (auto) or see all of them (dense)
    #[arg(long, value_enum, default_value = "auto")]
    pub attention: Attention,
    /// The device.
    #[command(flatten)]
    pub device: DeviceArgs,
}

/// `mlakit layer`.
#[derive(Debug, Group)]
pub struct LayerArgs {
    /// The model: a folder of a Hugging Face checkpoint
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// The layer, from 0
    #[arg(long, value_name = "N", value_parser = whole::<0, 4095>)]
    pub layer: usize,
    /// The inputs
    #[arg(long, value_name = "IN.safetensors")]
    pub input: PathBuf,
    /// Where its outputs go
    #[arg(long, value_name = "OUT.safetensors")]
    pub out: PathBuf,
    /// Feed each sequence N tokens at a time through the paged cache
    #[arg(long, value_name = "N", value_parser = whole::<1, { 1 << 24 }>)]
    pub chunk: Option<usize>,
    /// The record format of the cache
    #[arg(long, value_name = "FORMAT", default_value = "bf16", value_parser = record)]
    pub record: RecordFormat,
    /// The record format of the index keys
    #[arg(long, value_name = "FORMAT", default_value = "index_bf16_256", value_parser = index_record)]
    pub index_record: RecordFormat,
    /// The dtype of split results [bf16, f32]
    #[arg(long, value_name = "DTYPE", default_value = "bf16", value_parser = partial)]
    pub partial: Partial,
    /// The oracle in f64, which rounds nothing but what caches other than bf16 hold, or the device's kernels
    #[arg(long, value_enum, default_value = "bf16")]
    pub precision: Precision,
    /// The device.
    #[command(flatten)]
    pub device: DeviceArgs,
}

/// `mlakit eval`.
#[derive(Debug, Group)]
pub struct EvalArgs {
    /// The text
    pub file: PathBuf,
    /// The model: a folder of a Hugging Face checkpoint, instead of the embedded one
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// The record format of the cache
    #[arg(long, value_name = "FORMAT", default_value = "bf16", value_parser = record)]
    pub record: RecordFormat,
    /// The record format of the index keys
    #[arg(long, value_name = "FORMAT", default_value = "index_bf16_256", value_parser = index_record)]
    pub index_record: RecordFormat,
    /// Only this many tokens of the text
    #[arg(long, value_name = "N", value_parser = whole::<1, { 1 << 30 }>)]
    pub tokens: Option<usize>,
    /// Whether sparse layers select their keys (auto) or see all of them (dense)
    #[arg(long, value_enum, default_value = "auto")]
    pub attention: Attention,
    /// The dtype of split results [bf16, f32]
    #[arg(long, value_name = "DTYPE", default_value = "bf16", value_parser = partial)]
    pub partial: Partial,
    /// The device.
    #[command(flatten)]
    pub device: DeviceArgs,
}

/// What sparse layers attend to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Attention {
    /// What their indexer selects.
    Auto,
    /// Every visible key.
    Dense,
}

/// What computes a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Precision {
    /// The oracle.
    F64,
    /// The device's kernels.
    Bf16,
}

/// A whole number within bounds.
pub(crate) fn whole<const LOW: usize, const HIGH: usize>(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(value) if (LOW..=HIGH).contains(&value) => Ok(value),
        _ => Err(format!("needed a whole number from {LOW} to {HIGH}")),
    }
}

fn seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("needed a whole number from 0 to {}", u64::MAX))
}

/// Memory of a device, at most an exbibyte: beyond it a number is a slip.
fn gibibytes(text: &str) -> Result<f64, String> {
    const MOST: f64 = (1u64 << 30) as f64;
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value <= MOST => Ok(value),
        _ => Err(format!("needed a number above 0, at most {MOST}")),
    }
}

fn page_size(text: &str) -> Result<usize, String> {
    match whole::<1, 65_536>(text) {
        Ok(size) if size == 1 || size.is_multiple_of(16) => Ok(size),
        _ => Err("needed 1 or a multiple of 16, at most 65536".into()),
    }
}

fn at_least_zero(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err("needed a finite number, 0 or more".into()),
    }
}

fn record(name: &str) -> Result<RecordFormat, String> {
    match RecordFormat::parse(name) {
        Ok(format) if format.is_index() => Err(format!("{name} is the format of an index key")),
        found => found.map_err(|error| error.to_string()),
    }
}

fn index_record(name: &str) -> Result<RecordFormat, String> {
    match RecordFormat::parse(name) {
        Ok(format) if format.is_index() => Ok(format),
        _ => {
            let formats = RecordFormat::ALL.into_iter().filter(|format| format.is_index());
            let names: Vec<_> = formats.map(RecordFormat::name).collect();
            Err(format!("needed one of {}", names.join(", ")))
        }
    }
}

fn partial(name: &str) -> Result<Partial, String> {
    match name {
        "bf16" => Ok(Partial::Bf16),
        "f32" => Ok(Partial::F32),
        _ => Err("needed bf16 or f32".into()),
    }
}

fn splits(text: &str) -> Result<Splits, String> {
    const MOST: usize = 1 << 16;
    let number = |text: &str| text.parse().ok().filter(|count| *count > 0);
    match text.strip_prefix("fixed:") {
        None if text == "auto" => Some(Splits::Auto),
        None => number(text).filter(|count| *count <= MOST).map(Splits::Count),
        Some(tokens) => {
            number(tokens).filter(|tokens| tokens.is_multiple_of(64)).map(Splits::FixedTokens)
        }
    }
    .ok_or_else(|| {
        format!("needed auto, a number from 1 to {MOST}, or fixed:TOKENS with a multiple of 64")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::whole_command().debug_assert();
    }

    #[test]
    fn errors_are_one_line_with_help() {
        let explained = |line: &str| {
            let words: Vec<_> = line.split(' ').map(Into::into).collect();
            explain(&Args::read(&words).unwrap_err(), &words)
        };
        for (line, message, help) in [
            ("mlakit op dense", "--case <IN.safetensors> --out", "see `mlakit op --help`"),
            ("mlakit opp", "unrecognized subcommand 'opp'", "see `mlakit --help`"),
            ("mlakit op dense --orcale", "'--orcale'", "'--oracle'"),
            ("mlakit run a --threads -1", "'-1' for '--threads <N>': needed a whole number", "run"),
            ("mlakit run a --temperature -0.5", "needed a finite number, 0 or more", "run"),
            ("mlakit run a --seed -1", "needed a whole number from 0", "run"),
            ("mlakit plan --config x --memory-gib -3", "needed a number above 0", "plan"),
            ("mlakit bench --tokens 64,-1", "'-1' for '--tokens <N,..>'", "bench"),
        ] {
            let (given, advice) = explained(line).unwrap();
            assert!(given.contains(message) && !given.contains('\n'), "{line}: {given}");
            assert!(advice.contains(help), "{line}: {advice}");
        }
        assert!(explained("mlakit --help").is_none() && explained("mlakit").is_none());
    }

    #[test]
    fn the_model_commands_are_consistent_too() {
        let named = clap::Command::new;
        LayerArgs::augment_args(named("layer")).debug_assert();
        EvalArgs::augment_args(named("eval")).debug_assert();
        let run = RunArgs::augment_args(named("run"));
        let words = ["run", "a", "b", "--prompt", "c", "--splits", "fixed:128", "--seed", "7"];
        let matches = run.try_get_matches_from(words).unwrap();
        let run = <RunArgs as clap::FromArgMatches>::from_arg_matches(&matches).unwrap();
        assert_eq!((run.prompts.len(), run.more_prompts.len(), run.tokens), (2, 1, 128));
        assert_eq!((run.splits, run.attention), (Splits::FixedTokens(128), Attention::Auto));
    }

    #[test]
    fn splits_have_three_forms() {
        assert_eq!(splits("auto"), Ok(Splits::Auto));
        assert_eq!(splits("7"), Ok(Splits::Count(7)));
        assert_eq!(splits("fixed:256"), Ok(Splits::FixedTokens(256)));
        for wrong in
            ["", "0", "-1", "65537", "fixed", "fixed:", "fixed:0", "fixed:65", "Auto", "1.5"]
        {
            assert!(splits(wrong).is_err(), "{wrong}");
        }
    }
}
