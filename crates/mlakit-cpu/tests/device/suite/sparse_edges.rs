//! The edges of sparse attention, one test each.

use half::bf16;
use mlakit::op::merge::Partial;
use mlakit::op::sparse::{Selection, Sparse, SparseFields, SparseSpec};
use mlakit::{Error, LseBase, Plan, RecordFormat, Splits};

use super::compare::{same_bits, same_lse, same_out};
use super::dense_run::Outcome;
use super::random::Rng;
use super::sparse::{check, check_inputs};
use super::sparse_inputs::{Extra, SparseInputs, SparseShape, shape};
use super::sparse_run::{Operands, SparseDevice, prepare, run};

const WIDTHS: (usize, usize) = (66, 34);
const SELECTIONS: [Selection; 2] = [Selection::Positions, Selection::Slots];

/// Negative entries of every kind are unused wherever they stand; entries beyond the cache are
/// skipped and counted once each, however rows, heads and columns are divided.
pub fn entries_out_of_bounds_are_skipped_and_counted<D: SparseDevice>(device: &D) {
    let strange = [-1, -123_456, i32::MIN, 114_514, 1_919_810, 2_147_480_000, i32::MAX];
    for (selection, rows) in [(SELECTIONS[0], 2), (SELECTIONS[1], 2), (SELECTIONS[0], 1)] {
        for splits in [Splits::Count(1), Splits::Count(3), Splits::FixedTokens(64)] {
            let mut shape = shape(40, WIDTHS, 400 / rows, &[(300, rows)]);
            (shape.selection, shape.splits, shape.count) = (selection, splits, Some(400));
            let mut inputs = SparseInputs::new(&shape, 3);
            for (index, entry) in strange.into_iter().cycle().take(100).enumerate() {
                inputs.positions[4 * index] = entry;
                inputs.slots[4 * index] = entry;
            }
            let given = check_inputs(device, &inputs);
            let bad = strange.into_iter().cycle().take(100).filter(|entry| *entry > 300).count();
            assert_eq!(given.faults, [bad as u32, 0, 0]);
        }
    }
}

/// A row all of whose entries are unused or bad, a row without a count, one whose request is none:
/// output 0, log-sum-exp -inf, or the sink's where it counts.
pub fn a_row_without_a_key_is_zero<D: SparseDevice>(device: &D) {
    for splits in [Splits::Count(1), Splits::Count(2)] {
        for (sink, sink_in_lse) in [(false, false), (true, false), (true, true)] {
            for lse in [LseBase::Natural, LseBase::Base2] {
                let mut shape = shape(3, WIDTHS, 130, &[(200, 5)]);
                (shape.splits, shape.sink, shape.sink_in_lse) = (splits, sink, sink_in_lse);
                (shape.count, shape.lse) = (Some(130), lse);
                let mut inputs = SparseInputs::new(&shape, 4);
                inputs.positions[..130].fill(-1);
                inputs.positions[130..260].fill(i32::MAX);
                inputs.counts[2] = 0;
                (inputs.request[3], inputs.request[4]) = (-1, 7);
                let given = check_inputs(device, &inputs);
                // The last row's request is counted once, its entries are not looked at.
                assert_eq!(given.faults, [130 + 1, 0, 0]);
                assert!(given.out.iter().all(|out| out.to_bits() == 0));
                for (index, lse) in given.lse.iter().enumerate() {
                    let needed = match sink_in_lse {
                        true => f64::from(inputs.sink[index % 3]) / shape.lse.ln(),
                        false => f64::NEG_INFINITY,
                    };
                    assert_eq!(*lse, needed as f32, "row {}", index / 3);
                }
            }
        }
    }
}

