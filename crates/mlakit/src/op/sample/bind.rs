//! The operands of sampling, and their checks.

use super::plan::Sample;
use crate::memory::Uses;
use crate::op::dense::present;
use crate::op::spec::rows_of;
use crate::{Error, Input, Output, Plan, Region, Scratch};

/// The operands of one call. `R` rows are found from `ids`.
pub struct SampleArgs<'a, D> {
    /// `[R, vocab]`.
    pub logits: Input<'a, f32, D>,
    /// `[1]`, where the `Spec` has one; 0 or less means greedy.
    pub temperature: Option<Input<'a, f32, D>>,
    /// `[R]`, from 0 to below 1; exactly where there is a temperature.
    pub random: Option<Input<'a, f32, D>>,
    /// `[R]`.
    pub ids: Output<'a, i32, D>,
    /// As the plan says.
    pub scratch: Scratch<'a, D>,
}

/// The operands of a launch.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct SampleRegions {
    pub rows: usize,
    pub logits: Region,
    pub temperature: Region,
    pub random: Region,
    pub ids: Region,
    pub scratch: Region,
}

impl<'a, D> SampleArgs<'a, D> {
    pub(super) fn declare(
        self,
        plan: &Plan<Sample>,
        uses: &mut Uses<'a>,
    ) -> Result<SampleRegions, Error> {
        let spec = plan.spec();
        let rows = rows_of("ids", self.ids.len(), 1, spec.max_rows)?;
        Ok(SampleRegions {
            rows,
            logits: uses.input("logits", self.logits, rows * spec.vocab)?,
            temperature: present("temperature", self.temperature, (spec.temperature, 1), uses)?,
            random: present("random", self.random, (spec.temperature, rows), uses)?,
            ids: uses.output("ids", self.ids, rows)?,
            scratch: uses.scratch(self.scratch, plan)?,
        })
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;
    use crate::op::layer::operands::{device, lane, plan, refused, tensor};
    use crate::op::sample::{SampleFields, SampleSpec};

    /// Lengths of logits and ids, and of temperature and random numbers; rows of 3 logits.
    fn declare(
        temperature: bool,
        (logits, ids): (usize, usize),
        drawn: [Option<usize>; 2],
    ) -> Result<SampleRegions, Error> {
        let spec = SampleSpec::new(SampleFields { vocab: 3, max_rows: 2, temperature }).unwrap();
        let (device, plan) = (device(), plan::<Sample>(spec));
        let (logits, mut ids) = (tensor(&device, logits), tensor(&device, ids));
        let [temperature, random] = drawn.map(|len| len.map(|len| tensor(&device, len)));
        let mut lane = lane(&device);
        let args = SampleArgs {
            logits: (&logits).into(),
            temperature: temperature.as_ref().map(Into::into),
            random: random.as_ref().map(Into::into),
            ids: (&mut ids).into(),
            scratch: (&mut lane).into(),
        };
        args.declare(&plan, &mut Uses::new())
    }

    #[test]
    fn operands_that_do_not_fit_are_named() {
        assert_eq!(declare(false, (6, 2), [None, None]).unwrap().rows, 2);
        assert_eq!(declare(true, (3, 1), [Some(1), Some(1)]).unwrap().rows, 1);
        assert_eq!(refused(declare(false, (5, 2), [None, None])), "logits");
        assert_eq!(refused(declare(false, (9, 3), [None, None])), "ids");
        assert_eq!(refused(declare(false, (6, 2), [None, Some(2)])), "random");
        assert_eq!(refused(declare(false, (6, 2), [Some(1), None])), "temperature");
        assert_eq!(refused(declare(true, (6, 2), [None, Some(2)])), "temperature");
        assert_eq!(refused(declare(true, (6, 2), [Some(1), Some(1)])), "random");
    }
}
