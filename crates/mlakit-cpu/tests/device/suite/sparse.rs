//! Sparse attention is what the oracle says, and depends on nothing that no row refers to.

use mlakit::op::merge::Partial;
use mlakit::op::sparse::{Selection, SparseResult};
use mlakit::splits::Division;
use mlakit::{LseBase, Pages, RecordFormat, Splits};

use super::compare::{Bounds, LSE_BOUND, Needed, results_agree, same_bits};
use super::dense_inputs::Query;
use super::dense_run::Outcome;
use super::random::{Deck, Rng};
use super::sparse_inputs::{Extra, SparseInputs, SparseShape, records, shape, widths_of};
use super::sparse_run::{Operands, SparseDevice, prepare, run, run_prepared};

/// Products of a query element and a key element that a case may cost.
const WORK: usize = 30_000_000;
const CASES: u64 = 60;

const HEADS: [usize; 8] = [1, 3, 8, 16, 63, 99, 126, 128];
const WIDTHS: [usize; 9] = [1, 63, 64, 65, 128, 512, 2048, 2051, 2112];
const PAGES: [usize; 5] = [1, 16, 48, 64, 256];
const ROWS: [usize; 4] = [1, 2, 4, 9];
const TOKENS: [usize; 6] = [0, 1, 64, 65, 700, 3000];
const SPLITS: [Splits; 7] = [
    Splits::Count(1),
    Splits::Count(2),
    Splits::Count(7),
    Splits::Auto,
    Splits::FixedTokens(64),
    Splits::FixedTokens(192),
    Splits::FixedTokens(1024),
];

/// Where an F32 scale is no power of two, elements of records are rounded to BF16 on devices that
/// multiply BF16: scores then err by 2^-9 of their terms.
pub const ROUNDED_LSE_BOUND: (f64, f64) = (2e-2, 1e-3);

/// [`results_agree`] for sparse attention.
#[track_caller]
pub fn agrees(
    inputs: &SparseInputs,
    division: Division,
    (given, needed): (&Outcome, &SparseResult),
) {
    let bounds = Bounds {
        width: inputs.spec.value_width,
        rounded: division.splits > 1 && inputs.spec.partial == Partial::Bf16,
        lse: if inputs.shape.exact { LSE_BOUND } else { ROUNDED_LSE_BOUND },
    };
    let needed = Needed { out: &needed.out, lse: &needed.lse, faults: &needed.faults };
    results_agree(given, needed, bounds, &|index| {
        let whole = format!("{:?}\nin {division:?}", inputs.shape);
        let Some(index) = index else { return whole };
        let (row, head) = (index / inputs.spec.heads, index % inputs.spec.heads);
        let extra = inputs.extra_counts.get(row);
        let counts = format!("counts {} and {extra:?}", inputs.counts[row]);
        let entries = &inputs.positions[row * inputs.shape.width..][..inputs.shape.width.min(12)];
        format!(
            "row {row} of request {}, head {head}, {counts}, entries {entries:?}...\nof {whole}",
            inputs.request[row]
        )
    });
}

/// Runs and compares.
#[track_caller]
pub fn check<D: SparseDevice>(device: &D, shape: &SparseShape, seed: u64) -> Outcome {
    let inputs = SparseInputs::new(shape, seed);
    check_inputs(device, &inputs)
}

#[track_caller]
pub fn check_inputs<D: SparseDevice>(device: &D, inputs: &SparseInputs) -> Outcome {
    let prepared = prepare(device, &inputs.spec);
    let division = prepared.plan().division();
    let given = run_prepared(device, &prepared, inputs);
    agrees(inputs, division, (&given, &inputs.oracle(division)));
    given
}

/// Deals every value of every list equally often.
struct Sampler {
    rng: Rng,
    heads: Deck<usize>,
    widths: Deck<usize>,
    pages: Deck<usize>,
    rows: Deck<usize>,
    tokens: Deck<usize>,
    splits: Deck<Splits>,
    records: Deck<(RecordFormat, Query)>,
    extra: Deck<Option<RecordFormat>>,
}

impl Sampler {
    fn new(seed: u64) -> Self {
        let mut of: Vec<_> = records().map(|record| (record, Query::Bf16)).collect();
        of.extend([Query::E4m3, Query::Quantized].map(|query| (RecordFormat::E4m3, query)));
        let extra = [None, None, Some(RecordFormat::Bf16), Some(RecordFormat::E4m3)];
        Self {
            rng: Rng(seed),
            heads: Deck::new(&HEADS),
            widths: Deck::new(&WIDTHS),
            pages: Deck::new(&PAGES),
            rows: Deck::new(&ROWS),
            tokens: Deck::new(&TOKENS),
            splits: Deck::new(&SPLITS),
            records: Deck::new(&of),
            extra: Deck::new(&extra),
        }
    }

