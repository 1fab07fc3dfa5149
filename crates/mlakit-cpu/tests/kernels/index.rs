//! The kernel of an indexer, on every instruction set and on emulated tiles, against plain code.

use half::bf16;
use mlakit::op::indexer::top_k;
use mlakit::{RecordFormat, RecordLayout};
use mlakit_cpu::kernel::topk::{Candidates, capacity, list_bytes, score_of};
use mlakit_cpu::kernel::{IndexCache, IndexCall, IndexFormat, IndexItem, Kernels, MAX_ITEM_ROWS};

use super::common::{Rng, kernels};

const FORMATS: [(RecordFormat, IndexFormat); 3] = [
    (RecordFormat::IndexBf16_256, IndexFormat::Bf16),
    (RecordFormat::IndexFp8_132, IndexFormat::E4m3),
    (RecordFormat::IndexMxfp4_68, IndexFormat::E2m1),
];

/// Queries, weights and a cache of one request.
struct Inputs {
    heads: usize,
    width: usize,
    page_size: usize,
    format: IndexFormat,
    layout: RecordLayout,
    queries: Vec<bf16>,
    weights: Vec<f32>,
    cache: Vec<u8>,
    table: Vec<i32>,
    /// The values of every key whose page is there.
    keys: Vec<Option<Vec<f32>>>,
}

impl Inputs {
    /// Whole numbers where `exact`; the second page of three or more is out of the pool. What no key
    /// owns is NaN.
    fn new(
        (record, format): (RecordFormat, IndexFormat),
        (heads, width, page_size): (usize, usize, usize),
        (keys, exact): (usize, bool),
        rng: &mut Rng,
    ) -> Self {
        let layout = RecordLayout::of(record, width, 0);
        let planes = layout.planes(page_size);
        let (pages, stride) = (keys.div_ceil(page_size) + 1, page_size * layout.bytes() + 32);
        let mut element = || match exact {
            true => bf16::from_f32(rng.below(3) as f32 - 1.0),
            false => bf16::from_f32(rng.normal()),
        };
        let queries = (0..MAX_ITEM_ROWS * heads * width).map(|_| element()).collect();
        let mut cache = vec![0xff; pages * stride];
        let mut table: Vec<i32> = (0..pages as i32 - 1).rev().collect();
        if table.len() > 2 {
            table[1] = pages as i32;
        }
        let mut values = Vec::new();
        for position in 0..keys {
            let key: Vec<bf16> = (0..width).map(|_| element()).collect();
            let page = table[position / page_size] as usize;
            if page >= pages {
                values.push(None);
                continue;
            }
            let bytes = &mut cache[page * stride..(page + 1) * stride];
            let (data, scales) = bytes.split_at_mut(planes.scales.first);
            let at = position % page_size * planes.scales.stride;
            let data = &mut data[planes.data.token(position % page_size)];
            let scales = &mut scales[at..at + planes.scales.bytes];
            layout.encode(data, scales, &key, 1.0);
            let mut value = vec![0.0; width];
            layout.decode(data, scales, 1.0, &mut value);
            values.push(Some(value));
        }
        let weight = |rng: &mut Rng| if exact { rng.below(7) as f32 - 3.0 } else { rng.normal() };
        let weights = (0..MAX_ITEM_ROWS * heads).map(|_| weight(rng)).collect();
        Self {
            heads,
            width,
            page_size,
            format,
            layout,
            queries,
            weights,
            cache,
            table,
            keys: values,
        }
    }

    fn call(&self) -> IndexCall {
        let planes = self.layout.planes(self.page_size);
        let stride = self.page_size * self.layout.bytes() + 32;
        IndexCall {
            heads: self.heads,
            width: self.width,
            cache: IndexCache {
                base: self.cache.as_ptr(),
                pages: self.cache.len() / stride,
                page_size: self.page_size,
                page_stride_bytes: stride as u64,
                data_stride: planes.data.stride,
                scales_first: planes.scales.first,
                scales_stride: planes.scales.stride,
                format: self.format,
            },
        }
    }

    /// The scores of a row, in f64.
    fn scores(&self, row: usize, end: usize) -> Vec<Option<f64>> {
        let score = |key: &Vec<f32>| -> f64 {
            let head = |head: usize| {
                let at = (row * self.heads + head) * self.width;
                let query = &self.queries[at..at + self.width];
                let dot: f64 = query.iter().zip(key).map(|(q, k)| q.to_f64() * f64::from(*k)).sum();
                f64::from(self.weights[row * self.heads + head]) * dot.max(0.0)
            };
            (0..self.heads).map(head).sum()
        };
        self.keys[..end].iter().map(|key| key.as_ref().map(score)).collect()
    }

