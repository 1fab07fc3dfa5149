//! The operation `merge`: no scratch, and a probe that covers empty parts, NaN payloads and sinks.

use half::bf16;

use super::bind::{LseInput, LseOutput, MergeArgs, MergeRegions, PartialInput};
use super::oracle::{MergeCase, oracle};
use super::spec::{MergeFields, MergeSpec, Partial};
use crate::memory::Uses;
use crate::op::sealed::Sealed;
use crate::scratch::RegionSpec;
use crate::{Base2, Choice, Device, Error, Lse, LseBase, Natural, Op, Plan, Runs, Warm};

/// The operation.
#[derive(Debug)]
pub struct Merge;

impl Sealed for Merge {}

impl Op for Merge {
    const NAME: &'static str = "merge";
    type Spec = MergeSpec;
    type Args<'a, D: Device> = MergeArgs<'a, D>;
    type Regions = MergeRegions;

    fn scratch(_: &MergeSpec, _: &Choice) -> Vec<RegionSpec> {
        Vec::new()
    }

    fn operands<'a, D: Device>(
        plan: &Plan<Self>,
        args: MergeArgs<'a, D>,
        uses: &mut Uses<'a>,
    ) -> Result<MergeRegions, Error> {
        args.declare(plan, uses)
    }

    fn probe<'w, D: Runs<Self>>(warm: &mut Warm<'w, Self, D>) -> Result<(), Error> {
        let spec = warm.spec();
        let rows = spec.max_rows.min(2);
        let parts = spec.splits * rows * spec.heads;
        // The first part of every row is empty and holds NaN; the others have weights that differ.
        let lses: Vec<f32> = (0..parts)
            .map(|i| if i < rows * spec.heads { f32::NEG_INFINITY } else { (i % 7) as f32 - 3.0 })
            .collect();
        let outs: Vec<f32> =
            (0..parts * spec.value_width)
                .map(|i| {
                    if i < rows * spec.heads * spec.value_width {
                        f32::NAN
                    } else {
                        (i % 13) as f32
                    }
                })
                .collect();
        let sink: Vec<f32> = (0..spec.heads).map(|h| h as f32 * 0.5 - 1.0).collect();
        let case = MergeCase { outs: &outs, lses: &lses, sink: spec.sink.then_some(&sink[..]) };
        let (needed, needed_lse) = oracle(&spec, &case);
        let (given, given_lse) =
            Probing { outs: &outs, lses: &lses, sink: &sink, rows }.run(warm)?;
        let close = |n: &f64, g: &f64| n == g || (n - g).abs() <= 2e-2 * n.abs() + 1e-4;
        Warm::<Self, D>::expect(&needed, &given, close)?;
        Warm::<Self, D>::expect(&needed_lse, &given_lse, close)
    }
}

struct Probing<'p> {
    outs: &'p [f32],
    lses: &'p [f32],
    sink: &'p [f32],
    rows: usize,
}

impl Probing<'_> {
    fn run<'w, D: Runs<Merge>>(
        &self,
        warm: &mut Warm<'w, Merge, D>,
    ) -> Result<(Vec<f64>, Vec<f64>), Error> {
        let spec: MergeFields = warm.spec().into();
        let results = self.rows * spec.heads;
        let narrow: Vec<bf16> = self.outs.iter().map(|v| bf16::from_f32(*v)).collect();
        let (wide, narrow) = (warm.probe::<f32>(self.outs)?, warm.probe::<bf16>(&narrow)?);
        let natural = warm.probe::<Lse<Natural>>(self.lses)?;
        let base2 = warm.probe::<Lse<Base2>>(self.lses)?;
        let sink = warm.probe::<f32>(self.sink)?;
        let mut out = warm.probe::<bf16>(&vec![bf16::NAN; results * spec.value_width])?;
        let mut lse_natural = warm.probe::<Lse<Natural>>(&vec![f32::NAN; results])?;
        let mut lse_base2 = warm.probe::<Lse<Base2>>(&vec![f32::NAN; results])?;
        let mut scratch = warm.scratch()?;
        warm.run(MergeArgs {
            outs: match spec.partial {
                Partial::Bf16 => PartialInput::Bf16((&narrow).into()),
                Partial::F32 => PartialInput::F32((&wide).into()),
            },
            lses: match spec.lse {
                LseBase::Natural => LseInput::Natural((&natural).into()),
                LseBase::Base2 => LseInput::Base2((&base2).into()),
            },
            sink: spec.sink.then(|| (&sink).into()),
            out: (&mut out).into(),
            lse: match spec.lse {
                LseBase::Natural => LseOutput::Natural((&mut lse_natural).into()),
                LseBase::Base2 => LseOutput::Base2((&mut lse_base2).into()),
            },
            scratch: (&mut scratch).into(),
        })?;
        let out = warm.read(&out)?.into_iter().map(f64::from).collect();
        let lse = match spec.lse {
            LseBase::Natural => warm.read(&lse_natural)?,
            LseBase::Base2 => warm.read(&lse_base2)?,
        };
        Ok((out, lse.into_iter().map(f64::from).collect()))
    }
}