    fn case(&mut self) -> SparseShape {
        let rng = &mut self.rng;
        let mut sampled = shape(self.heads.deal(rng), (66, 34), self.widths.deal(rng), &[]);
        let (record, query) = self.records.deal(rng);
        let large = rng.chance(4);
        sampled = sampled.with_record(record, large);
        sampled.query = query;
        sampled.page_size = self.pages.deal(rng);
        sampled.selection = rng.pick(&[Selection::Positions, Selection::Slots]);
        sampled.splits = self.splits.deal(rng);
        sampled.partial = rng.pick(&[Partial::Bf16, Partial::F32]);
        sampled.lse = rng.pick(&[LseBase::Natural, LseBase::Base2]);
        sampled.sink = rng.chance(2);
        sampled.sink_in_lse = sampled.sink && rng.chance(2);
        sampled.padding = (0, rng.pick(&[0, 10, 256]));
        if record.is_plain() {
            sampled.padding.0 = rng.pick(&[0, 6, 32]);
        }
        sampled.padding_rows = rng.pick(&[0, 0, 2]);
        sampled.slack = rng.pick(&[1, 3]);
        sampled.strange = rng.chance(2);
        sampled.extra = self.extra.deal(rng).map(|record| Extra {
            record,
            page_size: rng.pick(&PAGES),
            width: rng.pick(&[1, 64, 100]),
            tokens: rng.pick(&[0, 50, 300]),
        });
        let wanted = 1 + rng.below(3);
        for _ in 0..wanted + 8 {
            let mut with = sampled.clone();
            with.requests.push((self.tokens.deal(rng), self.rows.deal(rng)));
            if with.work() <= WORK {
                sampled = with;
            }
            if sampled.requests.len() == wanted {
                break;
            }
        }
        while sampled.requests.is_empty() || sampled.work() > WORK {
            (sampled.heads, sampled.requests) = (sampled.heads.div_ceil(2), vec![(700, 1)]);
            sampled.padding_rows = 0;
        }
        sampled
    }
}

/// Records x queries x heads x widths of lists x pages x splits x partials x sinks x scopes, in
/// both ways to name tokens, with padding, rows that select nothing, and entries, counts, requests
/// and pages that are out of bounds.
pub fn agrees_with_the_oracle<D: SparseDevice>(device: &D) {
    let mut sampler = Sampler::new(0x5eed);
    let (mut faulty, mut with_keys) = ([false; 2], 0);
    for seed in 0..CASES {
        let given = check(device, &sampler.case(), seed);
        faulty[0] |= given.faults[0] > 0;
        faulty[1] |= given.faults[1] > 0;
        with_keys += given.lse.iter().filter(|lse| lse.is_finite()).count();
    }
    assert_eq!(faulty, [true; 2], "some ids and some counts are out of bounds");
    assert!(with_keys > 1000);
}

/// Every record of attention, at the widths of models and at small ones, in pages of every size
/// that the format takes; with scales of any value too.
pub fn every_record_agrees<D: SparseDevice>(device: &D) {
    for record in records() {
        for (large, page_size) in [(true, 64), (false, 16), (false, 1), (false, 48), (false, 256)] {
            for exact in [true, false] {
                let mut shape = shape(11, (0, 0), 150, &[(400, 2)]).with_record(record, large);
                (shape.page_size, shape.exact) = (page_size, exact);
                shape.padding.1 = 48;
                shape.count = Some(150);
                check(device, &shape, 5);
            }
        }
    }
    let mut pairs = shape(3, (0, 0), 70, &[(100, 1)]).with_record(RecordFormat::V4_584, true);
    pairs.page_size = 2;
    check(device, &pairs, 6);
}

/// Lists of every width, whole and in part, with more entries than there are keys.
pub fn lists_of_every_width<D: SparseDevice>(device: &D) {
    for width in WIDTHS {
        for heads in [1, 16] {
            let mut shape = shape(heads, (66, 34), width, &[(90, 1), (3000, 2)]);
            check(device, &shape, 7);
            shape.count = Some(width);
            shape.splits = Splits::FixedTokens(512);
            check(device, &shape, 8);
        }
    }
}

