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
