//! `mlakit bench`: how long dense decode takes, replayed from a captured graph.

use std::time::Instant;

use mlakit::Runs;
use mlakit::op::dense::Dense;
use serde::Serialize;

use crate::args::BenchArgs;
use crate::device::{self, AnyDevice, Environment};
use crate::failure::Failure;
use crate::progress::Progress;
use crate::report::{self, Report};

mod decode;

use decode::Decode;

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
    /// 2 x (qk width + value width) for each head and visible key, at the median.
    gflops: f64,
    /// Records of the visible keys, once for each request, at the median.
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
        let what = format!("{batch} x {each} rows, {qk_width}/{value_width}, {record}");
        vec![
            format!("{}: {what}, pages of {page_size}", self.device),
            report::table(&header, &[0, 1, 2, 3, 4, 5, 6], rows.collect()),
            "rates are at the median; the cache is read once a request in GB/s".into(),
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
    Ok(Timed {
        device: device.describe(),
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

fn time<D: Runs<Dense>>(
    args: &BenchArgs,
    shape: (usize, usize),
    device: &D,
) -> Result<Line, Failure> {
    let caller = device.own_stream()?;
    let mut decode = Decode::new(args, shape, device.stream(&caller)?)?;
    let mut time = |replays: usize| -> Result<f64, Failure> {
        let begin = Instant::now();
        decode.replay(replays)?;
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
    let (heads, tokens) = shape;
    let (median_ms, min_ms) = middle(&samples_ms);
    let seen: usize =
        (0..args.rows).map(|row| (tokens + row + 1).saturating_sub(args.rows).min(tokens)).sum();
    let each = 2.0 * (args.qk_width + args.value_width) as f64 * (args.batch * heads) as f64;
    let choice = decode.plan().choice();
    Ok(Line {
        heads,
        tokens,
        kernel: choice.kernel,
        splits: choice.splits,
        gflops: each * seen as f64 / median_ms / 1e6,
        gbytes_per_s: decode::cache_bytes(args, tokens) as f64 / median_ms / 1e6,
        median_ms,
        min_ms,
        replays_a_sample: replays,
        samples_ms,
    })
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
