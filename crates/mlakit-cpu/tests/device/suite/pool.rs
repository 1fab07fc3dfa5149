//! Pools of keys against their oracle, over steps: prefill, decoding, drafts that are taken back.

use half::bf16;
use mlakit::op::layer::Float;
use mlakit::op::pool::{Pool, PoolArgs, PoolCase, PoolFields, PoolSpec, oracle};
use mlakit::{Buffer, Category, Plan, Prepared};

use super::compare::bf16_unit;
use super::dense_run::tensor;
use super::indexer_run::IndexerDevice;
use super::layer::{Tensor, prepare, run};
use super::random::Rng;

fn fields(width: usize, pool_size: usize, input: Float) -> PoolFields {
    PoolFields {
        width,
        pool_size,
        max_draft_tokens: 3,
        input,
        page_size: 16,
        max_rows: 200,
        max_batch: 4,
        max_table_width: 9,
    }
}

/// Every kind of `Spec` prepares.
pub fn prepares<D: IndexerDevice>(device: &D) {
    for width in [1, 32, 129] {
        for pool_size in [1, 2, 4, 16] {
            for input in [Float::Bf16, Float::F32] {
                for page_size in [1, 16] {
                    let fields = PoolFields { page_size, ..fields(width, pool_size, input) };
                    let spec = PoolSpec::new(fields).unwrap();
                    let plan = Plan::<Pool>::for_device::<D>(&spec, device.facts()).unwrap();
                    plan.prepare(device).unwrap_or_else(|error| panic!("{spec:?}: {error}"));
                }
            }
        }
    }
    assert_eq!(device.census().live(Category::Probe), 0);
}

/// The token of a request at a position, always the same numbers.
fn token(spec: &PoolSpec, request: usize, position: usize) -> (Vec<f32>, Vec<f32>) {
    let mut rng = Rng((request * 100_000 + position) as u64);
    let mut values = |scale: f32| -> Vec<f32> {
        (0..spec.width).map(|_| spec.input.round(f64::from(rng.normal() * scale))).collect()
    };
    (values(1.0), values(3.0))
}

struct Session<'s, D: IndexerDevice> {
    device: &'s D,
    prepared: Prepared<Pool, D>,
    ape: Vec<f32>,
    state: Buffer<f32, D>,
    kept: Vec<f32>,
    table: Vec<i32>,
}

/// What a step gave: pooled keys and slots.
type Pooled = (Vec<f32>, Vec<i64>);

impl<'s, D: IndexerDevice> Session<'s, D> {
    fn new(device: &'s D, fields: PoolFields, table: Vec<i32>) -> Self {
        let spec = PoolSpec::new(fields).unwrap();
        let prepared = prepare::<Pool, D>(device, &spec);
        let kept = vec![0.0; 3 * spec.state_elements()];
        let state = tensor::<f32, D>(device, &kept);
        let ape = Rng(4).normals(spec.pool_size * spec.width);
        Self { device, prepared, ape, state, kept, table }
    }

    /// A step of requests, each with its length and its rows, and padding behind.
    fn step(&mut self, requests: &[(usize, usize)], states: &[i32]) -> Pooled {
        const PADDING: usize = 2;
        let spec = self.prepared.plan().spec().clone();
        let (mut key, mut gate, mut offsets) = (Vec::new(), Vec::new(), vec![0]);
        for (request, (length, rows)) in requests.iter().enumerate() {
            for position in length - rows..*length {
                let (k, g) = token(&spec, request, position);
                key.extend(k);
                gate.extend(g);
            }
            offsets.push((key.len() / spec.width) as i32);
        }
        key.extend(vec![f32::NAN; PADDING * spec.width]);
        gate.extend(vec![f32::NAN; PADDING * spec.width]);
        let rows = key.len() / spec.width;
        let lengths: Vec<i32> = requests.iter().map(|(length, _)| *length as i32).collect();
        let case = PoolCase {
            key: &key,
            gate: &gate,
            ape: &self.ape,
            kv_lens: &lengths,
            q_offsets: &offsets,
            states,
            page_table: &self.table,
        };
        let needed = oracle(&spec, &case, &mut self.kept);
        let device = self.device;
        let (key, gate) = (
            Tensor::new(device, spec.input, (0, &key)),
            Tensor::new(device, spec.input, (0, &gate)),
        );
        let ape = tensor::<f32, D>(device, &self.ape);
        let (lengths, offsets) =
            (tensor::<i32, D>(device, &lengths), tensor::<i32, D>(device, &offsets));
        let (states, table) =
            (tensor::<i32, D>(device, states), tensor::<i32, D>(device, &self.table));
        let pooled = tensor::<bf16, D>(device, &vec![bf16::NAN; rows * spec.width]);
        let slots = tensor::<i64, D>(device, &vec![-77; rows]);
        let faults = run(device, &self.prepared, |lane| {
            self.prepared.bind(PoolArgs {
                key: key.input(),
                gate: gate.input(),
                ape: (&ape.lease()).into(),
                kv_lens: (&lengths.lease()).into(),
                q_offsets: (&offsets.lease()).into(),
                states: (&states.lease()).into(),
                page_table: (&table.lease()).into(),
                state: (&self.state.lease()).into(),
                pooled: (&pooled.lease()).into(),
                slots: (&slots.lease()).into(),
                scratch: lane.lease(),
            })
        });
        assert_eq!(faults, needed.faults, "{requests:?}");
        let (pooled, slots) = (pooled.read().unwrap(), slots.read().unwrap());
        assert_eq!(slots, needed.slots, "{requests:?}");
        for (i, (given, needed)) in pooled.iter().zip(&needed.pooled).enumerate() {
            let close = (given.to_f64() - needed).abs() <= bf16_unit(*needed) + 1e-5;
            assert!(close, "element {i} of {requests:?}: {given} for {needed}");
        }
        assert_eq!(self.state.read().unwrap(), self.kept, "what is kept, {requests:?}");
        (pooled.into_iter().map(bf16::to_f32).collect(), slots)
    }
}

