//! The probe of `sparse`: a few rows over caches of their own, compared with the oracle.

use half::bf16;

use super::bind::{ExtraInput, SelectionInput, SparseArgs};
use super::oracle::{ExtraCase, SelectionCase, SparseCase, oracle};
use super::plan::Sparse;
use super::spec::{Selection, SparseFields};
use crate::op::dense::{QueryCase, QueryDtype, QueryInput};
use crate::op::merge::LseOutput;
use crate::{
    Base2, E4m3, Error, Lse, LseBase, Natural, PageGeometry, Probe, ProbeCache, Runs, Warm,
};

/// Numbers between -7/8 and 7/8 that BF16 and E4M3 hold exactly.
fn number(i: usize) -> f32 {
    ((i * 37 + i / 11) % 15) as f32 / 8.0 - 7.0 / 8.0
}

/// A record whose scales are powers of two in every format: the largest magnitudes are 21/16, which is 2688 (6 x 448) times one, and,
/// of the last element, 7/8, which is 448 times one.
fn values(width: usize, token: usize) -> Vec<bf16> {
    let mut values: Vec<f32> = (0..width).map(|i| number(token * 5 + i)).collect();
    values[0] = 21.0 / 16.0;
    values[width - 1] = 7.0 / 8.0;
    values.into_iter().map(bf16::from_f32).collect()
}

/// Entries of a probe's lists at most, and pages of its caches.
const WIDTH: usize = 70;
const PAGES: usize = 3;

struct Inputs {
    rows: usize,
    q: Vec<bf16>,
    q8: Vec<u8>,
    cache: Vec<u8>,
    entries: Vec<i32>,
    counts: Vec<i32>,
    request: Vec<i32>,
    table: Vec<i32>,
    extra_cache: Vec<u8>,
    extra_slots: Vec<i32>,
    extra_counts: Vec<i32>,
    sink: Vec<f32>,
}

fn cache(geometry: PageGeometry, qk_width: usize) -> Vec<u8> {
    let mut cache = vec![0xff; PAGES * geometry.payload_bytes()];
    let (planes, size) = (geometry.planes(), geometry.page_size);
    for token in 0..PAGES * size {
        let page = &mut cache[token / size * geometry.payload_bytes()..];
        let values = values(qk_width, token);
        planes.encode(geometry.record, (page, token % size), [&values, &[]], 1.0);
    }
    cache
}

/// Entries of which some are unused, some twice there, and some out of bounds.
fn entries(len: usize, tokens: usize) -> Vec<i32> {
    let entry = |i: usize| match i % 9 {
        4 => -1 - i as i32,
        7 => i32::MAX - i as i32,
        _ => (i * 7 % tokens) as i32,
    };
    (0..len).map(entry).collect()
}

impl Inputs {
    /// A row with a whole list, one with a part, and one whose count and request are out of bounds. Of the pages the second is unused.
    fn new(spec: &SparseFields) -> Self {
        let (rows, width) = (spec.max_rows.min(3), spec.width.min(WIDTH));
        let tokens = PAGES * spec.page_size;
        let q: Vec<bf16> =
            (0..rows * spec.heads * spec.qk_width).map(|i| bf16::from_f32(number(i))).collect();
        let q8 = q.iter().map(|v| E4m3::encode(v.to_f32())).collect();
        let counts = [width as i32, width as i32 / 2, i32::MAX];
        let extra = spec.extra();
        let extra_width = extra.map_or(0, |extra| extra.width.min(WIDTH));
        let extra_tokens = extra.map_or(1, |extra| PAGES * extra.pages.page_size);
        let table_width = spec.max_table_width.min(PAGES);
        Self {
            rows,
            q,
            q8,
            cache: cache(spec.pages(), spec.qk_width),
            entries: entries(rows * width, tokens),
            counts: counts[..rows].to_vec(),
            request: [0, 0, 1][..rows].to_vec(),
            table: [2, -1, 0][..table_width].to_vec(),
            extra_cache: extra.map_or(Vec::new(), |extra| cache(extra.pages, spec.qk_width)),
            extra_slots: entries(rows * extra_width, extra_tokens),
            extra_counts: vec![extra_width as i32; rows],
            sink: (0..spec.heads).map(|head| head as f32 / 8.0 - 1.0).collect(),
        }
    }

