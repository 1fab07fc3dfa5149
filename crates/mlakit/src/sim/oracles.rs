//! Real operations on a simulated device: a kernel copies its operands out of the heap, calls the
//! oracle and writes the result back.
//!
//! So real launches run late, with their real operands and through real views.

use std::sync::Arc;

use half::bf16;

use super::machine::{Heap, Kernel, Launch};
use super::{Facts, Pace, SimQueue, Simulated};
use crate::op::dense::{self, Dense, DenseCase, DenseRegions, DenseSpec, QueryCase, QueryDtype};
use crate::op::merge::{self, Merge, MergeCase, MergeRegions, MergeSpec, Partial};
use crate::op::writer::{self, Writer, WriterCase, WriterRegions, WriterSpec};
use crate::scratch::Fault;
use crate::splits::Division;
use crate::{Access, Choice, Error, Plan, Refusal, Region, Runs};

/// One element, or what it is where the operation has none.
fn scalar(heap: &mut Heap, region: Region, without: f32) -> f32 {
    if region == Region::EMPTY { without } else { heap.value(region.address()) }
}

fn optional<T: bytemuck::Pod>(heap: &mut Heap, region: Region, count: usize) -> Option<Vec<T>> {
    (region != Region::EMPTY).then(|| heap.values(region, count))
}

fn narrow<T>(values: &[f64], round: impl Fn(f64) -> T) -> Vec<T> {
    values.iter().map(|value| round(*value)).collect()
}

/// All pages behind a view: their address, bytes and stride.
fn pages(heap: &mut Heap, view: Region) -> (u64, Vec<u8>, usize) {
    let words = heap.view(view.address());
    let mut bytes = vec![0; (words.pages * words.page_stride_bytes) as usize];
    heap.load_into(words.base, &mut bytes);
    (words.base, bytes, words.page_stride_bytes as usize)
}

impl<P: Pace> Runs<Merge> for Simulated<P> {
    type Code = ();

    fn choose(_: &Facts, _: &MergeSpec) -> Result<Choice, Refusal> {
        Ok(Choice::of("oracle"))
    }

    fn prepare(&self, _: &Plan<Merge>) -> Result<(), Error> {
        self.0.machine().may_work("compile")
    }

    fn launch(
        &self,
        (): &(),
        plan: &Plan<Merge>,
        r: &MergeRegions,
        queue: &mut SimQueue,
    ) -> Result<(), Error> {
        let (inputs, outputs) = ([r.outs, r.lses, r.sink], [r.out, r.lse, r.scratch]);
        let (spec, r) = (plan.spec().clone(), *r);
        let kernel = Kernel::Oracle(Arc::new(move |heap| merge(heap, &spec, &r)));
        self.launch(queue, Launch::new(kernel, &inputs, &outputs, None))
    }
}

fn merge(heap: &mut Heap, spec: &MergeSpec, r: &MergeRegions) {
    let parts = spec.splits * r.rows * spec.heads;
    let outs = match spec.partial {
        Partial::F32 => heap.values(r.outs, parts * spec.value_width),
        Partial::Bf16 => {
            let outs: Vec<bf16> = heap.values(r.outs, parts * spec.value_width);
            outs.into_iter().map(bf16::to_f32).collect()
        }
    };
    let lses: Vec<f32> = heap.values(r.lses, parts);
    let sink: Option<Vec<f32>> = optional(heap, r.sink, spec.heads);
    let case = MergeCase { outs: &outs, lses: &lses, sink: sink.as_deref() };
    let (out, lse) = merge::oracle(spec, &case);
    heap.store(r.out.address(), bytemuck::cast_slice(&narrow(&out, bf16::from_f64)));
    heap.store(r.lse.address(), bytemuck::cast_slice(&narrow(&lse, |l| l as f32)));
}

impl<P: Pace> Runs<Writer> for Simulated<P> {
    type Code = ();

    fn choose(_: &Facts, _: &WriterSpec) -> Result<Choice, Refusal> {
        Ok(Choice::of("oracle"))
    }

    fn prepare(&self, _: &Plan<Writer>) -> Result<(), Error> {
        self.0.machine().may_work("compile")
    }

