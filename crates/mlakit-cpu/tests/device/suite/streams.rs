//! Several host threads, and streams whose order nobody declared.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use half::bf16;
use mlakit::op::dense::{Dense, DenseArgs, QueryInput};
use mlakit::op::merge::LseOutput;
use mlakit::{Buffer, Error, Lane, Lse, Natural, Prepared, Splits, Stream};

use super::SuiteDevice;
use super::compare::same_bits;
use super::dense_inputs::{DenseInputs, shape};
use super::dense_run::{Operands, Outcome, prepare, tensor};

/// Four host threads, each with a stream and operands of its own on one device, get the bits that
/// each gets alone.
pub fn threads_with_streams_of_their_own<D: SuiteDevice>(device: &D) {
    let cases: Vec<DenseInputs> = (0..4)
        .map(|seed| {
            let mut shape = shape(11, (66, 34), &[(200 + 90 * seed as usize, 3), (65, 1)]);
            shape.splits = [Splits::Auto, Splits::Count(3)][seed as usize % 2];
            DenseInputs::new(&shape, seed)
        })
        .collect();
    let alone: Vec<Outcome> = cases.iter().map(|inputs| run_some(device, inputs, 1)).collect();
    std::thread::scope(|scope| {
        for (inputs, needed) in cases.iter().zip(&alone) {
            scope.spawn(move || {
                let given = run_some(device, inputs, 50);
                same_bits("side by side", &given, needed);
            });
        }
    });
}

/// Runs that often and checks that each run is the first.
fn run_some<D: SuiteDevice>(device: &D, inputs: &DenseInputs, times: usize) -> Outcome {
    let prepared = prepare(device, &inputs.spec);
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let mut operands = Operands::new(&mut stream, inputs, &prepared);
    let first = operands.run(&mut stream, &prepared);
    for _ in 1..times {
        same_bits("again", &operands.run(&mut stream, &prepared), &first);
    }
    first
}

/// Operands that two streams share, as leases.
struct Shared<D: SuiteDevice> {
    q: Buffer<bf16, D>,
    table: Buffer<i32, D>,
    kv_lens: Buffer<i32, D>,
    offsets: Buffer<i32, D>,
    out: Buffer<bf16, D>,
    lse: Buffer<Lse<Natural>, D>,
    lane: Lane<D>,
    cache: Operands<D>,
}

impl<D: SuiteDevice> Shared<D> {
    fn new(
        stream: &mut Stream<'_, D>,
        inputs: &DenseInputs,
        prepared: &Prepared<Dense, D>,
    ) -> Self {
        let device = &stream.device().clone();
        let results = inputs.rows() * inputs.spec.heads;
        Self {
            q: tensor::<bf16, D>(device, &inputs.q),
            table: tensor::<i32, D>(device, &inputs.table),
            kv_lens: tensor::<i32, D>(device, &inputs.kv_lens),
            offsets: tensor::<i32, D>(device, &inputs.q_offsets),
            out: tensor::<bf16, D>(device, &vec![bf16::NAN; results * inputs.spec.value_width]),
            lse: tensor::<Lse<Natural>, D>(device, &vec![f32::NAN; results]),
            lane: Lane::new(device, "shared lane", &[prepared.plan().scratch_bytes()]).unwrap(),
            cache: Operands::new(stream, inputs, prepared),
        }
    }

    fn args(&self) -> DenseArgs<'static, D> {
        DenseArgs {
            q: QueryInput::Bf16((&self.q.lease()).into()),
            cache: self.cache.view.lease(),
            page_table: (&self.table.lease()).into(),
            kv_lens: (&self.kv_lens.lease()).into(),
            q_offsets: (&self.offsets.lease()).into(),
            row_kv_lens: None,
            kv_scale: None,
            q_scale: None,
            out: (&self.out.lease()).into(),
            lse: LseOutput::Natural((&self.lse.lease()).into()),
            scratch: self.lane.lease(),
        }
    }
}

/// A lane that two streams use at once, without a declared order, is refused as busy; whichever
/// ran, the result is right.
pub fn an_undeclared_order_is_busy<D: SuiteDevice>(device: &D) {
    let inputs = DenseInputs::new(&shape(16, (320, 256), &[(3000, 8)]), 2);
    let prepared = prepare(device, &inputs.spec);
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let shared = Shared::new(&mut stream, &inputs, &prepared);
    prepared.bind(shared.args()).unwrap().run(&mut stream).unwrap();
    stream.wait().unwrap();
    let needed = shared.out.read().unwrap();
    let busy = AtomicUsize::new(0);
    let attempt = |calls: Vec<DenseArgs<'static, D>>| {
        let caller = device.own_stream().unwrap();
        let mut stream = device.stream(&caller).unwrap();
        for call in calls {
            match prepared.bind(call).unwrap().run(&mut stream) {
                Ok(_) => {}
                Err(Error::Busy { .. }) => _ = busy.fetch_add(1, SeqCst),
                Err(other) => panic!("{other}"),
            }
            if busy.load(SeqCst) > 0 {
                break;
            }
        }
        stream.wait().unwrap();
    };
    let calls = || (0..500).map(|_| shared.args()).collect();
    // On a busy machine one may be over before the other begins; then they try again.
    for _ in 0..100 {
        std::thread::scope(|scope| {
            for calls in [calls(), calls()] {
                scope.spawn(|| attempt(calls));
            }
        });
        if busy.load(SeqCst) > 0 {
            break;
        }
    }
    assert!(busy.load(SeqCst) > 0, "the two never met");
    let given = shared.out.read().unwrap();
    assert!(given == needed, "a run that was not refused is right");
}

/// With the order declared, the second stream runs.
pub fn a_declared_order_is_not<D: SuiteDevice>(device: &D) {
    let inputs = DenseInputs::new(&shape(16, (320, 256), &[(1000, 4)]), 2);
    let prepared = prepare(device, &inputs.spec);
    let callers = [device.own_stream().unwrap(), device.own_stream().unwrap()];
    let [mut first, mut second] = callers.each_ref().map(|c| device.stream(c).unwrap());
    let shared = Shared::new(&mut first, &inputs, &prepared);
    for _ in 0..20 {
        second.wait_for(&first).unwrap();
        prepared.bind(shared.args()).unwrap().run(&mut second).unwrap();
        first.wait_for(&second).unwrap();
        prepared.bind(shared.args()).unwrap().run(&mut first).unwrap();
    }
    first.wait().unwrap();
    assert!(shared.out.read().unwrap().iter().all(|v| !v.is_nan()));
}
