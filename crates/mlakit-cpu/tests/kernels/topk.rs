//! Streaming selection against a full sort, on scores that are hard to select from.

use mlakit::op::indexer::top_k;
use mlakit_cpu::kernel::topk::{Candidates, capacity, list_bytes, ordered, score_of};

use super::common::{Rng, kernels};

/// Scores by a name, so that a failure says which.
fn patterns(len: usize) -> Vec<(&'static str, Vec<f32>)> {
    let mut rng = Rng(len as u64);
    let mut of = |name, score: &mut dyn FnMut(usize, &mut Rng) -> f32| {
        (name, (0..len).map(|i| score(i, &mut rng)).collect())
    };
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    vec![
        of("random", &mut |_, rng| rng.normal()),
        of("all equal", &mut |_, _| 1.5),
        of("all NaN", &mut |_, _| nan),
        of("all -inf", &mut |_, _| -inf),
        of("rising", &mut |i, _| i as f32),
        of("falling", &mut |i, _| -(i as f32)),
        of("ten low bits", &mut |_, rng| f32::from_bits(1.0f32.to_bits() + rng.below(1024) as u32)),
        of("ten low bits, negative", &mut |_, rng| {
            -f32::from_bits(1.0f32.to_bits() + rng.below(1024) as u32)
        }),
        of("both zeros", &mut |_, rng| rng.pick(&[0.0, -0.0])),
        of("few values", &mut |_, rng| rng.pick(&[-1.0, -0.0, 0.0, 1.0, 2.0])),
        of("infinities and NaN", &mut |_, rng| rng.pick(&[inf, -inf, nan, -nan, 0.0, -0.0, 3.0])),
        of("mostly NaN", &mut |i, _| if i % 97 == 3 { i as f32 } else { nan }),
        of("NaN first", &mut |i, _| if i < 300 { nan } else { -(i as f32) }),
        of("denormal", &mut |_, rng| f32::from_bits(rng.below(1 << 20) as u32)),
        of("any bits", &mut |_, rng| f32::from_bits(rng.bits() as u32)),
        of("the best last", &mut |i, _| if i + 70 >= len { 9.0 } else { 1.0 }),
    ]
}

/// What a list selects, with its scores; the memory begins with garbage.
fn memory(topk: usize, keys: usize) -> Vec<i32> {
    vec![0x5a5a_5a5a; list_bytes(capacity(topk, keys)) / 4]
}

fn selected(list: &mut Candidates<'_>) -> (Vec<usize>, Vec<f32>) {
    let (positions, numbers) = list.finish();
    let positions = positions.iter().map(|position| *position as usize).collect();
    (positions, numbers.iter().map(|number| score_of(*number)).collect())
}

#[test]
fn streams_select_what_a_sort_selects() {
    for len in [1, 63, 64, 65, 1000, 5003] {
        for (name, scores) in patterns(len) {
            let wrapped: Vec<Option<f32>> = scores.iter().copied().map(Some).collect();
            for topk in [1, 2, 63, 64, 65, 511, 2048, 9999] {
                let needed = top_k(&wrapped, topk);
                for kernels in kernels() {
                    let what = format!("{name}, {topk} of {len}, {}", kernels.isa());
                    let mut memory = memory(topk, len);
                    let mut list = Candidates::in_memory(&mut memory, topk);
                    list.clear();
                    kernels.select(&mut list, &scores, 0);
                    let (positions, given) = selected(&mut list);
                    assert_eq!(positions, needed, "{what}");
                    for (position, score) in needed.iter().zip(given) {
                        assert_eq!(ordered(score), ordered(scores[*position]), "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn parts_join_to_the_same() {
    for len in [700, 6000] {
        for (name, scores) in patterns(len) {
            let wrapped: Vec<Option<f32>> = scores.iter().copied().map(Some).collect();
            for topk in [3, 100, 2048] {
                let needed = top_k(&wrapped, topk);
                for cuts in [vec![64], vec![0, 640, 640], vec![128, 192, 640]] {
                    let kernels = kernels()[1];
                    let mut bounds = [&[0][..], &cuts, &[len]].concat();
                    bounds.sort_unstable();
                    let mut lists: Vec<Vec<i32>> =
                        (1..bounds.len()).map(|_| memory(topk, len)).collect();
                    for (memory, part) in lists.iter_mut().zip(bounds.windows(2)) {
                        let mut list = Candidates::in_memory(memory, topk);
                        list.clear();
                        kernels.select(&mut list, &scores[part[0]..part[1]], part[0]);
                    }
                    let (first, rest) = lists.split_first_mut().unwrap();
                    let mut all = Candidates::in_memory(first, topk);
                    rest.iter_mut().for_each(|part| all.absorb(&Candidates::in_memory(part, topk)));
                    let what = format!("{name}, {topk} of {len} in {cuts:?}");
                    assert_eq!(selected(&mut all).0, needed, "{what}");
                }
            }
        }
    }
}

#[test]
fn memory_does_not_grow_with_the_stream() {
    let bytes = |keys| list_bytes(capacity(2048, keys));
    assert_eq!(bytes(1 << 20), bytes(1 << 30));
    assert!(bytes(1 << 30) <= 33 << 10, "{}", bytes(1 << 30));
    assert!(bytes(100) < bytes(4096));
}
