//! The probe of `indexer`: numbers whose scores are exact, with ties, over a cache of its own, compared with the oracle.

use half::bf16;

use super::bind::IndexerArgs;
use super::oracle::{IndexerCase, IndexerResult, oracle};
use super::plan::Indexer;
use super::spec::{IndexerFields, IndexerSpec};
use crate::op::layer::pick;
use crate::{Error, Runs, Warm};

/// Keys of the probe at most; enough for a few blocks of any kernel and more than most selections.
const KEYS: usize = 700;

struct Inputs {
    q: Vec<bf16>,
    weights: Vec<f32>,
    cache: Vec<u8>,
    table: Vec<i32>,
    lengths: Vec<i32>,
    offsets: Vec<i32>,
    last: Vec<i64>,
}

/// -1, 0 or 1: every format holds them, scaled by its power of two, and sums of products are whole numbers.
fn whole(i: usize) -> bf16 {
    bf16::from_f32(pick(i, 3) as f32 - 1.0)
}

impl Inputs {
    /// One request with at most [`KEYS`] keys, behind it padding rows. The second page id is out of the pool.
    fn new(spec: &IndexerFields) -> Self {
        let geometry = spec.pages();
        let width = spec.max_table_width.min(KEYS.div_ceil(spec.page_size)).max(1);
        let length = (width * spec.page_size).min(spec.max_kv_tokens).min(KEYS);
        let (rows, batch) = (spec.max_rows.min(3), spec.max_batch.min(2));
        let mut cache = vec![0xff; width * geometry.payload_bytes()];
        let planes = geometry.record.planes(spec.page_size);
        for (page, bytes) in cache.chunks_exact_mut(geometry.payload_bytes()).enumerate() {
            let (data, scales) = bytes.split_at_mut(planes.scales.first);
            for token in 0..spec.page_size {
                let first = (page * spec.page_size + token) * spec.width;
                let key: Vec<bf16> = (first..first + spec.width).map(whole).collect();
                let scale = token * planes.scales.stride;
                let scales = &mut scales[scale..scale + planes.scales.bytes];
                geometry.record.encode(&mut data[planes.data.token(token)], scales, &key, 1.0);
            }
        }
        let mut table = vec![-1; batch * width];
        for (i, page) in table.iter_mut().take(width).enumerate() {
            *page = if i == 1 { i32::MAX } else { (width - 1 - i) as i32 };
        }
        let live = rows.div_ceil(2);
        let mut lengths = vec![0; batch];
        lengths[0] = length as i32;
        let mut offsets = vec![live as i32; batch + 1];
        offsets[0] = 0;
        let last = |row: usize| (length * spec.pool_size) as i64 - (live - row.min(live)) as i64;
        Self {
            q: (0..rows * spec.heads * spec.width).map(|i| whole(i + 5)).collect(),
            weights: (0..rows * spec.heads).map(|i| pick(i, 5) as f32 - 2.0).collect(),
            cache,
            table,
            lengths,
            offsets,
            last: (0..rows).map(last).collect(),
        }
    }

    fn oracle(&self, spec: &IndexerSpec) -> IndexerResult {
        let case = IndexerCase {
            q: &self.q,
            weights: &self.weights,
            cache: &self.cache,
            page_stride_bytes: spec.pages().payload_bytes(),
            page_table: &self.table,
            kv_lens: &self.lengths,
            q_offsets: &self.offsets,
            last_position: spec.is_pooled().then_some(&self.last[..]),
        };
        oracle(spec, &case)
    }
}

/// Runs on probes and compares: sums of small whole numbers are exact in every order.
pub(super) fn probe<'w, D: Runs<Indexer>>(warm: &mut Warm<'w, Indexer, D>) -> Result<(), Error> {
    let spec = warm.spec();
    let inputs = Inputs::new(&spec);
    let needed = inputs.oracle(&spec);
    let selected = needed.positions.len();
    let (q, weights) = (warm.probe::<bf16>(&inputs.q)?, warm.probe::<f32>(&inputs.weights)?);
    let cache = warm.cache(spec.pages(), &inputs.cache)?;
    let table = warm.probe::<i32>(&inputs.table)?;
    let lengths = warm.probe::<i32>(&inputs.lengths)?;
    let offsets = warm.probe::<i32>(&inputs.offsets)?;
    let last = warm.probe::<i64>(&inputs.last)?;
    let mut positions = warm.probe::<i32>(&vec![-2; selected])?;
    let mut counts = warm.probe::<i32>(&vec![-2; needed.counts.len()])?;
    let mut scores = warm.probe::<f32>(&vec![f32::NAN; selected])?;
    let mut scratch = warm.scratch()?;
    warm.run(IndexerArgs {
        q: (&q).into(),
        weights: (&weights).into(),
        cache: (&cache).into(),
        page_table: (&table).into(),
        kv_lens: (&lengths).into(),
        q_offsets: (&offsets).into(),
        last_position: spec.is_pooled().then(|| (&last).into()),
        positions: (&mut positions).into(),
        counts: (&mut counts).into(),
        scores: spec.scores.then(|| (&mut scores).into()),
        scratch: (&mut scratch).into(),
    })?;
    Warm::<Indexer, D>::expect(&needed.counts, &warm.read(&counts)?, |n, g| n == g)?;
    Warm::<Indexer, D>::expect(&needed.positions, &warm.read(&positions)?, |n, g| n == g)?;
    if spec.scores {
        Warm::<Indexer, D>::expect(&needed.scores, &warm.read(&scores)?, |n, g| n == g)?;
    }
    let faults = warm.faults(&scratch)?;
    Warm::<Indexer, D>::expect(&needed.faults[..], &faults, |n, g| n == g)
}
