//! The operands of a Hadamard transform, and their checks.

use half::bf16;

use super::plan::Hadamard;
use crate::memory::Uses;
use crate::op::layer::FloatInput;
use crate::op::spec::rows_of;
use crate::{Error, Output, Plan, Region, Scratch};

/// The operands of one call. `R` rows are found from `y`.
pub struct HadamardArgs<'a, D> {
    /// `[R, width]`.
    pub x: FloatInput<'a, D>,
    /// BF16 `[R, width]`.
    pub y: Output<'a, bf16, D>,
    /// As the plan says.
    pub scratch: Scratch<'a, D>,
}

/// The operands of a launch.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct HadamardRegions {
    pub rows: usize,
    pub x: Region,
    pub y: Region,
    pub scratch: Region,
}

impl<'a, D> HadamardArgs<'a, D> {
    pub(super) fn declare(
        self,
        plan: &Plan<Hadamard>,
        uses: &mut Uses<'a>,
    ) -> Result<HadamardRegions, Error> {
        let spec = plan.spec();
        let rows = rows_of("y", self.y.len(), spec.width, spec.max_rows)?;
        Ok(HadamardRegions {
            rows,
            x: self.x.declare("x", (spec.input, rows * spec.width), uses)?,
            y: uses.output("y", self.y, rows * spec.width)?,
            scratch: uses.scratch(self.scratch, plan)?,
        })
    }
}