    fn launch(
        &self,
        (): &(),
        plan: &Plan<Writer>,
        r: &WriterRegions,
        queue: &mut SimQueue,
    ) -> Result<(), Error> {
        let inputs = [r.latent, r.rope, r.slots, r.kv_scale];
        let (spec, r) = (plan.spec().clone(), *r);
        let kernel = Kernel::Oracle(Arc::new(move |heap| write(heap, &spec, &r)));
        let view = Some((r.view, Access::Write));
        self.launch(queue, Launch::new(kernel, &inputs, &[r.scratch], view))
    }
}

fn write(heap: &mut Heap, spec: &WriterSpec, r: &WriterRegions) {
    let [latent, rope] = spec.widths().map(|width| r.rows * width);
    let latent: Vec<bf16> = heap.values(r.latent, latent);
    let rope: Vec<bf16> = heap.values(r.rope, rope);
    let slots: Vec<i64> = heap.values(r.slots, r.rows);
    let kv_scale = scalar(heap, r.kv_scale, 1.0);
    let (base, mut cache, page_stride_bytes) = pages(heap, r.view);
    let (latent, rope, slots) = (&latent[..], &rope[..], &slots[..]);
    let case = WriterCase { latent, rope, slots, page_stride_bytes, kv_scale };
    let skipped = writer::oracle(spec, &case, &mut cache);
    heap.store(base, &cache);
    heap.count(r.scratch.address(), Fault::Id, skipped);
}

impl<P: Pace> Runs<Dense> for Simulated<P> {
    type Code = ();

    fn choose(facts: &Facts, spec: &DenseSpec) -> Result<Choice, Refusal> {
        let splits = spec.capacity().resolve(facts.units).map_err(|error| Refusal {
            what: "dense attention in these splits".into(),
            because: error.to_string(),
            instead: "a larger budget".into(),
        })?;
        Ok(Choice { splits, ..Choice::of("oracle") })
    }

    fn prepare(&self, _: &Plan<Dense>) -> Result<(), Error> {
        self.0.machine().may_work("compile")
    }

    fn launch(
        &self,
        (): &(),
        plan: &Plan<Dense>,
        r: &DenseRegions,
        queue: &mut SimQueue,
    ) -> Result<(), Error> {
        let inputs =
            [r.q, r.page_table, r.kv_lens, r.q_offsets, r.row_kv_lens, r.kv_scale, r.q_scale];
        let outputs = [r.out, r.lse, r.scratch];
        let (spec, division, r) = (plan.spec().clone(), plan.division(), *r);
        let kernel = Kernel::Oracle(Arc::new(move |heap| dense(heap, (&spec, division), &r)));
        let view = Some((r.view, Access::Read));
        self.launch(queue, Launch::new(kernel, &inputs, &outputs, view))
    }
}

fn dense(heap: &mut Heap, (spec, division): (&DenseSpec, Division), r: &DenseRegions) {
    let queries = r.rows * spec.heads * spec.qk_width;
    let (mut wide, mut bytes) = (Vec::new(), Vec::new());
    match spec.query {
        QueryDtype::Bf16 => wide = heap.values(r.q, queries),
        QueryDtype::E4m3 => bytes = heap.values(r.q, queries),
    }
    let page_table: Vec<i32> = heap.values(r.page_table, r.batch * r.table_width);
    let kv_lens: Vec<i32> = heap.values(r.kv_lens, r.batch);
    let q_offsets: Vec<i32> = heap.values(r.q_offsets, r.batch + 1);
    let row_kv_lens: Option<Vec<i32>> = optional(heap, r.row_kv_lens, r.rows);
    let (_, cache, page_stride_bytes) = pages(heap, r.view);
    let case = DenseCase {
        q: match spec.query {
            QueryDtype::Bf16 => QueryCase::Bf16(&wide),
            QueryDtype::E4m3 => QueryCase::E4m3(&bytes),
        },
        cache: &cache,
        page_stride_bytes,
        page_table: &page_table,
        kv_lens: &kv_lens,
        q_offsets: &q_offsets,
        row_kv_lens: row_kv_lens.as_deref(),
        kv_scale: scalar(heap, r.kv_scale, 1.0),
        q_scale: scalar(heap, r.q_scale, 1.0),
    };
    let result = dense::oracle(spec, division, &case);
    heap.store(r.out.address(), bytemuck::cast_slice(&narrow(&result.out, bf16::from_f64)));
    heap.store(r.lse.address(), bytemuck::cast_slice(&narrow(&result.lse, |l| l as f32)));
    for fault in [Fault::Id, Fault::Length, Fault::Offset] {
        heap.count(r.scratch.address(), fault, result.faults[fault as usize]);
    }
}
