//! The operands of a linear layer, and their checks.

use half::bf16;

use super::plan::Linear;
use crate::memory::Uses;
use crate::op::dense::present;
use crate::op::layer::{FloatInput, FloatOutput, MAX_EXPERTS};
use crate::op::spec::rows_of;
use crate::{Error, Input, Plan, Region, Scratch};

/// The operands of one call. `R` rows are found from `y`.
pub struct LinearArgs<'a, D> {
    /// `[R, in_width]`; for `combine` `[R, used, in_width]`.
    pub x: FloatInput<'a, D>,
    /// BF16 `[out_width, in_width]`; with experts `[count, out_width, in_width]`.
    pub weight: Input<'a, bf16, D>,
    /// `[out_width]`, where the `Spec` has one.
    pub bias: Option<Input<'a, f32, D>>,
    /// `[R, used]`, where the `Spec` has experts; not trusted.
    pub ids: Option<Input<'a, i32, D>>,
    /// `[R, used]`, where the `Spec` combines.
    pub gates: Option<Input<'a, f32, D>>,
    /// `[R, out_width]`; for `expand` `[R, used, out_width]`. Read as well where the `Spec`
    /// accumulates.
    pub y: FloatOutput<'a, D>,
    /// As the plan says.
    pub scratch: Scratch<'a, D>,
}

/// The operands of a launch.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct LinearRegions {
    pub rows: usize,
    /// Matrices in `weight`: ids from 0 to one below this are experts. 1 where the `Spec` has none.
    pub experts: usize,
    pub x: Region,
    pub weight: Region,
    pub bias: Region,
    pub ids: Region,
    pub gates: Region,
    pub y: Region,
    pub scratch: Region,
}

impl<'a, D> LinearArgs<'a, D> {
    pub(super) fn declare(
        self,
        plan: &Plan<Linear>,
        uses: &mut Uses<'a>,
    ) -> Result<LinearRegions, Error> {
        let spec = plan.spec();
        let rows = rows_of("y", self.y.len(), spec.y_row(), spec.max_rows)?;
        let experts = match spec.experts.map(|experts| experts.count) {
            None => 1,
            Some(Some(count)) => count,
            Some(None) => rows_of("weight", self.weight.len(), spec.matrix(), MAX_EXPERTS)?,
        };
        let chosen = rows * spec.used();
        let bias = (spec.bias, spec.out_width);
        Ok(LinearRegions {
            rows,
            experts,
            x: self.x.declare("x", (spec.input, rows * spec.x_row()), uses)?,
            weight: uses.input("weight", self.weight, experts * spec.matrix())?,
            bias: present("bias", self.bias, bias, uses)?,
            ids: present("ids", self.ids, (spec.experts.is_some(), chosen), uses)?,
            gates: present("gates", self.gates, (spec.combines(), chosen), uses)?,
            y: self.y.declare("y", (spec.output, rows * spec.y_row()), uses)?,
            scratch: uses.scratch(self.scratch, plan)?,
        })
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;
    use crate::op::layer::Float;
    use crate::op::layer::operands::{device, lane, plan, refused, tensor};
    use crate::op::linear::{Experts, LinearFields, LinearSpec};

    /// Lengths of the operands; the matrices are 2 by 4.
    #[derive(Clone, Copy)]
    struct Lengths {
        x: usize,
        weight: usize,
        ids: Option<usize>,
        gates: Option<usize>,
        y: usize,
    }

    fn declare(experts: Experts, dtypes: [Float; 2], of: Lengths) -> Result<LinearRegions, Error> {
        let spec = LinearSpec::new(LinearFields {
            in_width: 4,
            out_width: 2,
            max_rows: 3,
            input: Float::Bf16,
            output: Float::F32,
            accumulate: false,
            bias: false,
            experts: Some(experts),
        });
        let (device, plan) = (device(), plan::<Linear>(spec.unwrap()));
        let (x, wide_x) = (tensor(&device, of.x), tensor(&device, of.x));
        let weight = tensor(&device, of.weight);
        let ids = of.ids.map(|len| tensor::<i32, _>(&device, len));
        let gates = of.gates.map(|len| tensor::<f32, _>(&device, len));
        let (mut y, mut narrow_y) = (tensor(&device, of.y), tensor(&device, of.y));
        let mut lane = lane(&device);
        let args = LinearArgs {
            x: match dtypes[0] {
                Float::Bf16 => FloatInput::Bf16((&x).into()),
                Float::F32 => FloatInput::F32((&wide_x).into()),
            },
            weight: (&weight).into(),
            bias: None,
            ids: ids.as_ref().map(Into::into),
            gates: gates.as_ref().map(Into::into),
            y: match dtypes[1] {
                Float::Bf16 => FloatOutput::Bf16((&mut narrow_y).into()),
                Float::F32 => FloatOutput::F32((&mut y).into()),
            },
            scratch: (&mut lane).into(),
        };
        args.declare(&plan, &mut Uses::new())
    }

    /// Those of the `Spec`: `x`, then `y`.
    const DTYPES: [Float; 2] = [Float::Bf16, Float::F32];
    const COMBINE: Experts = Experts { count: None, used: 2, combine: true };
    const FITS: Lengths = Lengths { x: 16, weight: 24, ids: Some(4), gates: Some(4), y: 4 };

    #[test]
    fn rows_and_experts_are_those_of_the_operands() {
        let regions = declare(COMBINE, DTYPES, FITS).unwrap();
        assert_eq!((regions.rows, regions.experts), (2, 3));
        let expand = Experts { count: Some(2), combine: false, ..COMBINE };
        let lengths = Lengths { gates: None, y: 8, ..FITS };
        let regions = declare(expand, DTYPES, lengths).unwrap();
        assert_eq!((regions.rows, regions.experts, regions.gates), (2, 2, Region::EMPTY));
        let none = Lengths { x: 0, ids: Some(0), gates: Some(0), y: 0, ..FITS };
        assert_eq!(declare(COMBINE, DTYPES, none).unwrap().rows, 0);
    }

    #[test]
    fn operands_that_do_not_fit_are_named() {
        let wide = |lengths| refused(declare(COMBINE, DTYPES, lengths));
        assert_eq!(wide(Lengths { y: 5, ..FITS }), "y");
        assert_eq!(wide(Lengths { x: 99, ids: Some(9), gates: Some(9), y: 8, ..FITS }), "y");
        assert_eq!(wide(Lengths { x: 15, ..FITS }), "x");
        assert_eq!(wide(Lengths { weight: 25, ..FITS }), "weight");
        assert_eq!(wide(Lengths { ids: Some(3), ..FITS }), "ids");
        assert_eq!(wide(Lengths { ids: None, ..FITS }), "ids");
        assert_eq!(wide(Lengths { gates: None, ..FITS }), "gates");
        assert_eq!(refused(declare(COMBINE, [Float::Bf16; 2], FITS)), "y");
        assert_eq!(refused(declare(COMBINE, [Float::F32; 2], FITS)), "x");
        let four = Experts { count: Some(4), ..COMBINE };
        assert_eq!(refused(declare(four, DTYPES, FITS)), "weight");
    }
}
