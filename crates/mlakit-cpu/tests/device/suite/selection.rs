//! Selections against their oracle, and from an indexer to slots.

use mlakit::op::selection::{
    Selection, SelectionArgs, SelectionCase, SelectionFields, SelectionResult, SelectionSpec,
    oracle,
};
use mlakit::{Category, Plan};

use super::dense_run::tensor;
use super::indexer_run::IndexerDevice;
use super::layer::{prepare, run};
use super::random::Rng;

fn spec(page_size: usize, topk: usize, pool_size: usize) -> SelectionFields {
    SelectionFields {
        page_size,
        topk,
        pool_size,
        tail: true,
        pages: Some(40),
        max_rows: 200,
        max_batch: 9,
        max_table_width: 30,
    }
}

fn convert<D: IndexerDevice>(
    device: &D,
    spec: &SelectionSpec,
    case: &SelectionCase<'_>,
) -> SelectionResult {
    let prepared = prepare::<Selection, D>(device, spec);
    let rows = case.request.len();
    let positions = tensor::<i32, D>(device, case.positions);
    let request = tensor::<i32, D>(device, case.request);
    let table = tensor::<i32, D>(device, case.page_table);
    let last = case.last_position.map(|last| tensor::<i64, D>(device, last));
    let slots = tensor::<i32, D>(device, &vec![-77; rows * spec.slots()]);
    let counts = tensor::<i32, D>(device, &vec![-77; rows]);
    let faults = run(device, &prepared, |lane| {
        prepared.bind(SelectionArgs {
            positions: (&positions.lease()).into(),
            request: (&request.lease()).into(),
            page_table: (&table.lease()).into(),
            table_width: case.table_width,
            last_position: last.as_ref().map(|last| (&last.lease()).into()),
            slots: (&slots.lease()).into(),
            slot_counts: (&counts.lease()).into(),
            scratch: lane.lease(),
        })
    });
    SelectionResult { slots: slots.read().unwrap(), slot_counts: counts.read().unwrap(), faults }
}

/// Every kind of `Spec` prepares.
pub fn prepares<D: IndexerDevice>(device: &D) {
    for page_size in [1, 16, 64] {
        for (topk, pool_size) in [(1, 1), (77, 1), (2048, 1), (512, 4), (128, 16), (3, 1000)] {
            for (tail, pages) in [(true, None), (false, Some(3)), (true, Some(100))] {
                let fields = SelectionFields { tail, pages, ..spec(page_size, topk, pool_size) };
                let spec = SelectionSpec::new(fields).unwrap();
                let plan = Plan::<Selection>::for_device::<D>(&spec, device.facts()).unwrap();
                plan.prepare(device).unwrap_or_else(|error| panic!("{spec:?}: {error}"));
            }
        }
    }
    assert_eq!(device.census().live(Category::Probe), 0);
}

/// Positions, requests and pages in and out of bounds, unused entries anywhere.
pub fn agrees_with_the_oracle<D: IndexerDevice>(device: &D) {
    let mut rng = Rng(3);
    for (index, (page_size, topk, pool_size)) in
        [(1, 5, 1), (16, 64, 1), (64, 33, 1), (16, 9, 4), (64, 20, 16), (1, 7, 4)]
            .into_iter()
            .cycle()
            .take(24)
            .enumerate()
    {
        let (rows, batch, width) = ([0, 1, 7, 200][index % 4], 1 + index % 9, 1 + rng.below(30));
        let fields = SelectionFields {
            tail: index % 5 != 0,
            pages: [Some(40), None][index % 2],
            ..spec(page_size, topk, pool_size)
        };
        let spec = SelectionSpec::new(fields).unwrap();
        let end = width * page_size / pool_size;
        let odd = [-1, -9, i32::MIN, i32::MAX, end as i32];
        let mut entry =
            |_| if rng.chance(4) { rng.pick(&odd) } else { rng.below(end.max(1)) as i32 };
        let positions: Vec<i32> = (0..rows * topk).map(&mut entry).collect();
        let mut id = |_| {
            if rng.chance(9) { rng.pick(&[-1, -2, i32::MAX, 40]) } else { rng.below(40) as i32 }
        };
        let table: Vec<i32> = (0..batch * width).map(&mut id).collect();
        let mut of =
            |_| if rng.chance(5) { rng.pick(&[-1, -2, 99]) } else { rng.below(batch) as i32 };
        let request: Vec<i32> = (0..rows).map(&mut of).collect();
        let mut last =
            |_| rng.pick(&[-1, 0, 5, i64::MAX, i64::MIN, 3, (width * page_size) as i64 + 2]);
        let last: Vec<i64> =
            (0..rows)
                .map(|row| {
                    if row % 2 == 0 {
                        (width * page_size) as i64 - 1 - row as i64
                    } else {
                        last(row)
                    }
                })
                .collect();
        let case = SelectionCase {
            positions: &positions,
            request: &request,
            page_table: &table,
            table_width: width,
            last_position: spec.is_pooled().then_some(&last[..]),
        };
        let needed = oracle(&spec, &case);
        assert_eq!(convert(device, &spec, &case), needed, "{spec:?}");
    }
}

/// 512 pools of 4 and the 3 tokens behind the last: 2,051 slots, the newest among them.
pub fn pools_of_four_make_2051_slots<D: IndexerDevice>(device: &D) {
    let fields = SelectionFields { pages: None, max_table_width: 400, ..spec(16, 512, 4) };
    let spec = SelectionSpec::new(fields).unwrap();
    let pools: Vec<i32> = (0..512).map(|i| 2 * i).collect();
    let table: Vec<i32> = (0..300).map(|page| 299 - page).collect();
    let last = 4 * 1100 + 2;
    let case = SelectionCase {
        positions: &pools,
        request: &[0],
        page_table: &table,
        table_width: 300,
        last_position: Some(&[last]),
    };
    let given = convert(device, &spec, &case);
    assert_eq!((given.slots.len(), given.slot_counts[0], given.faults), (2051, 2051, [0; 3]));
    let slot = |token: i64| table[token as usize / 16] * 16 + token as i32 % 16;
    for (column, slot_given) in given.slots.iter().enumerate() {
        let token = match column {
            2048.. => last - (2050 - column) as i64,
            _ => i64::from(pools[column / 4]) * 4 + column as i64 % 4,
        };
        assert_eq!(*slot_given, slot(token), "column {column}");
    }
}