/// Counts below 0 are 0, counts beyond the list are its width; both are counted.
pub fn counts_are_clamped<D: SparseDevice>(device: &D) {
    for selection in SELECTIONS {
        let mut shape = shape(3, WIDTHS, 65, &[(200, 6)]);
        (shape.selection, shape.count) = (selection, Some(65));
        shape.extra =
            Some(Extra { record: RecordFormat::Bf16, page_size: 16, width: 20, tokens: 40 });
        let mut inputs = SparseInputs::new(&shape, 5);
        inputs.counts = vec![-1, i32::MIN, 0, 65, 66, i32::MAX];
        inputs.extra_counts = vec![20, 21, i32::MAX, -1, 0, i32::MIN];
        let given = check_inputs(device, &inputs);
        assert_eq!(given.faults, [0, 4 + 4, 0]);
    }
}

/// Requests without a token beside others: their rows select nothing.
pub fn requests_without_tokens<D: SparseDevice>(device: &D) {
    let shape = shape(8, WIDTHS, 64, &[(0, 2), (100, 1), (0, 1), (1, 3)]);
    let given = check(device, &shape, 6);
    for row in [0, 1, 3] {
        assert!(given.lse[row * 8..(row + 1) * 8].iter().all(|lse| *lse == f32::NEG_INFINITY));
    }
}

/// Lists of 2,048, 2,051 and 2,112 entries of requests with far fewer keys, the rest unused.
pub fn more_entries_than_keys<D: SparseDevice>(device: &D) {
    for width in [2048, 2051, 2112] {
        for tokens in [1, 63, 100, 2046] {
            let mut shape = shape(4, WIDTHS, width, &[(tokens, 2)]);
            shape.count = Some(width);
            let mut inputs = SparseInputs::new(&shape, 7);
            for (index, position) in inputs.positions.iter_mut().enumerate() {
                let index = index % width;
                *position = if index < tokens { index as i32 } else { -1 };
            }
            for row in 0..2 {
                for position in 0..tokens {
                    let slot = inputs.slot_of(0, position as i32, tokens) as usize;
                    let key = inputs.key(&mut Rng((row * tokens + position) as u64));
                    inputs.pool.write((slot / 16, slot % 16), &key, 1.0);
                }
            }
            check_inputs(device, &inputs);
        }
    }
}

/// A list whose entries are all there three times has the output of the list, and a log-sum-exp
/// larger by ln 3.
pub fn a_token_selected_twice_counts_twice<D: SparseDevice>(device: &D) {
    let mut once = shape(5, WIDTHS, 60, &[(400, 2)]);
    (once.count, once.splits) = (Some(60), Splits::Count(1));
    let once = SparseInputs::new(&once, 8);
    let mut thrice = once.clone();
    thrice.shape.width = 180;
    thrice.positions =
        once.positions.chunks(60).flat_map(|row| row.iter().flat_map(|p| [*p; 3])).collect();
    thrice.counts.fill(180);
    thrice.spec = thrice.shape.spec();
    let (single, triple) = (check_inputs(device, &once), check_inputs(device, &thrice));
    for (one, three) in single.lse.iter().zip(&triple.lse) {
        assert!((three - one - 3f32.ln()).abs() < 1e-5, "{one} {three}");
    }
    for (one, three) in single.out.iter().zip(&triple.out) {
        assert!((one.to_f32() - three.to_f32()).abs() <= 0.01 + 0.01 * one.to_f32().abs());
    }
}

/// A sink of +inf makes a head's outputs 0 and leaves its log-sum-exp, one of -inf adds nothing, in
/// every way to divide a row; with `sink_in_lse` the log-sum-exp is that of both.
pub fn infinite_sinks<D: SparseDevice>(device: &D) {
    for splits in [Splits::Count(1), Splits::Count(3), Splits::FixedTokens(64)] {
        for partial in [Partial::Bf16, Partial::F32] {
            let mut shape = shape(4, WIDTHS, 200, &[(300, 3)]);
            (shape.splits, shape.partial, shape.count) = (splits, partial, Some(200));
            let plain = run(device, &SparseInputs::new(&shape, 9));
            shape.sink = true;
            let mut inputs = SparseInputs::new(&shape, 9);
            inputs.sink = vec![f32::INFINITY, f32::NEG_INFINITY, 0.5, 1e30];
            let sunk = check_inputs(device, &inputs);
            same_lse("the log-sum-exp excludes a sink", &sunk.lse, &plain.lse);
            for (index, (out, plain)) in sunk.out.iter().zip(&plain.out).enumerate() {
                let head = index / WIDTHS.1 % 4;
                match head {
                    0 | 3 => assert_eq!(out.to_bits(), 0, "head {head}"),
                    1 => assert_eq!(out, plain, "head {head}"),
                    _ => assert!(out.to_f32().abs() <= plain.to_f32().abs()),
                }
            }
            shape.sink_in_lse = true;
            inputs.shape = shape.clone();
            inputs.spec = shape.spec();
            let counted = check_inputs(device, &inputs);
            same_out("outputs", &counted.out, &sunk.out);
            assert_eq!(counted.lse[0], f32::INFINITY);
            assert_eq!(counted.lse[1], plain.lse[1]);
        }
    }
}

