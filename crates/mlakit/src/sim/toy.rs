//! The toy operations on a simulated device.

use half::bf16;

use super::machine::{Heap, Kernel, Launch};
use super::{Facts, Pace, SimQueue, Simulated};
use crate::op::toy::{Scale, ScaleRegions, ScaleSpec, Sum, SumRegions, SumSpec};
use crate::scratch::Fault;
use crate::{Access, Choice, Error, Plan, Refusal, Runs};

/// Elements of a page that a unit can hold.
const UNIT_ELEMENTS: usize = 256;

/// Compiled code of a toy: its constants.
pub struct Constants([usize; 3]);

impl<P: Pace> Runs<Scale> for Simulated<P> {
    type Code = Constants;

    fn choose(_: &Facts, spec: &ScaleSpec) -> Result<Choice, Refusal> {
        if spec.page_elements() > UNIT_ELEMENTS {
            return Err(Refusal {
                what: format!("scale with pages of {} elements", spec.page_elements()),
                because: format!("a page must fit the {UNIT_ELEMENTS} elements of a unit"),
                instead: "smaller pages".into(),
            });
        }
        Ok(Choice::of("scale_paged"))
    }

    fn prepare(&self, plan: &Plan<Scale>) -> Result<Constants, Error> {
        self.0.machine().may_work("compile")?;
        Ok(Constants([plan.spec().rows, plan.spec().page_elements(), 0]))
    }

    fn launch(
        &self,
        code: &Constants,
        _: &Plan<Scale>,
        r: &ScaleRegions,
        queue: &mut SimQueue,
    ) -> Result<(), Error> {
        let (inputs, outputs) = ([r.factor, r.page_table], [r.out, r.scratch]);
        let view = Some((r.view, Access::Read));
        self.launch(queue, Launch::new(Kernel::Toy(scale, code.0), &inputs, &outputs, view))
    }
}

fn scale(heap: &mut Heap, launch: &Launch, [rows, elements, _]: [usize; 3]) {
    let [out, scratch, factor, page_table, ..] = launch.addresses();
    let (factor, words) = (heap.value::<f32>(factor), heap.view(launch.view_address()));
    for row in 0..rows as u64 {
        let id: i32 = heap.value(page_table + 4 * row);
        let page = u64::try_from(id).ok().filter(|page| *page < words.pages);
        if id != -1 && page.is_none() {
            heap.count(scratch, Fault::Id, 1);
        }
        for i in 0..elements as u64 {
            let value = page.map_or(0.0, |page| {
                let at = words.base + page * words.page_stride_bytes + 2 * i;
                factor * heap.value::<bf16>(at).to_f32()
            });
            heap.set(out + 4 * (row * elements as u64 + i), value);
        }
    }
}

impl<P: Pace> Runs<Sum> for Simulated<P> {
    type Code = Constants;

    fn choose(facts: &Facts, spec: &SumSpec) -> Result<Choice, Refusal> {
        Ok(Choice { splits: facts.units.clamp(1, spec.width), ..Choice::of("sum_split") })
    }

    fn prepare(&self, plan: &Plan<Sum>) -> Result<Constants, Error> {
        self.0.machine().may_work("compile")?;
        Ok(Constants([plan.spec().rows, plan.spec().width, plan.choice().splits]))
    }

    fn launch(
        &self,
        code: &Constants,
        plan: &Plan<Sum>,
        r: &SumRegions,
        queue: &mut SimQueue,
    ) -> Result<(), Error> {
        let outputs = [r.out, plan.region(r.scratch, Sum::PARTIALS)];
        self.launch(queue, Launch::new(Kernel::Toy(sum, code.0), &[r.x], &outputs, None))
    }
}

fn sum(heap: &mut Heap, launch: &Launch, [rows, width, splits]: [usize; 3]) {
    let [out, partials, x, ..] = launch.addresses();
    for row in 0..rows {
        let mut total = 0.0;
        for split in 0..splits {
            let part = split * width / splits..(split + 1) * width / splits;
            let element = |i: usize| x + 4 * (row * width + i) as u64;
            let mut partial: f32 = part.map(|i| heap.value::<f32>(element(i))).sum();
            if splits > 1 {
                let place = partials + 4 * (row * splits + split) as u64;
                heap.set(place, partial);
                partial = heap.value(place);
            }
            total += partial;
        }
        heap.set(out + 4 * row as u64, total);
    }
}
