//! `scale`: one page a row, times a factor.

use half::bf16;
use serde::{Deserialize, Serialize};

use crate::memory::Uses;
use crate::op::sealed::Sealed;
use crate::op::spec::{MAX_ROWS, checked_spec, within};
use crate::scratch::{Fault, RegionSpec};
use crate::{
    Cache, Choice, Device, Error, Input, Op, Output, PageGeometry, Plan, RecordFormat, Region,
    Runs, Scratch, Warm,
};

/// The operation.
#[derive(Debug)]
pub struct Scale;

/// The fields of a [`ScaleSpec`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScaleFields {
    /// Rows.
    pub rows: usize,
    /// Pages of BF16 records.
    pub pages: PageGeometry,
}

checked_spec! {
    /// A scale that can exist.
    ScaleSpec, ScaleFields, "ScaleFields"
}

impl ScaleFields {
    /// Elements of a page.
    pub fn page_elements(&self) -> usize {
        self.pages.page_size * self.pages.record.width
    }

    fn check(&self) -> Result<(), Error> {
        within("rows", self.rows, 1, MAX_ROWS)?;
        let format = self.pages.check()?.record.format;
        if format != RecordFormat::Bf16 {
            return Err(Error::contract("record", "bf16", format.name()));
        }
        Ok(())
    }
}

/// The operands of a call.
pub struct ScaleArgs<'a, D> {
    /// `[1]`; an operand and not a parameter, so that replays see its changes.
    pub factor: Input<'a, f32, D>,
    /// `[rows]`; -1 is a padding row; ids out of the pool are skipped and counted.
    pub page_table: Input<'a, i32, D>,
    /// The pages.
    pub cache: Cache<'a, D>,
    /// `[rows, page_elements]`.
    pub out: Output<'a, f32, D>,
    /// As the plan says; only its fault block is used.
    pub scratch: Scratch<'a, D>,
}

/// The operands of a launch.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct ScaleRegions {
    pub factor: Region,
    pub page_table: Region,
    pub view: Region,
    pub out: Region,
    pub scratch: Region,
}

impl Sealed for Scale {}

impl Op for Scale {
    const NAME: &'static str = "scale";
    type Spec = ScaleSpec;
    type Args<'a, D: Device> = ScaleArgs<'a, D>;
    type Regions = ScaleRegions;

    fn scratch(_: &ScaleSpec, _: &Choice) -> Vec<RegionSpec> {
        Vec::new()
    }

    fn operands<'a, D: Device>(
        plan: &Plan<Self>,
        args: ScaleArgs<'a, D>,
        uses: &mut Uses<'a>,
    ) -> Result<ScaleRegions, Error> {
        let spec = plan.spec();
        Ok(ScaleRegions {
            factor: uses.input("factor", args.factor, 1)?,
            page_table: uses.input("page_table", args.page_table, spec.rows)?,
            view: uses.cache("cache", args.cache, spec.pages)?,
            out: uses.output("out", args.out, spec.rows * spec.page_elements())?,
            scratch: uses.scratch(args.scratch, plan)?,
        })
    }

    fn probe<'w, D: Runs<Self>>(warm: &mut Warm<'w, Self, D>) -> Result<(), Error> {
        let spec = warm.spec();
        let page: Vec<bf16> =
            (0..spec.page_elements()).map(|i| bf16::from_f32((i % 100) as f32 + 1.0)).collect();
        let cache = warm.cache(spec.pages, bytemuck::cast_slice(&page))?;
        let factor = warm.probe::<f32>(&[3.0])?;
        let mut table = vec![0; spec.rows];
        table[spec.rows - 1] = 7; // out of the pool: must be skipped and counted
        let page_table = warm.probe::<i32>(&table)?;
        let mut out = warm.probe::<f32>(&vec![f32::NAN; spec.rows * spec.page_elements()])?;
        let mut scratch = warm.scratch()?;
        warm.run(ScaleArgs {
            factor: (&factor).into(),
            page_table: (&page_table).into(),
            cache: (&cache).into(),
            out: (&mut out).into(),
            scratch: (&mut scratch).into(),
        })?;
        let scaled = |id: &i32| {
            let found = *id == 0;
            page.iter().map(move |value| if found { 3.0 * value.to_f32() } else { 0.0 })
        };
        let needed: Vec<f32> = table.iter().flat_map(scaled).collect();
        Warm::<Self, D>::expect(&needed, &warm.read(&out)?, |n, g| n == g)?;
        let faults = warm.faults(&scratch)?;
        Warm::<Self, D>::expect(&[1], &[faults[Fault::Id as usize]], |n, g| n == g)
    }
}
