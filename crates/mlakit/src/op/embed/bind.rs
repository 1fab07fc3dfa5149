//! The operands of a gather, and their checks.

use super::plan::Embed;
use super::spec::MAX_TABLE_ROWS;
use crate::memory::Uses;
use crate::op::layer::{FloatInput, FloatOutput};
use crate::op::spec::rows_of;
use crate::{Error, Input, Plan, Region, Scratch};

/// The operands of one call. `R` rows are found from `y`; `vocab` is that of the `Spec`, or else
/// the whole rows of `table`.
pub struct EmbedArgs<'a, D> {
    /// `[vocab, width]`.
    pub table: FloatInput<'a, D>,
    /// `[R]`; -1 is padding; not trusted.
    pub ids: Input<'a, i32, D>,
    /// `[R, width]`.
    pub y: FloatOutput<'a, D>,
    /// As the plan says; only its fault block is used.
    pub scratch: Scratch<'a, D>,
}

/// The operands of a launch.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct EmbedRegions {
    pub rows: usize,
    /// Rows of `table`: ids from 0 to one below this are in it.
    pub vocab: usize,
    pub table: Region,
    pub ids: Region,
    pub y: Region,
    pub scratch: Region,
}

impl<'a, D> EmbedArgs<'a, D> {
    pub(super) fn declare(
        self,
        plan: &Plan<Embed>,
        uses: &mut Uses<'a>,
    ) -> Result<EmbedRegions, Error> {
        let spec = plan.spec();
        let rows = rows_of("y", self.y.len(), spec.width, spec.max_rows)?;
        let vocab = match spec.vocab {
            Some(vocab) => vocab,
            None => rows_of("table", self.table.len(), spec.width, MAX_TABLE_ROWS)?,
        };
        Ok(EmbedRegions {
            rows,
            vocab,
            table: self.table.declare("table", (spec.table, vocab * spec.width), uses)?,
            ids: uses.input("ids", self.ids, rows)?,
            y: self.y.declare("y", (spec.output, rows * spec.width), uses)?,
            scratch: uses.scratch(self.scratch, plan)?,
        })
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;
    use crate::op::embed::{EmbedFields, EmbedSpec};
    use crate::op::layer::operands::{device, lane, plan, refused, tensor};
    use crate::op::layer::{Float, one};

    /// Lengths of table, ids and `y`; rows of 4 elements.
    fn declare(vocab: Option<usize>, lengths: [usize; 3]) -> Result<EmbedRegions, Error> {
        let (float, scale) = (Float::F32, one());
        let fields =
            EmbedFields { width: 4, vocab, table: float, output: float, scale, max_rows: 2 };
        let (device, plan) = (device(), plan::<Embed>(EmbedSpec::new(fields).unwrap()));
        let (table, ids) = (tensor(&device, lengths[0]), tensor(&device, lengths[1]));
        let (mut y, mut lane) = (tensor(&device, lengths[2]), lane(&device));
        let args = EmbedArgs {
            table: FloatInput::F32((&table).into()),
            ids: (&ids).into(),
            y: FloatOutput::F32((&mut y).into()),
            scratch: (&mut lane).into(),
        };
        args.declare(&plan, &mut Uses::new())
    }

    #[test]
    fn the_vocabulary_is_that_of_the_spec_or_of_the_table() {
        let open = declare(None, [12, 2, 8]).unwrap();
        assert_eq!((open.rows, open.vocab), (2, 3));
        let closed = declare(Some(2), [12, 1, 4]).unwrap();
        assert_eq!((closed.rows, closed.vocab), (1, 2));
    }

    #[test]
    fn operands_that_do_not_fit_are_named() {
        assert_eq!(refused(declare(None, [13, 2, 8])), "table");
        assert_eq!(refused(declare(Some(4), [12, 2, 8])), "table");
        assert_eq!(refused(declare(None, [12, 1, 8])), "ids");
        assert_eq!(refused(declare(None, [12, 2, 7])), "y");
        assert_eq!(refused(declare(None, [12, 3, 12])), "y");
    }
}
