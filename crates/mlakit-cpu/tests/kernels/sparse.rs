//! Sparse attention kernels, among them those on emulated tiles: against f64, and against dense
//! attention over the same keys.

use std::sync::atomic::{AtomicU32, Ordering};

use half::bf16;
use mlakit::op::sparse::Columns;
use mlakit::{PageGeometry, RecordFormat, RecordLayout, RopePart};
use mlakit_cpu::kernel::{
    Attention, Geometry, Kernels, Lanes, List, LseBase, OutFormat, Output, Queries, QueryFormat,
    RecordCache, RecordRows, Sink, SparseCall, SparseItem,
};
use mlakit_cpu::numerics::bf16_to_f32;

use crate::common::{Rng, kernels};

/// One row over one cache, or two.
struct Case {
    geometry: Geometry,
    pools: Vec<Pool>,
    lists: [Vec<i32>; 2],
    queries: Vec<u16>,
    sink: Vec<f32>,
}

struct Pool {
    pages: PageGeometry,
    count: usize,
    bytes: Vec<u8>,
}

impl Pool {
    /// Pages whose tokens all have keys with scales that are powers of two.
    fn new(
        format: RecordFormat,
        (qk, value): (usize, usize),
        page_size: usize,
        rng: &mut Rng,
    ) -> Pool {
        let pages = PageGeometry { record: RecordLayout::of_key(format, qk, value), page_size };
        let count = 700_usize.div_ceil(page_size);
        let mut bytes = vec![0xff; count * pages.payload_bytes()];
        for token in 0..count * page_size {
            let mut number = || bf16::from_f32((0.7 * rng.normal()).clamp(-3.5, 3.5));
            let mut key: Vec<bf16> = (0..qk).map(|_| number()).collect();
            key[rng.below(value.min(qk - 1))] = bf16::from_f32(5.25);
            key[qk - 1] = bf16::from_f32(3.5);
            let page = &mut bytes[token / page_size * pages.payload_bytes()..];
            pages.planes().encode(pages.record, (page, token % page_size), [&key, &[]], 1.0);
        }
        Pool { pages, count, bytes }
    }

    fn key(&self, slot: i32) -> Option<Vec<f32>> {
        let slot = usize::try_from(slot).ok()?;
        let (page, token) = (slot / self.pages.page_size, slot % self.pages.page_size);
        let bytes =
            (page < self.count).then(|| &self.bytes[page * self.pages.payload_bytes()..])?;
        let mut key = vec![0.0; self.pages.record.width];
        self.pages.planes().decode(self.pages.record, (bytes, token), 1.0, &mut key);
        Some(key)
    }

    fn cache(&self, qk_width: usize) -> RecordCache {
        let planes = self.pages.planes();
        RecordCache {
            base: self.bytes.as_ptr(),
            pages: self.count,
            page_size: self.pages.page_size,
            page_stride_bytes: self.pages.payload_bytes() as u64,
            data: planes.data,
            scales: planes.scales,
            rows: RecordRows::new(self.pages.record, qk_width, None),
        }
    }
}

fn case(
    heads: usize,
    formats: &[RecordFormat],
    (qk, value): (usize, usize),
    lists: [usize; 2],
    seed: u64,
) -> Case {
    let mut rng = Rng(seed);
    let pools =
        formats.iter().map(|format| Pool::new(*format, (qk, value), 16, &mut rng)).collect();
    let lists = lists.map(|len| {
        let mut entry = || match rng.below(7) {
            0 => -1,
            1 => 700 + rng.below(100_000) as i32 + 64,
            _ => rng.below(700) as i32,
        };
        (0..len).map(|_| entry()).collect()
    });
    Case {
        geometry: Geometry { heads, qk_width: qk, value_width: value },
        pools,
        lists,
        queries: rng.bf16_vec(heads * qk, 1.0),
        sink: (0..heads).map(|head| head as f32 / 4.0 - 1.0).collect(),
    }
}

