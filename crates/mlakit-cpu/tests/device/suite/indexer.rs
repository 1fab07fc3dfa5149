//! The indexer against its oracle: every format, widths, head counts and page sizes, pools, padding;
//! what it may not depend on; the memory that it takes.

use half::bf16;
use mlakit::op::indexer::{Indexer, IndexerFields, IndexerSpec};
use mlakit::{Category, Error, Lane, Op, Plan};

use super::indexer_inputs::{FORMATS, IndexerInputs, Numbers, indexer_shape};
use super::indexer_run::{IndexerDevice, Operands, Outcome, prepare, run, run_prepared};
use super::random::{Deck, Rng};

/// Every kind of `Spec` prepares: the probe, with ties and a page out of bounds, agrees exactly.
pub fn prepares<D: IndexerDevice>(device: &D) {
    for (i, record) in FORMATS.into_iter().enumerate() {
        for (j, (heads, width)) in
            [(1, 32), (3, 64), (16, 128), (17, 96), (64, 128), (128, 32)].into_iter().enumerate()
        {
            let mut shape = indexer_shape(heads, [1, 5, 64, 700, 2048][(i + j) % 5], &[(500, 3)]);
            (shape.record, shape.width) = (record, width);
            shape.page_size = [1, 16, 64, 48][j % 4];
            shape.pool_size = [1, 4, 16][(i + j) % 3];
            shape.scores = j % 2 == 0;
            prepare(device, &shape.spec());
            assert_eq!(device.census().live(Category::Probe), 0, "{shape:?}");
        }
    }
    assert!(device.census().peak(Category::Probe) > 0);
}

/// Whole numbers, whose scores are exact: the same positions, counts, scores and faults, ties and all.
pub fn agrees_with_the_oracle<D: IndexerDevice>(device: &D) {
    let mut rng = Rng(5);
    let mut heads = Deck::new(&[1, 2, 3, 7, 16, 17, 32, 64]);
    let mut widths = Deck::new(&[32, 64, 96, 128]);
    let mut pages = Deck::new(&[1, 16, 48, 64, 256]);
    let mut topks = Deck::new(&[1, 2, 63, 64, 65, 127, 512, 2048]);
    let mut pools = Deck::new(&[1, 1, 4, 16]);
    let mut requests = Deck::new(&[
        vec![(1, 1)],
        vec![(1000, 1)],
        vec![(64, 1), (0, 1), (65, 2), (63, 1)],
        vec![(300, 9), (0, 0), (20, 3), (700, 1)],
        vec![(5, 9), (129, 17)],
        vec![(3000, 2)],
    ]);
    for (index, record) in FORMATS.into_iter().cycle().take(72).enumerate() {
        let of = requests.deal(&mut rng);
        let mut shape = indexer_shape(heads.deal(&mut rng), topks.deal(&mut rng), &of);
        (shape.record, shape.width) = (record, widths.deal(&mut rng));
        shape.page_size = pages.deal(&mut rng);
        shape.pool_size = pools.deal(&mut rng);
        shape.padding_rows = [0, 3][index % 2];
        shape.page_tail = [0, 34][index / 2 % 2];
        shape.bad_pages = index % 3 == 1;
        shape.scores = index % 5 != 4;
        shape.slack = 1 + index % 2;
        let inputs = IndexerInputs::new(&shape, index as u64);
        let mut needed = Outcome::exact(&inputs.oracle());
        if !shape.scores {
            needed.scores.clear();
        }
        assert_eq!(run(device, &inputs), needed, "{shape:?}");
    }
}

/// Numbers as models have them: scores within their error, and a key is selected that the oracle
/// leaves out only if its score is within it of the worst that it takes.
pub fn ordinary_scores_agree<D: IndexerDevice>(device: &D) {
    for (index, record) in FORMATS.into_iter().cycle().take(9).enumerate() {
        let requests = [(900, 3), (70, 2)];
        let mut shape = indexer_shape([4, 16, 64][index / 3], [50, 512][index % 2], &requests);
        (shape.record, shape.numbers) = (record, Numbers::Normal);
        shape.width = [128, 64, 32][index % 3];
        shape.bad_pages = index % 2 == 1;
        let inputs = IndexerInputs::new(&shape, index as u64);
        let (needed, given) = (inputs.oracle(), run(device, &inputs));
        assert_eq!((given.faults, &given.counts), (needed.faults, &needed.counts), "{shape:?}");
        for row in 0..shape.rows() {
            let (tolerance, visible) = (inputs.tolerance(row), &needed.visible[row]);
            let best = needed.positions[row * shape.topk..][..needed.counts[row] as usize].iter();
            let worst = best.map(|at| visible[*at as usize].unwrap()).fold(f64::INFINITY, f64::min);
            let positions = given.row(row);
            assert!(positions.windows(2).all(|pair| pair[0] < pair[1]), "{shape:?}");
            for (column, position) in positions.iter().enumerate() {
                let exact = visible[*position as usize].expect("a key that is there");
                let bits = given.scores[row * shape.topk + column];
                let (score, what) =
                    (f64::from(f32::from_bits(bits)), format!("{row} {position} {shape:?}"));
                assert!((score - exact).abs() <= tolerance, "{what}: {score} for {exact}");
                assert!(exact >= worst - 2.0 * tolerance, "{what}: {exact} below {worst}");
            }
            for (position, score) in visible.iter().enumerate() {
                let taken = positions.binary_search(&(position as i32)).is_ok();
                let score = score.unwrap_or(f64::NEG_INFINITY);
                assert!(taken || score <= worst + 2.0 * tolerance, "{row} {position} {shape:?}");
            }
        }
    }
}

