//! Sparse cases whose result is known to the last bit: equal tokens, two equal scores, one score
//! above all; and repeats.

use half::bf16;
use mlakit::op::merge::Partial;
use mlakit::op::sparse::Columns;
use mlakit::{RecordFormat, Splits};

use super::compare::same_bits;
use super::random::Rng;
use super::sparse_inputs::{Extra, SparseInputs, SparseShape, shape};
use super::sparse_run::{Operands, SparseDevice, prepare, run};

const HEADS: usize = 5;
const TOKENS: usize = 450;

/// Records, with widths whose last element, which makes the score, shares no scale with a value.
const RECORDS: [(RecordFormat, (usize, usize)); 6] = [
    (RecordFormat::Bf16, (66, 34)),
    (RecordFormat::E4m3, (66, 34)),
    (RecordFormat::Fp8_656, (154, 128)),
    (RecordFormat::V4_584, (192, 128)),
    (RecordFormat::V41_528, (96, 64)),
    (RecordFormat::Nvfp4_432, (80, 64)),
];

/// Every way to divide columns, with both dtypes of partial results and several records.
fn shapes() -> Vec<SparseShape> {
    let mut shapes = Vec::new();
    for splits in [
        Splits::Count(1),
        Splits::Count(2),
        Splits::Count(7),
        Splits::Auto,
        Splits::FixedTokens(64),
        Splits::FixedTokens(256),
    ] {
        for partial in [Partial::Bf16, Partial::F32] {
            for (record, widths) in RECORDS {
                let mut shape = shape(HEADS, widths, TOKENS, &[(TOKENS, 1)]);
                (shape.splits, shape.partial, shape.record) = (splits, partial, record);
                (shape.count, shape.exact) = (Some(TOKENS), false);
                shapes.push(shape);
            }
        }
    }
    shapes
}

/// A row that selects every token in a shuffled order, a cache of these keys by column, a query that
/// is 8 in the last element alone, and a scale of the cache that is a power of two, so that nothing is
/// rounded.
fn inputs(shape: &SparseShape, key: impl Fn(usize) -> Vec<f32>) -> SparseInputs {
    let mut inputs = SparseInputs::new(shape, 41);
    inputs.kv_scale = if inputs.spec.has_kv_scale() { 0.5 } else { 1.0 };
    for vector in inputs.q.chunks_exact_mut(shape.qk_width) {
        vector.fill(bf16::ZERO);
        vector[shape.qk_width - 1] = bf16::from_f32(8.0);
    }
    let mut order: Vec<i32> = (0..TOKENS as i32).collect();
    Rng(3).shuffle(&mut order);
    inputs.positions = order;
    for column in 0..TOKENS {
        let values: Vec<bf16> = key(column).into_iter().map(bf16::from_f32).collect();
        let slot = inputs.slot_of(0, inputs.positions[column], TOKENS) as usize;
        let place = (slot / shape.page_size, slot % shape.page_size);
        inputs.pool.write(place, &values, inputs.kv_scale);
    }
    inputs
}

/// Numbers that the record holds exactly: of all 8 bits of BF16, so that a mean of two is often a
/// tie, multiples of 1/8, or codes of 4 bits.
fn value(format: RecordFormat, seed: usize, element: usize) -> f32 {
    let number = seed * 31 + element * 7;
    let magnitude = match format {
        RecordFormat::Bf16 => 1.0 + (number % 128) as f32 / 128.0,
        RecordFormat::Nvfp4_432 => [0.0, 1.0, 2.0, 3.0, 4.0, 6.0][number % 6],
        _ => (number % 8) as f32 / 8.0,
    };
    if element.is_multiple_of(2) { magnitude } else { -magnitude }
}

/// A key of the value `seed`, whose last element makes the score.
fn key(shape: &SparseShape, seed: usize, score: f32) -> Vec<f32> {
    let mut values: Vec<f32> = (0..shape.qk_width).map(|i| value(shape.record, seed, i)).collect();
    values[shape.qk_width - 1] = score;
    values
}

#[track_caller]
fn every_head_has<D: SparseDevice>(
    device: &D,
    inputs: &SparseInputs,
    needed: impl Fn(usize) -> f32,
) {
    let (given, width) = (run(device, inputs), inputs.shape.value_width);
    for (index, out) in given.out.iter().enumerate() {
        let (head, element) = (index / width, index % width);
        let needed = bf16::from_f32(needed(element));
        assert_eq!(*out, needed, "head {head} element {element} of {:?}", inputs.shape);
    }
}

/// All tokens are one token: the output is its value, exactly.
pub fn equal_tokens_give_their_value<D: SparseDevice>(device: &D) {
    for shape in shapes() {
        let inputs = inputs(&shape, |_| key(&shape, 3, 0.5));
        every_head_has(device, &inputs, |element| value(shape.record, 3, element));
    }
}

/// One score so far above the others that they weigh nothing: its value, exactly.
pub fn a_saturated_token_gives_its_value<D: SparseDevice>(device: &D) {
    for shape in shapes() {
        for top in [0, 63, 64, 255, 256, TOKENS - 1] {
            let score = |column| if column == top { 224.0 } else { -224.0 };
            let inputs = inputs(&shape, |column| key(&shape, column, score(column)));
            every_head_has(device, &inputs, |element| value(shape.record, top, element));
        }
    }
}

/// Two equal scores above all others: the mean of their values, rounded to BF16 once, whether one
/// split has both or each has one.
pub fn two_equal_tokens_give_the_mean<D: SparseDevice>(device: &D) {
    let mut places = [false; 2];
    for shape in shapes() {
        let division = prepare(device, &shape.spec()).plan().division();
        for pair in [[0, 1], [62, 65], [3, TOKENS - 1], [200, 400]] {
            let score = |column| if pair.contains(&column) { 224.0 } else { -224.0 };
            let inputs = inputs(&shape, |column| key(&shape, column, score(column)));
            let two = |element| pair.map(|column| value(shape.record, column, element));
            every_head_has(device, &inputs, |element| two(element).iter().sum::<f32>() / 2.0);
            let columns = Columns { main: TOKENS, extra: 0 };
            let holds = |split: &usize| {
                let range = columns.split(division, *split);
                pair.iter().any(|column| range.contains(column))
            };
            places[(0..division.splits).filter(holds).count() - 1] = true;
        }
    }
    assert_eq!(places, [true; 2], "pairs in one split and in two");
}

/// Same inputs and plan, same bits: twenty times, in scratch that holds something else each time.
pub fn a_call_repeats_itself<D: SparseDevice>(device: &D) {
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    for splits in [Splits::Auto, Splits::Count(7), Splits::FixedTokens(128)] {
        for record in [RecordFormat::Bf16, RecordFormat::V4_584, RecordFormat::Nvfp4_368t] {
            let mut shape = shape(11, (0, 0), 513, &[(700, 3), (65, 1)]).with_record(record, false);
            (shape.splits, shape.strange, shape.sink) = (splits, true, true);
            shape.extra = Some(Extra { record, page_size: 16, width: 90, tokens: 70 });
            let inputs = SparseInputs::new(&shape, 31);
            let prepared = prepare(device, &inputs.spec);
            let mut operands = Operands::new(&mut stream, &inputs, &prepared);
            let needed = operands.run(&mut stream, &prepared);
            for repeat in 0..20 {
                operands.lane.poison(repeat * 13).unwrap();
                let given = operands.run(&mut stream, &prepared);
                same_bits(&format!("repeat {repeat} of {splits:?}"), &given, &needed);
            }
        }
    }
}
