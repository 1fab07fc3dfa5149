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

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;
    use crate::op::layer::operands::{device, lane, plan, refused, tensor};

    /// Lengths of `x`, weight, ids and gates; 4 experts of 3 elements, 2 used.
    fn declare(lengths: [usize; 4], bias: Option<usize>) -> Result<RouteRegions, Error> {
        let text = r#"{"hidden":3,"experts":4,"used":2,"scoring":"sigmoid","bias":true,
            "max_rows":2}"#;
        let (device, plan) = (device(), plan::<Route>(serde_json::from_str(text).unwrap()));
        let (x, weight) = (tensor(&device, lengths[0]), tensor(&device, lengths[1]));
        let (mut ids, mut gates) = (tensor(&device, lengths[2]), tensor(&device, lengths[3]));
        let (bias, mut lane) = (bias.map(|len| tensor(&device, len)), lane(&device));
        let args = RouteArgs {
            x: (&x).into(),
            weight: (&weight).into(),
            bias: bias.as_ref().map(Into::into),
            ids: (&mut ids).into(),
            gates: (&mut gates).into(),
            scratch: (&mut lane).into(),
        };
        args.declare(&plan, &mut Uses::new())
    }

    #[test]
    fn operands_that_do_not_fit_are_named() {
        assert_eq!(declare([6, 12, 4, 4], Some(4)).unwrap().rows, 2);
        assert_eq!(declare([3, 12, 2, 2], Some(4)).unwrap().rows, 1);
        assert_eq!(refused(declare([5, 12, 4, 4], Some(4))), "x");
        assert_eq!(refused(declare([6, 11, 4, 4], Some(4))), "weight");
        assert_eq!(refused(declare([6, 12, 4, 4], None)), "bias");
        assert_eq!(refused(declare([6, 12, 4, 4], Some(3))), "bias");
        assert_eq!(refused(declare([6, 12, 3, 4], Some(4))), "ids");
        assert_eq!(refused(declare([9, 12, 6, 6], Some(4))), "ids");
        assert_eq!(refused(declare([6, 12, 4, 3], Some(4))), "gates");
    }
}