/// Rows with keys in one scope alone, in both, in none; a first scope of width 0; a second one
/// without entries.
pub fn a_scope_may_be_empty<D: SparseDevice>(device: &D) {
    for selection in SELECTIONS {
        for splits in [Splits::Count(1), Splits::Count(4), Splits::FixedTokens(64)] {
            let mut shape = shape(6, WIDTHS, 130, &[(200, 4)]);
            (shape.selection, shape.splits) = (selection, splits);
            (shape.count, shape.sink) = (Some(130), true);
            let extra = Extra { record: RecordFormat::E4m3, page_size: 48, width: 70, tokens: 100 };
            shape.extra = Some(extra);
            let mut inputs = SparseInputs::new(&shape, 10);
            inputs.counts = vec![130, 0, 130, 0];
            inputs.extra_counts = vec![70, 70, 0, 0];
            check_inputs(device, &inputs);

            shape.width = 0;
            let given = check(device, &shape, 11);
            assert!(given.lse.iter().all(|lse| lse.is_finite()));
            (shape.width, shape.extra) = (130, Some(Extra { width: 0, ..extra }));
            check(device, &shape, 12);
        }
    }
}

/// Every pair of several records, with scopes whose pages differ too.
pub fn scopes_of_different_records<D: SparseDevice>(device: &D) {
    let records = [
        (RecordFormat::Bf16, (512, 512)),
        (RecordFormat::E4m3, (512, 512)),
        (RecordFormat::V4_584, (512, 512)),
        (RecordFormat::V41_528, (512, 512)),
        (RecordFormat::V41_288, (512, 512)),
        (RecordFormat::Fp8_528, (512, 512)),
    ];
    for (first, widths) in records {
        for (second, _) in records {
            let mut shape = shape(16, widths, 70, &[(100, 2)]);
            (shape.record, shape.page_size) = (first, 64);
            shape.extra = Some(Extra { record: second, page_size: 16, width: 100, tokens: 150 });
            shape.splits = Splits::Count(2);
            check(device, &shape, 13);
        }
    }
}

/// 70,000 rows of one entry, or none: each has the value of its token, exactly.
pub fn seventy_thousand_rows<D: SparseDevice>(device: &D) {
    let mut shape = shape(1, (2, 2), 1, &[(64, 70_000)]);
    shape.exact = false;
    let inputs = SparseInputs::new(&shape, 14);
    let given = run(device, &inputs);
    for (row, out) in given.out.chunks_exact(2).enumerate() {
        let value = match inputs.counts[row] {
            0 => [0; 4],
            _ => {
                let slot = inputs.slot_of(0, inputs.positions[row], 64) as usize;
                let [data, _] = inputs.pool.token(slot / 16, slot % 16);
                inputs.pool.bytes[data].try_into().unwrap()
            }
        };
        assert_eq!(bytemuck::cast_slice::<_, u8>(out), value, "row {row}");
    }
}

