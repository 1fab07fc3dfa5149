//! Rates of the kernels, beside the rate of the machine's multiply-add instructions in the same
//! run.
//!
//! `cargo run --release -p mlakit-cpu --example kernel_bench -- [--json] [--rounds N] [--threads N]
//! [--isa NAME]`
//!
//! Every round measures each thing once, in turn, so that drift of the clock meets all alike. The
//! table gives the best round; a ratio is the median over rounds of (kernel rate / peak rate of the
//! same round).

mod cases;
mod peak;

use std::time::{Duration, Instant};

use mlakit_cpu::isa::Isa;
use mlakit_cpu::kernel::Kernels;
use mlakit_cpu::pool::{Pool, PoolOptions};

use cases::{Case, cases};

/// Parsed arguments.
struct Options {
    json: bool,
    rounds: usize,
    threads: usize,
    isas: Vec<Isa>,
    filter: String,
}

fn options() -> Result<Options, String> {
    let available = Isa::ALL.into_iter().filter(|isa| isa.is_available());
    let mut options = Options {
        json: false,
        rounds: 5,
        threads: 0,
        isas: available.filter(|&isa| isa != Isa::Scalar).collect(),
        filter: String::new(),
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
        let number =
            |text: String| text.parse::<usize>().map_err(|_| format!("{text:?} is no number"));
        match argument.as_str() {
            "--json" => options.json = true,
            "--rounds" => options.rounds = number(value()?)?.max(1),
            "--threads" => options.threads = number(value()?)?,
            "--filter" => options.filter = value()?,
            "--isa" => {
                let isa: Isa = value()?.parse().map_err(|e| format!("{e}"))?;
                options.isas = vec![Isa::choose(Some(isa)).map_err(|e| e.to_string())?];
            }
            _ => return Err(format!("unknown argument {argument:?}")),
        }
    }
    Ok(options)
}

/// All rounds of one measured thing.
struct Row {
    isa: Isa,
    name: String,
    /// Multiply-add operations (two each) or bytes, as `unit` says, a second.
    rates: Vec<f64>,
    unit: &'static str,
    /// Rates relative to the peak of the same round.
    ratios: Vec<f64>,
}

fn main() {
    let options = options().unwrap_or_else(|error| {
        eprintln!("kernel_bench: {error}");
        std::process::exit(2);
    });
    let pool_options = PoolOptions { threads: options.threads, ..PoolOptions::default() };
    let pool = Pool::new(pool_options).expect("threads start");
    let dispatch = dispatch_ns(&pool);
    let mut rows = Vec::new();
    for &isa in &options.isas {
        let kernels = Kernels::new(isa).expect("the instruction set was chosen as available");
        rows.extend(measure(&options, kernels, &pool));
    }
    if options.json {
        print_json(&options, &pool, dispatch, &rows);
    } else {
        print_table(&pool, dispatch, &rows);
    }
}

/// Measures peak and cases of one instruction set.
fn measure(options: &Options, kernels: Kernels, pool: &Pool) -> Vec<Row> {
    let isa = kernels.isa();
    let row = |name: String, unit| Row { isa, name, rates: vec![], unit, ratios: vec![] };
    let mut rows = vec![row("peak multiply-add loop".to_owned(), "GF/s")];
    let names = cases(pool.threads());
    let mut made: Vec<Case> = Vec::new();
    for spec in names.into_iter().filter(|spec| spec.name().contains(&options.filter)) {
        rows.push(row(spec.name(), spec.unit()));
        made.push(spec.make(kernels, pool));
    }
    for _ in 0..options.rounds {
        let peak = peak::rate(isa, pool) / 1e9;
        rows[0].rates.push(peak);
        rows[0].ratios.push(1.0);
        for (row, case) in rows[1..].iter_mut().zip(&mut made) {
            let rate = case.work() / 1e9 / seconds(pool, || case.run(pool));
            row.rates.push(rate);
            row.ratios.push(rate / peak);
        }
    }
    rows
}

/// Seconds of one call, the best of calls that fill 60 ms.
fn seconds(pool: &Pool, mut call: impl FnMut()) -> f64 {
    call();
    let (start, mut best) = (Instant::now(), f64::MAX);
    while start.elapsed() < Duration::from_millis(60) {
        let clock = Clock::start(pool);
        call();
        best = best.min(clock.seconds());
    }
    best
}

/// Wall time; on one thread the time that the thread ran, which other processes do not disturb.
pub struct Clock {
    wall: Instant,
    thread: Option<f64>,
}

impl Clock {
    /// Starts the clock that suits the pool.
    pub fn start(pool: &Pool) -> Clock {
        let thread = (pool.threads() == 1).then(thread_seconds);
        Clock { wall: Instant::now(), thread }
    }

    /// Seconds since the start.
    pub fn seconds(&self) -> f64 {
        match self.thread {
            Some(start) => thread_seconds() - start,
            None => self.wall.elapsed().as_secs_f64(),
        }
    }
}

fn thread_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is writable.
    let status = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    assert_eq!(status, 0, "the clock of a thread exists");
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Nanoseconds of a section that does nothing: median and 99th percentile.
fn dispatch_ns(pool: &Pool) -> [f64; 2] {
    let mut times: Vec<f64> = (0..20_000)
        .map(|_| {
            let begin = Instant::now();
            pool.run(pool.threads(), &|_, _| {});
            begin.elapsed().as_secs_f64() * 1e9
        })
        .collect();
    times.sort_by(f64::total_cmp);
    [times[times.len() / 2], times[times.len() * 99 / 100]]
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

fn print_table(pool: &Pool, dispatch: [f64; 2], rows: &[Row]) {
    println!(
        "threads {}, empty section: median {:.0} ns, 99 % {:.0} ns",
        pool.threads(),
        dispatch[0],
        dispatch[1]
    );
    println!("{:<11} {:<44} {:>9} {:>10}", "isa", "what", "best", "of peak");
    for row in rows {
        let best = row.rates.iter().copied().fold(0.0, f64::max);
        let ratio = match row.unit {
            "GF/s" => format!("{:.1} %", 100.0 * median(&row.ratios)),
            _ => String::new(),
        };
        println!("{:<11} {:<44} {best:>9.1} {} {ratio:>9}", row.isa.name(), row.name, row.unit);
    }
}

fn print_json(options: &Options, pool: &Pool, dispatch: [f64; 2], rows: &[Row]) {
    let list = |values: &[f64]| {
        let texts: Vec<String> = values.iter().map(|v| format!("{v:.4}")).collect();
        texts.join(",")
    };
    println!("{{\"threads\":{},\"rounds\":{},", pool.threads(), options.rounds);
    println!("\"dispatch_ns\":{{\"median\":{:.0},\"p99\":{:.0}}},", dispatch[0], dispatch[1]);
    println!("\"rows\":[");
    for (i, row) in rows.iter().enumerate() {
        println!(
            "{{\"isa\":\"{}\",\"what\":\"{}\",\"unit\":\"{}\",\"rates\":[{}],\"of_peak\":[{}]}}{}",
            row.isa,
            row.name,
            row.unit,
            list(&row.rates),
            list(&row.ratios),
            if i + 1 < rows.len() { "," } else { "" }
        );
    }
    println!("]}}");
}
