//! Dense attention is what the oracle says, and depends on nothing that no row refers to.

use half::bf16;
use mlakit::op::merge::Partial;
use mlakit::{LseBase, Pages, RecordFormat, Splits};

use super::SuiteDevice;
use super::compare::{dense_agrees, same_bits, same_lse, same_out};
use super::dense_inputs::{DenseInputs, DenseShape, Query, shape};
use super::dense_run::{Operands, Outcome, prepare, run, run_prepared};
use super::random::{Deck, Rng};

/// Products of a query element and a key element that a case may cost.
const WORK: usize = 30_000_000;
const CASES: u64 = 40;

/// Heads, then rows and lengths of a request, page sizes.
const HEADS: [usize; 7] = [1, 3, 8, 11, 16, 99, 128];
const ROWS: [usize; 5] = [1, 2, 4, 5, 64];
const LENGTHS: [usize; 7] = [0, 1, 63, 64, 65, 2049, 4097];
const PAGES: [usize; 5] = [1, 16, 48, 64, 256];
const WINDOWS: [Option<usize>; 4] = [None, Some(1), Some(66), Some(514)];
const WIDTHS: [(usize, usize); 10] = [
    (576, 512),
    (512, 512),
    (320, 256),
    (288, 256),
    (160, 128),
    (1088, 1024),
    (2, 2),
    (18, 14),
    (66, 34),
    (130, 130),
];
const SPLITS: [Splits; 7] = [
    Splits::Count(1),
    Splits::Count(2),
    Splits::Count(7),
    Splits::Auto,
    Splits::FixedTokens(64),
    Splits::FixedTokens(192),
    Splits::FixedTokens(1024),
];
const RECORDS: [(RecordFormat, Query); 4] = [
    (RecordFormat::Bf16, Query::Bf16),
    (RecordFormat::E4m3, Query::Bf16),
    (RecordFormat::E4m3, Query::E4m3),
    (RecordFormat::E4m3, Query::Quantized),
];

/// Deals every value of every list equally often, so that a run of some dozens of cases has them
/// all, in combinations that change with the seed.
struct Sampler {
    rng: Rng,
    heads: Deck<usize>,
    rows: Deck<usize>,
    lengths: Deck<usize>,
    pages: Deck<usize>,
    windows: Deck<Option<usize>>,
    widths: Deck<(usize, usize)>,
    splits: Deck<Splits>,
    records: Deck<(RecordFormat, Query)>,
}

impl Sampler {
    fn new(seed: u64) -> Self {
        Self {
            rng: Rng(seed),
            heads: Deck::new(&HEADS),
            rows: Deck::new(&ROWS),
            lengths: Deck::new(&LENGTHS),
            pages: Deck::new(&PAGES),
            windows: Deck::new(&WINDOWS),
            widths: Deck::new(&WIDTHS),
            splits: Deck::new(&SPLITS),
            records: Deck::new(&RECORDS),
        }
    }

    fn case(&mut self) -> DenseShape {
        let rng = &mut self.rng;
        let mut sampled = shape(self.heads.deal(rng), self.widths.deal(rng), &[]);
        (sampled.record, sampled.query) = self.records.deal(rng);
        sampled.page_size = self.pages.deal(rng);
        sampled.window = self.windows.deal(rng);
        sampled.splits = self.splits.deal(rng);
        sampled.partial = rng.pick(&[Partial::Bf16, Partial::F32]);
        sampled.lse = rng.pick(&[LseBase::Natural, LseBase::Base2]);
        sampled.padding = rng.pick(&[(0, 0), (6, 0), (0, 10), (32, 256)]);
        sampled.padding_rows = rng.pick(&[0, 0, 2]);
        sampled.row_lengths = rng.chance(4);
        sampled.slack = rng.pick(&[1, 3]);
        sampled.bad_pages = rng.chance(4);
        // One pair of what was dealt first, as many more as the cap allows.
        let wanted = 1 + rng.below(4);
        for _ in 0..wanted + 8 {
            let request = (self.lengths.deal(rng), self.rows.deal(rng));
            let mut with = sampled.clone();
            with.requests.push(request);
            if with.work() <= WORK {
                sampled = with;
            }
            if sampled.requests.len() == wanted {
                break;
            }
        }
        if sampled.requests.is_empty() {
            sampled.requests.push((65, 1));
        }
        sampled
    }
}

