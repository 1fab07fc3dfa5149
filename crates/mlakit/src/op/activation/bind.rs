//! The operands of an activation, and their checks.

use super::plan::Activation;
use crate::memory::Uses;
use crate::op::layer::{FloatInput, FloatOutput};
use crate::op::spec::rows_of;
use crate::{Error, Plan, Region, Scratch};

/// The operands of one call. `R` rows are found from `y`.
pub struct ActivationArgs<'a, D> {
    /// `[R, 2, width]`: the gate, then what it multiplies; where the gate is apart, `[R, width]`.
    pub x: FloatInput<'a, D>,
    /// `[R, width / gate_span]`, of the dtype of `x`, where the `Spec` has it apart.
    pub gate: Option<FloatInput<'a, D>>,
    /// `[R, width]`.
    pub y: FloatOutput<'a, D>,
    /// As the plan says.
    pub scratch: Scratch<'a, D>,
}

/// The operands of a launch.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct ActivationRegions {
    pub rows: usize,
    pub x: Region,
    /// Empty where the gate is in `x`.
    pub gate: Region,
    pub y: Region,
    pub scratch: Region,
}

impl<'a, D> ActivationArgs<'a, D> {
    pub(super) fn declare(
        self,
        plan: &Plan<Activation>,
        uses: &mut Uses<'a>,
    ) -> Result<ActivationRegions, Error> {
        let spec = plan.spec();
        let rows = rows_of("y", self.y.len(), spec.width, spec.max_rows)?;
        Ok(ActivationRegions {
            rows,
            x: self.x.declare("x", (spec.input, rows * spec.in_width()), uses)?,
            gate: match (self.gate, spec.gate_width()) {
                (Some(gate), Some(width)) => {
                    gate.declare("gate", (spec.input, rows * width), uses)?
                }
                (None, None) => Region::EMPTY,
                (Some(_), None) => {
                    return Err(Error::contract("gate", "none for this Spec", "one"));
                }
                (None, Some(_)) => {
                    return Err(Error::contract("gate", "one for this Spec", "none"));
                }
            },
            y: self.y.declare("y", (spec.output, rows * spec.width), uses)?,
            scratch: uses.scratch(self.scratch, plan)?,
        })
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;
    use crate::op::layer::operands::{device, lane, plan, refused, tensor};

    fn declare(x: usize, y: usize) -> Result<ActivationRegions, Error> {
        declare_as(r#""kind":"silu""#, (x, None), y)
    }

    fn declare_as(
        more: &str,
        (x, gate): (usize, Option<usize>),
        y: usize,
    ) -> Result<ActivationRegions, Error> {
        let text = format!(r#"{{"width":3,"max_rows":2,"input":"f32",{more}}}"#);
        let (device, plan) = (device(), plan::<Activation>(serde_json::from_str(&text).unwrap()));
        let gate = gate.map(|len| tensor(&device, len));
        let (x, mut y, mut lane) = (tensor(&device, x), tensor(&device, y), lane(&device));
        let args = ActivationArgs {
            x: FloatInput::F32((&x).into()),
            gate: gate.as_ref().map(|gate| FloatInput::F32(gate.into())),
            y: FloatOutput::Bf16((&mut y).into()),
            scratch: (&mut lane).into(),
        };
        args.declare(&plan, &mut Uses::new())
    }

    #[test]
    fn a_gate_apart_is_as_long_as_its_span_says() {
        let element = r#""kind":"sigmoid","gate_span":1"#;
        let head = r#""kind":"sigmoid","gate_span":3"#;
        assert_eq!(declare_as(element, (6, Some(6)), 6).unwrap().rows, 2);
        assert_eq!(declare_as(head, (6, Some(2)), 6).unwrap().rows, 2);
        assert_eq!(refused(declare_as(head, (6, Some(1)), 6)), "gate");
        assert_eq!(refused(declare_as(head, (6, None), 6)), "gate");
        assert_eq!(refused(declare_as(head, (5, Some(2)), 6)), "x");
        assert_eq!(refused(declare_as(r#""kind":"silu""#, (12, Some(6)), 6)), "gate");
    }

    #[test]
    fn a_row_of_x_has_two_halves() {
        assert_eq!(declare(12, 6).unwrap().rows, 2);
        assert_eq!(refused(declare(11, 6)), "x");
        assert_eq!(refused(declare(12, 5)), "y");
        assert_eq!(refused(declare(18, 9)), "y");
    }
}
