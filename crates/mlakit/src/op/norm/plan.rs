//! The operation `norm`: no scratch of its own.

use half::bf16;

use super::bind::{NormArgs, NormRegions};
use super::oracle::oracle;
use super::spec::NormSpec;
use crate::memory::Uses;
use crate::op::layer::{FloatProbe, eighths, same_bf16, with_gaps};
use crate::op::sealed::Sealed;
use crate::scratch::RegionSpec;
use crate::{Choice, Device, Error, Op, Plan, Runs, Warm};

/// The operation.
#[derive(Debug)]
pub struct Norm;

impl Sealed for Norm {}

/// What lies in the gaps of `y` and must stay there.
const GAP: f32 = 77.0;

impl Op for Norm {
    const NAME: &'static str = "norm";
    type Spec = NormSpec;
    type Args<'a, D: Device> = NormArgs<'a, D>;
    type Regions = NormRegions;

    fn scratch(_: &NormSpec, _: &Choice) -> Vec<RegionSpec> {
        Vec::new()
    }

    fn operands<'a, D: Device>(
        plan: &Plan<Self>,
        args: NormArgs<'a, D>,
        uses: &mut Uses<'a>,
    ) -> Result<NormRegions, Error> {
        args.declare(plan, uses)
    }

    /// A row of ordinary numbers, one so small that epsilon counts, one of zeros; gaps of NaN in
    /// `x`, and of a number in `y` that stays.
    fn probe<'w, D: Runs<Self>>(warm: &mut Warm<'w, Self, D>) -> Result<(), Error> {
        let spec = warm.spec();
        let width = spec.width;
        let weight: Vec<f32> = (0..width).map(|i| 2.0 * eighths(i + 5)).collect();
        let bias: Vec<f32> =
            (0..if spec.bias { width } else { 0 }).map(|i| eighths(i + 9)).collect();
        let scales = [1.0, 1.0 / 1024.0, 0.0];
        for scales in scales.chunks(spec.max_rows) {
            let rows = scales.len();
            let x: Vec<f32> = (0..rows * width).map(|i| eighths(i) * scales[i / width]).collect();
            let values = oracle(&spec, &x, &weight, &bias);
            let needed = with_gaps(&values, (width, spec.out_stride()), f64::from(GAP));

            let x = with_gaps(&x, (width, spec.in_stride()), f32::NAN);
            let x = FloatProbe::new(warm, spec.input, &x)?;
            let weight = warm.probe::<f32>(&weight)?;
            let bias = warm.probe::<f32>(&bias)?;
            let before = with_gaps(
                &vec![bf16::NAN; rows * width],
                (width, spec.out_stride()),
                bf16::from_f32(GAP),
            );
            let mut y = warm.probe::<bf16>(&before)?;
            let mut y_wide = warm.probe::<f32>(&vec![f32::NAN; rows * width])?;
            let mut scratch = warm.scratch()?;
            warm.run(NormArgs {
                x: x.input(),
                weight: (&weight).into(),
                bias: spec.bias.then(|| (&bias).into()),
                y: spec.narrow.then(|| (&mut y).into()),
                y_wide: spec.wide.then(|| (&mut y_wide).into()),
                scratch: (&mut scratch).into(),
            })?;
            if spec.narrow {
                let given: Vec<f64> = warm.read(&y)?.into_iter().map(f64::from).collect();
                // Where something is subtracted or added, the error of F32 terms that cancel.
                let floor = if spec.center || spec.bias { 1e-5 } else { 1e-30 };
                Warm::<Self, D>::expect(&needed, &given, same_bf16(floor))?;
            }
            if spec.wide {
                let given: Vec<f64> = warm.read(&y_wide)?.into_iter().map(f64::from).collect();
                // The F32 sum of many squares loses some units; a wrong epsilon or mean is far
                // outside.
                let floor = if spec.center || spec.bias { 1e-5 } else { 0.0 };
                let close = |n: &f64, g: &f64| (n - g).abs() <= 1e-4 * n.abs() + floor;
                Warm::<Self, D>::expect(&values, &given, close)?;
            }
        }
        Ok(())
    }
}