/// A row's scores and choice have the bits that it has alone, whatever rows and requests are with it,
/// and so has a call that is made again.
pub fn rows_know_no_company<D: IndexerDevice>(device: &D) {
    for record in FORMATS {
        let mut shape = indexer_shape(24, 70, &[(700, 5), (40, 1), (3000, 1), (900, 9)]);
        (shape.record, shape.numbers, shape.width) = (record, Numbers::Normal, 64);
        let all = IndexerInputs::new(&shape, 3);
        let prepared = prepare(device, &all.spec);
        let together = run_prepared(device, &prepared, &all);
        assert_eq!(run_prepared(device, &prepared, &all), together, "made again");
        let width = all.table.len() / 4;
        for request in 0..4 {
            let rows = all.q_offsets[request] as usize..all.q_offsets[request + 1] as usize;
            for row in rows.clone() {
                let mut alone = all.clone();
                let seen = all.kv_lens[request] - (rows.end - 1 - row) as i32;
                alone.shape.requests = vec![(seen as usize, 1)];
                alone.q = all.q[row * 24 * 64..(row + 1) * 24 * 64].to_vec();
                alone.weights = all.weights[row * 24..(row + 1) * 24].to_vec();
                alone.table = all.table[request * width..(request + 1) * width].to_vec();
                (alone.kv_lens, alone.q_offsets) = (vec![seen], vec![0, 1]);
                let given = run_prepared(device, &prepared, &alone);
                let own = row * 70..(row + 1) * 70;
                assert_eq!(given.positions, together.positions[own.clone()], "row {row}");
                assert_eq!(given.scores, together.scores[own], "row {row}");
            }
        }
    }
}

/// Changed queries, weights, lengths, tables and keys in place: each replay of the same operands has
/// the bits of a call of its own, over scratch that another left.
pub fn calls_in_the_same_memory_agree<D: IndexerDevice>(device: &D) {
    let mut shape = indexer_shape(8, 33, &[(400, 2), (90, 3)]);
    shape.record = FORMATS[1];
    let first = IndexerInputs::new(&shape, 0);
    let prepared = prepare(device, &first.spec);
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let mut operands = Operands::new(&mut stream, &first, &prepared);
    for seed in 1..6 {
        let mut next = IndexerInputs::new(&shape, seed);
        next.kv_lens = vec![400 - 70 * seed as i32, 90 - 15 * seed as i32];
        operands.q.write(&next.q).unwrap();
        operands.weights.write(&next.weights).unwrap();
        operands.table.write(&next.table).unwrap();
        operands.kv_lens.write(&next.kv_lens).unwrap();
        operands.pool.write((0, 0), &next.cache).unwrap();
        let given = operands.run(&mut stream, &prepared);
        assert_eq!(given, Outcome::exact(&next.oracle()), "{seed}");
    }
}

