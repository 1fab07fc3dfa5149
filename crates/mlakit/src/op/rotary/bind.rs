//! The operands of a rotary embedding, and their checks.

use half::bf16;

use super::plan::Rotary;
use crate::memory::Uses;
use crate::op::layer::{FloatInput, strided_elements};
use crate::op::projection::strided_rows;
use crate::{Error, Input, Output, Plan, Region, Scratch};

/// The operands of one call. `R` rows are found from `y`: as many whole rows as end in it, the last
/// one without the gap behind its last head. Where the rotated elements are not the first of their
/// head, lend the part of the buffer that begins with them ([`Lease::part`](crate::Lease::part)).
pub struct RotaryArgs<'a, D> {
    /// `[R, heads, width]`, heads `in_stride` apart.
    pub x: FloatInput<'a, D>,
    /// `[R]`; any number.
    pub positions: Input<'a, i32, D>,
    /// F32 `[width / 2]`, radians a position.
    pub inv_freq: Input<'a, f32, D>,
    /// BF16 `[R, heads, width]`, heads `out_stride` apart.
    pub y: Output<'a, bf16, D>,
    /// As the plan says.
    pub scratch: Scratch<'a, D>,
}

/// The operands of a launch.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct RotaryRegions {
    pub rows: usize,
    pub x: Region,
    pub positions: Region,
    pub inv_freq: Region,
    pub y: Region,
    pub scratch: Region,
}

impl<'a, D> RotaryArgs<'a, D> {
    pub(super) fn declare(
        self,
        plan: &Plan<Rotary>,
        uses: &mut Uses<'a>,
    ) -> Result<RotaryRegions, Error> {
        let spec = plan.spec();
        let (width, stride) = (spec.width, spec.out_stride());
        let row = (spec.heads * stride, stride - width);
        let rows = strided_rows("y", self.y.len(), row, spec.max_rows)?;
        let heads = rows * spec.heads;
        let x = strided_elements(heads, spec.in_stride(), width);
        Ok(RotaryRegions {
            rows,
            x: self.x.declare("x", (spec.input, x), uses)?,
            positions: uses.input("positions", self.positions, rows)?,
            inv_freq: uses.input("inv_freq", self.inv_freq, width / 2)?,
            y: uses.output("y", self.y, strided_elements(heads, stride, width))?,
            scratch: uses.scratch(self.scratch, plan)?,
        })
    }
}
