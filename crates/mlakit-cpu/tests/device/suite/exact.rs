//! Cases whose result is known to the last bit: equal keys, two equal scores, one score above all.

use half::bf16;
use mlakit::op::merge::Partial;
use mlakit::{RecordFormat, Splits};

use super::SuiteDevice;
use super::dense_inputs::{DenseInputs, DenseShape, shape};
use super::dense_run::{prepare, run};

const HEADS: usize = 5;
const WIDTHS: (usize, usize) = (66, 34);
const TOKENS: usize = 450;

/// Every way to divide keys, with both dtypes of partial results and both records.
fn shapes() -> Vec<DenseShape> {
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
            for record in RecordFormat::PLAIN {
                let mut shape = shape(HEADS, WIDTHS, &[(TOKENS, 1)]);
                (shape.splits, shape.partial, shape.record) = (splits, partial, record);
                shapes.push(shape);
            }
        }
    }
    shapes
}

/// A cache of these records, a query that is 8 in the last element alone, and a scale of the cache
/// that is a power of two, so that nothing is rounded.
fn inputs(shape: &DenseShape, record: impl Fn(usize) -> Vec<f32>) -> DenseInputs {
    let mut inputs = DenseInputs::new(shape, 41);
    inputs.kv_scale = if inputs.spec.record.is_scaled() { 0.5 } else { 1.0 };
    for vector in inputs.q.chunks_exact_mut(WIDTHS.0) {
        vector.fill(bf16::ZERO);
        vector[WIDTHS.0 - 1] = bf16::from_f32(8.0);
    }
    let layout = inputs.spec.pages().record;
    for position in 0..TOKENS {
        let values: Vec<bf16> = record(position).into_iter().map(bf16::from_f32).collect();
        let first = inputs.record(0, position).unwrap();
        let bytes = &mut inputs.cache[first..first + layout.bytes()];
        layout.encode(bytes, &mut [], &values, inputs.kv_scale);
    }
    inputs
}

/// Numbers that the record holds exactly: of all 8 bits of BF16, so that a mean of two is often a
/// tie, or multiples of 1/8.
fn value(format: RecordFormat, seed: usize, element: usize) -> f32 {
    let number = seed * 31 + element * 7;
    let magnitude = match format {
        RecordFormat::Bf16 => 1.0 + (number % 128) as f32 / 128.0,
        _ => (number % 8) as f32 / 8.0,
    };
    if element.is_multiple_of(2) { magnitude } else { -magnitude }
}

/// A record of the value `seed`, whose last element makes the score.
fn record(format: RecordFormat, seed: usize, score: f32) -> Vec<f32> {
    let mut values: Vec<f32> = (0..WIDTHS.0).map(|i| value(format, seed, i)).collect();
    values[WIDTHS.0 - 1] = score;
    values
}

#[track_caller]
fn every_head_has<D: SuiteDevice>(device: &D, inputs: &DenseInputs, needed: impl Fn(usize) -> f32) {
    let given = run(device, inputs);
    for (index, out) in given.out.iter().enumerate() {
        let (head, element) = (index / WIDTHS.1, index % WIDTHS.1);
        let needed = bf16::from_f32(needed(element));
        assert_eq!(*out, needed, "head {head} element {element} of {:?}", inputs.shape);
    }
}

/// All keys are one key: the output is its value, exactly.
pub fn equal_keys_give_their_value<D: SuiteDevice>(device: &D) {
    for shape in shapes() {
        let format = shape.record;
        let inputs = inputs(&shape, |_| record(format, 3, 0.5));
        every_head_has(device, &inputs, |element| value(format, 3, element));
    }
}

/// One score so far above the others that they weigh nothing: its value, exactly.
pub fn a_saturated_score_gives_its_value<D: SuiteDevice>(device: &D) {
    for shape in shapes() {
        let format = shape.record;
        for top in [0, 63, 64, 255, 256, TOKENS - 1] {
            let score = |position| if position == top { 224.0 } else { -224.0 };
            let inputs = inputs(&shape, |at| record(format, at, score(at)));
            every_head_has(device, &inputs, |element| value(format, top, element));
        }
    }
}

/// Two equal scores above all others: the mean of their values, rounded to BF16 once, whether one
/// split has both or each has one.
pub fn two_equal_scores_give_the_mean<D: SuiteDevice>(device: &D) {
    let mut places = [false; 2];
    for shape in shapes() {
        let format = shape.record;
        for pair in [[0, 1], [62, 65], [3, TOKENS - 1], [200, 400]] {
            let score = |position| if pair.contains(&position) { 224.0 } else { -224.0 };
            let inputs = inputs(&shape, |at| record(format, at, score(at)));
            let two = |element| pair.map(|key| value(format, key, element));
            every_head_has(device, &inputs, |element| two(element).iter().sum::<f32>() / 2.0);
            places[splits_of(device, &inputs, pair) - 1] = true;
        }
    }
    assert_eq!(places, [true; 2], "pairs in one split and in two");
}

/// How many splits hold the two keys.
fn splits_of<D: SuiteDevice>(device: &D, inputs: &DenseInputs, pair: [usize; 2]) -> usize {
    let division = prepare(device, &inputs.spec).plan().division();
    let span = inputs.span(0);
    let holds = |split: &usize| {
        let range = division.range(&span, &span, *split);
        pair.iter().any(|key| range.contains(key))
    };
    (0..division.splits).filter(holds).count()
}
