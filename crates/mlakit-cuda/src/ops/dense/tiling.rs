//! How the portable kernel is specialised for the widths of a `Spec`, and how many blocks it takes.

use mlakit::op::dense::DenseSpec;
use mlakit::{RecordFormat, Splits};

use crate::facts::Facts;

/// Threads of a block.
pub(super) const THREADS: u32 = 256;

/// Shared memory that a block may have on every architecture from sm_80 on.
const SHARED_LIMIT: u32 = 99 << 10;

/// Accumulators and query registers of a thread that leave room for everything else: of 255
/// registers, and of the 128 that let two blocks share a multiprocessor.
const WIDE_LIMIT: u32 = 148;
const NARROW_LIMIT: u32 = 68;
/// Those of one matrix that leave room for the products of 32 keys.
const LONG_STEP_LIMIT: u32 = 100;

/// What of a specialisation follows from the widths, the record and the pairs of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tiling {
    /// Matrices of 16 pairs (row, head): 1 or 2.
    matrices: u32,
    /// Keys of a step. The bits of a row depend on it, so it depends on widths and record alone.
    keys: u32,
    /// Steps in shared memory.
    stages: u32,
    /// From one key to the next in shared memory.
    key_stride_bytes: u32,
    /// Accumulators and query registers of a thread.
    registers: u32,
}

/// Whether a tile has pairs of one row only. With a window and splits of fixed size each row begins
/// at a cut of its own.
pub(super) fn rows_apart(spec: &DenseSpec) -> bool {
    spec.window.is_some() && matches!(spec.splits, Splits::FixedTokens(_))
}

impl Tiling {
    /// For a `Spec`: two matrices where a request may have more than 16 pairs and they fit. `None` if
    /// the widths are too large.
    pub(super) fn new(spec: &DenseSpec) -> Option<Self> {
        let several_rows = spec.max_rows > spec.max_batch && !rows_apart(spec);
        let widths = (spec.qk_width, spec.value_width);
        let of = |matrices| Self::of(widths, spec.record == RecordFormat::E4m3, matrices);
        let two = if spec.heads > 16 || several_rows { of(2) } else { None };
        two.or_else(|| of(1))
    }

    /// For widths and a number of matrices, if they fit.
    pub(super) fn of((qk, value): (usize, usize), e4m3: bool, matrices: u32) -> Option<Self> {
        let (qk, value) = (u32::try_from(qk).ok()?, u32::try_from(value).ok()?);
        let quarter = qk.div_ceil(16).div_ceil(4);
        let groups = value.div_ceil(16).div_ceil(THREADS / 32);
        let chunks = qk.div_ceil(16) * if e4m3 { 1 } else { 2 };
        let tiling = |keys, stages| Self {
            matrices,
            keys,
            stages,
            key_stride_bytes: (chunks | 1) * 16,
            registers: matrices * (4 * quarter + 8 * groups),
        };
        let fits = |tiling: &Self| tiling.shared_bytes() <= SHARED_LIMIT;
        // Whatever this tile is: the steps are those with which two matrices fit as well.
        let steps_fit = |keys: &u32| {
            let registers = *keys == 16 || tiling(16, 2).registers <= LONG_STEP_LIMIT * matrices;
            registers && fits(&Self { matrices: 2, ..tiling(*keys, 2) })
        };
        let keys = [32, 16].into_iter().find(steps_fit)?;
        let tiling = [4, 3, 2].map(|stages| tiling(keys, stages)).into_iter().find(fits)?;
        (tiling.registers <= WIDE_LIMIT).then_some(tiling)
    }