fn wide_table() -> Vec<i32> {
    (0..36).map(|i| 35 - i).collect()
}

/// The pooled keys of a request by pool, whatever the steps were.
fn by_slot((pooled, slots): &Pooled, width: usize) -> Vec<(i64, Vec<f32>)> {
    let rows = slots.iter().zip(pooled.chunks_exact(width));
    rows.filter(|(slot, _)| **slot >= 0).map(|(slot, key)| (*slot, key.to_vec())).collect()
}

/// Steps of every size end in the same keys as one, bit for bit.
pub fn steps_of_any_size_agree<D: IndexerDevice>(device: &D) {
    for (width, pool_size, input) in
        [(32, 4, Float::Bf16), (128, 16, Float::F32), (1, 1, Float::F32), (33, 3, Float::Bf16)]
    {
        let mut whole = Session::new(device, fields(width, pool_size, input), wide_table());
        let once = whole.step(&[(70, 70), (33, 33), (0, 0), (1, 1)], &[0, 1, -1, 2]);
        let needed = by_slot(&once, width);
        for step in [1, 2, 3, 5, 17, 64] {
            let mut parts = Session::new(device, fields(width, pool_size, input), wide_table());
            let mut given = Vec::new();
            let mut at = [0; 4];
            while at != [70, 33, 0, 1] {
                let mut requests = [(0, 0); 4];
                for (i, end) in [70, 33, 0, 1].into_iter().enumerate() {
                    let next = end.min(at[i] + step);
                    requests[i] = (next, next - at[i]);
                    at[i] = next;
                }
                given.extend(by_slot(&parts.step(&requests, &[0, 1, -1, 2]), width));
            }
            let mut needed = needed.clone();
            needed.sort_by_key(|(slot, _)| *slot);
            given.sort_by_key(|(slot, _)| *slot);
            assert!(given == needed, "pools of {pool_size} in steps of {step}");
        }
    }
}

/// Drafts that are taken back leave no trace: a step with a smaller length gives the keys and the state
/// of a request that never had them.
pub fn rejected_drafts_leave_no_trace<D: IndexerDevice>(device: &D) {
    for pool_size in [2, 4, 16] {
        let mut fields = fields(32, pool_size, Float::F32);
        fields.max_draft_tokens = 3;
        let mut drafts = Session::new(device, fields.clone(), wide_table());
        let mut plain = Session::new(device, fields, wide_table());
        let (mut length, mut rng) = (5, Rng(7));
        drafts.step(&[(5, 5), (0, 0), (0, 0), (0, 0)], &[0, -1, -1, -1]);
        plain.step(&[(5, 5), (0, 0), (0, 0), (0, 0)], &[0, -1, -1, -1]);
        for _ in 0..30 {
            // One token that stays and three drafts, of which some are accepted.
            let accepted = 1 + rng.below(4);
            let with = drafts.step(&[(length + 4, 4), (0, 0), (0, 0), (0, 0)], &[0, -1, -1, -1]);
            let without = plain
                .step(&[(length + accepted, accepted), (0, 0), (0, 0), (0, 0)], &[0, -1, -1, -1]);
            let (with, without) = (by_slot(&with, 32), by_slot(&without, 32));
            assert!(with.starts_with(&without), "{accepted} accepted of 4 at {length}");
            length += accepted;
        }
    }
}

/// States and pages that are not there, lengths and offsets out of bounds.
pub fn what_is_not_there_is_left_out<D: IndexerDevice>(device: &D) {
    let table = vec![3, -1, 5, -7, 0, 1, 2, 3, -2, -1, 4, 6];
    let fields = PoolFields { page_size: 1, max_table_width: 3, ..fields(32, 4, Float::F32) };
    let mut session = Session::new(device, fields, table);
    let (_, slots) = session.step(&[(12, 12), (9, 6), (12, 3), (4, 4)], &[0, 9, -1, -5]);
    // Pages 3, -1 and 5; a pool whose beginning nobody knows, then bad pages; a state that is not there
    // but is not needed.
    assert_eq!(slots[3], 3);
    assert_eq!((slots[7], slots[11]), (-1, 5));
    session.step(&[(15, 3), (5, 2), (14, 2), (0, 0)], &[0, 1, 2, -1]);
    // Longer than the table covers.
    session.step(&[(16, 3), (5, 2), (99, 2), (0, 0)], &[0, 1, 2, -1]);
}
