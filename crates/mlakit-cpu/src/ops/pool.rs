//! `pool` on the CPU: rows whose token ends a pool are divided among threads, then requests, whose rings move on.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use half::bf16;
use mlakit::op::dense::{Rows, Visible};
use mlakit::op::pool::{Pool as Pooling, PoolRegions, PoolSpec};
use mlakit::scratch::Fault;
use mlakit::{Choice, Error, Plan, Refusal, Runs};

use super::layer::{FUNCTION, Source, elementwise};
use super::{Shared, divide, fault, read, write};
use crate::device::{Cpu, Facts, Queue};
use crate::pool::Pool;

elementwise!(Pooling, PoolSpec, PoolRegions, "pool_scalar", pool);

/// A request of a step.
struct Request<'r> {
    rows: Range<usize>,
    /// The position of its first row's token; negative where there are more rows than tokens.
    first_position: i64,
    state: Option<usize>,
    table: &'r [i32],
}

struct Step<'r> {
    spec: &'r PoolSpec,
    r: &'r PoolRegions,
    key: Source<'r>,
    gate: Source<'r>,
    ape: &'r [f32],
}

fn pool(threads: &Pool, spec: &PoolSpec, r: &PoolRegions) {
    let elements = r.rows * spec.width;
    // SAFETY: operands of this launch, bound at these sizes.
    let (key, gate, ape): (Source<'_>, Source<'_>, &[f32]) = unsafe {
        (
            Source::new(spec.input, r.key, elements),
            Source::new(spec.input, r.gate, elements),
            read(r.ape, spec.pool_size * spec.width),
        )
    };
    let step = Step { spec, r, key, gate, ape };
    step.clear();
    let (mut clamped, mut ids) = ([0, 0], 0);
    step.requests(|request, bad| {
        clamped = [clamped[0] + bad.offsets, clamped[1] + bad.lengths];
        ids += bad.ids + step.slots(request);
    });
    step.count([(Fault::Offset, clamped[0]), (Fault::Length, clamped[1]), (Fault::Id, ids)]);
    let cost = spec.width * (spec.pool_size + FUNCTION);
    divide(threads, (r.rows, 1), cost, &|rows| {
        step.requests(|request, _| {
            let own = request.rows.start.max(rows.start)..request.rows.end.min(rows.end);
            own.for_each(|row| step.complete(request, row));
        });
    });
    step.requests(|request, _| step.keep(request));
}

/// What of a request was out of bounds.
struct Bad {
    offsets: u32,
    lengths: u32,
    ids: u32,
}

