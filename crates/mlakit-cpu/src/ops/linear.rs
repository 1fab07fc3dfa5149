//! `linear` on the CPU.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use half::bf16;
use mlakit::op::layer::Float;
use mlakit::op::linear::{Linear, LinearRegions, LinearSpec};
use mlakit::scratch::{Fault, RegionSpec};
use mlakit::{Choice, Error, Plan, Refusal, Region, Runs};

use super::{Shared, divide, fault, read, write};
use crate::device::{Cpu, Facts, Queue};
use crate::kernel::{Experts, Kernels, LinearCall, LinearOut};
use crate::pool::Pool;

/// The region of sums in F32 that a bias or gates still have to be applied to.
const SUMS: &str = "sums";
/// The region of the order in which rows of one expert are neighbours.
const ORDER: &str = "order";
/// The region of the two BF16 parts of an F32 `x`.
const PARTS: &str = "x in two parts";
/// The region of the ids of both parts.
const IDS: &str = "ids of both parts";

/// Outputs of a task are a multiple of this.
const GRAIN: usize = 16;

/// Code of a linear layer.
pub struct LinearCode {
    kernels: Kernels,
    spec: LinearSpec,
}

/// Whether sums take a second step.
fn finishes(spec: &LinearSpec) -> bool {
    spec.bias || spec.combines() || parts(spec) > 1
}

/// BF16 numbers that an element of `x` is the sum of. An F32 `x` is `high + low`, each rounded to BF16: 16 bits of it. Their rows pass the
/// same weights, so a decode step reads the weights once.
fn parts(spec: &LinearSpec) -> usize {
    if spec.input == Float::F32 { 2 } else { 1 }
}

impl Runs<Linear> for Cpu {
    type Code = Arc<LinearCode>;

    fn choose(facts: &Facts, spec: &LinearSpec) -> Result<Choice, Refusal> {
        let both = parts(spec) > 1;
        let pairs = spec.max_rows.saturating_mul(spec.used()).saturating_mul(parts(spec));
        let when = |wanted: bool, bytes: usize| if wanted { bytes } else { 0 };
        let elements = spec.max_rows.saturating_mul(spec.x_row());
        let experts = spec.experts.is_some();
        let work = vec![
            RegionSpec::new(SUMS, when(finishes(spec), pairs.saturating_mul(spec.out_width * 4))),
            RegionSpec::new(ORDER, when(experts, pairs.saturating_mul(4))),
            RegionSpec::new(PARTS, when(both, elements.saturating_mul(4))),
            RegionSpec::new(IDS, when(both && experts, pairs.saturating_mul(4))),
        ];
        Ok(Choice { work, ..Choice::of(super::kernel_name("linear", facts)) })
    }

    fn prepare(&self, plan: &Plan<Linear>) -> Result<Self::Code, Error> {
        Ok(Arc::new(LinearCode { kernels: self.kernels()?, spec: plan.spec().clone() }))
    }

    fn launch(
        &self,
        code: &Self::Code,
        plan: &Plan<Linear>,
        regions: &LinearRegions,
        queue: &mut Queue,
    ) -> Result<(), Error> {
        let scratch = |name| plan.region(regions.scratch, name);
        let launch = Launch {
            code: code.clone(),
            r: *regions,
            sums: scratch(SUMS),
            order: scratch(ORDER),
            x_parts: scratch(PARTS),
            ids: scratch(IDS),
        };
        self.enqueue(queue, move |pool: &Pool| launch.run(pool))
    }
}

struct Launch {
    code: Arc<LinearCode>,
    r: LinearRegions,
    sums: Region,
    order: Region,
    x_parts: Region,
    ids: Region,
}

impl Launch {
    fn run(&self, pool: &Pool) {
        let spec = &self.code.spec;
        let pairs = self.r.rows * spec.used() * parts(spec);
        if pairs == 0 {
            return;
        }
        let both = parts(spec) > 1;
        if both {
            self.split();
        }
        let ids = if both { self.ids } else { self.r.ids };
        let sorted = spec.experts.is_some() && pairs > spec.used();
        if sorted {
            self.sort(ids, pairs);
        }
        let kernels = self.code.kernels;
        let pointers = Pointers {
            x: Shared::of(if both { self.x_parts } else { self.r.x }),
            w: Shared::of(self.r.weight),
            y: Shared::of(if finishes(spec) { self.sums } else { self.r.y }),
            ids: Shared::of(ids),
            order: sorted.then(|| Shared::of(self.order)),
            counted_here: AtomicU32::new(0),
        };
        if spec.experts.is_some() {
            self.count();
        }
        divide(pool, (spec.out_width, GRAIN), pairs * spec.in_width, &|outs| {
            // SAFETY: the operands were bound at these sizes, and tasks have outputs of their own.
            unsafe { kernels.linear(&self.call(pairs, &pointers), outs) };
        });
        if finishes(spec) {
            self.finish(pool);
        }
    }

    /// Counts the ids that are no expert.
    fn count(&self) {
        let bad = (0..self.r.rows * self.code.spec.used()).filter(|pair| !self.valid(*pair)).count();
        if bad > 0 {
            // SAFETY: the scratch of this launch.
            unsafe { fault(self.r.scratch, Fault::Id) }.fetch_add(bad as u32, Relaxed);
        }
    }

