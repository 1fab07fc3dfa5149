//! The operation `writer`: no scratch, and a probe that is compared byte by byte.

use half::bf16;

use super::bind::{WriterArgs, WriterInput, WriterRegions};
use super::oracle::{WriterCase, oracle};
use super::spec::WriterSpec;
use crate::memory::Uses;
use crate::op::sealed::Sealed;
use crate::scratch::{Fault, RegionSpec};
use crate::{Choice, Device, Error, Op, Plan, Runs, Warm};

/// The operation.
#[derive(Debug)]
pub struct Writer;

impl Sealed for Writer {}

impl Op for Writer {
    const NAME: &'static str = "writer";
    type Spec = WriterSpec;
    type Args<'a, D: Device> = WriterArgs<'a, D>;
    type Regions = WriterRegions;

    fn scratch(_: &WriterSpec, _: &Choice) -> Vec<RegionSpec> {
        Vec::new()
    }

    fn operands<'a, D: Device>(
        plan: &Plan<Self>,
        args: WriterArgs<'a, D>,
        uses: &mut Uses<'a>,
    ) -> Result<WriterRegions, Error> {
        args.declare(plan, uses)
    }

    fn probe<'w, D: Runs<Self>>(warm: &mut Warm<'w, Self, D>) -> Result<(), Error> {
        let spec = warm.spec();
        let rows = spec.max_rows.min(4);
        let value = |i: usize| bf16::from_f32((i * 29 % 97) as f32 / 16.0 - 3.0);
        let [first, second] = spec.widths();
        let latent: Vec<bf16> = (0..rows * first).map(value).collect();
        let rope: Vec<bf16> = (0..rows * second).map(|i| value(i + 7)).collect();
        let size = spec.page_size as i64;
        // The end of the pool, one behind it, a padding row, the beginning.
        let slots = [2 * size - 1, 2 * size, -1, 0];
        let slots = &slots[..rows];
        let mut needed = vec![0xa5; 2 * spec.pages().payload_bytes()];
        let cache = needed.clone();
        let page_stride_bytes = spec.pages().payload_bytes();
        let kv_scale = 0.25;
        let case = WriterCase { latent: &latent, rope: &rope, slots, page_stride_bytes, kv_scale };
        let skipped = oracle(&spec, &case, &mut needed);

        let (latent, rope) = (warm.probe::<bf16>(&latent)?, warm.probe::<bf16>(&rope)?);
        let (slots, scale) = (warm.probe::<i64>(slots)?, warm.probe::<f32>(&[kv_scale])?);
        let mut cache = warm.cache(spec.pages(), &cache)?;
        let mut scratch = warm.scratch()?;
        warm.run(WriterArgs {
            tokens: if spec.record.is_index() {
                WriterInput::Key((&latent).into())
            } else {
                let rope = (second > 0).then(|| (&rope).into());
                WriterInput::Latent { latent: (&latent).into(), rope }
            },
            slots: (&slots).into(),
            cache: (&mut cache).into(),
            kv_scale: spec.record.is_scaled().then(|| (&scale).into()),
            scratch: (&mut scratch).into(),
        })?;
        let given = warm.read_cache(&cache)?;
        Warm::<Self, D>::expect(&needed, &given, |n, g| n == g)?;
        let faults = warm.faults(&scratch)?;
        Warm::<Self, D>::expect(&[skipped], &[faults[Fault::Id as usize]], |n, g| n == g)
    }
}