/// Heads x rows x lengths x pages x splits x partials x windows x records x widths, with padded
/// records and pages, padding rows, lengths a row, both bases, and page ids out of the pool.
pub fn agrees_with_the_oracle<D: SuiteDevice>(device: &D) {
    let mut sampler = Sampler::new(0x5eed);
    let (mut pairs, mut faulty) = (Vec::new(), 0);
    for seed in 0..CASES {
        let shape = sampler.case();
        let inputs = DenseInputs::new(&shape, seed);
        let prepared = prepare(device, &inputs.spec);
        let division = prepared.plan().division();
        let needed = inputs.oracle(division);
        let given = run_prepared(device, &prepared, &inputs);
        dense_agrees(&inputs, division, (&given, &needed));
        pairs.extend(shape.requests);
        faulty += usize::from(needed.faults != [0; 3]);
    }
    assert!(LENGTHS.iter().all(|length| pairs.iter().any(|(tokens, _)| tokens == length)));
    assert!(ROWS.iter().all(|count| pairs.iter().any(|(_, rows)| rows == count)));
    assert!(faulty > 0, "some case counts faults");
}

/// Lengths, offsets and ids that are out of bounds in every way give what the oracle gives, and
/// are counted as it counts.
pub fn counts_what_is_out_of_bounds<D: SuiteDevice>(device: &D) {
    counts_with_widths(device, (18, 14));
}

/// The same for some widths.
pub fn counts_with_widths<D: SuiteDevice>(device: &D, widths: (usize, usize)) {
    let mut shape = shape(3, widths, &[(40, 2), (20, 1), (33, 3), (16, 1)]);
    shape.padding_rows = 1;
    let base = DenseInputs::new(&shape, 3);
    let change = |change: &dyn Fn(&mut DenseInputs)| {
        let mut inputs = base.clone();
        change(&mut inputs);
        // Whatever is looked at now is defined.
        inputs.cache.fill(0x3f);
        inputs
    };
    let cases = [
        change(&|i| i.kv_lens[0] = -5),
        change(&|i| i.kv_lens[1] = i32::MAX),
        change(&|i| i.kv_lens[2] = 41),
        change(&|i| i.q_offsets[0] = -1),
        change(&|i| i.q_offsets[0] = 3),
        change(&|i| i.q_offsets[1] = i32::MIN),
        change(&|i| i.q_offsets[2] = 100),
        change(&|i| i.q_offsets[4] = 2),
        change(&|i| i.q_offsets.fill(i32::MAX)),
        change(&|i| i.table.fill(i32::MIN)),
        change(&|i| i.table.fill(-1)),
        change(&|i| i.table[1] = i.pages as i32),
    ];
    let prepared = prepare(device, &base.spec);
    let mut counted = [false; 3];
    for inputs in cases {
        let needed = inputs.oracle(prepared.plan().division());
        let given = run_prepared(device, &prepared, &inputs);
        assert_eq!(given.faults[..], needed.faults[..], "{:?}", inputs.q_offsets);
        dense_agrees(&inputs, prepared.plan().division(), (&given, &needed));
        counted.iter_mut().zip(needed.faults).for_each(|(seen, count)| *seen |= count > 0);
    }
    assert_eq!(counted, [true; 3], "every kind of fault occurs");
}