/// Any number of heads.
pub fn any_number_of_heads<D: SparseDevice>(device: &D) {
    for heads in HEADS.into_iter().chain([2, 17, 33, 48]) {
        let shape = shape(heads, (66, 34), 130, &[(300, 2)]);
        check(device, &shape, 9);
    }
}

/// Positions become places of the pool inside the kernel: the same bits and the same faults as for
/// their slots, and a plan whose scratch does not grow with the list or the rows.
pub fn positions_are_looked_up_in_the_kernel<D: SparseDevice>(device: &D) {
    for strange in [false, true] {
        for splits in [Splits::Count(1), Splits::Count(3)] {
            let mut shape = shape(5, (66, 34), 200, &[(500, 3), (70, 2)]);
            (shape.strange, shape.splits) = (strange, splits);
            let mut inputs = SparseInputs::new(&shape, 11);
            // A row whose request is out of bounds sees nothing; slots know no request.
            for row in 0..inputs.rows() {
                let request = usize::try_from(inputs.request[row]);
                if !request.is_ok_and(|request| request < shape.requests.len()) {
                    inputs.counts[row] = 0;
                }
            }
            let by_position = run(device, &inputs);
            inputs.shape.selection = Selection::Slots;
            inputs.spec = inputs.shape.spec();
            let by_slot = run(device, &inputs);
            same_bits(&format!("{strange} {splits:?}"), &by_slot, &by_position);
        }
    }
    let bytes = |width: usize, rows: usize| {
        let mut shape = shape(16, (576, 512), width, &[(100_000, rows)]);
        shape.splits = Splits::Count(1);
        let prepared = prepare(device, &shape.spec());
        let regions: Vec<_> = prepared.plan().scratch().to_vec();
        assert!(!regions.iter().any(|region| region.name.contains("slot")), "{regions:?}");
        regions.iter().map(|region| region.bytes).sum::<usize>()
    };
    assert_eq!(bytes(64, 1), bytes(4096, 1));
    assert_eq!(bytes(64, 1), bytes(4096, 500));
}

/// Unreferenced tokens, tails of pages, padding of records, scratch, entries behind a row's count
/// and page ids that no entry needs may hold anything: no bit changes.
pub fn sees_only_what_is_referred_to<D: SparseDevice>(device: &D) {
    for (record, selection) in
        records().zip([Selection::Positions, Selection::Slots].iter().cycle())
    {
        let mut shape =
            shape(5, (0, 0), 100, &[(131, 3), (0, 1), (200, 2)]).with_record(record, false);
        (shape.selection, shape.splits) = (*selection, Splits::Count(2));
        (shape.padding, shape.page_size, shape.padding_rows) = ((0, 34), 48, 1);
        shape.padding.0 = if record.is_plain() { 6 } else { 0 };
        shape.extra = Some(Extra { record, page_size: 16, width: 40, tokens: 64 });
        let clean = SparseInputs::new(&shape, 17);
        let prepared = prepare(device, &clean.spec);
        let needed = run_prepared(device, &prepared, &clean);
        for fill in 0..3u64 {
            let (mut other, mut rng) = (clean.clone(), Rng(fill + 100));
            disturb(&mut other, &mut rng, fill as usize);
            let caller = device.own_stream().unwrap();
            let mut stream = device.stream(&caller).unwrap();
            let mut operands = Operands::new(&mut stream, &other, &prepared);
            operands.lane.poison([0x00, 0xff, 0x7f][fill as usize]).unwrap();
            let given = operands.run(&mut stream, &prepared);
            same_bits(&format!("fill {fill} of {shape:?}"), &given, &needed);
        }
    }
}

/// Overwrites whatever no row refers to.
fn disturb(inputs: &mut SparseInputs, rng: &mut Rng, fill: usize) {
    let byte = |rng: &mut Rng| [0x00, 0x7f, rng.bits() as u8][fill];
    for pool in [Some(&mut inputs.pool), inputs.extra_pool.as_mut()].into_iter().flatten() {
        for (at, used) in pool.bytes.iter_mut().zip(&pool.referenced).filter(|(_, used)| !**used) {
            debug_assert!(!used);
            *at = byte(rng);
        }
    }
    let size = inputs.shape.page_size;
    let mut needed = vec![false; inputs.table.len()];
    for row in 0..inputs.rows() {
        let live = inputs.counts[row].max(0) as usize;
        for index in 0..inputs.shape.width {
            let at = row * inputs.shape.width + index;
            if index >= live {
                let any = rng.bits() as i32;
                inputs.positions[at] = [0, i32::MAX, any][fill];
                inputs.slots[at] = [0, i32::MAX, any][fill];
            } else if let Ok(position) = usize::try_from(inputs.positions[at]) {
                let request = inputs.request[row] as usize;
                needed[request * inputs.table_width + position / size] = true;
            }
        }
        for index in inputs.extra_counts.get(row).map_or(0, |count| *count as usize)
            ..inputs.shape.extra.map_or(0, |extra| extra.width)
        {
            let width = inputs.shape.extra.map_or(0, |extra| extra.width);
            inputs.extra_slots[row * width + index] = rng.bits() as i32;
        }
    }
    for (page, needed) in inputs.table.iter_mut().zip(needed) {
        if !needed {
            *page = [0, i32::MIN, rng.bits() as i32][fill];
        }
    }
}

