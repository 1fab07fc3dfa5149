//! `writer` on the CPU.

use std::sync::atomic::Ordering::Relaxed;

use half::bf16;
use mlakit::op::writer::{Writer, WriterRegions, WriterSpec};
use mlakit::record::Plane;
use mlakit::scratch::Fault;
use mlakit::{Choice, Error, Plan, Refusal, Runs};

use super::{fault, read, scale, view_words};
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

/// Elements that a thread should write at least; fewer cost less than waking it.
const WORTH_A_THREAD: usize = 1 << 11;

/// Rows are divided among threads by their slots, so rows of one slot are written by one thread, in their order: the later stays, and
/// nothing needs to look for repeated slots.
fn run(pool: &Pool, spec: &WriterSpec, r: &WriterRegions) {
    // SAFETY: operands of this launch, bound at these sizes.
    let slots: &[i64] = unsafe { read(r.slots, r.rows) };
    let elements = r.rows * spec.widths().iter().sum::<usize>();
    let tasks = pool.threads().min(elements / WORTH_A_THREAD).max(1) as u64;
    pool.run(tasks as usize, &|task, _| {
        for (row, slot) in slots.iter().enumerate() {
            match u64::try_from(*slot) {
                Ok(slot) if slot % tasks == task as u64 => write_row(spec, r, (row, slot)),
                _ => {}
            }
        }
    });
}

fn write_row(spec: &WriterSpec, r: &WriterRegions, (row, slot): (usize, u64)) {
    // SAFETY: the view of this launch.
    let view = unsafe { view_words(r.view) };
    let (page, offset) = (slot / spec.page_size as u64, slot % spec.page_size as u64);
    if page >= view.pages {
        // SAFETY: the scratch of this launch.
        unsafe { fault(r.scratch, Fault::Id) }.fetch_add(1, Relaxed);
        return;
    }
    let page = view.base + page * view.page_stride_bytes;
    let [first, rope] = spec.widths();
    let part = |region, width: usize| -> &[bf16] {
        // SAFETY: an operand of this launch with at least `rows` rows of `width`.
        let all: &[bf16] = unsafe { read(region, r.rows * width) };
        &all[row * width..(row + 1) * width]
    };
    // SAFETY: an operand of this launch with one element where the spec has it.
    let kv_scale = unsafe { scale(spec.record.is_scaled(), r.kv_scale) };
    let planes = spec.pages().planes();
    // SAFETY: `offset` is below the page size, so the bytes are the token's in a page of the pool, which this launch writes; no other task
    // has the same slot.
    let data = unsafe { token(page, planes.data, offset) };
    // SAFETY: as above; the planes of a page do not overlap.
    let scales = unsafe { token(page, planes.scales, offset) };
    let values = [part(r.latent, first), part(r.rope, rope)];
    spec.pages().record.encode_parts(data, scales, values, kv_scale);
}

/// A token's bytes in a plane of the page at an address.
///
/// # Safety
/// They belong to the running launch, and no other slice of them exists meanwhile.
unsafe fn token<'p>(page: u64, plane: Plane, offset: u64) -> &'p mut [u8] {
    let address = page + plane.first as u64 + offset * plane.stride as u64;
    // SAFETY: the caller's contract.
    unsafe { std::slice::from_raw_parts_mut(address as *mut u8, plane.bytes) }
}
