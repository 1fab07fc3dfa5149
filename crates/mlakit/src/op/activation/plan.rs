//! The operation `activation`: no scratch of its own.

use super::bind::{ActivationArgs, ActivationRegions};
use super::oracle::oracle;
use super::spec::ActivationSpec;
use crate::memory::Uses;
use crate::op::layer::{Float, FloatProbe, eighths, same_bf16};
use crate::op::sealed::Sealed;
use crate::scratch::RegionSpec;
use crate::{Choice, Device, Error, Op, Plan, Runs, Warm};

/// The operation.
#[derive(Debug)]
pub struct Activation;

impl Sealed for Activation {}

/// Gates from the middle of the function to where its exponential is no F32 any more.
const GATES: [f32; 8] = [0.0, 1.0, -1.0, 0.125, -6.5, 20.0, -100.0, 1000.0];

impl Op for Activation {
    const NAME: &'static str = "activation";
    type Spec = ActivationSpec;
    type Args<'a, D: Device> = ActivationArgs<'a, D>;
    type Regions = ActivationRegions;

    fn scratch(_: &ActivationSpec, _: &Choice) -> Vec<RegionSpec> {
        Vec::new()
    }

    fn operands<'a, D: Device>(
        plan: &Plan<Self>,
        args: ActivationArgs<'a, D>,
        uses: &mut Uses<'a>,
    ) -> Result<ActivationRegions, Error> {
        args.declare(plan, uses)
    }

    /// Rows whose gates begin with different members of the list, so that a narrow row has each of
    /// them as well.
    fn probe<'w, D: Runs<Self>>(warm: &mut Warm<'w, Self, D>) -> Result<(), Error> {
        let spec = warm.spec();
        let width = spec.width;
        let firsts: Vec<usize> = (0..GATES.len()).step_by(width.min(4)).collect();
        for firsts in firsts.chunks(spec.max_rows) {
            let gate_of = |first: usize, column: usize| GATES[(first + column) % GATES.len()];
            let in_width = spec.in_width();
            let element = |i: usize| match (i % in_width, firsts[i / in_width]) {
                (column, first) if in_width > width && column < width => gate_of(first, column),
                _ => eighths(i),
            };
            let x: Vec<f32> = (0..firsts.len() * in_width).map(element).collect();
            let gates = spec.gate_width().map(|width| -> Vec<f32> {
                let row = |first: usize| (0..width).map(move |column| gate_of(first, column));
                firsts.iter().flat_map(|first| row(*first)).collect()
            });
            let needed = oracle(&spec, &x, gates.as_deref().unwrap_or(&[]));

            let x = FloatProbe::new(warm, spec.input, &x)?;
            let gate = gates.map(|gate| FloatProbe::new(warm, spec.input, &gate)).transpose()?;
            let mut y = FloatProbe::new(warm, spec.output, &vec![f32::NAN; needed.len()])?;
            let mut scratch = warm.scratch()?;
            warm.run(ActivationArgs {
                x: x.input(),
                gate: gate.as_ref().map(FloatProbe::input),
                y: y.output(),
                scratch: (&mut scratch).into(),
            })?;
            let given: Vec<f64> = y.read(warm)?.into_iter().map(f64::from).collect();
            // The floor is what F32 flushes to zero.
            let close = |n: &f64, g: &f64| match spec.output {
                Float::Bf16 => same_bf16(1e-30)(n, g),
                Float::F32 => (n - g).abs() <= 1e-5 * n.abs() + 1e-30,
            };
            Warm::<Self, D>::expect(&needed, &given, close)?;
        }
        Ok(())
    }
}
