//! `mlakit bench`: how long a step of attention takes, replayed from a captured graph.

use std::time::Instant;

use mlakit::op::dense::Dense;
use mlakit::op::sparse::Sparse;
use mlakit::{Choice, Runs};
use serde::Serialize;

use crate::args::{BenchArgs, BenchOp};
use crate::device::{self, AnyDevice, Environment};
use crate::failure::Failure;
use crate::progress::Progress;
use crate::report::{self, Report};

mod decode;
mod sparse;

use decode::Decode;
use sparse::SparseDecode;

/// A step that can be replayed.
trait Step {
    /// Replays it so many times, one behind the other, and waits for the last.
    ///
    /// # Errors
    /// What replaying says.
    fn replay(&mut self, times: usize) -> Result<(), Failure>;
    /// What the plan chose.
    fn choice(&self) -> &Choice;
}

/// Replays before the first sample: caches and clocks settle.
const WARM_UP: usize = 3;

/// A sample takes about this long, in milliseconds: a short step is replayed several times, so that the host's
/// wait at the end does not count.
const SAMPLE_MS: f64 = 2.0;

/// Replays of a sample at most.
const MAX_REPLAYS: usize = 50;

/// One shape that was timed.
#[derive(Clone, Debug, Serialize)]
struct Line {
    heads: usize,
    tokens: usize,
    kernel: &'static str,
    splits: usize,
    median_ms: f64,
    min_ms: f64,
    /// 2 x (qk width + value width) for each head and key that a row sees, at the median.
    gflops: f64,
    /// Records of the keys, at the median: of dense attention once for each request, of sparse attention for each row.
    gbytes_per_s: f64,
    /// Replays behind one another of which a sample is the mean.
    replays_a_sample: usize,
    /// Every sample, in the order in which they were taken.
    samples_ms: Vec<f64>,
}

/// All shapes.
#[derive(Clone, Debug, Serialize)]
struct Timed {
    device: String,
    operation: &'static str,
    /// Tokens that a row selects, where it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    selected: Option<usize>,
    rows: usize,
    batch: usize,
    qk_width: usize,
    value_width: usize,
    page_size: usize,
    record: &'static str,
    partial: mlakit::op::merge::Partial,
    shapes: Vec<Line>,
}

impl Report for Timed {
    fn lines(&self) -> Vec<String> {
        let rows = self.shapes.iter().map(|line| {
            vec![
                line.heads.to_string(),
                line.tokens.to_string(),
                line.splits.to_string(),
                format!("{:.4}", line.median_ms),
                format!("{:.4}", line.min_ms),
                format!("{:.1}", line.gflops),
                format!("{:.2}", line.gbytes_per_s),
                line.kernel.to_owned(),
            ]
        });
        let header = ["heads", "tokens", "splits", "median ms", "min ms", "GF/s", "GB/s", "kernel"];
        let Self { rows: each, batch, qk_width, value_width, record, page_size, .. } = self;
        let operation = match self.selected {
            Some(selected) => format!("{}, {selected} tokens a row", self.operation),
            None => self.operation.into(),
        };
        let what = format!("{batch} x {each} rows, {qk_width}/{value_width}, {record}");
        vec![
            format!("{}: {operation}, {what}, pages of {page_size}", self.device),
            report::table(&header, &[0, 1, 2, 3, 4, 5, 6], rows.collect()),
            "rates are at the median; GB/s count the cache once a request, or what rows select"
                .into(),
        ]
    }
}