/// Positions on both sides of 65,536, in pages of every size.
pub fn positions_around_65536<D: SparseDevice>(device: &D) {
    for page_size in [1, 16, 48, 256] {
        let mut shape = shape(2, (18, 14), 64, &[(65_600, 1)]);
        (shape.page_size, shape.count) = (page_size, Some(64));
        let mut inputs = SparseInputs::new(&shape, 15);
        for index in 0..64 {
            let position = 65_504 + index as i32;
            inputs.positions[index] = position;
            let slot = inputs.slot_of(0, position, 65_600) as usize;
            let key = inputs.key(&mut Rng(index as u64));
            inputs.pool.write((slot / page_size, slot % page_size), &key, 1.0);
        }
        let given = check_inputs(device, &inputs);
        assert_eq!(given.faults, [0; 3]);
    }
}

/// Rows far shorter than the capacity: most splits are empty, and what the merge reads of them says
/// so.
pub fn splits_that_get_no_column<D: SparseDevice>(device: &D) {
    for splits in [Splits::Count(16), Splits::FixedTokens(64), Splits::FixedTokens(128)] {
        for count in [0, 1, 64, 65, 129, 1000] {
            let mut shape = shape(4, WIDTHS, 1024, &[(1100, 2)]);
            (shape.splits, shape.count) = (splits, Some(count));
            check(device, &shape, 16);
        }
    }
}

/// A token that is NaN makes the rows that select it NaN and no other row, however they are divided.
pub fn a_nan_token_reaches_the_rows_that_select_it<D: SparseDevice>(device: &D) {
    for record in [RecordFormat::Bf16, RecordFormat::E4m3, RecordFormat::Fp8_656] {
        for splits in [Splits::Count(1), Splits::Count(2), Splits::FixedTokens(64)] {
            for sink in [false, true] {
                let mut shape = shape(3, (0, 0), 150, &[(150, 6)]).with_record(record, false);
                (shape.splits, shape.count, shape.sink) = (splits, Some(150), sink);
                let mut clean = SparseInputs::new(&shape, 17);
                let poisoned_token = clean.positions[40];
                for position in &mut clean.positions[3 * 150..] {
                    if *position == poisoned_token {
                        *position = -1;
                    }
                }
                let needed = run(device, &clean);
                let mut poisoned = clean.clone();
                let slot = clean.slot_of(0, poisoned_token, 150) as usize;
                for range in clean.pool.token(slot / 16, slot % 16) {
                    poisoned.pool.bytes[range].fill(0xff);
                }
                let given = run(device, &poisoned);
                let outs = 3 * shape.value_width;
                for row in 0..6 {
                    let sees =
                        clean.positions[row * 150..(row + 1) * 150].contains(&poisoned_token);
                    let (out, lse) = (row * outs..(row + 1) * outs, row * 3..row * 3 + 3);
                    if sees {
                        assert!(given.out[out].iter().all(|v| v.is_nan()), "row {row}");
                        assert!(given.lse[lse].iter().all(|v| v.is_nan()), "row {row}");
                    } else {
                        same_out("other rows", &given.out[out.clone()], &needed.out[out]);
                        same_lse("other rows", &given.lse[lse.clone()], &needed.lse[lse]);
                    }
                }
                assert!(given.lse[..3].iter().all(|v| v.is_nan()));
            }
        }
    }
}

/// Tokens whose scores are -inf weigh nothing beside others, and rows that select no other token are as
/// those that select none: output 0, log-sum-exp -inf.
pub fn scores_of_minus_infinity_weigh_nothing<D: SparseDevice>(device: &D) {
    for splits in [Splits::Count(1), Splits::Count(2), Splits::FixedTokens(64)] {
        for sink in [false, true] {
            let mut shape = shape(3, WIDTHS, 150, &[(300, 6)]);
            (shape.splits, shape.count, shape.sink) = (splits, Some(150), sink);
            let mut inputs = SparseInputs::new(&shape, 18);
            for q in inputs.q.chunks_exact_mut(WIDTHS.0) {
                q[WIDTHS.0 - 1] = bf16::ONE;
            }
            // The first two rows select the same tokens, which are far; the others any.
            let far = inputs.positions[..150].to_vec();
            inputs.positions[150..300].copy_from_slice(&far);
            for position in far {
                let slot = inputs.slot_of(0, position, 300) as usize;
                let [data, _] = inputs.pool.token(slot / 16, slot % 16);
                let last = data.start + (WIDTHS.0 - 1) * 2;
                let bytes = bf16::NEG_INFINITY.to_le_bytes();
                inputs.pool.bytes[last..last + 2].copy_from_slice(&bytes);
            }
            let given = check_inputs(device, &inputs);
            let (outs, lses) = (2 * 3 * shape.value_width, 2 * 3);
            assert!(given.out[..outs].iter().all(|v| v.to_f32() == 0.0));
            assert!(given.lse[..lses].iter().all(|v| *v == f32::NEG_INFINITY));
            assert!(given.lse[lses..].iter().all(|v| v.is_finite()));
        }
    }
}

