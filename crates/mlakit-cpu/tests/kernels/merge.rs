//! Merging against f64; empty, poisoned and infinite partials; sinks.

use mlakit_cpu::kernel::{Kernels, LseBase, MergeCall, OutFormat};
use mlakit_cpu::numerics::{bf16_to_f32, f32_to_bf16};

use crate::common::{Rng, kernels};

/// Partials of `rows * heads` lanes.
#[derive(Clone)]
struct Partials {
    splits: usize,
    heads: usize,
    lanes: usize,
    width: usize,
    outs: Vec<f32>,
    lses: Vec<f32>,
    sink: Option<Vec<f32>>,
    sink_in_lse: bool,
    format: OutFormat,
    base: LseBase,
    out_base: LseBase,
}

impl Partials {
    fn new(splits: usize, lanes: usize, width: usize, seed: u64) -> Partials {
        let mut rng = Rng(seed);
        Partials {
            splits,
            heads: 2,
            lanes,
            width,
            outs: (0..splits * lanes * width).map(|_| bf16_to_f32(rng.bf16(1.0))).collect(),
            lses: (0..splits * lanes).map(|_| rng.normal() * 4.0 + 20.0).collect(),
            sink: None,
            sink_in_lse: false,
            format: OutFormat::F32,
            base: LseBase::Two,
            out_base: LseBase::Natural,
        }
    }

    fn run(&self, kernels: Kernels) -> (Vec<u16>, Vec<f32>) {
        let bf16: Vec<u16> = self.outs.iter().map(|x| f32_to_bf16(*x)).collect();
        let mut out = vec![0xffff; self.lanes * self.width + 1];
        let mut lse = vec![f32::NAN; self.lanes];
        let call = MergeCall {
            splits: self.splits,
            heads: self.heads,
            width: self.width,
            outs: match self.format {
                OutFormat::F32 => self.outs.as_ptr().cast(),
                OutFormat::Bf16 => bf16.as_ptr().cast(),
            },
            format: self.format,
            lses: self.lses.as_ptr(),
            lse_base: self.base,
            split_stride: self.lanes,
            sink: self.sink.as_ref().map_or(std::ptr::null(), |sink| sink.as_ptr()),
            nan_spreads: false,
            sink_in_lse: self.sink_in_lse,
            out: out.as_mut_ptr(),
            lse: lse.as_mut_ptr(),
            out_lse_base: self.out_base,
        };
        let middle = self.lanes / 3;
        // SAFETY: inputs and outputs are as large as the call says.
        unsafe { kernels.merge(&call, 0..middle) };
        // SAFETY: as above.
        unsafe { kernels.merge(&call, middle..self.lanes) };
        assert_eq!(out.pop(), Some(0xffff), "wrote past the output");
        (out, lse)
    }

    fn unit(base: LseBase) -> f64 {
        if base == LseBase::Two { std::f64::consts::LN_2 } else { 1.0 }
    }

    /// Checks a run against f64.
    fn check(&self, kernels: Kernels) {
        let (out, lse) = self.run(kernels);
        for lane in 0..self.lanes {
            let part = |split: usize| f64::from(self.lses[split * self.lanes + lane]);
            let live: Vec<usize> = (0..self.splits)
                .filter(|&s| part(s) < f64::INFINITY && part(s).exp() > 0.0)
                .collect();
            let natural = |split: usize| part(split) * Partials::unit(self.base);
            let max = live.iter().map(|&s| natural(s)).fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = live.iter().map(|&s| (natural(s) - max).exp()).sum();
            let sink = self.sink.as_ref().map(|sink| f64::from(sink[lane % self.heads]));
            let extra = sink.map_or(0.0, |sink| (sink - max).exp());
            let total = if self.sink_in_lse { sum + extra } else { sum };
            let expected = if live.is_empty() {
                f64::NEG_INFINITY
            } else {
                (max + total.ln()) / Partials::unit(self.out_base)
            };
            let got = f64::from(lse[lane]);
            let close = got == expected || (got - expected).abs() <= 2e-6 * expected.abs().max(1.0);
            assert!(close, "{} lane {lane}: lse {got}, expected {expected}", kernels.isa());
            for v in 0..self.width {
                let value =
                    |s: usize| f64::from(self.outs[(s * self.lanes + lane) * self.width + v]);
                let weigh = |s: usize| (natural(s) - max).exp() / (sum + extra);
                let (mut mean, mut size) = (0.0, 0.0);
                for &split in &live {
                    mean += weigh(split) * value(split);
                    size += weigh(split) * value(split).abs();
                }
                let got = f64::from(bf16_to_f32(out[lane * self.width + v]));
                let bound = mean.abs() / 256.0 + size * 1e-5;
                assert!(
                    (got - mean).abs() <= bound,
                    "{} lane {lane} element {v}: {got}, expected {mean}",
                    kernels.isa()
                );
            }
        }
    }
}