    /// What the kernel is compiled with beside widths and formats.
    pub(super) fn defines(self) -> [(&'static str, String); 5] {
        [
            ("TILE_MATRICES", self.matrices.to_string()),
            ("KEYS", self.keys.to_string()),
            ("STAGES", self.stages.to_string()),
            ("BLOCKS_PER_SM", self.blocks_per_multiprocessor().to_string()),
            ("SHARED_BYTES", self.shared_bytes().to_string()),
        ]
    }

    /// Keys of a step.
    pub(super) fn keys(self) -> usize {
        self.keys as usize
    }

    /// The size of `Shared` in the kernel, which asserts it: steps of keys, four tiles of scores, one
    /// of weights, factors, marks of keys, and the division of work.
    pub(super) fn shared_bytes(self) -> u32 {
        let (rows, keys) = (16 * self.matrices, self.keys);
        let steps = self.stages * keys * self.key_stride_bytes;
        let scores = (4 * 4 + 2) * rows * (keys + 8);
        let work = 1120 + 8 * rows;
        steps + scores + 4 * rows + self.stages * keys + work
    }

    /// Blocks of a multiprocessor that the kernel leaves registers for.
    pub(super) fn blocks_per_multiprocessor(self) -> u32 {
        if self.registers <= NARROW_LIMIT { 2 } else { 1 }
    }

    /// The tiles that there is room for with so many rows and requests, and the blocks of the launch;
    /// `None` if a grid does not hold them. Each request, and the padding on both sides, may end with
    /// a tile that is not full.
    pub(super) fn blocks(
        self,
        spec: &DenseSpec,
        (rows, batch): (usize, usize),
        splits: usize,
    ) -> Option<(u32, u32)> {
        let pairs = 16 * self.matrices as usize;
        let tiles = if rows_apart(spec) {
            rows.checked_mul(spec.heads.div_ceil(pairs))?.max(1)
        } else {
            rows.checked_mul(spec.heads)? / pairs + batch + 2
        };
        let blocks = tiles.checked_mul(splits)?;
        i32::try_from(blocks).ok()?;
        Some((tiles as u32, blocks as u32))
    }

    /// Splits that `Auto` would like at capacity: the number whose blocks take the least time by a
    /// simple model. Blocks of a multiprocessor share its part of the memory's bandwidth, of which
    /// one alone gets 70 %; a block costs as much as four 64-blocks of keys before and after its
    /// loop, and a merge as much as one, and one more for every 20 splits. The figures are those of
    /// an H200 (`docs/kernels/dense-portable.md`).
    pub(super) fn wanted_splits(self, facts: &Facts, spec: &DenseSpec) -> usize {
        let pairs = 16 * self.matrices as usize;
        let requests = spec.max_batch.min(spec.max_rows);
        let rows = if rows_apart(spec) { 1 } else { spec.max_rows.div_ceil(requests) };
        let tiles = spec.max_rows.div_ceil(rows) * (rows * spec.heads).div_ceil(pairs);
        let (multiprocessors, key_blocks) =
            (facts.multiprocessors.max(1) as usize, spec.capacity().blocks());
        let most = key_blocks.min(4 * multiprocessors / tiles.min(4 * multiprocessors) + 1);
        let cost = |splits: usize| {
            let each = (tiles * splits).div_ceil(multiprocessors);
            let rate = if each > 1 && self.resident(facts) > 1 { 1.0 } else { 0.7 };
            let merge = if splits > 1 { 1.0 + splits as f64 / 20.0 } else { 0.0 };
            each as f64 * (key_blocks.div_ceil(splits) as f64 + 4.0) / rate + merge
        };
        (1..=most).min_by(|a, b| cost(*a).total_cmp(&cost(*b))).unwrap_or(1)
    }

    /// Blocks that a multiprocessor holds.
    fn resident(self, facts: &Facts) -> u32 {
        let by_shared = facts.shared_bytes_per_multiprocessor / (self.shared_bytes() + 1024);
        by_shared.min(self.blocks_per_multiprocessor()).max(1)
    }
}

#[cfg(test)]
mod tests {
    use mlakit::op::dense::{Dense, DenseFields};
    use mlakit::op::spec::Scalar;
    use mlakit::{Error, Plan};

    use super::*;
    use crate::{Cuda, DenseFamily};

    #[test]
    fn widths_in_use_fit_with_the_same_steps_for_all_tiles() {
        for widths in [(576, 512), (512, 512), (320, 256), (288, 256), (160, 128), (2, 2)] {
            for e4m3 in [false, true] {
                let [one, two] = [1, 2].map(|m| Tiling::of(widths, e4m3, m).unwrap());
                assert_eq!((one.keys, two.keys), (32, 32), "{widths:?}");
                assert!(one.stages >= 2 && two.shared_bytes() <= SHARED_LIMIT);
                assert_eq!(one.blocks_per_multiprocessor(), 2, "{widths:?}");
            }
        }
        let wide = Tiling::of((1088, 1024), false, 1).unwrap();
        assert_eq!((wide.keys, wide.blocks_per_multiprocessor()), (16, 1));
        assert_eq!(Tiling::of((1088, 1024), true, 1).unwrap().keys, 16);
        assert_eq!(Tiling::of((1088, 1024), false, 2), None);
        assert_eq!(Tiling::of((1154, 1154), false, 1), None);
        assert_eq!(Tiling::of((8192, 2), true, 1), None);
    }

