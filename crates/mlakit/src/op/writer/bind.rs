//! The operands of a writer, and their checks.

use half::bf16;

use super::plan::Writer;
use super::spec::WriterSpec;
use crate::memory::Uses;
use crate::op::dense::present;
use crate::op::spec::rows_of;
use crate::{CacheMut, Error, Input, Plan, Region, Scratch};

/// The operands of one call. `M` rows are found from `slots`; the tensors may hold more.
pub struct WriterArgs<'a, D> {
    /// `N` tokens, `N >= M`.
    pub tokens: WriterInput<'a, D>,
    /// `[M]`.
    pub slots: Input<'a, i64, D>,
    /// The pages.
    pub cache: CacheMut<'a, D>,
    /// `[1]`, where the record is scaled.
    pub kv_scale: Option<Input<'a, f32, D>>,
    /// As the plan says; only its fault block is used.
    pub scratch: Scratch<'a, D>,
}

/// The tokens of one call.
pub enum WriterInput<'a, D> {
    /// For records of attention.
    Latent {
        /// BF16 `[N, latent_width]`.
        latent: Input<'a, bf16, D>,
        /// BF16 `[N, rope_width]`, rotated; absent where the width is 0.
        rope: Option<Input<'a, bf16, D>>,
    },
    /// For index keys: BF16 `[N, key_width]`, normed and rotated.
    Key(Input<'a, bf16, D>),
}

/// The operands of a launch.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct WriterRegions {
    pub rows: usize,
    /// The latent, or the key.
    pub latent: Region,
    /// The rotary part; of no bytes where there is none.
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
        let [latent, rope] = self.tokens.declare((spec, rows), uses)?;
        Ok(WriterRegions {
            rows,
            latent,
            rope,
            slots: uses.input("slots", self.slots, rows)?,
            view: uses.cache_mut("cache", self.cache, spec.pages())?,
            kv_scale: present("kv_scale", self.kv_scale, (spec.record.is_scaled(), 1), uses)?,
            scratch: uses.scratch(self.scratch, plan)?,
        })
    }
}

impl<'a, D> WriterInput<'a, D> {
    fn declare(
        self,
        (spec, rows): (&WriterSpec, usize),
        uses: &mut Uses<'a>,
    ) -> Result<[Region; 2], Error> {
        let [first, second] = spec.widths();
        let (what, token, rope) = match (self, spec.record.is_index()) {
            (Self::Latent { latent, rope }, false) => ("latent", latent, rope),
            (Self::Key(key), true) => ("key", key, None),
            (Self::Latent { .. }, true) => return Err(other("a key", "a latent", spec)),
            (Self::Key(_), false) => return Err(other("a latent", "a key", spec)),
        };
        let token = uses.input(what, token, rows * first)?;
        Ok([token, present("rope", rope, (second > 0, rows * second), uses)?])
    }
}

fn other(needed: &str, given: &str, spec: &WriterSpec) -> Error {
    Error::contract("tokens", format!("{needed} for {}", spec.record.name()), given)
}
