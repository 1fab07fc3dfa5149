//! How fast dense attention reads its cache, against a copy measured in the same run.
//!
//! ```text
//! cargo run --release -p mlakit-cuda --example dense_bench [batch rows heads tokens]
//! ```
//!
//! `MLAKIT_CUDA_DENSE=portable` or `hopper` takes kernels of one family, where a plan would take
//! what is best. Without numbers: 128 requests of one row, 16 heads, 4,096 tokens, BF16; the run fails below 65 %
//! of the copy rate. Calls are enqueued one behind the other and timed by the host's clock, so
//! calls of a few microseconds show the host, not the device. The cache is read once a call, bytes
//! are those of the keys; the copy counts what it reads and what it writes.

use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use cudarc::driver::sys;
use half::bf16;
use mlakit::op::dense::{Dense, DenseArgs, DenseFields, DenseSpec, QueryInput};
use mlakit::op::merge::LseOutput;
use mlakit::op::spec::Scalar;
use mlakit::{
    Buffer, Category, Device, Element, Lane, Lse, Natural, Pages, Plan, PoolView, RecordFormat,
};
use mlakit_cuda::{Cuda, Options};

const FLOOR: f64 = 0.65;
const SAMPLES: usize = 21;
const CALLS: usize = 20;
const WIDTHS: (usize, usize) = (576, 512);
const PAGE: usize = 64;

type Fallible<T> = Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            println!("below {:.0} % of the copy rate", 100.0 * FLOOR);
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Fallible<bool> {
    let numbers: Vec<usize> =
        std::env::args().skip(1).map(|text| text.parse()).collect::<Result<_, _>>()?;
    let shape = match numbers[..] {
        [] => [128, 1, 16, 4096],
        [batch, rows, heads, tokens] => [batch, rows, heads, tokens],
        _ => return Err("batch, rows, heads and tokens, or nothing".into()),
    };
    let device = Cuda::with(Options::from_environment())?;
    println!("{}", device.facts());
    let copy = copy_rate(&device)?;
    report("copy, TB/s (larger is faster)", &copy, 3);
    let micros = attention(&device, shape)?;
    report("dense, microseconds a call (smaller is faster)", &micros, 1);
    let [batch, _, _, tokens] = shape;
    let rate = (batch * tokens * WIDTHS.0 * 2) as f64 / median(&micros) / 1e6;
    let share = rate / median(&copy);
    println!("keys read at {rate:.3} TB/s, {:.1} % of the copy rate", 100.0 * share);
    Ok(!numbers.is_empty() || share >= FLOOR)
}

fn report(what: &str, samples: &[f64], digits: usize) {
    let all: Vec<String> = samples.iter().map(|sample| format!("{sample:.digits$}")).collect();
    println!("{what}: median {:.digits$} of {}", median(samples), all.join(" "));
}

fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

fn tensor<T: Element>(device: &Cuda, values: &[T::Raw]) -> Result<Buffer<T, Cuda>, mlakit::Error> {
    Buffer::new(device, (Category::Tensors, "bench"), values)
}

/// TB/s of a copy of 2 GiB, read and written bytes together.
fn copy_rate(device: &Cuda) -> Fallible<Vec<f64>> {
    let bytes = 2 << 30;
    let of = || Buffer::<u8, Cuda>::zeroed(device, (Category::Tensors, "bench"), bytes);
    let (from, to) = (of()?, of()?);
    let caller = device.own_stream()?;
    let mut samples = Vec::new();
    for _ in 0..SAMPLES {
        caller.synchronize()?;
        let begin = Instant::now();
        for _ in 0..4 {
            // SAFETY: both allocations are of this size and live until the stream has been waited
            // for.
            let code = unsafe {
                sys::cuMemcpyDtoDAsync_v2(to.address(), from.address(), bytes, caller.raw().cast())
            };
            code.result()?;
        }
        caller.synchronize()?;
        samples.push(8.0 * bytes as f64 / begin.elapsed().as_secs_f64() / 1e12);
    }
    Ok(samples)
}