/// The row of an outcome.
fn row_of(outcome: &Outcome, row: usize, shape: &SparseShape) -> (Vec<bf16>, Vec<f32>) {
    let (outs, lses) = (shape.heads * shape.value_width, shape.heads);
    let (out, lse) = (&outcome.out[row * outs..], &outcome.lse[row * lses..]);
    (out[..outs].to_vec(), lse[..lses].to_vec())
}

/// With fixed splits a row has the same bits, alone or in any batch, at any capacity, in a wider
/// list, in any order of rows: with sinks and a second scope too.
pub fn rows_know_no_company<D: SparseDevice>(device: &D) {
    for (splits, sink, partial) in [
        (Splits::FixedTokens(64), false, Partial::Bf16),
        (Splits::FixedTokens(64), true, Partial::Bf16),
        (Splits::FixedTokens(256), true, Partial::F32),
        (Splits::FixedTokens(1024), true, Partial::Bf16),
    ] {
        for record in [RecordFormat::Bf16, RecordFormat::Fp8_656] {
            let mut shape =
                shape(17, (0, 0), 300, &[(900, 3), (64, 1), (400, 4)]).with_record(record, false);
            (shape.splits, shape.sink, shape.partial) = (splits, sink, partial);
            shape.extra = Some(Extra { record, page_size: 16, width: 100, tokens: 90 });
            let inputs = SparseInputs::new(&shape, 23);
            let needed = run(device, &inputs);
            for row in 0..inputs.rows() {
                for widen in [0, 700] {
                    let mut one = inputs.alone(row);
                    one.positions.extend(vec![-1; widen]);
                    one.shape.width += widen;
                    let mut fields: SparseFields = one.shape.spec().into();
                    // One row at its own capacity, and at that of the batch.
                    (fields.width, fields.max_rows) = (300 + widen, [1, 8][row % 2]);
                    one.spec = SparseSpec::new(fields).unwrap();
                    let given = run(device, &one);
                    let what = format!("row {row}, {widen} wider, {splits:?} {record:?}");
                    let (out, lse) = row_of(&needed, row, &shape);
                    same_lse(&what, &given.lse, &lse);
                    same_out(&what, &given.out, &out);
                }
            }
            let order = [3, 7, 0, 1, 6, 2, 5, 4];
            let mut shuffled = inputs.clone();
            let (q, list) = (17 * shape.qk_width, shape.width);
            shuffled.q = order.iter().flat_map(|r| inputs.q[r * q..][..q].to_vec()).collect();
            let pick = |of: &[i32], width: usize| -> Vec<i32> {
                order.iter().flat_map(|row| of[row * width..][..width].to_vec()).collect()
            };
            shuffled.positions = pick(&inputs.positions, list);
            (shuffled.counts, shuffled.request) =
                (pick(&inputs.counts, 1), pick(&inputs.request, 1));
            shuffled.extra_slots = pick(&inputs.extra_slots, 100);
            shuffled.extra_counts = pick(&inputs.extra_counts, 1);
            let given = run(device, &shuffled);
            for (at, row) in order.into_iter().enumerate() {
                let (out, lse) = row_of(&needed, row, &shape);
                let (given_out, given_lse) = row_of(&given, at, &shape);
                same_lse("shuffled", &given_lse, &lse);
                same_out("shuffled", &given_out, &out);
            }
        }
    }
}

