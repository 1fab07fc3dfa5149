//! The operands of a normalisation, and their checks.

use half::bf16;

use super::plan::Norm;
use crate::memory::Uses;
use crate::op::dense::present;
use crate::op::layer::{FloatInput, strided_elements};
use crate::op::projection::strided_rows;
use crate::op::spec::rows_of;
use crate::{Error, Input, Output, Plan, Region, Scratch};

/// The operands of one call. `R` rows are found from `y`: as many whole rows as end in it, the last
/// one without the gap behind it; where there is no `y`, from `y_wide`.
pub struct NormArgs<'a, D> {
    /// `[R, width]`, rows `in_stride` apart.
    pub x: FloatInput<'a, D>,
    /// F32 `[width]`.
    pub weight: Input<'a, f32, D>,
    /// F32 `[width]`, where the `Spec` has it.
    pub bias: Option<Input<'a, f32, D>>,
    /// BF16 `[R, width]`, rows `out_stride` apart, where the `Spec` is `narrow`.
    pub y: Option<Output<'a, bf16, D>>,
    /// F32 `[R, width]` without gaps, where the `Spec` is `wide`.
    pub y_wide: Option<Output<'a, f32, D>>,
    /// As the plan says.
    pub scratch: Scratch<'a, D>,
}

/// The operands of a launch; a region that the `Spec` does not have is empty.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct NormRegions {
    pub rows: usize,
    pub x: Region,
    pub weight: Region,
    pub bias: Region,
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
        let rows = match (&self.y, &self.y_wide) {
            (Some(y), _) => strided_rows("y", y.len(), (row, row - width), spec.max_rows)?,
            (None, Some(y_wide)) => rows_of("y_wide", y_wide.len(), width, spec.max_rows)?,
            (None, None) => return Err(Error::contract("y", "one for this Spec", "none")),
        };
        let x = strided_elements(rows, spec.in_stride(), width);
        let y = wanted("y", self.y, spec.narrow)?;
        let y = y.map(|y| uses.output("y", y, strided_elements(rows, row, width)));
        let y_wide = wanted("y_wide", self.y_wide, spec.wide)?;
        let y_wide = y_wide.map(|y_wide| uses.output("y_wide", y_wide, rows * width));
        Ok(NormRegions {
            rows,
            x: self.x.declare("x", (spec.input, x), uses)?,
            weight: uses.input("weight", self.weight, width)?,
            bias: present("bias", self.bias, (spec.bias, width), uses)?,
            y: y.transpose()?.unwrap_or(Region::EMPTY),
            y_wide: y_wide.transpose()?.unwrap_or(Region::EMPTY),
            scratch: uses.scratch(self.scratch, plan)?,
        })
    }
}

/// The output, if there is one exactly where the `Spec` has it.
fn wanted<T>(what: &'static str, given: Option<T>, needed: bool) -> Result<Option<T>, Error> {
    match (given.is_some(), needed) {
        (true, false) => Err(Error::contract(what, "none for this Spec", "one")),
        (false, true) => Err(Error::contract(what, "one for this Spec", "none")),
        _ => Ok(given),
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;
    use crate::op::layer::operands::{device, lane, plan, refused, tensor};

    /// Rows of 4 elements, 6 apart in `x`; `more` is the rest of the `Spec`.
    fn declare_as(
        more: &str,
        x: usize,
        (y, y_wide): (Option<usize>, Option<usize>),
    ) -> Result<NormRegions, Error> {
        let text = r#"{"width":4,"eps":1e-6,"max_rows":2,"input":"bf16","in_stride":6"#;
        let spec = serde_json::from_str(&format!("{text},{more}}}")).unwrap();
        let (device, plan) = (device(), plan::<Norm>(spec));
        let (x, weight) = (tensor(&device, x), tensor(&device, 4));
        let (mut y, mut lane) = (y.map(|len| tensor(&device, len)), lane(&device));
        let mut y_wide = y_wide.map(|len| tensor(&device, len));
        let args = NormArgs {
            x: FloatInput::Bf16((&x).into()),
            weight: (&weight).into(),
            bias: more.contains("\"bias\":true").then(|| (&weight).into()),
            y: y.as_mut().map(Into::into),
            y_wide: y_wide.as_mut().map(Into::into),
            scratch: (&mut lane).into(),
        };
        args.declare(&plan, &mut Uses::new())
    }

    /// Both results, rows of `y` 8 apart.
    fn declare(x: usize, y: usize, y_wide: Option<usize>) -> Result<NormRegions, Error> {
        declare_as(r#""out_stride":8,"wide":true"#, x, (Some(y), y_wide))
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

    #[test]
    fn the_wide_result_may_be_the_only_one() {
        const ONLY_WIDE: &str = r#""narrow":false,"wide":true"#;
        let regions = declare_as(ONLY_WIDE, 10, (None, Some(8))).unwrap();
        assert_eq!((regions.rows, regions.y.bytes(), regions.y_wide.bytes()), (2, 0, 32));
        assert_eq!(refused(declare_as(ONLY_WIDE, 10, (None, Some(7)))), "y_wide");
        assert_eq!(refused(declare_as(ONLY_WIDE, 10, (None, Some(12)))), "y_wide");
        assert_eq!(refused(declare_as(ONLY_WIDE, 10, (Some(8), Some(8)))), "y");
        assert_eq!(refused(declare_as(ONLY_WIDE, 10, (None, None))), "y");
        assert_eq!(refused(declare_as(r#""wide":false"#, 10, (None, None))), "y");
        assert_eq!(refused(declare_as(r#""wide":false"#, 10, (None, Some(8)))), "y");
        assert_eq!(refused(declare_as(r#""wide":false"#, 10, (Some(8), Some(8)))), "y_wide");
    }
}
