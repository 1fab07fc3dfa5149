//! Edges of an indexer by name: chosen scores, strange numbers, lengths around blocks and tables, rows
//! and requests that are not there, pages far away.

use half::bf16;
use mlakit::RecordFormat;

use super::indexer_inputs::{FORMATS, IndexerInputs, indexer_shape};
use super::indexer_run::{IndexerDevice, Outcome, run};
use super::random::Rng;

/// A request of one row whose keys have these scores, each a sum of up to four BF16 numbers: with
/// queries 1 and -1 and weights 1 and -1 the score is the sum of the key, whatever its sign.
fn chosen(scores: &[[f32; 4]], topk: usize) -> IndexerInputs {
    let mut shape = indexer_shape(2, topk, &[(scores.len(), 1)]);
    shape.width = 4;
    let mut inputs = IndexerInputs::new(&shape, 0);
    inputs.q = [1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0].map(bf16::from_f32).to_vec();
    inputs.weights = vec![1.0, -1.0];
    for (position, score) in scores.iter().enumerate() {
        inputs.put_key(0, position, &score.map(bf16::from_f32));
    }
    inputs
}

/// The call agrees with the oracle, exactly.
#[track_caller]
fn exact<D: IndexerDevice>(device: &D, inputs: &IndexerInputs) -> Outcome {
    let given = run(device, inputs);
    assert_eq!(given, Outcome::exact(&inputs.oracle()), "{:?}", inputs.shape);
    given
}

fn first(count: i32) -> Vec<i32> {
    (0..count).collect()
}

pub fn equal_scores_go_to_the_smaller_position<D: IndexerDevice>(device: &D) {
    for len in [65, 1000, 9000] {
        let given = exact(device, &chosen(&vec![[0.5, 0.0, 0.0, 0.0]; len], 63));
        assert_eq!(given.row(0), first(63));
    }
}

/// Scores that differ in their ten last bits only.
pub fn near_ties_are_told_apart<D: IndexerDevice>(device: &D) {
    let mut rng = Rng(9);
    let mut score = |_| {
        let low = rng.below(1024);
        [1.0, (low & !15) as f32 * f32::EPSILON, (low & 15) as f32 * f32::EPSILON, 0.0]
    };
    let scores: Vec<[f32; 4]> = (0..5000).map(&mut score).collect();
    for topk in [1, 77, 2048] {
        exact(device, &chosen(&scores, topk));
    }
}

pub fn sorted_both_ways<D: IndexerDevice>(device: &D) {
    let rising: Vec<[f32; 4]> =
        (0..9000).map(|i| [(i & !63) as f32, (i & 63) as f32, 0.0, -4096.0]).collect();
    let falling: Vec<[f32; 4]> = rising.iter().copied().rev().collect();
    let given = exact(device, &chosen(&rising, 100));
    assert_eq!(given.row(0), (8900..9000).collect::<Vec<i32>>());
    assert_eq!(exact(device, &chosen(&falling, 100)).row(0), first(100));
}

/// NaN comes after -inf and is selected where there is nothing else.
pub fn infinities_and_nan_have_their_place<D: IndexerDevice>(device: &D) {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let value = [nan, -inf, 0.0, inf, -1.0, nan, 2.0];
    let scores: Vec<[f32; 4]> =
        value.into_iter().cycle().take(700).map(|v| [v, 0.0, 0.0, 0.0]).collect();
    for topk in [1, 99, 100, 101, 399, 400, 401, 500, 501, 650, 700, 800] {
        exact(device, &chosen(&scores, topk));
    }
    let given = exact(device, &chosen(&vec![[nan, 0.0, 0.0, 0.0]; 300], 7));
    assert_eq!(given.row(0), first(7));
}

/// A head that only fills up a group may not turn an infinite key into NaN.
pub fn an_infinite_key_has_an_infinite_score<D: IndexerDevice>(device: &D) {
    for heads in [1, 3, 16, 17] {
        let mut shape = indexer_shape(heads, 2, &[(70, 1)]);
        (shape.width, shape.page_size) = (32, 16);
        let mut inputs = IndexerInputs::new(&shape, 2);
        inputs.q.fill(bf16::ONE);
        inputs.weights.fill(1.0);
        inputs.put_key(0, 66, &[bf16::INFINITY; 32]);
        let given = exact(device, &inputs);
        assert!(given.row(0).contains(&66), "{heads} heads");
        assert!(given.scores.contains(&f32::INFINITY.to_bits()), "{heads} heads");
    }
}

/// More asked for than seen: everything, then -1, and scores of -inf behind.
pub fn short_rows_select_everything<D: IndexerDevice>(device: &D) {
    for record in FORMATS {
        for scores in [true, false] {
            let mut shape = indexer_shape(4, 501, &[(1, 1), (2, 2), (500, 3), (0, 1), (502, 1)]);
            (shape.record, shape.scores, shape.bad_pages) = (record, scores, true);
            let inputs = IndexerInputs::new(&shape, 8);
            let mut needed = Outcome::exact(&inputs.oracle());
            if !scores {
                needed.scores.clear();
            }
            assert_eq!(run(device, &inputs), needed, "{shape:?}");
        }
    }
}

