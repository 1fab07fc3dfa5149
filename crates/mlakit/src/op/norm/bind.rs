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