impl Case {
    fn columns(&self) -> Columns {
        Columns { main: self.lists[0].len(), extra: self.lists[1].len() }
    }

    fn scale(&self) -> f32 {
        1.0 / (self.geometry.qk_width as f32).sqrt()
    }

    /// Outputs and base-2 log-sum-exps in f64.
    fn exact(&self, sink: bool) -> (Vec<f64>, Vec<f64>) {
        let Geometry { heads, qk_width, value_width } = self.geometry;
        let of = |scope: usize| {
            let pool = &self.pools[scope.min(self.pools.len() - 1)];
            self.lists[scope].iter().filter_map(|slot| pool.key(*slot)).collect::<Vec<_>>()
        };
        let keys: Vec<Vec<f32>> = (0..2).flat_map(of).collect();
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        for head in 0..heads {
            let query = &self.queries[head * qk_width..(head + 1) * qk_width];
            let score = |key: &Vec<f32>| {
                let dot: f64 = query
                    .iter()
                    .zip(key)
                    .map(|(q, k)| f64::from(bf16_to_f32(*q)) * f64::from(*k))
                    .sum();
                dot * f64::from(self.scale())
            };
            let scores: Vec<f64> = keys.iter().map(score).collect();
            let sum: f64 = scores.iter().map(|score| score.exp()).sum();
            let all = sum + if sink { f64::from(self.sink[head]).exp() } else { 0.0 };
            for element in 0..value_width {
                let total: f64 =
                    keys.iter().zip(&scores).map(|(k, s)| s.exp() * f64::from(k[element])).sum();
                out.push(if sum > 0.0 { total / all } else { 0.0 });
            }
            lse.push(sum.log2());
        }
        (out, lse)
    }

    /// Runs in scratch full of NaN, at an odd address, in two parts of the heads.
    fn run(&self, kernels: Kernels, sink: bool) -> (Vec<f32>, Vec<f32>, u32) {
        let Geometry { heads, qk_width, value_width } = self.geometry;
        let faults = AtomicU32::new(0);
        let mut out = vec![bf16::NAN; heads * value_width];
        let mut lse = vec![f32::NAN; heads];
        let sink = sink.then_some(Sink {
            logits: self.sink.as_ptr(),
            in_lse: false,
            partial: OutFormat::F32,
        });
        let call = SparseCall {
            attention: Attention {
                geometry: self.geometry,
                queries: Queries { base: self.queries.as_ptr().cast(), format: QueryFormat::Bf16 },
                score_scale_log2: Attention::score_scale(self.scale(), 1.0, 1.0),
                value_scale: 1.0,
                sink,
            },
            caches: [0, self.pools.len() - 1].map(|pool| self.pools[pool].cache(qk_width)),
            faults: &faults,
        };
        let half = heads.div_ceil(2);
        for part in [0..half, half..heads].into_iter().filter(|part| !part.is_empty()) {
            let columns = self.columns();
            let item = SparseItem {
                counts_faults: part.start == 0,
                lanes: Lanes {
                    rows: 0..1,
                    heads: part,
                    out: Output {
                        values: out.as_mut_ptr().cast(),
                        format: OutFormat::Bf16,
                        lse: lse.as_mut_ptr(),
                        lse_base: LseBase::Two,
                    },
                },
                lists: self.lists.each_ref().map(|list| List::Slots { entries: list.as_ptr() }),
                columns,
                range: 0..columns.end(),
            };
            let bytes = kernels.sparse_scratch_bytes(self.geometry, item.lanes.heads.len());
            let mut scratch = vec![0xff_u8; bytes + 65];
            // SAFETY: inputs and outputs are those of the case, the scratch is as long as was asked.
            unsafe { kernels.sparse(&call, &item, scratch.as_mut_ptr().add(1)) };
            assert!(scratch[bytes + 1..].iter().all(|b| *b == 0xff), "wrote past the scratch");
        }
        let out = out.into_iter().map(bf16::to_f32).collect();
        (out, lse, faults.load(Ordering::Relaxed))
    }

