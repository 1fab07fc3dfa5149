//! The operands of a normalisation, and their checks.

use half::bf16;

use super::plan::Norm;
use crate::memory::Uses;
use crate::op::layer::{FloatInput, strided_elements};
use crate::op::projection::strided_rows;
use crate::{Error, Input, Output, Plan, Region, Scratch};

/// The operands of one call. `R` rows are found from `y`: as many whole rows as end in it, the last
/// one without the gap behind it.
pub struct NormArgs<'a, D> {
    /// `[R, width]`, rows `in_stride` apart.
    pub x: FloatInput<'a, D>,
    /// F32 `[width]`.
    pub weight: Input<'a, f32, D>,
    /// BF16 `[R, width]`, rows `out_stride` apart.
    pub y: Output<'a, bf16, D>,
    /// F32 `[R, width]` without gaps, where the `Spec` is `wide`.
    pub y_wide: Option<Output<'a, f32, D>>,
    /// As the plan says.
    pub scratch: Scratch<'a, D>,
}

/// The operands of a launch.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct NormRegions {
    pub rows: usize,
    pub x: Region,
    pub weight: Region,
    pub y: Region,
    pub y_wide: Region,
    pub scratch: Region,
}

impl<'a, D> NormArgs<'a, D> {
    pub(super) fn declare(
        self,
        plan: &Plan<Norm>,
        uses: &mut Uses<'a>,
    ) -> Result<NormRegions, Error> {
        let spec = plan.spec();
        let (width, row) = (spec.width, spec.out_stride());
        let rows = strided_rows("y", self.y.len(), (row, row - width), spec.max_rows)?;
        let x = strided_elements(rows, spec.in_stride(), width);
        let y_wide = match (self.y_wide, spec.wide) {
            (Some(y_wide), true) => uses.output("y_wide", y_wide, rows * width)?,
            (None, false) => Region::EMPTY,
            (Some(_), false) => return Err(Error::contract("y_wide", "none for this Spec", "one")),
            (None, true) => return Err(Error::contract("y_wide", "one for this Spec", "none")),
        };
        Ok(NormRegions {
            rows,
            x: self.x.declare("x", (spec.input, x), uses)?,
            weight: uses.input("weight", self.weight, width)?,
            y: uses.output("y", self.y, strided_elements(rows, row, width))?,
            y_wide,
            scratch: uses.scratch(self.scratch, plan)?,
        })
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;
    use crate::op::layer::operands::{device, lane, plan, refused, tensor};

    /// Rows of 4 elements, 6 apart in `x` and 8 apart in `y`.
    fn declare(x: usize, y: usize, y_wide: Option<usize>) -> Result<NormRegions, Error> {
        let text = r#"{"width":4,"eps":1e-6,"max_rows":2,"input":"bf16","in_stride":6,
            "out_stride":8,"wide":true}"#;
        let (device, plan) = (device(), plan::<Norm>(serde_json::from_str(text).unwrap()));
        let (x, weight) = (tensor(&device, x), tensor(&device, 4));
        let (mut y, mut lane) = (tensor(&device, y), lane(&device));
        let mut y_wide = y_wide.map(|len| tensor(&device, len));
        let args = NormArgs {
            x: FloatInput::Bf16((&x).into()),
            weight: (&weight).into(),
            y: (&mut y).into(),
            y_wide: y_wide.as_mut().map(Into::into),
            scratch: (&mut lane).into(),
        };
        args.declare(&plan, &mut Uses::new())
    }

    #[test]
    fn the_last_row_needs_no_gap_behind_it() {
        assert_eq!(declare(10, 12, Some(8)).unwrap().rows, 2);
        assert_eq!(declare(10, 16, Some(8)).unwrap().rows, 2);
        assert_eq!(declare(4, 4, Some(4)).unwrap().rows, 1);
        assert_eq!(declare(0, 0, Some(0)).unwrap().rows, 0);
    }

    #[test]
    fn operands_that_do_not_fit_are_named() {
        assert_eq!(refused(declare(9, 12, Some(8))), "x");
        assert_eq!(refused(declare(10, 11, Some(8))), "y");
        assert_eq!(refused(declare(99, 20, Some(99))), "y");
        assert_eq!(refused(declare(10, 12, Some(7))), "y_wide");
        assert_eq!(refused(declare(10, 12, None)), "y_wide");
    }
}
