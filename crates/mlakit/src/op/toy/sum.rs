//! `sum`: a row's elements, in splits whose partial results lie in scratch.

use serde::{Deserialize, Serialize};

use crate::memory::Uses;
use crate::op::sealed::Sealed;
use crate::op::spec::{MAX_ROWS, checked_spec, within};
use crate::scratch::RegionSpec;
use crate::{Choice, Device, Error, Input, Op, Output, Plan, Region, Runs, Scratch, Warm};

/// The operation.
#[derive(Debug)]
pub struct Sum;

impl Sum {
    /// The region of partial sums, F32 `[rows, splits]`.
    pub const PARTIALS: &'static str = "partials";
}

/// The fields of a [`SumSpec`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SumFields {
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
}

checked_spec! {
    /// A sum that can exist.
    SumSpec, SumFields, "SumFields"
}

impl SumFields {
    fn check(&self) -> Result<(), Error> {
        within("rows", self.rows, 1, MAX_ROWS)?;
        within("width", self.width, 1, 1 << 16)
    }
}

/// The operands of a call.
pub struct SumArgs<'a, D> {
    /// `[rows, width]`.
    pub x: Input<'a, f32, D>,
    /// `[rows]`.
    pub out: Output<'a, f32, D>,
    /// As the plan says.
    pub scratch: Scratch<'a, D>,
}

/// The operands of a launch.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct SumRegions {
    pub x: Region,
    pub out: Region,
    pub scratch: Region,
}

impl Sealed for Sum {}

impl Op for Sum {
    const NAME: &'static str = "sum";
    type Spec = SumSpec;
    type Args<'a, D: Device> = SumArgs<'a, D>;
    type Regions = SumRegions;

    fn scratch(spec: &SumSpec, choice: &Choice) -> Vec<RegionSpec> {
        // One split writes no partial result.
        let partials = if choice.splits == 1 { 0 } else { spec.rows * choice.splits };
        vec![RegionSpec::new(Self::PARTIALS, 4 * partials)]
    }

    fn operands<'a, D: Device>(
        plan: &Plan<Self>,
        args: SumArgs<'a, D>,
        uses: &mut Uses<'a>,
    ) -> Result<SumRegions, Error> {
        Ok(SumRegions {
            x: uses.input("x", args.x, plan.spec().rows * plan.spec().width)?,
            out: uses.output("out", args.out, plan.spec().rows)?,
            scratch: uses.scratch(args.scratch, plan)?,
        })
    }

    fn probe<'w, D: Runs<Self>>(warm: &mut Warm<'w, Self, D>) -> Result<(), Error> {
        let (rows, width) = (warm.spec().rows, warm.spec().width);
        let x = warm.probe::<f32>(&vec![1.0; rows * width])?;
        let mut out = warm.probe::<f32>(&vec![f32::NAN; rows])?;
        let mut scratch = warm.scratch()?;
        let (x, scratch) = ((&x).into(), (&mut scratch).into());
        warm.run(SumArgs { x, out: (&mut out).into(), scratch })?;
        Warm::<Self, D>::expect(&vec![width as f32; rows], &warm.read(&out)?, |n, g| n == g)
    }
}
