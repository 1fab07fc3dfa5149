//! The operation `selection`: no scratch of its own.

use super::bind::{SelectionArgs, SelectionRegions};
use super::oracle::{SelectionCase, oracle};
use super::spec::SelectionSpec;
use crate::memory::Uses;
use crate::op::layer::pick;
use crate::op::sealed::Sealed;
use crate::scratch::RegionSpec;
use crate::{Choice, Device, Error, Op, Plan, Runs, Warm};

/// The operation.
#[derive(Debug)]
pub struct Selection;

impl Sealed for Selection {}

impl Op for Selection {
    const NAME: &'static str = "selection";
    type Spec = SelectionSpec;
    type Args<'a, D: Device> = SelectionArgs<'a, D>;
    type Regions = SelectionRegions;

    fn scratch(_: &SelectionSpec, _: &Choice) -> Vec<RegionSpec> {
        Vec::new()
    }

    fn operands<'a, D: Device>(
        plan: &Plan<Self>,
        args: SelectionArgs<'a, D>,
        uses: &mut Uses<'a>,
    ) -> Result<SelectionRegions, Error> {
        args.declare(plan, uses)
    }

    /// Entries in and out of bounds, unused ones between, a padding row, a bad request.
    fn probe<'w, D: Runs<Self>>(warm: &mut Warm<'w, Self, D>) -> Result<(), Error> {
        let spec = warm.spec();
        let (rows, batch) = (spec.max_rows.min(4), spec.max_batch.min(2));
        let width = spec.max_table_width.min(5);
        let end = width * spec.page_size / spec.pool_size;
        let position = |i: usize| match pick(i, 9) {
            0 => -1,
            1 => i32::MAX,
            _ => pick(i + 7, end + 1) as i32,
        };
        let positions: Vec<i32> = (0..rows * spec.topk).map(position).collect();
        let request: Vec<i32> = [0, batch as i32 - 1, -1, batch as i32][..rows].to_vec();
        let entries = [3, 0, -1, 1, i32::MAX];
        let table: Vec<i32> = (0..batch * width).map(|i| entries[i % 5]).collect();
        let last = |row: usize| (width * spec.page_size) as i64 - 2 - row as i64;
        let last: Vec<i64> = (0..rows).map(last).collect();
        let case = SelectionCase {
            positions: &positions,
            request: &request,
            page_table: &table,
            table_width: width,
            last_position: spec.is_pooled().then_some(&last[..]),
        };
        let needed = oracle(&spec, &case);

        let positions = warm.probe::<i32>(&positions)?;
        let (request, table) = (warm.probe::<i32>(&request)?, warm.probe::<i32>(&table)?);
        let last = warm.probe::<i64>(&last)?;
        let mut slots = warm.probe::<i32>(&vec![-2; needed.slots.len()])?;
        let mut slot_counts = warm.probe::<i32>(&vec![-2; rows])?;
        let mut scratch = warm.scratch()?;
        warm.run(SelectionArgs {
            positions: (&positions).into(),
            request: (&request).into(),
            page_table: (&table).into(),
            table_width: width,
            last_position: spec.is_pooled().then(|| (&last).into()),
            slots: (&mut slots).into(),
            slot_counts: (&mut slot_counts).into(),
            scratch: (&mut scratch).into(),
        })?;
        Warm::<Self, D>::expect(&needed.slots, &warm.read(&slots)?, |n, g| n == g)?;
        Warm::<Self, D>::expect(&needed.slot_counts, &warm.read(&slot_counts)?, |n, g| n == g)?;
        let faults = warm.faults(&scratch)?;
        Warm::<Self, D>::expect(&needed.faults[..], &faults, |n, g| n == g)
    }
}
