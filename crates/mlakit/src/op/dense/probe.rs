//! The probe of `dense`: a few rows over a cache of its own, compared with the oracle.

use half::bf16;

use super::bind::{DenseArgs, QueryInput};
use super::oracle::{DenseCase, QueryCase, oracle};
use super::plan::Dense;
use super::spec::{DenseFields, QueryDtype};
use crate::op::merge::LseOutput;
use crate::{Base2, E4m3, Error, Lse, LseBase, Natural, Runs, Warm};

/// Numbers between -1 and 1 that BF16 and E4M3 hold exactly.
fn number(i: usize) -> f32 {
    ((i * 37 + i / 11) % 17) as f32 / 8.0 - 1.0
}

struct Inputs {
    q: Vec<bf16>,
    q8: Vec<u8>,
    cache: Vec<u8>,
    table: Vec<i32>,
    lengths: Vec<i32>,
    offsets: Vec<i32>,
    row_lengths: Vec<i32>,
    rows: usize,
}

impl Inputs {
    /// One request with as many keys as fit three pages or the capacity, behind it padding rows. The second page id is out of the pool.
    fn new(spec: &DenseFields) -> Self {
        let geometry = spec.pages();
        let width = spec.max_table_width.min(3);
        let length = (width * spec.page_size).min(spec.max_kv_tokens).min(200);
        let (rows, batch) = (spec.max_rows.min(3), spec.max_batch.min(2));
        let q: Vec<bf16> =
            (0..rows * spec.heads * spec.qk_width).map(|i| bf16::from_f32(number(i))).collect();
        let mut cache = vec![0xff; width * geometry.payload_bytes()];
        let planes = geometry.planes();
        for token in 0..width * spec.page_size {
            let values: Vec<bf16> =
                (0..spec.qk_width).map(|i| bf16::from_f32(number(token * 5 + i))).collect();
            let page = &mut cache[token / spec.page_size * geometry.payload_bytes()..];
            planes.encode(geometry.record, (page, token % spec.page_size), [&values, &[]], 1.0);
        }
        let mut table = vec![-1; batch * width];
        for (i, page) in table.iter_mut().take(width).enumerate() {
            *page = if i == 1 { i32::MAX } else { (width - 1 - i) as i32 };
        }
        let live = rows.div_ceil(2) as i32;
        let mut lengths = vec![0; batch];
        lengths[0] = length as i32;
        let mut offsets = vec![live; batch + 1];
        offsets[0] = 0;
        let q8 = q.iter().map(|v| E4m3::encode(v.to_f32())).collect();
        let row_lengths = (0..rows).map(|r| length as i32 - r as i32).collect();
        Self { q, q8, cache, table, lengths, offsets, row_lengths, rows }
    }
}

/// Runs on probes and compares.
pub(super) fn probe<'w, D: Runs<Dense>>(warm: &mut Warm<'w, Dense, D>) -> Result<(), Error> {
    let spec = warm.spec();
    let inputs = Inputs::new(&spec);
    let case = DenseCase {
        q: match spec.query {
            QueryDtype::Bf16 => QueryCase::Bf16(&inputs.q),
            QueryDtype::E4m3 => QueryCase::E4m3(&inputs.q8),
        },
        cache: &inputs.cache,
        page_stride_bytes: spec.pages().payload_bytes(),
        page_table: &inputs.table,
        kv_lens: &inputs.lengths,
        q_offsets: &inputs.offsets,
        row_kv_lens: spec.row_lengths.then_some(&inputs.row_lengths[..]),
        kv_scale: 1.0,
        q_scale: 1.0,
    };
    let needed = oracle(&spec, warm.plan().division(), &case);
    let (out, lse, faults) = run(warm, &inputs)?;
    let close = |n: &f64, g: &f64| n == g || (n - g).abs() <= 2e-2 * n.abs() + 1e-2;
    Warm::<Dense, D>::expect(&needed.out, &out, close)?;
    Warm::<Dense, D>::expect(&needed.lse, &lse, |n, g| {
        n == g || (n - g).abs() <= 1e-3 * n.abs() + 1e-3
    })?;
    Warm::<Dense, D>::expect(&needed.faults[..], &faults, |n, g| n == g)
}

type Given = (Vec<f64>, Vec<f64>, Vec<u32>);

fn run<'w, D: Runs<Dense>>(warm: &mut Warm<'w, Dense, D>, inputs: &Inputs) -> Result<Given, Error> {
    let spec = warm.spec();
    let results = inputs.rows * spec.heads;
    let (q, q8) = (warm.probe::<bf16>(&inputs.q)?, warm.probe::<E4m3>(&inputs.q8)?);
    let cache = warm.cache(spec.pages(), &inputs.cache)?;
    let table = warm.probe::<i32>(&inputs.table)?;
    let (lengths, offsets) =
        (warm.probe::<i32>(&inputs.lengths)?, warm.probe::<i32>(&inputs.offsets)?);
    let row_lengths = warm.probe::<i32>(&inputs.row_lengths)?;
    let (kv_scale, q_scale) = (warm.probe::<f32>(&[1.0])?, warm.probe::<f32>(&[1.0])?);
    let mut out = warm.probe::<bf16>(&vec![bf16::NAN; results * spec.value_width])?;
    let mut natural = warm.probe::<Lse<Natural>>(&vec![f32::NAN; results])?;
    let mut base2 = warm.probe::<Lse<Base2>>(&vec![f32::NAN; results])?;
    let mut scratch = warm.scratch()?;
    warm.run(DenseArgs {
        q: match spec.query {
            QueryDtype::Bf16 => QueryInput::Bf16((&q).into()),
            QueryDtype::E4m3 => QueryInput::E4m3((&q8).into()),
        },
        cache: (&cache).into(),
        page_table: (&table).into(),
        kv_lens: (&lengths).into(),
        q_offsets: (&offsets).into(),
        row_kv_lens: spec.row_lengths.then(|| (&row_lengths).into()),
        kv_scale: spec.record.is_scaled().then(|| (&kv_scale).into()),
        q_scale: spec.has_query_scale().then(|| (&q_scale).into()),
        out: (&mut out).into(),
        lse: match spec.lse {
            LseBase::Natural => LseOutput::Natural((&mut natural).into()),
            LseBase::Base2 => LseOutput::Base2((&mut base2).into()),
        },
        scratch: (&mut scratch).into(),
    })?;
    let out = warm.read(&out)?.into_iter().map(f64::from).collect();
    let lse = match spec.lse {
        LseBase::Natural => warm.read(&natural)?,
        LseBase::Base2 => warm.read(&base2)?,
    };
    let faults = warm.faults(&scratch)?;
    Ok((out, lse.into_iter().map(f64::from).collect(), faults.to_vec()))
}
