//! The operation `rotary`: no scratch of its own.

use half::bf16;

use super::bind::{RotaryArgs, RotaryRegions};
use super::oracle::{RotaryCase, oracle};
use super::spec::RotarySpec;
use crate::memory::Uses;
use crate::op::layer::{FloatProbe, eighths, same_bf16, with_gaps};
use crate::op::sealed::Sealed;
use crate::scratch::RegionSpec;
use crate::{Choice, Device, Error, Op, Plan, Runs, Warm};

/// The operation.
#[derive(Debug)]
pub struct Rotary;

impl Sealed for Rotary {}

/// What lies in the gaps of `y` and must stay there.
const GAP: f32 = 77.0;

/// No turn, one position, backwards, beyond what F32 counts, the ends.
const POSITIONS: [i32; 6] = [5, 0, -3, 16_777_217, i32::MAX, i32::MIN];

impl Op for Rotary {
    const NAME: &'static str = "rotary";
    type Spec = RotarySpec;
    type Args<'a, D: Device> = RotaryArgs<'a, D>;
    type Regions = RotaryRegions;

    fn scratch(_: &RotarySpec, _: &Choice) -> Vec<RegionSpec> {
        Vec::new()
    }

    fn operands<'a, D: Device>(
        plan: &Plan<Self>,
        args: RotaryArgs<'a, D>,
        uses: &mut Uses<'a>,
    ) -> Result<RotaryRegions, Error> {
        args.declare(plan, uses)
    }

    /// Every kind of position, gaps of NaN in `x` and of a number in `y` that stays; both end
    /// without the last gap.
    fn probe<'w, D: Runs<Self>>(warm: &mut Warm<'w, Self, D>) -> Result<(), Error> {
        let spec = warm.spec();
        let (width, rotated) = (spec.head_width(), spec.width);
        // Base 10000, as most models: from one radian a position down.
        let inv_freq: Vec<f32> =
            (0..rotated / 2).map(|j| 10_000f32.powf(-2.0 * j as f32 / rotated as f32)).collect();
        let on_device = warm.probe::<f32>(&inv_freq)?;
        for positions in POSITIONS.chunks(spec.max_rows) {
            let elements = positions.len() * spec.heads * width;
            let x: Vec<f32> = (0..elements).map(eighths).collect();
            let values = oracle(&spec, &RotaryCase { x: &x, positions, inv_freq: &inv_freq });
            let needed = with_gaps(&values, (width, spec.out_stride()), f64::from(GAP));

            let x = with_gaps(&x, (width, spec.in_stride()), f32::NAN);
            let x = FloatProbe::new(warm, spec.input, &x)?;
            let positions = warm.probe::<i32>(positions)?;
            let before = with_gaps(
                &vec![bf16::NAN; elements],
                (width, spec.out_stride()),
                bf16::from_f32(GAP),
            );
            let mut y = warm.probe::<bf16>(&before)?;
            let mut scratch = warm.scratch()?;
            warm.run(RotaryArgs {
                x: x.input(),
                positions: (&positions).into(),
                inv_freq: (&on_device).into(),
                y: (&mut y).into(),
                scratch: (&mut scratch).into(),
            })?;
            let given: Vec<f64> = warm.read(&y)?.into_iter().map(f64::from).collect();
            // The two products may cancel; each is off by some F32 units of the factor.
            let floor = 1e-5 * f64::from(spec.attention_factor.value()).abs();
            Warm::<Self, D>::expect(&needed, &given, same_bf16(floor))?;
        }
        Ok(())
    }
}