/// Numbers between -1 and 1, the same each time.
fn numbers(len: usize) -> Vec<bf16> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        bf16::from_f32((state >> 8) as f32 / (1 << 23) as f32 - 1.0)
    };
    (0..len).map(|_| next()).collect()
}

fn spec([batch, rows, heads, tokens]: [usize; 4]) -> Result<DenseSpec, mlakit::Error> {
    DenseSpec::new(DenseFields {
        heads,
        qk_width: WIDTHS.0,
        value_width: WIDTHS.1,
        record: RecordFormat::Bf16,
        record_width: None,
        page_size: PAGE,
        softmax_scale: Scalar::try_from(192f32.sqrt().recip())?,
        lse: Default::default(),
        sink_in_lse: false,
        query: Default::default(),
        quantize_query: false,
        partial: Default::default(),
        splits: Default::default(),
        budget: Default::default(),
        window: None,
        row_lengths: false,
        max_rows: batch * rows,
        max_batch: batch,
        max_kv_tokens: tokens,
        max_table_width: tokens.div_ceil(PAGE),
    })
}

/// Microseconds of a call. Pages lie in an order that has nothing to do with their ids.
fn attention(device: &Cuda, shape: [usize; 4]) -> Fallible<Vec<f64>> {
    let [batch, rows, heads, tokens] = shape;
    let (spec, width) = (spec(shape)?, tokens.div_ceil(PAGE));
    let plan = Plan::<Dense>::for_device::<Cuda>(&spec, device.facts())?;
    let (kernel, splits) = (plan.choice().kernel, plan.choice().splits);
    println!("{shape:?} requests, rows, heads, tokens: {kernel}, {splits} splits");
    let prepared = plan.prepare(device)?;
    let pages = batch * width;
    let mut pool = Pages::new(device, "bench", spec.pages(), pages)?;
    let page = numbers(spec.pages().payload_bytes() / 2);
    for id in 0..pages {
        pool.write((id, 0), bytemuck::cast_slice(&page))?;
    }
    let table: Vec<i32> = (0..pages).map(|i| (i * 7919 % pages) as i32).collect();
    let offsets: Vec<i32> = (0..=batch).map(|b| (b * rows) as i32).collect();
    let results = batch * rows * heads;
    let q = tensor::<bf16>(device, &numbers(results * WIDTHS.0))?;
    let table = tensor::<i32>(device, &table)?;
    let kv_lens = tensor::<i32>(device, &vec![tokens as i32; batch])?;
    let q_offsets = tensor::<i32>(device, &offsets)?;
    let mut out = tensor::<bf16>(device, &vec![bf16::NAN; results * WIDTHS.1])?;
    let mut lse = tensor::<Lse<Natural>>(device, &vec![f32::NAN; results])?;
    let mut lane = Lane::new(device, "bench", &[plan.scratch_bytes()])?;
    let caller = device.own_stream()?;
    let mut stream = device.stream(&caller)?;
    let mut view = PoolView::new(device, "bench", spec.pages())?;
    view.bind(&mut stream, &pool)?;
    let mut samples = Vec::new();
    for _ in 0..SAMPLES {
        stream.wait()?;
        let begin = Instant::now();
        for _ in 0..CALLS {
            let args = DenseArgs {
                q: QueryInput::Bf16((&q).into()),
                cache: (&view).into(),
                page_table: (&table).into(),
                kv_lens: (&kv_lens).into(),
                q_offsets: (&q_offsets).into(),
                row_kv_lens: None,
                kv_scale: None,
                q_scale: None,
                out: (&mut out).into(),
                lse: LseOutput::Natural((&mut lse).into()),
                scratch: (&mut lane).into(),
            };
            prepared.bind(args)?.run(&mut stream)?;
        }
        stream.wait()?;
        samples.push(begin.elapsed().as_secs_f64() * 1e6 / CALLS as f64);
    }
    assert!(out.read()?.iter().all(|value| value.is_finite()), "every output was written");
    Ok(samples)
}