/// Pages that begin beyond 2^31 and 2^32 bytes of cache give the bits that low pages give, in both
/// scopes.
pub fn pages_beyond_two_gibibytes<D: SparseDevice>(device: &D) {
    const STRIDE: usize = 1 << 20;
    const FIRST: usize = 2047;
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    for record in [RecordFormat::Bf16, RecordFormat::Fp8_656, RecordFormat::V4_584] {
        let mut shape = shape(4, (0, 0), 100, &[(130, 2), (64, 1)]).with_record(record, true);
        shape.page_size = 64;
        shape.extra = Some(Extra { record, page_size: 64, width: 30, tokens: 128 });
        let low = SparseInputs::new(&shape, 5);
        let prepared = prepare(device, &low.spec);
        let needed = Operands::new(&mut stream, &low, &prepared).run(&mut stream, &prepared);
        assert_eq!(needed.faults, [0; 3]);

        // Page p moves to 2047 + 400 p: the last ones lie beyond 2^32.
        let high = |page: usize| FIRST + 400 * page;
        let mut moved = low.clone();
        for id in &mut moved.table {
            if usize::try_from(*id).is_ok_and(|id| id < low.pool.pages) {
                *id = high(*id as usize) as i32;
            }
        }
        for slot in moved.extra_slots.iter_mut().filter(|slot| **slot >= 0) {
            *slot = (high(*slot as usize / 64) * 64 + *slot as usize % 64) as i32;
        }
        let mut operands = Operands::new(&mut stream, &moved, &prepared);
        let extra = low.extra_pool.as_ref().unwrap();
        let pages = high(low.pool.pages.max(extra.pages)) + 1;
        let of = |device: &D| {
            Pages::with_stride(device, "large pool", low.spec.pages(), (pages, STRIDE)).unwrap()
        };
        let (mut large, mut large_extra) = (of(device), of(device));
        for (from, to) in [(&low.pool, &mut large), (extra, &mut large_extra)] {
            for (page, bytes) in from.bytes.chunks_exact(from.stride).enumerate() {
                to.write((high(page), 0), bytes).unwrap();
            }
        }
        operands.main.view.bind(&mut stream, &large).unwrap();
        operands.extra.as_mut().unwrap().view.bind(&mut stream, &large_extra).unwrap();
        let given = operands.run(&mut stream, &prepared);
        same_bits(&format!("{record:?} high pages"), &given, &needed);
    }
}

/// Every operation prepares: its probe runs and agrees with the oracle, and leaves nothing behind.
pub fn prepares<D: SparseDevice>(device: &D) {
    use mlakit::Category;
    for (index, record) in records().cycle().take(44).enumerate() {
        let heads = HEADS[index % HEADS.len()];
        let large = index % 3 == 0;
        let mut one = shape(heads, widths_of(record, large), [1, 70, 2048][index % 3], &[(500, 3)])
            .with_record(record, large);
        one.page_size = PAGES[index % 5];
        one.splits = SPLITS[index % 7];
        one.selection = [Selection::Positions, Selection::Slots][index / 2 % 2];
        one.sink = index % 2 == 0;
        one.sink_in_lse = index % 4 == 0;
        one.lse = [LseBase::Natural, LseBase::Base2][index / 3 % 2];
        one.partial = [Partial::Bf16, Partial::F32][index % 2];
        one.extra =
            (index % 4 == 1).then_some(Extra { record, page_size: 16, width: 9, tokens: 1 });
        prepare(device, &one.spec());
        assert_eq!(device.census().live(Category::Probe), 0, "{one:?}");
    }
    assert!(device.census().peak(Category::Probe) > 0);
}