    #[track_caller]
    fn check(&self, kernels: Kernels, sink: bool, what: &str) {
        let (out, lse, faults) = self.run(kernels, sink);
        let (needed, needed_lse) = self.exact(sink);
        let bad = |(scope, list): (usize, &Vec<i32>)| {
            let pool = &self.pools[scope.min(self.pools.len() - 1)];
            list.iter().filter(|slot| **slot >= 0 && pool.key(**slot).is_none()).count() as u32
        };
        assert_eq!(faults, self.lists.iter().enumerate().map(bad).sum(), "{what}: faults");
        for (head, (g, n)) in lse.iter().zip(&needed_lse).enumerate() {
            let same = f64::from(*g) == *n || (f64::from(*g) - n).abs() <= 3e-5 + 1e-6 * n.abs();
            assert!(same, "{what}: lse of head {head} is {g}, needed {n}");
        }
        let width = self.geometry.value_width;
        for (head, (given, needed)) in out.chunks(width).zip(needed.chunks(width)).enumerate() {
            let size = (needed.iter().map(|n| n * n).sum::<f64>() / width as f64).sqrt();
            for (i, (g, n)) in given.iter().zip(needed).enumerate() {
                let close = (f64::from(*g) - n).abs() <= n.abs() / 128.0 + size / 64.0 + 1e-6;
                assert!(close, "{what}: head {head} element {i} is {g}, needed {n}");
            }
        }
    }
}

fn widths(format: RecordFormat) -> (usize, usize) {
    match (format, format.rope()) {
        (RecordFormat::V4_584, _) => (192, 192),
        (_, RopePart::Apart) => (154, 128),
        (RecordFormat::V41_528 | RecordFormat::V41_288, _) => (96, 96),
        (_, RopePart::Absent) => (128, 128),
        _ => (66, 34),
    }
}

#[test]
fn every_record_on_every_instruction_set() {
    for format in RecordFormat::ALL.into_iter().filter(|format| !format.is_index()) {
        for (len, seed) in [(1, 1), (64, 2), (257, 3), (600, 4)] {
            for heads in [1, 16, 37] {
                let case = case(heads, &[format], widths(format), [len, 0], seed);
                for kernels in kernels() {
                    let what = format!("{} {kernels:?} {len} entries", format.name());
                    case.check(kernels, len == 64, &what);
                }
            }
        }
    }
}

#[test]
fn two_scopes_on_every_instruction_set() {
    let formats = [RecordFormat::V4_584, RecordFormat::Bf16];
    for lists in [[300, 90], [0, 90], [300, 0], [64, 64], [63, 1], [0, 0]] {
        let case = case(19, &formats, (192, 192), lists, 5);
        for kernels in kernels() {
            case.check(kernels, true, &format!("{kernels:?} {lists:?}"));
        }
    }
}

#[test]
fn real_widths() {
    for (format, widths) in [
        (RecordFormat::Bf16, (576, 512)),
        (RecordFormat::Fp8_656, (576, 512)),
        (RecordFormat::V4_584, (512, 512)),
        (RecordFormat::Nvfp4_304, (512, 512)),
    ] {
        let case = case(33, &[format], widths, [400, 0], 6);
        for kernels in kernels() {
            case.check(kernels, false, &format!("{} {kernels:?}", format.name()));
        }
    }
}

/// Unused entries change no bit, wherever in their block they stand.
#[test]
fn unused_entries_are_nothing() {
    let with = case(5, &[RecordFormat::Bf16], (66, 34), [60, 0], 7);
    let mut without = case(5, &[RecordFormat::Bf16], (66, 34), [60, 0], 7);
    without.lists[0].retain(|slot| with.pools[0].key(*slot).is_some());
    for kernels in kernels() {
        let (a, b) = (with.run(kernels, false), without.run(kernels, false));
        assert!(a.2 > 0 && b.2 == 0);
        assert_eq!((a.0, a.1), (b.0, b.1), "{kernels:?}");
    }
}
