//! `writer` on the CPU.

use std::sync::atomic::Ordering::Relaxed;

use half::bf16;
use mlakit::op::writer::{Writer, WriterRegions, WriterSpec};
use mlakit::scratch::Fault;
use mlakit::{Choice, Error, Plan, Refusal, Runs};

use super::{Shared, divide, fault, read, scale, view_words};
use crate::device::{Cpu, Facts, Queue};
use crate::pool::Pool;

/// Code of a writer: the format that it writes.
pub struct WriterCode(WriterSpec);

impl Runs<Writer> for Cpu {
    type Code = std::sync::Arc<WriterCode>;

    fn choose(_: &Facts, _: &WriterSpec) -> Result<Choice, Refusal> {
        Ok(Choice::of("writer_scalar"))
    }

    fn prepare(&self, plan: &Plan<Writer>) -> Result<Self::Code, Error> {
        Ok(std::sync::Arc::new(WriterCode(plan.spec().clone())))
    }

    fn launch(
        &self,
        code: &Self::Code,
        _: &Plan<Writer>,
        regions: &WriterRegions,
        queue: &mut Queue,
    ) -> Result<(), Error> {
        let (code, r) = (code.clone(), *regions);
        self.enqueue(queue, move |pool: &Pool| run(pool, &code.0, &r))
    }
}

/// Rows are divided among threads; of two rows for one slot the later must stay, so a batch in which slots repeat is written by one.
fn run(pool: &Pool, spec: &WriterSpec, r: &WriterRegions) {
    // SAFETY: operands of this launch, bound at these sizes.
    let slots: &[i64] = unsafe { read(r.slots, r.rows) };
    let ascending = slots.windows(2).all(|pair| pair[0] < pair[1] || pair[1] < 0);
    let width = spec.latent_width + spec.rope_width;
    let cost = if ascending { width } else { 0 };
    divide(pool, (r.rows, 1), cost, &|rows| {
        for row in rows {
            write_row(spec, r, (row, slots[row]));
        }
    });
}

fn write_row(spec: &WriterSpec, r: &WriterRegions, (row, slot): (usize, i64)) {
    let Ok(slot) = u64::try_from(slot) else { return };
    // SAFETY: the view of this launch.
    let view = unsafe { view_words(r.view) };
    let (page, offset) = (slot / spec.page_size as u64, slot % spec.page_size as u64);
    if page >= view.pages {
        // SAFETY: the scratch of this launch.
        unsafe { fault(r.scratch, Fault::Id) }.fetch_add(1, Relaxed);
        return;
    }
    let layout = spec.pages().record;
    let address = view.base + page * view.page_stride_bytes + offset * layout.bytes() as u64;
    let to = Shared(address as *mut u8);
    let part = |region, width: usize| -> &[bf16] {
        // SAFETY: an operand of this launch with at least `rows` rows of `width`.
        let all: &[bf16] = unsafe { read(region, r.rows * width) };
        &all[row * width..(row + 1) * width]
    };
    // SAFETY: an operand of this launch with one element where the spec has it.
    let kv_scale = unsafe { scale(spec.record.is_scaled(), r.kv_scale) };
    let latent = part(r.latent, spec.latent_width);
    let rope = part(r.rope, spec.rope_width);
    // SAFETY: the page is one of the pool's and the offset one of the page's, so the record lies in the pool, which this launch writes;
    // no other task has the same slot.
    let record = unsafe { std::slice::from_raw_parts_mut(to.get(), layout.bytes()) };
    let split = layout.bytes_of(spec.latent_width);
    layout.encode(&mut record[..split], latent, kv_scale);
    layout.encode(&mut record[split..], rope, kv_scale);
}