    fn call<'c>(&self, pairs: usize, pointers: &'c Pointers) -> LinearCall<'c> {
        let spec = &self.code.spec;
        let out = match (finishes(spec), spec.output, spec.accumulate) {
            (true, _, _) => LinearOut::F32,
            (false, Float::Bf16, _) => LinearOut::Bf16,
            (false, Float::F32, false) => LinearOut::F32,
            (false, Float::F32, true) => LinearOut::AddF32,
        };
        LinearCall {
            rows: pairs,
            in_features: spec.in_width,
            out_features: spec.out_width,
            x: pointers.x.get(),
            x_stride: spec.in_width,
            w: pointers.w.get(),
            y: pointers.y.get(),
            y_stride: spec.out_width,
            out,
            experts: spec.experts.map(|_| Experts {
                of_row: pointers.ids.get(),
                count: self.r.experts,
                rows_per_input: if spec.combines() { 1 } else { spec.used() },
                order: pointers.order.as_ref().map_or(std::ptr::null(), |order| order.get()),
                faults: &pointers.counted_here,
            }),
        }
    }

    /// Writes the high parts of `x`, behind them the low parts; and the ids once for each.
    fn split(&self) {
        let (spec, r) = (&self.code.spec, &self.r);
        let (elements, pairs) = (r.rows * spec.x_row(), r.rows * spec.used());
        // SAFETY: an operand and scratch of this launch, bound at these sizes.
        let (x, parts): (&[f32], &mut [bf16]) =
            unsafe { (read(r.x, elements), write(self.x_parts, 2 * elements)) };
        let (high, low) = parts.split_at_mut(elements);
        for ((x, high), low) in x.iter().zip(high).zip(low) {
            *high = bf16::from_f32(*x);
            let rest = *x - high.to_f32();
            // The rest of an infinite value is not a number, and nothing is lost without it.
            *low = if high.is_finite() { bf16::from_f32(rest) } else { bf16::ZERO };
        }
        if spec.experts.is_some() {
            // SAFETY: as above.
            let (from, ids): (&[i32], &mut [i32]) =
                unsafe { (read(r.ids, pairs), write(self.ids, 2 * pairs)) };
            ids[..pairs].copy_from_slice(from);
            ids[pairs..].copy_from_slice(from);
        }
    }

    /// Sorts the pairs of row and expert by expert, those of bad ids last.
    fn sort(&self, ids: Region, pairs: usize) {
        // SAFETY: an operand and scratch of this launch, bound at these sizes.
        let (ids, order): (&[i32], &mut [u32]) =
            unsafe { (read(ids, pairs), write(self.order, pairs)) };
        order.iter_mut().enumerate().for_each(|(i, place)| *place = i as u32);
        let key = |pair: &u32| (ids[*pair as usize] as u32, *pair);
        order.sort_unstable_by_key(key);
    }

    /// `y (+)= bias + sum` or `y (+)= sum over j of gate_j sum_j`, a sum being that of both parts of `x`.
    fn finish(&self, pool: &Pool) {
        let (spec, r) = (&self.code.spec, &self.r);
        let (width, pairs) = (spec.out_width, r.rows * spec.used());
        // SAFETY: operands and scratch of this launch, bound at these sizes; the tasks that wrote the sums have ended.
        let (sums, bias, gates): (&[f32], &[f32], &[f32]) = unsafe {
            (
                read(self.sums, parts(spec) * pairs * width),
                read(r.bias, if spec.bias { width } else { 0 }),
                read(r.gates, if spec.combines() { pairs } else { 0 }),
            )
        };
        let sum = |pair: usize, out: usize| {
            let high = sums[pair * width + out];
            if parts(spec) == 1 { high } else { high + sums[(pairs + pair) * width + out] }
        };
        let value = |row: usize, out: usize| {
            if !spec.combines() {
                return sum(row, out) + bias.get(out).copied().unwrap_or(0.0);
            }
            let uses = row * spec.used()..(row + 1) * spec.used();
            uses.filter(|pair| self.valid(*pair)).map(|pair| gates[pair] * sum(pair, out)).sum()
        };
        let rows = r.rows * if spec.combines() { 1 } else { spec.used() };
        let (narrow, wide) = (Shared::<bf16>::of(r.y), Shared::<f32>::of(r.y));
        divide(pool, (rows, 1), width * 4 * spec.used(), &|rows| {
            for (row, out) in rows.flat_map(|row| (0..width).map(move |out| (row, out))) {
                let (value, at) = (value(row, out), row * width + out);
                // SAFETY: an element of this task's rows; the output was bound at this size, in this dtype.
                unsafe {
                    match spec.output {
                        Float::F32 if spec.accumulate => *wide.get().add(at) += value,
                        Float::F32 => *wide.get().add(at) = value,
                        Float::Bf16 => *narrow.get().add(at) = bf16::from_f32(value),
                    }
                }
            }
        });
    }

    /// Whether a pair's expert exists: a gate that is NaN or infinite must not turn the zeros of a bad id into something.
    fn valid(&self, pair: usize) -> bool {
        // SAFETY: an operand of this launch, bound at this size.
        let ids: &[i32] = unsafe { read(self.r.ids, pair + 1) };
        usize::try_from(ids[pair]).is_ok_and(|id| id < self.r.experts)
    }
}

struct Pointers {
    x: Shared<u16>,
    w: Shared<u16>,
    y: Shared<u8>,
    ids: Shared<i32>,
    order: Option<Shared<u32>>,
    /// What the kernel counts is dropped: it would count an id once for each part of `x`.
    counted_here: AtomicU32,
}