impl<'r> Step<'r> {
    fn requests(&self, mut each: impl FnMut(&Request<'r>, Bad)) {
        let (r, spec) = (self.r, self.spec);
        // SAFETY: operands of this launch, bound at these sizes.
        let (offsets, lengths, states, table): (&[i32], &[i32], &[i32], &[i32]) = unsafe {
            (
                read(r.q_offsets, r.batch + 1),
                read(r.kv_lens, r.batch),
                read(r.states, r.batch),
                read(r.page_table, r.batch * r.table_width),
            )
        };
        let (mut next, mut fine) = Rows::begin(offsets[0], r.rows);
        for (index, length) in lengths.iter().enumerate() {
            let (rows, end_fine) = next.until(offsets[index + 1]);
            let (length, length_fine) = Visible::clamp_length(*length, spec.covered(r.table_width));
            let state = usize::try_from(states[index]).ok().filter(|id| *id < r.state_count);
            let bad = Bad {
                offsets: u32::from(!fine) + u32::from(!end_fine),
                lengths: u32::from(!length_fine),
                ids: u32::from(state.is_none() && states[index] != -1),
            };
            let request = Request {
                first_position: length as i64 - rows.len() as i64,
                state,
                table: &table[index * r.table_width..][..r.table_width],
                rows,
            };
            each(&request, bad);
            fine = true;
        }
    }

    /// Every row begins as one that ends no pool.
    fn clear(&self) {
        // SAFETY: outputs of this launch, bound at these sizes; nothing else uses them yet.
        let (pooled, slots): (&mut [bf16], &mut [i64]) = unsafe {
            (write(self.r.pooled, self.r.rows * self.spec.width), write(self.r.slots, self.r.rows))
        };
        pooled.fill(bf16::ZERO);
        slots.fill(-1);
    }

    fn count(&self, counts: [(Fault, u32); 3]) {
        for (kind, bad) in counts.into_iter().filter(|(_, bad)| *bad > 0) {
            // SAFETY: the scratch of this launch.
            unsafe { fault(self.r.scratch, kind) }.fetch_add(bad, Relaxed);
        }
    }

    fn position(request: &Request<'_>, row: usize) -> i64 {
        request.first_position + (row - request.rows.start) as i64
    }

    /// Writes the slots of the pools that a request's rows end; how many pages were bad.
    fn slots(&self, request: &Request<'_>) -> u32 {
        let mut bad = 0;
        // SAFETY: an output of this launch, bound at this size; this task alone uses it now.
        let slots: &mut [i64] = unsafe { write(self.r.slots, self.r.rows) };
        for row in request.rows.clone() {
            let Some(pool) = self.spec.ends_pool(Self::position(request, row)) else { continue };
            let known = (pool * self.spec.pool_size) as i64 >= request.first_position;
            if !known && request.state.is_none() {
                continue;
            }
            let size = self.spec.page_size;
            match request.table[pool / size] {
                page if page >= 0 => {
                    slots[row] = i64::from(page) * size as i64 + (pool % size) as i64;
                }
                page => bad += u32::from(page != -1),
            }
        }
        bad
    }

    /// The key of the pool that a row ends, if its slot says that it does.
    fn complete(&self, request: &Request<'_>, row: usize) {
        let (spec, width) = (self.spec, self.spec.width);
        // SAFETY: an output of this launch, bound at this size, that is only read now.
        let slots: &[i64] = unsafe { read(self.r.slots, self.r.rows) };
        let Some(pool) = spec.ends_pool(Self::position(request, row)) else { return };
        if slots[row] < 0 {
            return;
        }
        // SAFETY: the state of this launch, bound at this size; the rings move on after all rows are done.
        let states: &[f32] =
            unsafe { read(self.r.state, self.r.state_count * spec.state_elements()) };
        let state = &states[request.state.unwrap_or(0) * spec.state_elements()..];
        let first = pool * spec.pool_size;
        // SAFETY: the row's part of an output of this launch; no other task has the row.
        let pooled = unsafe {
            let at = Shared::<bf16>::of(self.r.pooled).get().add(row * width);
            std::slice::from_raw_parts_mut(at, width)
        };
        for (channel, to) in pooled.iter_mut().enumerate() {
            let token = |place: usize| -> (f32, f32) {
                let ape = self.ape[place * width + channel];
                let ahead = (first + place) as i64 - request.first_position;
                match usize::try_from(ahead) {
                    Ok(local) => {
                        let at = (request.rows.start + local) * width + channel;
                        (self.key.at(at), self.gate.at(at) + ape)
                    }
                    Err(_) => {
                        let at = spec.place(first + place) + channel;
                        (state[at], state[at + width] + ape)
                    }
                }
            };
            let top =
                (0..spec.pool_size).map(|place| token(place).1).fold(f32::NEG_INFINITY, f32::max);
            let (mut sum, mut weighted) = (0.0, 0.0);
            for place in 0..spec.pool_size {
                let (key, gate) = token(place);
                let weight = (gate - top).exp();
                sum += weight;
                weighted += weight * key;
            }
            *to = bf16::from_f32(weighted / sum);
        }
    }

    /// Puts the last tokens of a step into the request's ring.
    fn keep(&self, request: &Request<'_>) {
        let (Some(state), width) = (request.state, self.spec.width) else { return };
        let each = self.spec.state_elements();
        // SAFETY: the state of this launch, bound at this size, which this task alone uses now.
        let states: &mut [f32] = unsafe { write(self.r.state, self.r.state_count * each) };
        let state = &mut states[state * each..][..each];
        for row in request.rows.clone().rev().take(self.spec.ring()) {
            let Ok(position) = usize::try_from(Self::position(request, row)) else { continue };
            let at = self.spec.place(position);
            for channel in 0..width {
                state[at + channel] = self.key.at(row * width + channel);
                state[at + width + channel] = self.gate.at(row * width + channel);
            }
        }
    }
}
