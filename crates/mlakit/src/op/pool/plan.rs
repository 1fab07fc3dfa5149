//! The operation `pool`: no scratch of its own.

use half::bf16;

use super::bind::{PoolArgs, PoolRegions};
use super::oracle::{PoolCase, oracle};
use super::spec::PoolSpec;
use crate::memory::Uses;
use crate::op::layer::{FloatProbe, eighths, same_bf16};
use crate::op::sealed::Sealed;
use crate::scratch::RegionSpec;
use crate::{Choice, Device, Error, Op, Plan, Runs, Warm};

/// The operation.
#[derive(Debug)]
pub struct Pool;

impl Sealed for Pool {}

impl Op for Pool {
    const NAME: &'static str = "pool";
    type Spec = PoolSpec;
    type Args<'a, D: Device> = PoolArgs<'a, D>;
    type Regions = PoolRegions;

    fn scratch(_: &PoolSpec, _: &Choice) -> Vec<RegionSpec> {
        Vec::new()
    }

    fn operands<'a, D: Device>(
        plan: &Plan<Self>,
        args: PoolArgs<'a, D>,
        uses: &mut Uses<'a>,
    ) -> Result<PoolRegions, Error> {
        args.declare(plan, uses)
    }

    /// Two steps of one request; the second completes a pool that the first began. Behind its rows is padding, behind its state one
    /// that must stay.
    fn probe<'w, D: Runs<Self>>(warm: &mut Warm<'w, Self, D>) -> Result<(), Error> {
        let (spec, width) = (warm.spec(), warm.spec().width);
        let (rows, batch) = (spec.max_rows.min(2 * spec.pool_size + 1), spec.max_batch.min(2));
        let columns = spec.max_table_width.min(3);
        let table: Vec<i32> = (0..batch * columns).map(|i| [4, -1, 2, 0, -5][i % 5]).collect();
        let states: Vec<i32> = [0, 7][..batch].to_vec();
        let ape: Vec<f32> = (0..spec.pool_size * width).map(|i| eighths(i + 3)).collect();
        let mut kept = vec![f32::NAN; 2 * spec.state_elements()];
        let before = warm.probe::<f32>(&kept)?;
        let (mut state, table_probe) = (before, warm.probe::<i32>(&table)?);
        let (ape_probe, states_probe) = (warm.probe::<f32>(&ape)?, warm.probe::<i32>(&states)?);
        let live = (rows - 1).max(1);
        for step in 1..=2 {
            let elements = rows * width;
            let key: Vec<f32> = (0..elements).map(|i| eighths(i + step)).collect();
            let gate: Vec<f32> = (0..elements).map(|i| 4.0 * eighths(i + 100 * step)).collect();
            let mut lengths = vec![0; batch];
            lengths[0] = (step * live) as i32;
            let mut offsets = vec![live as i32; batch + 1];
            offsets[0] = 0;
            let case = PoolCase {
                key: &key,
                gate: &gate,
                ape: &ape,
                kv_lens: &lengths,
                q_offsets: &offsets,
                states: &states,
                page_table: &table,
            };
            let needed = oracle(&spec, &case, &mut kept);

            let key = FloatProbe::new(warm, spec.input, &key)?;
            let gate = FloatProbe::new(warm, spec.input, &gate)?;
            let (lengths, offsets) = (warm.probe::<i32>(&lengths)?, warm.probe::<i32>(&offsets)?);
            let mut pooled = warm.probe::<bf16>(&vec![bf16::NAN; elements])?;
            let mut slots = warm.probe::<i64>(&vec![-2; rows])?;
            let mut scratch = warm.scratch()?;
            warm.run(PoolArgs {
                key: key.input(),
                gate: gate.input(),
                ape: (&ape_probe).into(),
                kv_lens: (&lengths).into(),
                q_offsets: (&offsets).into(),
                states: (&states_probe).into(),
                page_table: (&table_probe).into(),
                state: (&mut state).into(),
                pooled: (&mut pooled).into(),
                slots: (&mut slots).into(),
                scratch: (&mut scratch).into(),
            })?;
            let given: Vec<f64> = warm.read(&pooled)?.into_iter().map(f64::from).collect();
            Warm::<Self, D>::expect(&needed.pooled, &given, same_bf16(1e-5))?;
            Warm::<Self, D>::expect(&needed.slots, &warm.read(&slots)?, |n, g| n == g)?;
            let faults = warm.faults(&scratch)?;
            Warm::<Self, D>::expect(&needed.faults[..], &faults, |n, g| n == g)?;
            let same = |n: &f32, g: &f32| n.to_bits() == g.to_bits() || (n.is_nan() && g.is_nan());
            Warm::<Self, D>::expect(&kept, &warm.read(&state)?, same)?;
        }
        Ok(())
    }
}