#[test]
fn shapes_formats_and_bases_against_f64() {
    for kernels in kernels() {
        for (splits, lanes, width) in [(1, 4, 16), (2, 6, 512), (7, 10, 33), (64, 2, 1)] {
            for base in [LseBase::Two, LseBase::Natural] {
                for format in [OutFormat::F32, OutFormat::Bf16] {
                    let mut partials = Partials::new(splits, lanes, width, splits as u64);
                    (partials.base, partials.out_base, partials.format) = (base, base, format);
                    partials.check(kernels);
                    partials.out_base = LseBase::Two;
                    partials.sink = Some(vec![13.0, -3.0]);
                    partials.check(kernels);
                    partials.sink_in_lse = true;
                    partials.check(kernels);
                }
            }
        }
    }
}

#[test]
fn empty_partials_are_never_read() {
    for kernels in kernels() {
        for format in [OutFormat::F32, OutFormat::Bf16] {
            let mut partials = Partials::new(4, 6, 40, 9);
            partials.format = format;
            let lses = [f32::NEG_INFINITY, f32::NAN, f32::INFINITY, -4000.0];
            for lane in 0..6 {
                // One poisoned partial a lane, of each kind; the last weighs nothing.
                let split = lane % 4;
                let index = split * 6 + lane;
                partials.lses[index] = lses[(lane + lane / 4) % 4];
                partials.outs[index * 40..(index + 1) * 40].fill(f32::NAN);
            }
            partials.check(kernels);
        }
    }
}

#[test]
fn nothing_to_merge_and_infinite_sinks() {
    for kernels in kernels() {
        let mut partials = Partials::new(3, 2, 20, 5);
        partials.sink = Some(vec![f32::INFINITY, f32::NEG_INFINITY]);
        let (out, lse) = partials.run(kernels);
        assert!(out[..20].iter().all(|&x| x == 0), "a sink of +inf takes everything");
        partials.sink = None;
        let plain = partials.run(kernels);
        assert_eq!(out[20..], plain.0[20..], "a sink of -inf takes nothing");
        assert_eq!(lse, plain.1, "the log-sum-exp excludes the sink");
        partials.sink = Some(vec![f32::INFINITY, 0.0]);
        partials.sink_in_lse = true;
        assert_eq!(partials.run(kernels).1[0], f32::INFINITY);
        partials.lses.fill(f32::NEG_INFINITY);
        partials.outs.fill(f32::NAN);
        let (out, lse) = partials.run(kernels);
        assert!(out.iter().all(|&x| x == 0));
        assert_eq!(lse, [f32::INFINITY, 0.0], "of nothing but the sink");
        partials.sink_in_lse = false;
        assert!(partials.run(kernels).1.iter().all(|&x| x == f32::NEG_INFINITY));
    }
}

#[test]
fn one_partial_comes_back_unchanged() {
    for kernels in kernels() {
        let mut partials = Partials::new(1, 4, 50, 2);
        partials.format = OutFormat::Bf16;
        partials.out_base = LseBase::Two;
        let (out, lse) = partials.run(kernels);
        let expected: Vec<u16> = partials.outs.iter().map(|x| f32_to_bf16(*x)).collect();
        assert_eq!(out, expected);
        assert_eq!(lse, partials.lses);
    }
}