    /// Positions and scores that each row selects, of keys in two items.
    fn run(&self, kernels: Kernels, topk: usize, ends: &[usize]) -> Vec<(Vec<usize>, Vec<f32>)> {
        let call = self.call();
        let most = ends.iter().copied().max().unwrap();
        let words = list_bytes(capacity(topk, most)) / 4;
        let mut memory = vec![vec![0x7fff_ffff; words]; ends.len()];
        let mut each = memory.iter_mut();
        let mut lists: [Candidates<'_>; MAX_ITEM_ROWS] =
            std::array::from_fn(|_| match each.next() {
                Some(memory) => Candidates::in_memory(memory, topk),
                None => Candidates::none(),
            });
        lists.iter_mut().take(ends.len()).for_each(Candidates::clear);
        let mut scratch = vec![0xff_u8; kernels.index_scratch_bytes(&call, ends.len())];
        let middle = (most / 2).next_multiple_of(64).min(most);
        for keys in [0..middle, middle..most] {
            let mut all = [0; MAX_ITEM_ROWS];
            all[..ends.len()].copy_from_slice(ends);
            let item = IndexItem {
                page_table: self.table.as_ptr(),
                keys,
                rows: ends.len(),
                ends: all,
                queries: self.queries.as_ptr().cast(),
                weights: self.weights.as_ptr(),
                scored: true,
            };
            // SAFETY: the pointers are those of these inputs, whose table covers the keys; the scratch is
            // as long as asked for.
            unsafe { kernels.index(&call, &item, &mut lists, scratch.as_mut_ptr()) };
        }
        let finish = |list: &mut Candidates<'_>| {
            let (positions, numbers) = list.finish();
            let positions = positions.iter().map(|at| *at as usize).collect();
            (positions, numbers.iter().map(|number| score_of(*number)).collect())
        };
        lists.iter_mut().take(ends.len()).map(finish).collect()
    }
}

/// Exact scores: the same positions and scores on every machine, in every format.
#[test]
fn whole_numbers_are_exact_everywhere() {
    let mut rng = Rng(6);
    for format in FORMATS {
        for (heads, width, page_size, keys) in [
            (1, 32, 1, 70),
            (3, 64, 16, 200),
            (16, 96, 48, 130),
            (17, 128, 64, 333),
            (64, 128, 64, 1000),
            (40, 32, 16, 15),
        ] {
            let inputs = Inputs::new(format, (heads, width, page_size), (keys, true), &mut rng);
            for ends in
                [&[keys][..], &[keys - 2, keys - 1, keys], &[1, keys / 3, 0, keys, 64.min(keys)]]
            {
                for topk in [1, 40, 700] {
                    for kernels in kernels() {
                        let given = inputs.run(kernels, topk, ends);
                        for (row, (end, (positions, scores))) in ends.iter().zip(given).enumerate()
                        {
                            let exact = inputs.scores(row, *end);
                            let narrow: Vec<_> =
                                exact.iter().map(|s| s.map(|s| s as f32)).collect();
                            let what =
                                format!("{} {format:?} {heads} {width} {row}", kernels.isa());
                            assert_eq!(positions, top_k(&narrow, topk), "{what}");
                            for (position, score) in positions.iter().zip(scores) {
                                assert_eq!(f64::from(score), exact[*position].unwrap(), "{what}");
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Widths that fill no product of tiles, where the format allows.
#[test]
fn widths_between() {
    let mut rng = Rng(8);
    for (format, width) in [(FORMATS[0], 2), (FORMATS[0], 50), (FORMATS[1], 36), (FORMATS[1], 4)] {
        let inputs = Inputs::new(format, (5, width, 16), (150, true), &mut rng);
        for kernels in kernels() {
            let (positions, _) = inputs.run(kernels, 20, &[150]).remove(0);
            let exact = inputs.scores(0, 150);
            let narrow: Vec<_> = exact.iter().map(|s| s.map(|s| s as f32)).collect();
            assert_eq!(positions, top_k(&narrow, 20), "{} {width}", kernels.isa());
        }
    }
}

/// Ordinary numbers: every score within the error of an F32 sum. Those without tiles give one result.
#[test]
fn ordinary_scores_are_close_and_those_of_vectors_equal() {
    let mut rng = Rng(7);
    for format in FORMATS {
        let inputs = Inputs::new(format, (24, 128, 64), (300, false), &mut rng);
        let exact = inputs.scores(0, 300);
        let size: f64 = inputs.weights[..24].iter().map(|w| f64::from(w.abs())).sum();
        let mut vectors: Option<Vec<u32>> = None;
        for kernels in kernels() {
            let (positions, scores) = inputs.run(kernels, 300, &[300]).remove(0);
            for (position, score) in positions.iter().zip(&scores) {
                let needed = exact[*position].unwrap();
                let error = (f64::from(*score) - needed).abs();
                assert!(
                    error <= size * 40.0 * 1e-6,
                    "{} {position}: {score} {needed}",
                    kernels.isa()
                );
            }
            if kernels.isa() != mlakit_cpu::isa::Isa::Amx {
                let bits: Vec<u32> = scores.iter().map(|score| score.to_bits()).collect();
                let first = vectors.get_or_insert_with(|| bits.clone());
                assert_eq!(*first, bits, "{} {format:?}", kernels.isa());
            }
        }
    }
}
