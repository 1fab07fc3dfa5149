//! What a row's bits do not depend on.

use mlakit::op::merge::Partial;
use mlakit::{RecordFormat, Splits};

use super::SuiteDevice;
use super::compare::{same_bits, same_lse, same_out};
use super::dense_inputs::{DenseInputs, DenseShape, Query, shape};
use super::dense_run::{Operands, Outcome, prepare, run};

/// Shapes with splits of fixed size.
fn fixed_shapes() -> Vec<DenseShape> {
    let requests = [(300, 5), (65, 1), (0, 1), (64, 2), (700, 20), (1, 1)];
    let mut shapes = Vec::new();
    for (heads, partial, tokens) in
        [(5, Partial::Bf16, 64), (16, Partial::F32, 128), (99, Partial::Bf16, 256)]
    {
        for window in [None, Some(66)] {
            for (record, query) in
                [(RecordFormat::Bf16, Query::Bf16), (RecordFormat::E4m3, Query::Quantized)]
            {
                let mut shape = shape(heads, (66, 34), &requests);
                (shape.partial, shape.splits) = (partial, Splits::FixedTokens(tokens));
                (shape.window, shape.record, shape.query) = (window, record, query);
                shapes.push(shape);
            }
        }
    }
    shapes
}

/// Some rows of one request, alone: a call whose keys end where those of the last of them end.
fn alone(inputs: &DenseInputs, (request, first, rows): (usize, usize, usize)) -> DenseInputs {
    let mut one = inputs.clone();
    let (tokens, of) = inputs.shape.requests[request];
    let seen = (tokens + first + rows).saturating_sub(of).min(tokens);
    one.shape.requests = vec![(seen, rows)];
    one.shape.padding_rows = 0;
    let width = inputs.table_width();
    one.table = inputs.table[request * width..][..width].to_vec();
    one.kv_lens = vec![seen as i32];
    one.q_offsets = vec![0, rows as i32];
    let row = inputs.shape.heads * inputs.shape.qk_width;
    let begin = inputs.q_offsets[request] as usize + first;
    one.q = inputs.q[begin * row..(begin + rows) * row].to_vec();
    one.row_kv_lens = inputs.row_kv_lens[begin..begin + rows].to_vec();
    one
}

#[track_caller]
fn same_rows(what: &str, given: &Outcome, needed: &Outcome, (begin, shape): (usize, &DenseShape)) {
    let (outs, lses) = (shape.heads * shape.value_width, shape.heads);
    let (out, lse) = (begin * outs, begin * lses);
    same_out(what, &given.out, &needed.out[out..out + given.out.len()]);
    same_lse(what, &given.lse, &needed.lse[lse..lse + given.lse.len()]);
}

/// With fixed splits a row has the same bits, output and log-sum-exp, alone, in any batch, at any
/// capacity, however rows are grouped, and whether its length comes from the batch or by itself.
pub fn fixed_splits_know_no_company<D: SuiteDevice>(device: &D) {
    for shape in fixed_shapes() {
        knows_no_company(device, &shape);
    }
}

/// The same for one shape.
pub fn knows_no_company<D: SuiteDevice>(device: &D, shape: &DenseShape) {
    let inputs = DenseInputs::new(shape, 23);
    let needed = run(device, &inputs);
    for (request, (_, rows)) in shape.requests.iter().enumerate() {
        let begin = inputs.q_offsets[request] as usize;
        for (first, count, slack) in
            [(0, *rows, 1), (0, *rows, 7), (rows - 1, 1, 1), (rows / 2, 1, 3)]
        {
            let mut one = alone(&inputs, (request, first, count));
            one.shape.slack = slack;
            let longest = one.shape.clone();
            one.spec = capacity_for(&longest, inputs.table_width());
            let what = format!("rows {first}+{count} of request {request} of {shape:?}");
            same_rows(&what, &run(device, &one), &needed, (begin + first, shape));
        }
    }
    lengths_by_row(device, &inputs, &needed);
}

/// The `Spec` of a shape, with room for a page table of this width.
fn capacity_for(shape: &DenseShape, width: usize) -> mlakit::op::dense::DenseSpec {
    let mut fields: mlakit::op::dense::DenseFields = shape.spec().into();
    fields.max_table_width = fields.max_table_width.max(width);
    mlakit::op::dense::DenseSpec::new(fields).unwrap()
}

/// The same rows, each with its length beside it.
fn lengths_by_row<D: SuiteDevice>(device: &D, inputs: &DenseInputs, needed: &Outcome) {
    let mut by_row = inputs.clone();
    by_row.shape.row_lengths = true;
    by_row.row_kv_lens.clear();
    for (request, (_, rows)) in inputs.shape.requests.iter().enumerate() {
        let ends = (0..*rows).map(|row| inputs.keys(request, row).end as i32);
        by_row.row_kv_lens.extend(ends);
    }
    by_row.spec = by_row.shape.spec();
    same_bits(&format!("lengths by row of {:?}", inputs.shape), &run(device, &by_row), needed);
}

/// The same calls on several devices of one kind (of other numbers of threads, say).
pub fn fixed_splits_know_no_threads<D: SuiteDevice>(devices: &[D]) {
    for shape in fixed_shapes() {
        let inputs = DenseInputs::new(&shape, 29);
        let needed = run(&devices[0], &inputs);
        for (index, device) in devices.iter().enumerate().skip(1) {
            same_bits(&format!("device {index}, {shape:?}"), &run(device, &inputs), &needed);
        }
    }
}

/// Same inputs and plan, same bits: twenty times, in scratch that holds something else each time.
pub fn a_call_repeats_itself<D: SuiteDevice>(device: &D) {
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    for splits in [Splits::Auto, Splits::Count(7), Splits::FixedTokens(128)] {
        for partial in [Partial::Bf16, Partial::F32] {
            let mut shape = shape(11, (160, 128), &[(513, 3), (65, 1), (300, 8)]);
            (shape.splits, shape.partial) = (splits, partial);
            let inputs = DenseInputs::new(&shape, 31);
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