/// Shapes whose caches have all kinds of bytes that nobody refers to.
fn shapes_with_gaps() -> Vec<DenseShape> {
    let mut shapes = Vec::new();
    for (record, query) in RECORDS {
        for (window, row_lengths) in [(None, false), (Some(66), false), (None, true)] {
            for splits in [Splits::Count(1), Splits::Count(3), Splits::FixedTokens(64)] {
                let mut shape = shape(5, (66, 34), &[(131, 3), (0, 1), (65, 1), (200, 5)]);
                (shape.record, shape.query) = (record, query);
                (shape.window, shape.row_lengths, shape.splits) = (window, row_lengths, splits);
                (shape.padding, shape.page_size, shape.padding_rows) = ((6, 34), 48, 1);
                shapes.push(shape);
            }
        }
    }
    shapes
}

/// Unreferenced pages, tails of pages, padding of records, scratch and unused entries of page
/// tables may hold anything: zeros, NaN, garbage. No bit changes.
pub fn sees_only_what_is_referred_to<D: SuiteDevice>(device: &D) {
    for shape in shapes_with_gaps() {
        sees_no_gap(device, &shape);
    }
}

/// The same for one shape.
pub fn sees_no_gap<D: SuiteDevice>(device: &D, shape: &DenseShape) {
    let clean = DenseInputs::new(shape, 17);
    let referenced = clean.is_referenced();
    assert!(referenced.contains(&false) && referenced.contains(&true));
    let prepared = prepare(device, &clean.spec);
    let needed = run_prepared(device, &prepared, &clean);
    for fill in 0..3u64 {
        let (mut other, mut rng) = (clean.clone(), Rng(fill + 100));
        for (byte, _) in other.cache.iter_mut().zip(&referenced).filter(|(_, used)| !**used) {
            *byte = [0x00, 0x7f, rng.bits() as u8][fill as usize];
        }
        for request in 0..shape.requests.len() {
            let (width, span) = (other.table_width(), other.span(request));
            for entry in 0..width {
                let begin = entry * shape.page_size;
                let unused = begin >= span.end || begin + shape.page_size <= span.start;
                if unused {
                    let any = rng.bits() as i32;
                    other.table[request * width + entry] = [0, i32::MIN, any][fill as usize];
                }
            }
        }
        let given = run_with_scratch(device, &other, [0x00, 0xff, 0x7f][fill as usize]);
        same_bits(&format!("fill {fill} of {shape:?}"), &given, &needed);
    }
}

fn run_with_scratch<D: SuiteDevice>(device: &D, inputs: &DenseInputs, fill: u8) -> Outcome {
    let prepared = prepare(device, &inputs.spec);
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let mut operands = Operands::new(&mut stream, inputs, &prepared);
    operands.lane.poison(fill).unwrap();
    operands.run(&mut stream, &prepared)
}

/// A NaN key leaves every bit of the rows that do not see it alone, and the rows that see it are
/// NaN, however their keys are divided: a visible key is a key.
pub fn a_nan_key_stays_with_the_rows_that_see_it<D: SuiteDevice>(device: &D) {
    for (record, query) in RECORDS {
        for splits in [Splits::Count(1), Splits::Count(2), Splits::FixedTokens(64)] {
            let mut shape = shape(3, (66, 34), &[(150, 40)]);
            (shape.record, shape.query, shape.splits) = (record, query, splits);
            shape.window = Some(64);
            let clean = DenseInputs::new(&shape, 9);
            let needed = run(device, &clean);
            for position in [70, 111, 128, 149] {
                let mut poisoned = clean.clone();
                let first = clean.record(0, position).unwrap();
                let bytes = clean.spec.pages().record.bytes();
                poisoned.cache[first..first + bytes].fill(0xff);
                let prepared = prepare(device, &poisoned.spec);
                let given = run_prepared(device, &prepared, &poisoned);
                for row in 0..40 {
                    let what = format!("{record:?} {splits:?} key {position} row {row}");
                    let (outs, lses) = (row * 3 * 34..(row + 1) * 3 * 34, row * 3..row * 3 + 3);
                    let sees = clean.keys(0, row).contains(&position);
                    if sees {
                        assert!(given.out[outs].iter().all(|v| v.is_nan()), "{what}");
                        assert!(given.lse[lses].iter().all(|v| v.is_nan()), "{what}");
                    } else {
                        same_out(&what, &given.out[outs.clone()], &needed.out[outs]);
                        same_lse(&what, &given.lse[lses.clone()], &needed.lse[lses]);
                    }
                }
            }
        }
    }
}

