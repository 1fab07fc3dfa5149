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
use crate::isa::Isa;
use crate::kernel::{Experts, Kernels, LinearCall, LinearOut, pack_row, packed_words, packs_f32};
use crate::pool::Pool;

/// The region of sums in F32 that a bias or gates still have to be applied to.
const SUMS: &str = "sums";
/// The region of the order in which rows of one expert are neighbours.
const ORDER: &str = "order";
/// The region of an F32 `x` as the kernel reads it.
const OPERAND: &str = "x as an operand";
/// The region of the ids of both parts.
const IDS: &str = "ids of both parts";

/// Outputs of a task are a multiple of this.
const GRAIN: usize = 16;

/// Code of a linear layer.
pub struct LinearCode {
    kernels: Kernels,
    operand: Operand,
    spec: LinearSpec,
}

/// How the kernel reads `x`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Operand {
    /// BF16, where it lies.
    Bf16,
    /// F32, packed for vectors of so many lanes.
    Packed(usize),
    /// F32 as `high + low`, each rounded to BF16: 16 bits of it. The rows of both pass the same weights, so a decode step reads the weights
    /// once.
    Parts,
}

impl Operand {
    fn new(isa: Isa, spec: &LinearSpec) -> Self {
        match (spec.input, packs_f32(isa)) {
            (Float::Bf16, _) => Self::Bf16,
            (Float::F32, Some(lanes)) => Self::Packed(lanes),
            (Float::F32, None) => Self::Parts,
        }
    }

    /// Rows that a row of `x` becomes.
    fn rows(self) -> usize {
        if self == Self::Parts { 2 } else { 1 }
    }

    /// Bytes that `rows` rows of `width` elements take in the scratch.
    fn bytes(self, rows: usize, width: usize) -> usize {
        match self {
            Self::Bf16 => 0,
            Self::Packed(lanes) => rows.saturating_mul(4 * packed_words(width, lanes)),
            Self::Parts => rows.saturating_mul(2 * 2 * width),
        }
    }
}

/// Whether sums take a second step.
fn finishes(spec: &LinearSpec, operand: Operand) -> bool {
    spec.bias || spec.combines() || operand == Operand::Parts
}

impl Runs<Linear> for Cpu {
    type Code = Arc<LinearCode>;

    fn choose(facts: &Facts, spec: &LinearSpec) -> Result<Choice, Refusal> {
        let operand = Operand::new(facts.isa, spec);
        let pairs = spec.max_rows.saturating_mul(spec.used()).saturating_mul(operand.rows());
        let when = |wanted: bool, bytes: usize| if wanted { bytes } else { 0 };
        let rows = spec.max_rows.saturating_mul(spec.x_row() / spec.in_width);
        let experts = spec.experts.is_some();
        let sums = pairs.saturating_mul(spec.out_width * 4);
        let ids = experts && operand == Operand::Parts;
        let work = vec![
            RegionSpec::new(SUMS, when(finishes(spec, operand), sums)),
            RegionSpec::new(ORDER, when(experts, pairs.saturating_mul(4))),
            RegionSpec::new(OPERAND, operand.bytes(rows, spec.in_width)),
            RegionSpec::new(IDS, when(ids, pairs.saturating_mul(4))),
        ];
        Ok(Choice { work, ..Choice::of(super::kernel_name("linear", facts)) })
    }

    fn prepare(&self, plan: &Plan<Linear>) -> Result<Self::Code, Error> {
        let (kernels, spec) = (self.kernels()?, plan.spec().clone());
        Ok(Arc::new(LinearCode { operand: Operand::new(kernels.isa(), &spec), kernels, spec }))
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
            operand: scratch(OPERAND),
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
    operand: Region,
    ids: Region,
}

impl Launch {
    fn run(&self, pool: &Pool) {
        let spec = &self.code.spec;
        let operand = self.code.operand;
        let pairs = self.r.rows * spec.used() * operand.rows();
        if pairs == 0 {
            return;
        }
        match operand {
            Operand::Bf16 => {}
            Operand::Packed(lanes) => self.pack(lanes),
            Operand::Parts => self.split(),
        }
        let ids = if operand == Operand::Parts { self.ids } else { self.r.ids };
        let sorted = spec.experts.is_some() && pairs > spec.used();
        if sorted {
            self.sort(ids, pairs);
        }
        let kernels = self.code.kernels;
        let finishes = finishes(spec, operand);
        let pointers = Pointers {
            x: Shared::of(if operand == Operand::Bf16 { self.r.x } else { self.operand }),
            w: Shared::of(self.r.weight),
            y: Shared::of(if finishes { self.sums } else { self.r.y }),
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
        if finishes {
            self.finish(pool);
        }
    }

    /// Packs the rows of an F32 `x`.
    fn pack(&self, lanes: usize) {
        let (spec, width) = (&self.code.spec, self.code.spec.in_width);
        let elements = self.r.rows * spec.x_row();
        let words = packed_words(width, lanes);
        // SAFETY: an operand and scratch of this launch, bound at these sizes.
        let (x, packed): (&[f32], &mut [f32]) =
            unsafe { (read(self.r.x, elements), write(self.operand, elements / width * words)) };
        for (from, to) in x.chunks_exact(width).zip(packed.chunks_exact_mut(words)) {
            pack_row(from, to, lanes);
        }
    }

    /// Counts the ids that are no expert.
    fn count(&self) {
        let bad =
            (0..self.r.rows * self.code.spec.used()).filter(|pair| !self.valid(*pair)).count();
        if bad > 0 {
            // SAFETY: the scratch of this launch.
            unsafe { fault(self.r.scratch, Fault::Id) }.fetch_add(bad as u32, Relaxed);
        }
    }

    fn call<'c>(&self, pairs: usize, pointers: &'c Pointers) -> LinearCall<'c> {
        let spec = &self.code.spec;
        let operand = self.code.operand;
        let out = match (finishes(spec, operand), spec.output, spec.accumulate) {
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
            x_stride: match operand {
                Operand::Packed(lanes) => packed_words(spec.in_width, lanes),
                Operand::Bf16 | Operand::Parts => spec.in_width,
            },
            packed: matches!(operand, Operand::Packed(_)),
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
            unsafe { (read(r.x, elements), write(self.operand, 2 * elements)) };
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
                read(self.sums, self.code.operand.rows() * pairs * width),
                read(r.bias, if spec.bias { width } else { 0 }),
                read(r.gates, if spec.combines() { pairs } else { 0 }),
            )
        };
        let sum = |pair: usize, out: usize| {
            let high = sums[pair * width + out];
            if self.code.operand != Operand::Parts {
                high
            } else {
                high + sums[(pairs + pair) * width + out]
            }
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
