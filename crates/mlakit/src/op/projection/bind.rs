//! The operands of a projection, and their checks.

use half::bf16;

use super::plan::Projection;
use crate::memory::Uses;
use crate::op::layer::FloatOutput;
use crate::{Error, Input, Plan, Region, Scratch};

/// The operands of one call. `R` rows are found from `y`: as many whole rows as end in it, the last one without the gap behind its last
/// head.
pub struct ProjectionArgs<'a, D> {
    /// BF16 `[R, H, in_width]`, heads `in_stride` apart.
    pub x: Input<'a, bf16, D>,
    /// BF16 `[H, in_width, out_width]`.
    pub weight: Input<'a, bf16, D>,
    /// `[R, H, out_width]`, heads `out_stride` apart.
    pub y: FloatOutput<'a, D>,
    /// As the plan says.
    pub scratch: Scratch<'a, D>,
}

/// The operands of a launch.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct ProjectionRegions {
    pub rows: usize,
    pub x: Region,
    pub weight: Region,
    pub y: Region,
    pub scratch: Region,
}

/// Rows of strided records in `len` elements: the last needs no gap behind its `width`.
pub(crate) fn strided_rows(
    what: &'static str,
    len: usize,
    (row, gap): (usize, usize),
    max_rows: usize,
) -> Result<usize, Error> {
    let rows = (len + gap) / row;
    if rows > max_rows || len > rows * row || len + gap < rows * row {
        let needed = format!("whole rows of {row} elements, at most {max_rows}");
        return Err(Error::contract(what, needed, format!("{len} elements")));
    }
    Ok(rows)
}

impl<'a, D> ProjectionArgs<'a, D> {
    pub(super) fn declare(
        self,
        plan: &Plan<Projection>,
        uses: &mut Uses<'a>,
    ) -> Result<ProjectionRegions, Error> {
        let spec = plan.spec();
        let out_row = spec.heads * spec.out_stride();
        let gap = spec.out_stride() - spec.out_width;
        let rows = strided_rows("y", self.y.len(), (out_row, gap), spec.max_rows)?;
        let elements = |stride: usize, width: usize| match rows {
            0 => 0,
            _ => (rows * spec.heads - 1) * stride + width,
        };
        let weights = spec.heads * spec.in_width * spec.out_width;
        let out_elements = elements(spec.out_stride(), spec.out_width);
        Ok(ProjectionRegions {
            rows,
            x: uses.input("x", self.x, elements(spec.in_stride(), spec.in_width))?,
            weight: uses.input("weight", self.weight, weights)?,
            y: self.y.declare("y", (spec.output, out_elements), uses)?,
            scratch: uses.scratch(self.scratch, plan)?,
        })
    }
}
