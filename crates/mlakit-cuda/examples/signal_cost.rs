//! What a signal behind a submission costs: a write of the stream to a word of pinned host memory,
//! against a recorded event; alone, and behind a kernel that does nothing. For each, the time of
//! the host to enqueue one and the time until a row of them is done.
//! docs/benchmarks/cuda-signals.md has the figures.
//!
//! `cargo run --release -p mlakit-cuda --example signal_cost`
//!
//! It calls the driver itself: the library has only the way that was kept.

use std::ffi::c_void;
use std::time::Instant;

use cudarc::driver::sys;

const TEXT: &str = "
.version 7.1
.target sm_80
.address_size 64
.visible .entry nothing() { ret; }
\0";

/// Signals of a sample: with a kernel each still below what the driver queues, so that the host
/// never waits.
const SIGNALS: usize = 400;
const SAMPLES: usize = 50;
const WARM_UPS: usize = 5;
/// As the library has.
const RING: usize = 64;

fn ok(result: sys::CUresult) {
    assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
}

/// What is measured: a stream, a kernel, and both ways to signal.
struct Bench {
    stream: sys::CUstream,
    kernel: sys::CUfunction,
    word: u64,
    ring: Vec<sys::CUevent>,
}

impl Bench {
    fn new() -> Self {
        let (mut context, mut module) = (std::ptr::null_mut(), std::ptr::null_mut());
        let (mut stream, mut kernel) = (std::ptr::null_mut(), std::ptr::null_mut());
        let (mut host, mut word) = (std::ptr::null_mut(), 0);
        // SAFETY: all pointers are to live values of the driver's types, and each call uses what
        // the one before it gave.
        unsafe {
            ok(sys::cuInit(0));
            ok(sys::cuDevicePrimaryCtxRetain(&mut context, 0));
            ok(sys::cuCtxSetCurrent(context));
            ok(sys::cuModuleLoadData(&mut module, TEXT.as_ptr().cast()));
            ok(sys::cuModuleGetFunction(&mut kernel, module, c"nothing".as_ptr()));
            ok(sys::cuStreamCreate(&mut stream, 1));
            ok(sys::cuMemHostAlloc(&mut host, 8, 2));
            ok(sys::cuMemHostGetDevicePointer_v2(&mut word, host, 0));
        }
        let event = || {
            let mut event = std::ptr::null_mut();
            // SAFETY: the context is current, and the pointer is to a live handle.
            unsafe { ok(sys::cuEventCreate(&mut event, 2)) };
            event
        };
        Self { stream, kernel, word, ring: (0..RING).map(|_| event()).collect() }
    }

    fn launch(&self) {
        let none: *mut *mut c_void = std::ptr::null_mut();
        let (kernel, stream) = (self.kernel, self.stream);
        // SAFETY: the kernel is loaded and takes nothing.
        unsafe { ok(sys::cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, none, none)) };
    }

    fn signal(&self, way: &str, number: usize) {
        match way {
            // SAFETY: the word is mapped, and the stream is live.
            "word" => unsafe {
                ok(sys::cuStreamWriteValue64_v2(self.stream, self.word, number as u64, 0));
            },
            // SAFETY: event and stream are live.
            "event" => unsafe { ok(sys::cuEventRecord(self.ring[number % RING], self.stream)) },
            _ => {}
        }
    }

    /// One sample: nanoseconds a signal until it is enqueued, and until all are done.
    fn sample(&self, way: &str, kernel: bool) -> (f64, f64) {
        let start = Instant::now();
        for number in 0..SIGNALS {
            if kernel {
                self.launch();
            }
            self.signal(way, number);
        }
        let enqueued = start.elapsed().as_nanos() as f64 / SIGNALS as f64;
        // SAFETY: the stream is live.
        unsafe { ok(sys::cuStreamSynchronize(self.stream)) };
        (enqueued.round(), (start.elapsed().as_nanos() as f64 / SIGNALS as f64).round())
    }
}

fn main() {
    let bench = Bench::new();
    let cases =
        [("word", false), ("event", false), ("none", true), ("word", true), ("event", true)];
    for round in 0..2 {
        for (way, kernel) in cases {
            let samples: Vec<_> =
                (0..WARM_UPS + SAMPLES).map(|_| bench.sample(way, kernel)).collect();
            let (enqueue, finish): (Vec<_>, Vec<_>) = samples.into_iter().skip(WARM_UPS).unzip();
            let medians = (median(&enqueue), median(&finish));
            println!(
                "{{\"round\": {round}, \"signal\": \"{way}\", \"kernel\": {kernel}, \"signals\": \
                 {SIGNALS}, \"enqueue_median_ns\": {}, \"finish_median_ns\": {}, \"enqueue_ns\": \
                 {enqueue:?}, \"finish_ns\": {finish:?}}}",
                medians.0, medians.1
            );
        }
    }
}

fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}
