//! The operands of a router, and their checks.

use super::plan::Route;
use crate::memory::Uses;
use crate::op::dense::present;
use crate::op::spec::rows_of;
use crate::{Error, Input, Output, Plan, Region, Scratch};

/// The operands of one call. `R` rows are found from `ids`.
pub struct RouteArgs<'a, D> {
    /// `[R, hidden]`.
    pub x: Input<'a, f32, D>,
    /// `[experts, hidden]`.
    pub weight: Input<'a, f32, D>,
    /// `[experts]`, where the `Spec` has one.
    pub bias: Option<Input<'a, f32, D>>,
    /// `[R, used]`.
    pub ids: Output<'a, i32, D>,
    /// `[R, used]`.
    pub gates: Output<'a, f32, D>,
    /// As the plan says.
    pub scratch: Scratch<'a, D>,
}

/// The operands of a launch.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct RouteRegions {
    pub rows: usize,
    pub x: Region,
    pub weight: Region,
    pub bias: Region,
    pub ids: Region,
    pub gates: Region,
    pub scratch: Region,
}

impl<'a, D> RouteArgs<'a, D> {
    pub(super) fn declare(
        self,
        plan: &Plan<Route>,
        uses: &mut Uses<'a>,
    ) -> Result<RouteRegions, Error> {
        let spec = plan.spec();
        let rows = rows_of("ids", self.ids.len(), spec.used, spec.max_rows)?;
        Ok(RouteRegions {
            rows,
            x: uses.input("x", self.x, rows * spec.hidden)?,
            weight: uses.input("weight", self.weight, spec.experts * spec.hidden)?,
            bias: present("bias", self.bias, (spec.bias, spec.experts), uses)?,
            ids: uses.output("ids", self.ids, rows * spec.used)?,
            gates: uses.output("gates", self.gates, rows * spec.used)?,
            scratch: uses.scratch(self.scratch, plan)?,
        })
    }
}