    fn case<'c>(&'c self, spec: &SparseFields) -> SparseCase<'c> {
        SparseCase {
            q: match spec.query {
                QueryDtype::Bf16 => QueryCase::Bf16(&self.q),
                QueryDtype::E4m3 => QueryCase::E4m3(&self.q8),
            },
            cache: &self.cache,
            page_stride_bytes: spec.pages().payload_bytes(),
            selection: match spec.selection {
                Selection::Positions => SelectionCase::Positions {
                    positions: &self.entries,
                    counts: &self.counts,
                    request: &self.request,
                    page_table: &self.table,
                    table_width: self.table.len(),
                },
                Selection::Slots => {
                    SelectionCase::Slots { slots: &self.entries, counts: &self.counts }
                }
            },
            extra: spec.extra().map(|extra| ExtraCase {
                cache: &self.extra_cache,
                page_stride_bytes: extra.pages.payload_bytes(),
                slots: &self.extra_slots,
                slot_counts: &self.extra_counts,
            }),
            sink: spec.sink.then_some(&self.sink[..]),
            kv_scale: 1.0,
            q_scale: 1.0,
        }
    }
}

/// Runs on probes and compares.
pub(super) fn probe<'w, D: Runs<Sparse>>(warm: &mut Warm<'w, Sparse, D>) -> Result<(), Error> {
    let spec = warm.spec();
    let inputs = Inputs::new(&spec);
    let needed = oracle(&spec, warm.plan().division(), &inputs.case(&spec));
    let (out, lse, faults) = run(warm, &inputs)?;
    let close = |n: &f64, g: &f64| n == g || (n - g).abs() <= 2e-2 * n.abs() + 1e-2;
    Warm::<Sparse, D>::expect(&needed.out, &out, close)?;
    Warm::<Sparse, D>::expect(&needed.lse, &lse, |n, g| {
        n == g || (n - g).abs() <= 1e-3 * n.abs() + 1e-3
    })?;
    Warm::<Sparse, D>::expect(&needed.faults[..], &faults, |n, g| n == g)
}

type Given = (Vec<f64>, Vec<f64>, Vec<u32>);

/// The second scope: pages, slots, counts.
type Extra<'w, D> = (ProbeCache<'w, D>, Probe<'w, i32, D>, Probe<'w, i32, D>);

fn extra<'w, D: Runs<Sparse>>(
    warm: &mut Warm<'w, Sparse, D>,
    inputs: &Inputs,
) -> Result<Option<Extra<'w, D>>, Error> {
    let Some(scope) = warm.spec().extra() else { return Ok(None) };
    Ok(Some((
        warm.cache(scope.pages, &inputs.extra_cache)?,
        warm.probe::<i32>(&inputs.extra_slots)?,
        warm.probe::<i32>(&inputs.extra_counts)?,
    )))
}

fn run<'w, D: Runs<Sparse>>(
    warm: &mut Warm<'w, Sparse, D>,
    inputs: &Inputs,
) -> Result<Given, Error> {
    let spec = warm.spec();
    let results = inputs.rows * spec.heads;
    let (q, q8) = (warm.probe::<bf16>(&inputs.q)?, warm.probe::<E4m3>(&inputs.q8)?);
    let cache = warm.cache(spec.pages(), &inputs.cache)?;
    let entries = warm.probe::<i32>(&inputs.entries)?;
    let counts = warm.probe::<i32>(&inputs.counts)?;
    let request = warm.probe::<i32>(&inputs.request)?;
    let table = warm.probe::<i32>(&inputs.table)?;
    let extra = extra(warm, inputs)?;
    let sink = warm.probe::<f32>(&inputs.sink)?;
    let (kv_scale, q_scale) = (warm.probe::<f32>(&[1.0])?, warm.probe::<f32>(&[1.0])?);
    let mut out = warm.probe::<bf16>(&vec![bf16::NAN; results * spec.value_width])?;
    let mut natural = warm.probe::<Lse<Natural>>(&vec![f32::NAN; results])?;
    let mut base2 = warm.probe::<Lse<Base2>>(&vec![f32::NAN; results])?;
    let mut scratch = warm.scratch()?;
    warm.run(SparseArgs {
        q: match spec.query {
            QueryDtype::Bf16 => QueryInput::Bf16((&q).into()),
            QueryDtype::E4m3 => QueryInput::E4m3((&q8).into()),
        },
        cache: (&cache).into(),
        selection: match spec.selection {
            Selection::Positions => SelectionInput::Positions {
                positions: (&entries).into(),
                counts: (&counts).into(),
                request: (&request).into(),
                page_table: (&table).into(),
                table_width: inputs.table.len(),
            },
            Selection::Slots => {
                SelectionInput::Slots { slots: (&entries).into(), counts: (&counts).into() }
            }
        },
        extra: extra.as_ref().map(|(cache, slots, counts)| ExtraInput {
            cache: cache.into(),
            slots: slots.into(),
            slot_counts: counts.into(),
        }),
        sink: spec.sink.then(|| (&sink).into()),
        kv_scale: spec.has_kv_scale().then(|| (&kv_scale).into()),
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
