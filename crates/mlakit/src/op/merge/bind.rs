//! The operands of a merge, and their checks.

use half::bf16;

use super::plan::Merge;
use super::spec::Partial;
use crate::memory::Uses;
use crate::op::spec::rows_of;
use crate::{Base2, Error, Input, Lse, LseBase, Natural, Output, Plan, Region, Scratch};

/// Partial outputs in their dtype.
pub enum PartialInput<'a, D> {
    /// BF16.
    Bf16(Input<'a, bf16, D>),
    /// F32.
    F32(Input<'a, f32, D>),
}

/// Log-sum-exps that are read, in their base.
pub enum LseInput<'a, D> {
    /// Base e.
    Natural(Input<'a, Lse<Natural>, D>),
    /// Base 2.
    Base2(Input<'a, Lse<Base2>, D>),
}

/// Log-sum-exps that are written, in their base.
pub enum LseOutput<'a, D> {
    /// Base e.
    Natural(Output<'a, Lse<Natural>, D>),
    /// Base 2.
    Base2(Output<'a, Lse<Base2>, D>),
}

impl<'a, D> LseInput<'a, D> {
    pub(crate) fn declare(
        self,
        what: &'static str,
        (base, needed): (LseBase, usize),
        uses: &mut Uses<'a>,
    ) -> Result<Region, Error> {
        match (self, base) {
            (Self::Natural(lse), LseBase::Natural) => uses.input(what, lse, needed),
            (Self::Base2(lse), LseBase::Base2) => uses.input(what, lse, needed),
            (Self::Natural(_), _) => Err(Error::contract(what, "base 2", "natural")),
            (Self::Base2(_), _) => Err(Error::contract(what, "natural", "base 2")),
        }
    }
}

impl<'a, D> LseOutput<'a, D> {
    pub(crate) fn declare(
        self,
        what: &'static str,
        (base, needed): (LseBase, usize),
        uses: &mut Uses<'a>,
    ) -> Result<Region, Error> {
        match (self, base) {
            (Self::Natural(lse), LseBase::Natural) => uses.output(what, lse, needed),
            (Self::Base2(lse), LseBase::Base2) => uses.output(what, lse, needed),
            (Self::Natural(_), _) => Err(Error::contract(what, "base 2", "natural")),
            (Self::Base2(_), _) => Err(Error::contract(what, "natural", "base 2")),
        }
    }
}

/// The operands of one call. `S` splits, `R` rows (found from `out`), `H` heads, `V` value width.
pub struct MergeArgs<'a, D> {
    /// `[S, R, H, V]`, each normalised by its own sum. A part whose log-sum-exp is -inf is never read.
    pub outs: PartialInput<'a, D>,
    /// `[S, R, H]`; NaN and +inf count as -inf.
    pub lses: LseInput<'a, D>,
    /// `[H]`, where the `Spec` has one; natural logarithm whatever the base. +inf makes the output 0.
    pub sink: Option<Input<'a, f32, D>>,
    /// BF16 `[R, H, V]`.
    pub out: Output<'a, bf16, D>,
    /// `[R, H]`.
    pub lse: LseOutput<'a, D>,
    /// As the plan says.
    pub scratch: Scratch<'a, D>,
}

/// The operands of a launch.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct MergeRegions {
    pub rows: usize,
    pub outs: Region,
    pub lses: Region,
    pub sink: Region,
    pub out: Region,
    pub lse: Region,
    pub scratch: Region,
}

impl<'a, D> MergeArgs<'a, D> {
    pub(super) fn declare(
        self,
        plan: &Plan<Merge>,
        uses: &mut Uses<'a>,
    ) -> Result<MergeRegions, Error> {
        let spec = plan.spec();
        let rows = rows_of("out", self.out.len(), spec.heads * spec.value_width, spec.max_rows)?;
        let (results, parts) = (rows * spec.heads, spec.splits * rows * spec.heads);
        let outs = match (self.outs, spec.partial) {
            (PartialInput::Bf16(outs), Partial::Bf16) => {
                uses.input("outs", outs, parts * spec.value_width)?
            }
            (PartialInput::F32(outs), Partial::F32) => {
                uses.input("outs", outs, parts * spec.value_width)?
            }
            (PartialInput::Bf16(_), _) => return Err(Error::contract("outs", "F32", "BF16")),
            (PartialInput::F32(_), _) => return Err(Error::contract("outs", "BF16", "F32")),
        };
        let sink = match (self.sink, spec.sink) {
            (Some(sink), true) => uses.input("sink", sink, spec.heads)?,
            (None, false) => Region::EMPTY,
            (Some(_), false) => return Err(Error::contract("sink", "none", "a sink")),
            (None, true) => return Err(Error::contract("sink", "a sink", "none")),
        };
        Ok(MergeRegions {
            rows,
            outs,
            lses: self.lses.declare("lses", (spec.lse, parts), uses)?,
            sink,
            out: uses.output("out", self.out, results * spec.value_width)?,
            lse: self.lse.declare("lse", (spec.lse, results), uses)?,
            scratch: uses.scratch(self.scratch, plan)?,
        })
    }
}
