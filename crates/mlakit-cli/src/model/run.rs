//! `mlakit run`: continues texts.

use std::io::{self, IsTerminal, Write};

use mlakit::Category;
use mlakit_model::decoder::{
    DecodeError, DecoderDevice, Generation, Generator, GeneratorOptions, Sampling, TextLimits,
};
use mlakit_model::{ModelFolder, TextTokenizer};
use serde::Serialize;

use super::{Owned, PROMPT_ROWS, attention, cache, ensure_cache, ledger, ledger_lines, open};
use crate::args::{Format, RunArgs};
use crate::device::{self, AnyDevice, Environment};
use crate::failure::Failure;
use crate::plan::model::assumed;
use crate::progress::Progress;
use crate::report::Report;

/// What `run` did.
#[derive(Debug, Serialize)]
pub struct RunReport {
    device: String,
    texts: Vec<TextReport>,
    prompt_tokens: usize,
    new_tokens: usize,
    prompt_seconds: f64,
    decode_seconds: f64,
    tokens_per_second: f64,
    probe_peak_bytes: usize,
    probe_bytes: usize,
    ledger: Vec<Owned>,
    #[serde(skip_serializing_if = "serde_json::Map::is_empty")]
    assumed: serde_json::Map<String, serde_json::Value>,
    #[serde(skip)]
    streamed: bool,
}

#[derive(Debug, Serialize)]
struct TextReport {
    prompt: String,
    text: String,
    ids: Vec<u32>,
}

/// Runs the command. In the table format the text is printed as it is made.
///
/// # Errors
/// No prompt, a checkpoint that cannot be read or run, a text that does not fit.
pub fn command(
    args: &RunArgs,
    environment: &Environment,
    format: Format,
) -> Result<RunReport, Failure> {
    let prompts: Vec<String> = args.prompts.iter().chain(&args.more_prompts).cloned().collect();
    if prompts.is_empty() {
        return Err(Failure::input(
            "no prompt: needed at least one text",
            "try `mlakit run \"MACBETH.\"`",
        ));
    }
    if let Some(blank) = prompts.iter().position(|prompt| prompt.trim().is_empty()) {
        return Err(Failure::input(
            format!("prompt {}: needed a text, given {:?}", blank + 1, prompts[blank]),
            "quote a text of one character or more; a variable that is not set is an empty text",
        ));
    }
    // What would run it comes first: without it nothing else matters.
    let device = device::open(&args.device, environment)?;
    let model = open(args.model.as_deref(), format)?;
    let tokenizer = model.tokenizer.as_ref().ok_or_else(|| {
        Failure::input("the folder has no tokenizer.json", "add the checkpoint's tokenizer.json")
    })?;
    let ids = prompts
        .iter()
        .map(|prompt| tokenizer.encode(prompt).map_err(mlakit_model::Error::from))
        .collect::<Result<Vec<_>, _>>()?;
    // Before the weights are loaded: what is too long is known at once.
    let limits = TextLimits::new(&model.config);
    ids.iter().try_for_each(|ids| limits.check(ids.len(), args.tokens))?;
    let longest = ids.iter().map(Vec::len).max().unwrap_or(1) + args.tokens;
    ensure_cache(&model.config, (args.record, args.index_record), (ids.len(), longest))?;
    let job = Job { args, model: &model, tokenizer, prompts: &prompts, ids: &ids };
    let stream_text = format == Format::Table;
    match device {
        AnyDevice::Cpu(device) => job.run(&device, stream_text),
        AnyDevice::Cuda(device) => job.run(&device, stream_text),
    }
}

struct Job<'j> {
    args: &'j RunArgs,
    model: &'j ModelFolder,
    tokenizer: &'j TextTokenizer,
    prompts: &'j [String],
    ids: &'j [Vec<u32>],
}