/// `mlakit bench`.
///
/// # Errors
/// A device that is not there; a shape that is none, or needs more memory than there is.
pub fn command(
    args: &BenchArgs,
    environment: &Environment,
) -> Result<impl Report + use<>, Failure> {
    let device = device::open(&args.device, environment)?;
    let mut progress = Progress::new("bench", args.heads.len() * args.tokens.len());
    let mut shapes = Vec::new();
    for tokens in &args.tokens {
        for heads in &args.heads {
            progress.step(&format!("{heads} heads, {tokens} tokens"));
            let shape = (*heads, *tokens);
            shapes.push(match &device {
                AnyDevice::Cpu(cpu) => time(args, shape, cpu)?,
                AnyDevice::Cuda(gpu) => time(args, shape, gpu)?,
            });
            progress.done();
        }
    }
    let is_sparse = args.op == BenchOp::Sparse;
    Ok(Timed {
        device: device.describe(),
        operation: if is_sparse { "sparse" } else { "dense" },
        selected: is_sparse.then_some(args.selected),
        rows: args.rows,
        batch: args.batch,
        qk_width: args.qk_width,
        value_width: args.value_width,
        page_size: args.page_size,
        record: args.record.name(),
        partial: args.partial,
        shapes,
    })
}

fn time<D: Runs<Dense> + Runs<Sparse>>(
    args: &BenchArgs,
    shape: (usize, usize),
    device: &D,
) -> Result<Line, Failure> {
    let caller = device.own_stream()?;
    let stream = device.stream(&caller)?;
    match args.op {
        BenchOp::Dense => time_step(args, shape, &mut Decode::new(args, shape, stream)?),
        BenchOp::Sparse => time_step(args, shape, &mut SparseDecode::new(args, shape, stream)?),
    }
}

fn time_step(
    args: &BenchArgs,
    (heads, tokens): (usize, usize),
    step: &mut dyn Step,
) -> Result<Line, Failure> {
    let mut time = |replays: usize| -> Result<f64, Failure> {
        let begin = Instant::now();
        step.replay(replays)?;
        Ok(begin.elapsed().as_secs_f64() * 1e3 / replays as f64)
    };
    let mut once_ms = f64::INFINITY;
    for _ in 0..WARM_UP {
        once_ms = once_ms.min(time(1)?);
    }
    let replays = ((SAMPLE_MS / once_ms).ceil() as usize).clamp(1, MAX_REPLAYS);
    let mut samples_ms = Vec::with_capacity(args.samples);
    for _ in 0..args.samples {
        samples_ms.push(time(replays)?);
    }
    let (median_ms, min_ms) = middle(&samples_ms);
    let (keys, bytes) = seen(args, tokens);
    let each = 2.0 * (args.qk_width + args.value_width) as f64 * (args.batch * heads) as f64;
    let choice = step.choice();
    Ok(Line {
        heads,
        tokens,
        kernel: choice.kernel,
        splits: choice.splits,
        gflops: each * keys as f64 / median_ms / 1e6,
        gbytes_per_s: bytes as f64 / median_ms / 1e6,
        median_ms,
        min_ms,
        replays_a_sample: replays,
        samples_ms,
    })
}

/// Keys that the rows of a request see, and bytes of records of all requests.
fn seen(args: &BenchArgs, tokens: usize) -> (usize, usize) {
    match args.op {
        BenchOp::Dense => {
            let of = |row: usize| (tokens + row + 1).saturating_sub(args.rows).min(tokens);
            ((0..args.rows).map(of).sum(), decode::cache_bytes(args, tokens))
        }
        BenchOp::Sparse => {
            let keys = args.rows * sparse::selected(args, tokens);
            (keys, decode::cache_bytes(args, keys))
        }
    }
}

/// Median and minimum of samples, of which there is one at least.
fn middle(samples: &[f64]) -> (f64, f64) {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let (half, odd) = (sorted.len() / 2, sorted.len() % 2 == 1);
    let median = if odd { sorted[half] } else { (sorted[half - 1] + sorted[half]) / 2.0 };
    (median, sorted[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(middle(&[3.0, 1.0, 2.0]), (2.0, 1.0));
        assert_eq!(middle(&[4.0, 1.0, 3.0, 2.0]), (2.5, 1.0));
        assert_eq!(middle(&[5.0]), (5.0, 5.0));
    }
}
