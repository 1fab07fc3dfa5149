//! The operands of a rotary embedding, and their checks.

use half::bf16;

use super::plan::Rotary;
use crate::memory::Uses;
use crate::op::layer::{FloatInput, strided_elements};
use crate::op::projection::strided_rows;
use crate::{Error, Input, Output, Plan, Region, Scratch};

/// The operands of one call. `R` rows are found from `y`: as many whole rows as end in it, the last
/// one without the gap behind its last head. Where the elements around the rotated ones are not
/// copied either, lend the part of the buffer that begins with the rotated ones
/// ([`Lease::part`](crate::Lease::part)).
pub struct RotaryArgs<'a, D> {
    /// `[R, heads, head_width()]`, heads `in_stride` apart.
    pub x: FloatInput<'a, D>,
    /// `[R]`; any number.
    pub positions: Input<'a, i32, D>,
    /// F32 `[width / 2]`, radians a position.
    pub inv_freq: Input<'a, f32, D>,
    /// BF16 `[R, heads, head_width()]`, heads `out_stride` apart.
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
        let (width, stride) = (spec.head_width(), spec.out_stride());
        let row = (spec.heads * stride, stride - width);
        let rows = strided_rows("y", self.y.len(), row, spec.max_rows)?;
        let heads = rows * spec.heads;
        let x = strided_elements(heads, spec.in_stride(), width);
        Ok(RotaryRegions {
            rows,
            x: self.x.declare("x", (spec.input, x), uses)?,
            positions: uses.input("positions", self.positions, rows)?,
            inv_freq: uses.input("inv_freq", self.inv_freq, spec.width / 2)?,
            y: uses.output("y", self.y, strided_elements(heads, stride, width))?,
            scratch: uses.scratch(self.scratch, plan)?,
        })
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;
    use crate::op::layer::operands::{device, lane, plan, refused, tensor};

    /// Two heads of 2 elements, 5 apart in `x` and 4 apart in `y`.
    fn declare(x: usize, positions: usize, y: usize) -> Result<RotaryRegions, Error> {
        let text = r#"{"heads":2,"width":2,"style":"pair","input":"f32","in_stride":5,
            "out_stride":4,"max_rows":2}"#;
        let (device, plan) = (device(), plan::<Rotary>(serde_json::from_str(text).unwrap()));
        let (x, positions) = (tensor(&device, x), tensor(&device, positions));
        let (inv_freq, mut y) = (tensor(&device, 1), tensor(&device, y));
        let mut lane = lane(&device);
        let args = RotaryArgs {
            x: FloatInput::F32((&x).into()),
            positions: (&positions).into(),
            inv_freq: (&inv_freq).into(),
            y: (&mut y).into(),
            scratch: (&mut lane).into(),
        };
        args.declare(&plan, &mut Uses::new())
    }

    #[test]
    fn the_last_head_needs_no_gap_behind_it() {
        assert_eq!(declare(17, 2, 14).unwrap().rows, 2);
        assert_eq!(declare(17, 2, 16).unwrap().rows, 2);
        assert_eq!(declare(7, 1, 6).unwrap().rows, 1);
        assert_eq!(declare(0, 0, 0).unwrap().rows, 0);
    }

    #[test]
    fn operands_that_do_not_fit_are_named() {
        assert_eq!(refused(declare(16, 2, 14)), "x");
        assert_eq!(refused(declare(17, 1, 14)), "positions");
        assert_eq!(refused(declare(17, 2, 13)), "y");
        assert_eq!(refused(declare(99, 9, 22)), "y");
    }
}
