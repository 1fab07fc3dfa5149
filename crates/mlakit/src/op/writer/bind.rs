//! The operands of a writer, and their checks.

use half::bf16;

use super::plan::Writer;
use crate::memory::Uses;
use crate::op::dense::present;
use crate::op::spec::rows_of;
use crate::{CacheMut, Error, Input, Plan, Region, Scratch};

/// The operands of one call. `M` rows are found from `slots`; the tensors may hold more.
pub struct WriterArgs<'a, D> {
    /// BF16 `[N, latent_width]`, `N >= M`.
    pub latent: Input<'a, bf16, D>,
    /// BF16 `[N, rope_width]`, rotated; absent where the width is 0.
    pub rope: Option<Input<'a, bf16, D>>,
    /// `[M]`.
    pub slots: Input<'a, i64, D>,
    /// The pages.
    pub cache: CacheMut<'a, D>,
    /// `[1]`, where the record is scaled.
    pub kv_scale: Option<Input<'a, f32, D>>,
    /// As the plan says; only its fault block is used.
    pub scratch: Scratch<'a, D>,
}

/// The operands of a launch.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct WriterRegions {
    pub rows: usize,
    pub latent: Region,
    pub rope: Region,
    pub slots: Region,
    pub view: Region,
    pub kv_scale: Region,
    pub scratch: Region,
}

impl<'a, D> WriterArgs<'a, D> {
    pub(super) fn declare(
        self,
        plan: &Plan<Writer>,
        uses: &mut Uses<'a>,
    ) -> Result<WriterRegions, Error> {
        let spec = plan.spec();
        let rows = rows_of("slots", self.slots.len(), 1, spec.max_rows)?;
        let rope = (spec.rope_width > 0, rows * spec.rope_width);
        Ok(WriterRegions {
            rows,
            latent: uses.input("latent", self.latent, rows * spec.latent_width)?,
            rope: present("rope", self.rope, rope, uses)?,
            slots: uses.input("slots", self.slots, rows)?,
            view: uses.cache_mut("cache", self.cache, spec.pages())?,
            kv_scale: present("kv_scale", self.kv_scale, (spec.record.is_scaled(), 1), uses)?,
            scratch: uses.scratch(self.scratch, plan)?,
        })
    }
}