/// What the host gives is checked when a Spec is made or a call is bound, and the error names it.
pub fn operands_are_checked<D: SparseDevice>(device: &D) {
    let contract = |error: Error| match error {
        Error::Contract { what, .. } => what,
        other => panic!("{other}"),
    };
    let base: SparseFields = shape(3, WIDTHS, 64, &[(100, 2)]).spec().into();
    let refused = |change: &dyn Fn(&mut SparseFields)| {
        let mut fields = base.clone();
        change(&mut fields);
        contract(SparseSpec::new(fields).unwrap_err())
    };
    assert_eq!(refused(&|f| f.width = 0), "width");
    assert_eq!(refused(&|f| f.window = Some(3)), "window");
    assert_eq!(refused(&|f| f.sink_in_lse = true), "sink_in_lse");
    assert_eq!(refused(&|f| f.record = RecordFormat::IndexFp8_132), "record");
    assert_eq!(refused(&|f| f.quantize_query = true), "record");
    assert_eq!(refused(&|f| f.extra_width = Some(3)), "extra_width");
    assert_eq!(refused(&|f| f.extra_record = Some(RecordFormat::Bf16)), "extra_page_size");
    assert_eq!(refused(&|f| f.splits = Splits::FixedTokens(65)), "splits.fixed_tokens");
    assert_eq!(refused(&|f| f.page_size = 7), "page_size");
    assert_eq!(refused(&|f| f.max_batch = 0), "max_batch");
    assert_eq!(refused(&|f| f.record = RecordFormat::Fp8_656), "record");

    let text = serde_json::to_string(&shape(3, WIDTHS, 64, &[(100, 2)]).spec()).unwrap();
    let back: SparseSpec = serde_json::from_str(&text).unwrap();
    assert_eq!(back, shape(3, WIDTHS, 64, &[(100, 2)]).spec());
    assert!(text.contains("\"selection\":\"positions\""), "{text}");

    // A list wider than the Spec, lists of the other kind, a second scope that is not declared.
    let of = |shape: &SparseShape| SparseInputs::new(shape, 1);
    let narrow = prepare(device, &shape(3, WIDTHS, 64, &[(100, 2)]).spec());
    let error = |inputs: &SparseInputs| {
        let caller = device.own_stream().unwrap();
        let mut stream = device.stream(&caller).unwrap();
        let own = prepare(device, &inputs.spec);
        let mut operands = Operands::new(&mut stream, inputs, &own);
        contract(narrow.bind(operands.args()).map(drop).unwrap_err())
    };
    assert_eq!(error(&of(&shape(3, WIDTHS, 65, &[(100, 2)]))), "positions");
    let mut slots = shape(3, WIDTHS, 64, &[(100, 2)]);
    slots.selection = Selection::Slots;
    assert_eq!(error(&of(&slots)), "selection");
    let mut extra = shape(3, WIDTHS, 64, &[(100, 2)]);
    let record = RecordFormat::Bf16;
    extra.extra = Some(Extra { record, page_size: 16, width: 4, tokens: 4 });
    assert_eq!(error(&of(&extra)), "extra");
    let mut sink = shape(3, WIDTHS, 64, &[(100, 2)]);
    sink.sink = true;
    assert_eq!(error(&of(&sink)), "sink");

    // The dtype of partial results changes one region and nothing else.
    let plan = |partial| {
        let mut shape = shape(4, WIDTHS, 640, &[(1000, 2)]);
        (shape.partial, shape.splits) = (partial, Splits::Count(5));
        Plan::<Sparse>::for_device::<D>(&shape.spec(), device.facts()).unwrap()
    };
    let (bf16, f32) = (plan(Partial::Bf16), plan(Partial::F32));
    assert_eq!(bf16.choice().splits, f32.choice().splits);
    for (a, b) in bf16.scratch().iter().zip(f32.scratch()) {
        let factor = if a.name == Sparse::PARTIAL_OUT { 2 } else { 1 };
        assert_eq!((a.name, a.bytes * factor), (b.name, b.bytes));
    }
    let repeated = of(&shape(3, WIDTHS, 64, &[(100, 2)]));
    same_bits("two plans", &run(device, &repeated), &run(device, &repeated));
}