/// 64 rows of 1,048,576 keys in a budget of 16 MiB: the plan, the lane and the ledger's peak.
pub fn a_million_keys_in_a_small_budget<D: IndexerDevice>(device: &D) {
    const KEYS: usize = 1 << 20;
    const BUDGET: usize = 16 << 20;
    let mut shape = indexer_shape(1, 2048, &[(KEYS, 64)]);
    (shape.width, shape.page_size, shape.scores) = (2, 4096, false);
    let inputs = IndexerInputs::new(&shape, 1);
    let full = IndexerFields { heads: 64, width: 128, ..inputs.spec.clone().into() };
    let plan = Plan::<Indexer>::for_device::<D>(&IndexerSpec::new(full).unwrap(), device.facts());
    let plan = plan.unwrap();
    assert!(plan.scratch_bytes() <= BUDGET, "{} bytes", plan.scratch_bytes());

    let prepared = prepare(device, &inputs.spec);
    let before = device.census().peak(Category::Scratch);
    let given = run_prepared(device, &prepared, &inputs);
    let peak = device.census().peak(Category::Scratch);
    assert!(before <= BUDGET && peak <= BUDGET, "the ledger saw {peak} bytes");
    assert!(peak >= prepared.plan().scratch_bytes());
    // Scores are sums of two products of -1, 0 and 1: whole numbers, which every sum gives exactly.
    let (q, weight) = (&inputs.q, &inputs.weights);
    for row in [0, 31, 63] {
        let mut scores = Vec::with_capacity(KEYS);
        for position in 0..KEYS - (63 - row) {
            let page = inputs.table[position / 4096] as usize;
            let at = page * inputs.page_stride_bytes + position % 4096 * 4;
            let element = |i: usize| {
                let bytes = &inputs.cache[at + 2 * i..at + 2 * i + 2];
                bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
            };
            let query = |i: usize| q[2 * row + i].to_f32();
            let dot = query(0) * element(0) + query(1) * element(1);
            scores.push(Some(weight[row] * dot.max(0.0)));
        }
        let needed = mlakit::op::indexer::top_k(&scores, 2048);
        let given: Vec<usize> = given.row(row).iter().map(|at| *at as usize).collect();
        assert_eq!(given, needed, "row {row}");
    }
}

/// Memory that is too little for one row is refused with the number that would do, and that does.
pub fn a_budget_too_small_is_refused<D: IndexerDevice>(device: &D) {
    let shape = indexer_shape(64, 2048, &[(100_000, 8)]);
    let with = |budget_bytes: usize| {
        let fields = IndexerFields { budget_bytes, ..shape.spec().into() };
        Plan::<Indexer>::for_device::<D>(&IndexerSpec::new(fields).unwrap(), device.facts())
    };
    let Err(Error::Refused(refusal)) = with(1000) else {
        panic!("{} in 1000 bytes", Indexer::NAME)
    };
    let least = refusal.instead.split(' ').find_map(|word| word.parse().ok());
    let least: usize = least.unwrap_or_else(|| panic!("{refusal:?} names no number"));
    let plan = with(least).unwrap();
    assert!(plan.scratch_bytes() <= least);
    assert!(with(least - 1).is_err());
    let given = {
        let mut inputs = IndexerInputs::new(&indexer_shape(64, 2048, &[(3000, 8)]), 4);
        inputs.spec = plan.spec().clone();
        run_prepared(device, &plan.prepare(device).unwrap(), &inputs)
            == Outcome::exact(&inputs.oracle())
    };
    assert!(given, "the least memory that is accepted is enough");
}

/// Scratch that no plan asked for is refused, and so are operands of other shapes.
pub fn operands_are_checked<D: IndexerDevice>(device: &D) {
    let mut shape = indexer_shape(2, 4, &[(40, 2)]);
    shape.pool_size = 4;
    let inputs = IndexerInputs::new(&shape, 1);
    let prepared = prepare(device, &inputs.spec);
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let refused = |change: &mut dyn FnMut(&mut Operands<D>)| {
        let mut operands = Operands::new(
            &mut device.stream(&device.own_stream().unwrap()).unwrap(),
            &inputs,
            &prepared,
        );
        change(&mut operands);
        match prepared.bind(operands.args()) {
            Err(Error::Contract { what, .. }) => what.to_owned(),
            Err(Error::Size { what, .. }) => what.as_str().to_owned(),
            other => panic!("{:?}", other.map(drop)),
        }
    };
    let ints = |len| super::dense_run::tensor::<i32, D>(device, &vec![0; len]);
    assert_eq!(refused(&mut |o| o.positions = ints(7)), "positions");
    assert_eq!(refused(&mut |o| o.counts = ints(1)), "counts");
    assert_eq!(refused(&mut |o| o.q_offsets = ints(1)), "q_offsets");
    assert_eq!(refused(&mut |o| o.table = ints(9)), "page_table");
    assert_eq!(refused(&mut |o| o.last_position = None), "last_position");
    assert_eq!(refused(&mut |o| o.scores = None), "scores");
    assert_eq!(refused(&mut |o| o.lane = Lane::new(device, "small", &[300]).unwrap()), "scratch");
    let given = Operands::new(&mut stream, &inputs, &prepared).run(&mut stream, &prepared);
    assert_eq!(given, Outcome::exact(&inputs.oracle()));
}