impl Job<'_> {
    fn run<D: DecoderDevice>(&self, device: &D, stream_text: bool) -> Result<RunReport, Failure> {
        let args = self.args;
        let longest = self.ids.iter().map(Vec::len).max().unwrap_or(1);
        let options = GeneratorOptions {
            cache: cache((args.record, args.index_record), args.partial, args.splits),
            attention: attention(args.attention),
            batch: self.ids.len(),
            max_tokens: longest + args.tokens,
            prompt_rows: PROMPT_ROWS.min(longest),
            prompt_logits: false,
        };
        let caller = device.own_stream()?;
        let mut stream = device.stream(&caller)?;
        let pair = (&self.model.config, &self.model.checkpoint);
        let loading = Progress::new("loading and preparing", 1);
        let mut generator = Generator::new(&mut stream, pair, options)?;
        drop(loading);
        let sampling = Sampling { temperature: args.temperature, seed: args.seed };
        let mut printer = Printer::new(self, stream_text);
        let made = generator.generate(
            &mut stream,
            self.ids,
            (args.tokens, sampling),
            &mut |sequence, id| printer.push(sequence, id),
        );
        let made = match made {
            Err(_) if printer.failure.is_some() => {
                return Err(printer.failure.take().expect("seen"));
            }
            made => made?,
        };
        let texts = printer.finish()?;
        Ok(self.report(device, &made, (texts, stream_text)))
    }

    fn report<D: DecoderDevice>(
        &self,
        device: &D,
        made: &Generation,
        (texts, streamed): (Vec<String>, bool),
    ) -> RunReport {
        let census = device.census();
        let texts = self.prompts.iter().zip(texts).zip(&made.ids);
        RunReport {
            device: device.facts().to_string(),
            texts: texts
                .map(|((prompt, text), ids)| TextReport {
                    prompt: prompt.clone(),
                    text,
                    ids: ids.clone(),
                })
                .collect(),
            prompt_tokens: made.prompt_tokens,
            new_tokens: made.ids.iter().map(Vec::len).sum(),
            prompt_seconds: made.prompt_seconds,
            decode_seconds: made.decode_seconds,
            tokens_per_second: made.tokens_per_second(),
            probe_peak_bytes: census.peak(Category::Probe),
            probe_bytes: census.live(Category::Probe),
            ledger: ledger(census),
            assumed: assumed(&self.model.config.assumed),
            streamed,
        }
    }
}

/// Prints one text as it is made; of several, each when all are done, since they grow side by side.
struct Printer<'p> {
    streams: Vec<mlakit_model::TextStream<'p>>,
    texts: Vec<String>,
    prompts: &'p [String],
    live: bool,
    begun: bool,
    all: bool,
    failure: Option<Failure>,
}

impl<'p> Printer<'p> {
    fn new(job: &Job<'p>, print: bool) -> Self {
        Self {
            streams: job.prompts.iter().map(|_| job.tokenizer.stream()).collect(),
            texts: vec![String::new(); job.prompts.len()],
            prompts: job.prompts,
            begun: false,
            live: print && job.prompts.len() == 1,
            all: print && job.prompts.len() > 1,
            failure: None,
        }
    }

    /// Before the first piece: a text that is refused is not begun.
    fn begin(&mut self) -> Result<(), Failure> {
        if std::mem::replace(&mut self.begun, true) {
            return Ok(());
        }
        let bold = io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        let (on, off) = if bold { ("\x1b[1m", "\x1b[0m") } else { ("", "") };
        print(&format!("{on}{}{off}", self.prompts[0]))
    }

    fn push(&mut self, sequence: usize, id: u32) -> Result<(), DecodeError> {
        let piece = self.streams[sequence].push(id).map_err(mlakit_model::Error::from)?;
        if self.live
            && let Err(failure) = self.begin().and_then(|()| print(&piece))
        {
            self.failure = Some(failure);
            let (needed, given) = ("a reader".to_owned(), "none".to_owned());
            return Err(DecodeError::Input { what: "standard output", needed, given });
        }
        self.texts[sequence].push_str(&piece);
        Ok(())
    }

    fn finish(mut self) -> Result<Vec<String>, Failure> {
        if self.live {
            self.begin()?;
        }
        let mut texts = std::mem::take(&mut self.texts);
        for (stream, text) in self.streams.into_iter().zip(&mut texts) {
            let rest = stream.finish().map_err(mlakit_model::Error::from)?;
            if self.live {
                print(&format!("{rest}\n\n"))?;
            }
            text.push_str(&rest);
        }
        if self.all {
            for (prompt, text) in self.prompts.iter().zip(&texts) {
                print(&format!("{prompt}{text}\n\n"))?;
            }
        }
        Ok(texts)
    }
}

fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .map_err(|error| Failure::output(&error))
}

impl Report for RunReport {
    fn lines(&self) -> Vec<String> {
        let mut lines = vec![format!(
            "{}: {} new tokens, {:.0} tokens/s (prompts: {} tokens in {:.1} ms)",
            self.device,
            self.new_tokens,
            self.tokens_per_second,
            self.prompt_tokens,
            self.prompt_seconds * 1e3
        )];
        lines.push(format!(
            "preparation: probes peaked at {}, {} are left",
            crate::report::bytes(self.probe_peak_bytes),
            crate::report::bytes(self.probe_bytes)
        ));
        lines.extend(ledger_lines(&self.ledger));
        if !self.streamed {
            lines.splice(
                0..0,
                self.texts.iter().map(|text| format!("{}{}", text.prompt, text.text)),
            );
        }
        lines
    }
}