/// Keys whose scores are -inf weigh nothing beside others, and rows that see no other key are as those
/// that see none: output 0, log-sum-exp -inf.
pub fn scores_of_minus_infinity_weigh_nothing<D: SuiteDevice>(device: &D) {
    const FAR: usize = 130;
    for splits in [Splits::Count(1), Splits::Count(2), Splits::FixedTokens(64)] {
        for partial in [Partial::Bf16, Partial::F32] {
            let mut shape = shape(3, (66, 34), &[(150, 40), (90, 2)]);
            (shape.splits, shape.partial) = (splits, partial);
            let mut inputs = DenseInputs::new(&shape, 12);
            for q in inputs.q.chunks_exact_mut(66) {
                q[65] = bf16::ONE;
            }
            for (request, far) in [(0, 0..FAR), (1, 0..90)] {
                for position in far {
                    let last = inputs.record(request, position).unwrap() + 65 * 2;
                    let bytes = bf16::NEG_INFINITY.to_le_bytes();
                    inputs.cache[last..last + 2].copy_from_slice(&bytes);
                }
            }
            let prepared = prepare(device, &inputs.spec);
            let division = prepared.plan().division();
            let given = run_prepared(device, &prepared, &inputs);
            dense_agrees(&inputs, division, (&given, &inputs.oracle(division)));
            // The first rows of the first request see positions below 130 only, those of the second no other.
            for row in (0..=FAR - 111).chain(40..42) {
                let (outs, lses) = (row * 3 * 34..(row + 1) * 3 * 34, row * 3..row * 3 + 3);
                assert!(given.out[outs].iter().all(|v| v.to_f32() == 0.0), "row {row}");
                assert!(given.lse[lses].iter().all(|v| *v == f32::NEG_INFINITY), "row {row}");
            }
            assert!(given.lse[20 * 3..40 * 3].iter().all(|v| v.is_finite()));
        }
    }
}

/// Pages that begin beyond 2^31 and 2^32 bytes of cache give the bits that low pages give.
pub fn pages_beyond_two_gibibytes<D: SuiteDevice>(device: &D) {
    const STRIDE: usize = 1 << 20;
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    for record in RecordFormat::PLAIN {
        let mut shape = shape(4, (576, 512), &[(130, 2), (64, 1)]);
        (shape.record, shape.page_size) = (record, 64);
        let low = DenseInputs::new(&shape, 5);
        let prepared = prepare(device, &low.spec);
        let mut operands = Operands::new(&mut stream, &low, &prepared);
        let needed = operands.run(&mut stream, &prepared);
        assert_eq!(needed.faults, [0; 3]);

        let high = [2047, 2048, 4095, 4096, 4097, 4200, 4300, 4399];
        let size = (4400, STRIDE);
        let mut pool = Pages::with_stride(device, "large pool", low.spec.pages(), size).unwrap();
        let mut moved = low.clone();
        let payload = low.spec.pages().payload_bytes();
        for (bytes, page) in low.cache.chunks_exact(low.page_stride_bytes).zip(high) {
            pool.write((page, 0), &bytes[..payload]).unwrap();
        }
        for id in &mut moved.table {
            if let Some(page) = usize::try_from(*id).ok().and_then(|id| high.get(id)) {
                *id = *page as i32;
            }
        }
        // The large pool takes the place of the small one behind the view.
        let mut operands = Operands::new(&mut stream, &moved, &prepared);
        operands.view.bind(&mut stream, &pool).unwrap();
        let given = operands.run(&mut stream, &prepared);
        same_bits(&format!("{record:?} high pages"), &given, &needed);
    }
}