/// Lengths around blocks, pages and what a list holds.
pub fn lengths_around_every_boundary<D: IndexerDevice>(device: &D) {
    for topk in [1, 63, 64, 65] {
        for page_size in [1, 16, 64] {
            let mut lengths =
                vec![1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 575, 576, 577, 639, 640];
            lengths.extend([641, 1151, 1152, 1153]);
            let requests: Vec<_> = lengths.into_iter().map(|keys| (keys, 1)).collect();
            let mut shape = indexer_shape(3, topk, &requests);
            (shape.width, shape.page_size) = (32, page_size);
            exact(device, &IndexerInputs::new(&shape, 6));
        }
    }
}

/// Lengths below 0 and beyond the table, offsets that fall and lie outside, requests without rows.
pub fn bad_lengths_and_offsets_are_counted<D: IndexerDevice>(device: &D) {
    let shape = indexer_shape(3, 40, &[(100, 2), (90, 1), (80, 3), (70, 0)]);
    let mut inputs = IndexerInputs::new(&shape, 7);
    inputs.kv_lens = vec![-4, i32::MAX, 80, 3];
    inputs.q_offsets = vec![0, 2, 5, 3, 99];
    let given = exact(device, &inputs);
    assert_eq!(given.faults[1..], [2, 2]);
    inputs.q_offsets = vec![-1, 0, 1, 1, 4];
    exact(device, &inputs);
}

/// A row at a position beyond its request's pools sees those that there are, and is counted.
pub fn positions_beyond_the_pools_are_counted<D: IndexerDevice>(device: &D) {
    for pool_size in [4, 16] {
        let mut shape = indexer_shape(2, 512, &[(700, 6), (3, 1)]);
        shape.pool_size = pool_size;
        shape.padding_rows = 2;
        let mut inputs = IndexerInputs::new(&shape, 3);
        inputs.last_position[..6].copy_from_slice(&[
            -1,
            pool_size as i64 - 2,
            pool_size as i64 - 1,
            i64::MAX,
            i64::MIN,
            700 * pool_size as i64 + pool_size as i64 - 1,
        ]);
        let given = exact(device, &inputs);
        assert_eq!(given.counts[..6], [0, 0, 1, 512, 0, 512]);
        assert_eq!(given.faults, [0, 2, 0]);
    }
}

/// A key with a negative scale is one with the other sign; NaN scales give NaN.
pub fn scales_may_be_anything<D: IndexerDevice>(device: &D) {
    let mut shape = indexer_shape(5, 90, &[(300, 2)]);
    (shape.record, shape.page_size) = (RecordFormat::IndexFp8_132, 16);
    let mut inputs = IndexerInputs::new(&shape, 4);
    let planes = inputs.spec.layout().planes(16);
    let mut rng = Rng(1);
    for page in 0..inputs.pages {
        for token in 0..16 {
            let at = page * inputs.page_stride_bytes + planes.scales.token(token).start;
            let scale: f32 = rng.pick(&[1.0, -1.0, 0.5, -0.25, 0.0, -0.0, f32::NAN, 4.0]);
            inputs.cache[at..at + 4].copy_from_slice(&scale.to_le_bytes());
        }
    }
    exact(device, &inputs);
}

/// No rows, no requests, no columns.
pub fn empty_calls<D: IndexerDevice>(device: &D) {
    for requests in [vec![], vec![(50, 0)], vec![(0, 3)]] {
        exact(device, &IndexerInputs::new(&indexer_shape(3, 5, &requests), 1));
    }
    let mut shape = indexer_shape(3, 5, &[]);
    shape.padding_rows = 4;
    exact(device, &IndexerInputs::new(&shape, 1));
}

pub fn seventy_thousand_rows<D: IndexerDevice>(device: &D) {
    let mut shape = indexer_shape(1, 3, &[(20, 2), (9, 69_990), (5, 7)]);
    (shape.width, shape.page_size, shape.padding_rows) = (2, 16, 1);
    exact(device, &IndexerInputs::new(&shape, 1));
}

/// Positions around 2^16, where a 16-bit index would turn.
pub fn positions_around_65536<D: IndexerDevice>(device: &D) {
    let mut shape = indexer_shape(1, 100, &[(65_535, 1), (65_536, 1), (65_537, 2)]);
    shape.width = 2;
    exact(device, &IndexerInputs::new(&shape, 1));
}

/// Pages whose first byte lies beyond 2^31.
pub fn index_pages_beyond_two_gibibytes<D: IndexerDevice>(device: &D) {
    let mut shape = indexer_shape(2, 10, &[(130, 1)]);
    (shape.page_size, shape.record) = (64, RecordFormat::IndexFp8_132);
    let mut inputs = IndexerInputs::new(&shape, 3);
    let near = Outcome::exact(&inputs.oracle());
    // The same pages, far apart, so that the last begins beyond 2^31: memory that is never touched
    // costs nothing.
    let (stride, payload) = (600 << 20, inputs.page_stride_bytes);
    let spec = &inputs.spec;
    let mut pool =
        mlakit::Pages::with_stride(device, "pool", spec.pages(), (inputs.pages, stride)).unwrap();
    for page in 0..inputs.pages {
        pool.write((page, 0), &inputs.cache[page * payload..(page + 1) * payload]).unwrap();
    }
    assert!((inputs.pages - 1) * stride > 1 << 31);
    let prepared = super::indexer_run::prepare(device, spec);
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    inputs.cache.truncate(inputs.pages * payload);
    let mut operands = super::indexer_run::Operands::new(&mut stream, &inputs, &prepared);
    operands.view.bind(&mut stream, &pool).unwrap();
    assert_eq!(operands.run(&mut stream, &prepared), near);
}
