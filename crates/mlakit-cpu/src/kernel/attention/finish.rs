//! The end of an item: normalised outputs and log-sum-exps.

use super::call::{Attention, Lanes, LseBase, OutFormat, Sink};
use super::scratch::Area;
use crate::kernel::engine::Engine;
use crate::kernel::merge::{BF16_NAN, sink_alone, with_sink};
use crate::kernel::store::store_chunk;
use crate::numerics::log2;

/// Writes the result of every lane: accumulator times `value_scale / sum`, shrunk by the sink, and the
/// log-sum-exp.
///
/// # Safety
/// `area` holds the item's finished state; the item's output is writable.
#[inline(always)]
pub(in crate::kernel) unsafe fn finish<E: Engine>(
    e: E,
    attention: &Attention,
    lanes: &Lanes,
    area: &Area,
) {
    for lane in 0..area.size.lanes {
        // SAFETY: the area has the lane.
        let (max, sum) = unsafe { (*area.max.add(lane), *area.sum.add(lane)) };
        let result = Result::of(attention, lanes, lane);
        // SAFETY: the output has the lane's row and head.
        unsafe {
            if sum == 0.0 {
                result.write_nothing();
                continue;
            }
            let from = area.outs.add(lane * area.size.out_stride);
            let factor = attention.value_scale / sum;
            match result.sink {
                None => {
                    *result.lse = log_sum_exp(max, sum, result.lse_base);
                    result.write_values(e, from, factor);
                }
                Some((sink, logit)) => {
                    let two = f64::from(log_sum_exp(max, sum, LseBase::Two));
                    let (denominator, lse) = match two.is_nan() {
                        true => (f32::NAN, f64::NAN),
                        false => with_sink(two, 1.0, logit),
                    };
                    let lse = if sink.in_lse { lse } else { two };
                    *result.lse = in_base(lse, result.lse_base);
                    result.write_shrunk(e, from, (factor, 1.0 / denominator), sink.partial);
                }
            }
        }
    }
}

/// Writes the result of an item of which no row sees a key.
///
/// # Safety
/// The item's output is writable.
pub(in crate::kernel) unsafe fn nothing(attention: &Attention, lanes: &Lanes) {
    for lane in 0..lanes.count() {
        // SAFETY: the output has the lane's row and head.
        unsafe { Result::of(attention, lanes, lane).write_nothing() };
    }
}

/// The log-sum-exp of scores whose maximum, to base 2, is `max` and whose weights sum to `sum`.
pub(in crate::kernel) fn log_sum_exp(max: f32, sum: f32, base: LseBase) -> f32 {
    if !(sum > 0.0 && sum < f32::INFINITY) {
        return f32::NAN;
    }
    // Rounded to f32 in base 2 whatever the base, as a partial result is, so that a row has the same bits with one split and after a merge.
    let two = (f64::from(max) + log2(f64::from(sum))) as f32;
    in_base(f64::from(two), base)
}

/// A logarithm to base 2 in another base.
fn in_base(two: f64, base: LseBase) -> f32 {
    match base {
        LseBase::Two => two as f32,
        LseBase::Natural => (two * std::f64::consts::LN_2) as f32,
    }
}

/// Where the result of one lane goes.
struct Result {
    values: *mut u8,
    format: OutFormat,
    width: usize,
    lse: *mut f32,
    lse_base: LseBase,
    /// The sink, with the logit of the lane's head.
    sink: Option<(Sink, f32)>,
}

impl Result {
    #[inline(always)]
    fn of(attention: &Attention, lanes: &Lanes, lane: usize) -> Result {
        let (row, head) = (lane / lanes.heads.len(), lanes.heads.start + lane % lanes.heads.len());
        let index = row * attention.geometry.heads + head;
        let (out, width) = (&lanes.out, attention.geometry.value_width);
        Result {
            values: out.values.wrapping_add(index * width * out.format.bytes()),
            format: out.format,
            width,
            lse: out.lse.wrapping_add(index),
            lse_base: out.lse_base,
            // SAFETY: a sink has a logit for each head.
            sink: attention.sink.map(|sink| (sink, unsafe { *sink.logits.add(head) })),
        }
    }

    /// # Safety
    /// The item's output has the lane.
    unsafe fn write_nothing(&self) {
        let lse = match self.sink {
            Some((sink, logit)) if sink.in_lse => sink_alone(logit, self.lse_base),
            _ => f32::NEG_INFINITY,
        };
        // SAFETY: the output has the lane; zero bytes are 0.0 in both formats.
        unsafe {
            self.values.write_bytes(0, self.width * self.format.bytes());
            *self.lse = lse;
        }
    }

    /// Writes accumulators times `factor`.
    ///
    /// # Safety
    /// `from` is a lane of the accumulators, padded to whole chunks; the output has the lane.
    #[inline(always)]
    unsafe fn write_values<E: Engine>(&self, e: E, from: *const f32, factor: f32) {
        let factor = e.splat(factor);
        for offset in (0..self.width).step_by(2 * E::W) {
            // SAFETY: the contract of this function.
            unsafe {
                let from = from.add(offset);
                let chunk = e.in_order([e.load(from), e.load(from.add(E::W))]);
                let chunk = [e.mul(chunk[0], factor), e.mul(chunk[1], factor)];
                self.store(e, chunk, offset);
            }
        }
    }

    /// Writes accumulators times the first factor, rounded to `partial`, times the second: what a merge of
    /// this one part and the sink gives.
    ///
    /// # Safety
    /// As [`Result::write_values`]; the output is BF16.
    #[inline(always)]
    unsafe fn write_shrunk<E: Engine>(
        &self,
        e: E,
        from: *const f32,
        (factor, shrink): (f32, f32),
        partial: OutFormat,
    ) {
        if shrink == 0.0 {
            // SAFETY: the contract of this function.
            return unsafe { self.values.write_bytes(0, self.width * self.format.bytes()) };
        }
        if shrink.is_nan() {
            for element in 0..self.width {
                // SAFETY: the contract of this function.
                unsafe { *self.values.cast::<u16>().add(element) = BF16_NAN };
            }
            return;
        }
        let (factor, shrink, zero) = (e.splat(factor), e.splat(shrink), e.splat(0.0));
        for offset in (0..self.width).step_by(2 * E::W) {
            // SAFETY: the contract of this function; the buffer has a whole chunk.
            unsafe {
                let from = from.add(offset);
                let chunk = e.in_order([e.load(from), e.load(from.add(E::W))]);
                let mut chunk = [e.mul(chunk[0], factor), e.mul(chunk[1], factor)];
                if partial == OutFormat::Bf16 {
                    let mut rounded = [0_u16; 32];
                    for (i, half) in chunk.iter_mut().enumerate() {
                        let at = rounded.as_mut_ptr().add(i * E::W);
                        e.store_bf16(at, *half);
                        *half = e.load_bf16(at);
                    }
                }
                // A merge adds to 0, after which no zero is negative.
                let chunk = chunk.map(|half| e.mul(e.add(half, zero), shrink));
                self.store(e, chunk, offset);
            }
        }
    }

    /// # Safety
    /// The output has the lane.
    #[inline(always)]
    unsafe fn store<E: Engine>(&self, e: E, chunk: [E::V; 2], offset: usize) {
        let to = self.values.wrapping_add(offset * self.format.bytes());
        // SAFETY: the contract of this function.
        unsafe { store_chunk(e, chunk, to, self.format == OutFormat::F32, self.width - offset) };
    }
}