    fn fields([batch, rows, heads, tokens]: [usize; 4]) -> DenseFields {
        DenseFields {
            heads,
            qk_width: 576,
            value_width: 512,
            record: RecordFormat::Bf16,
            record_width: None,
            page_size: 64,
            softmax_scale: Scalar::try_from(0.1).unwrap(),
            lse: Default::default(),
            sink_in_lse: false,
            query: Default::default(),
            quantize_query: false,
            partial: Default::default(),
            splits: Splits::Auto,
            budget: Default::default(),
            window: None,
            row_lengths: false,
            max_rows: batch * rows,
            max_batch: batch,
            max_kv_tokens: tokens,
            max_table_width: tokens.div_ceil(64),
        }
    }

    fn plan(gpu: &str, fields: DenseFields) -> Result<Plan<Dense>, Error> {
        let spec = DenseSpec::new(fields).unwrap();
        let facts = Facts { dense: Some(DenseFamily::Portable), ..Facts::preset(gpu).unwrap() };
        Plan::for_device::<Cuda>(&spec, &facts)
    }

    fn wanted(gpu: &str, shape: [usize; 4]) -> usize {
        plan(gpu, fields(shape)).unwrap().choice().splits
    }

    /// The numbers of splits that were the fastest where they were measured.
    #[test]
    fn auto_takes_what_was_fastest() {
        assert_eq!(wanted("h200", [128, 1, 16, 4096]), 2);
        assert_eq!(wanted("h200", [1, 1, 16, 4096]), 32);
        assert_eq!(wanted("h200", [1, 1, 16, 32768]), 128);
        assert_eq!(wanted("h200", [8, 1, 16, 32768]), 32);
        assert_eq!(wanted("h200", [32, 1, 16, 4096]), 8);
        assert_eq!(wanted("h200", [1, 1, 128, 32768]), 32);
    }

    #[test]
    fn a_large_batch_is_not_divided() {
        for gpu in Facts::PRESETS {
            assert_eq!(wanted(gpu, [4096, 1, 16, 4096]), 1, "{gpu}");
        }
    }

    fn refusal(gpu: &str, fields: DenseFields) -> String {
        match plan(gpu, fields) {
            Err(Error::Refused(refusal)) => refusal.because,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_reason() {
        let usual = [2, 1, 16, 1000];
        let wide = DenseFields { qk_width: 2048, value_width: 1024, ..fields(usual) };
        assert!(refusal("h200", wide).contains("two steps of keys"));
        let many = DenseFields { max_rows: 1 << 24, heads: 1 << 14, ..fields(usual) };
        assert!(refusal("h200", many).contains("do not fit a grid"));
        let old = Facts { capability: (7, 5), ..Facts::preset("a100").unwrap() };
        let spec = DenseSpec::new(fields(usual)).unwrap();
        assert!(Plan::<Dense>::for_device::<Cuda>(&spec, &old).is_err());
    }

    /// With fixed splits a window sets rows apart; tiles and blocks then count rows.
    #[test]
    fn there_is_room_for_every_way_to_divide_rows() {
        let spec = |window, splits| {
            let fields = DenseFields { window, splits, ..fields([3, 4, 40, 1000]) };
            DenseSpec::new(fields).unwrap()
        };
        let together = spec(None, Splits::FixedTokens(64));
        let tiling = Tiling::new(&together).unwrap();
        assert_eq!(tiling.matrices, 2);
        // 12 rows of 40 heads are 15 tiles of 32, and each of 3 requests may end with another.
        assert_eq!(tiling.blocks(&together, (12, 3), 7), Some((20, 140)));
        let apart = spec(Some(100), Splits::FixedTokens(64));
        assert_eq!(tiling.blocks(&apart, (12, 3), 7), Some((24, 168)));
        assert_eq!(tiling.blocks(&apart, (0, 3), 1), Some((1, 1)));
    }

    #[test]
    fn a_block_of_the_usual_widths_leaves_room_for_a_second() {
        let tiling = Tiling::of((576, 512), false, 1).unwrap();
        assert_eq!(tiling.resident(&Facts::preset("h200").unwrap()), 2);
        assert_eq!(tiling.resident(&Facts::preset("a100").unwrap()), 1);
        assert_eq!(tiling.shared_bytes(), 2 * 32 * 1168 + 18 * 16 * 40 + 64 + 64 + 1248);
    }
}
