//! Dense attention by each family of kernels: what the suite shows with small widths, with those of
//! the kernel for Hopper. Where the GPU is no Hopper, that family has nothing to show.

use half::bf16;
use mlakit::op::merge::Partial;
use mlakit::paging::ViewWords;
use mlakit::{Buffer, Category, LseBase, Splits};
use mlakit_cuda::{Cuda, DenseFamily, Options};

use super::cuda_with;
use super::suite::compare::{dense_agrees, same_bits};
use super::suite::dense::{counts_with_widths, sees_no_gap};
use super::suite::dense_inputs::{DenseInputs, DenseShape, shape};
use super::suite::dense_run::{Operands, prepare, run, run_prepared};
use super::suite::invariance::knows_no_company;
use super::suite::random::{Deck, Rng};

const WIDTHS: (usize, usize) = (576, 512);

/// Runs a test on a device of each family that the GPU has.
fn each_family(test: impl Fn(&Cuda)) {
    for family in DenseFamily::ALL {
        let options = Options { dense: Some(family), ..Options::from_environment() };
        let Some(device) = cuda_with(options) else { return };
        let facts = mlakit::Device::facts(&device);
        if family == DenseFamily::Portable || facts.capability == (9, 0) {
            assert_eq!(kernel(&device), family.name());
            test(&device);
        }
    }
}

/// The family of the kernel that a plan has.
fn kernel(device: &Cuda) -> String {
    let prepared = prepare(device, &shape(2, WIDTHS, &[(70, 1)]).spec());
    prepared.plan().choice().kernel.split('_').next().unwrap().to_string()
}

/// Products of a query element and a key element that a case may cost.
const WORK: usize = 12_000_000;
const CASES: u64 = 36;

/// A case of everything that the kernel for Hopper takes.
fn sampled(rng: &mut Rng, decks: &mut (Deck<usize>, Deck<(usize, usize)>)) -> DenseShape {
    let widths = rng.pick(&[WIDTHS, WIDTHS, (512, 512)]);
    let mut sampled = shape(decks.0.deal(rng), widths, &[]);
    sampled.page_size = rng.pick(&[1, 16, 32, 48, 64, 256]);
    let fixed = [64, 192, 1024].map(Splits::FixedTokens);
    sampled.splits = rng.pick(&[Splits::Auto, Splits::Auto, fixed[0], fixed[1], fixed[2]]);
    sampled.partial = rng.pick(&[Partial::Bf16, Partial::F32]);
    sampled.lse = rng.pick(&[LseBase::Natural, LseBase::Base2]);
    sampled.padding = rng.pick(&[(0, 0), (8, 0), (0, 10), (32, 256)]);
    sampled.padding_rows = rng.pick(&[0, 0, 2]);
    sampled.row_lengths = rng.chance(4);
    sampled.slack = rng.pick(&[1, 3]);
    sampled.bad_pages = rng.chance(4);
    let wanted = 1 + rng.below(5);
    for _ in 0..wanted + 8 {
        let mut with = sampled.clone();
        with.requests.push(decks.1.deal(rng));
        if with.work() <= WORK {
            sampled = with;
        }
        if sampled.requests.len() == wanted {
            break;
        }
    }
    if sampled.requests.is_empty() {
        sampled.requests.push((65, 1));
    }
    sampled
}

#[test]
fn each_family_agrees_with_the_oracle() {
    let lengths = [0, 1, 63, 64, 65, 700, 2049, 4097];
    let pairs: Vec<_> = lengths.into_iter().flat_map(|t| [1, 2, 5, 40].map(|r| (t, r))).collect();
    each_family(|device| {
        let mut rng = Rng(0xfa01);
        let mut decks = (Deck::new(&[1, 3, 8, 11, 16, 99, 128]), Deck::new(&pairs));
        for seed in 0..CASES {
            let shape = sampled(&mut rng, &mut decks);
            let inputs = DenseInputs::new(&shape, seed);
            let prepared = prepare(device, &inputs.spec);
            let division = prepared.plan().division();
            let needed = inputs.oracle(division);
            let given = run_prepared(device, &prepared, &inputs);
            dense_agrees(&inputs, division, (&given, &needed));
        }
    });
}

/// More tiles than blocks, the same number of tiles in every request, and one request that has many
/// among others that have one.
#[test]
fn each_family_divides_tiles() {
    let even = vec![(130, 1); 40];
    let mut uneven = vec![(90, 1); 30];
    uneven.insert(7, (70, 24));
    let long = vec![(2000, 3), (65, 1)];
    each_family(|device| {
        for (heads, requests) in [(128, &even), (16, &uneven), (129, &uneven), (40, &long)] {
            for splits in [Splits::Auto, Splits::FixedTokens(64)] {
                let mut shape = shape(heads, WIDTHS, requests);
                (shape.splits, shape.page_size, shape.padding_rows) = (splits, 64, 1);
                let inputs = DenseInputs::new(&shape, 77);
                let prepared = prepare(device, &inputs.spec);
                let division = prepared.plan().division();
                let given = run_prepared(device, &prepared, &inputs);
                dense_agrees(&inputs, division, (&given, &inputs.oracle(division)));
            }
        }
    });
}

#[test]
fn each_family_counts_what_is_out_of_bounds() {
    each_family(|device| counts_with_widths(device, WIDTHS));
}

#[test]
fn each_family_sees_only_what_is_referred_to() {
    each_family(|device| {
        for (row_lengths, splits) in [
            (false, Splits::Auto),
            (true, Splits::Auto),
            (false, Splits::FixedTokens(64)),
            (true, Splits::FixedTokens(64)),
        ] {
            for (heads, padding) in [(5, (8, 32)), (40, (8, 34))] {
                let mut shape = shape(heads, WIDTHS, &[(131, 3), (0, 1), (65, 1), (200, 5)]);
                (shape.row_lengths, shape.splits, shape.padding) = (row_lengths, splits, padding);
                (shape.page_size, shape.padding_rows) = (48, 1);
                sees_no_gap(device, &shape);
            }
        }
    });
}

#[test]
fn each_family_with_fixed_splits_knows_no_company() {
    let requests = [(300, 5), (65, 1), (0, 1), (64, 2), (2000, 20), (1, 1)];
    each_family(|device| {
        for (heads, partial, tokens) in [
            (5, Partial::Bf16, 64),
            (16, Partial::F32, 128),
            (16, Partial::Bf16, 512),
            (99, Partial::Bf16, 256),
        ] {
            let mut shape = shape(heads, WIDTHS, &requests);
            (shape.partial, shape.splits) = (partial, Splits::FixedTokens(tokens));
            knows_no_company(device, &shape);
        }
    });
}

/// A NaN in a key makes the rows that see it NaN, however the keys are divided, and no others.
#[test]
fn each_family_keeps_a_nan_with_the_rows_that_see_it() {
    const ROWS: usize = 40;
    each_family(|device| {
        for (heads, splits) in
            [(3, Splits::Auto), (3, Splits::FixedTokens(64)), (16, Splits::FixedTokens(128))]
        {
            let mut shape = shape(heads, WIDTHS, &[(150, ROWS)]);
            shape.splits = splits;
            let clean = DenseInputs::new(&shape, 9);
            let needed = run(device, &clean);
            for position in [70, 111, 128, 149] {
                let mut poisoned = clean.clone();
                let first = clean.record(0, position).unwrap();
                let bytes = clean.spec.pages().record.bytes();
                poisoned.cache[first..first + bytes].fill(0xff);
                let given = run(device, &poisoned);
                for row in 0..ROWS {
                    let outs = row * heads * 512..(row + 1) * heads * 512;
                    let (given, needed) = (&given.out[outs.clone()], &needed.out[outs]);
                    let sees = clean.keys(0, row).contains(&position);
                    let all_nan = given.iter().all(|v| v.is_nan());
                    let what = format!("{heads} heads, {splits:?}, key {position}, row {row}");
                    assert!(if sees { all_nan } else { given == needed }, "{what}");
                }
            }
        }
    });
}

/// Equal keys give their value to the last bit, whatever the splits.
#[test]
fn each_family_gives_the_value_of_equal_keys() {
    each_family(|device| {
        for splits in [Splits::Auto, Splits::FixedTokens(64), Splits::FixedTokens(256)] {
            for heads in [5, 128] {
                let mut shape = shape(heads, WIDTHS, &[(450, 1)]);
                shape.splits = splits;
                let mut inputs = DenseInputs::new(&shape, 41);
                let value = |i: usize| bf16::from_f32(1.0 + (i * 7 % 128) as f32 / 128.0);
                let key: Vec<_> = (0..576).map(value).collect();
                inputs.q.fill(bf16::from_f32(0.03));
                for position in 0..450 {
                    let first = inputs.record(0, position).unwrap();
                    inputs.cache[first..first + 1152].copy_from_slice(bytemuck::cast_slice(&key));
                }
                for (index, out) in run(device, &inputs).out.into_iter().enumerate() {
                    assert_eq!(out, value(index % 512), "{heads} heads, {splits:?}, at {index}");
                }
            }
        }
    });
}

/// Pools whose address and strides are multiples of 16 bytes have a tensor map in their view on a
/// Hopper GPU: without one its kernel gives the same results, at a tenth of the speed.
#[test]
fn aligned_pools_have_a_tensor_map() {
    let Some(device) = cuda_with(Options::from_environment()) else { return };
    let mapped = |page_size: usize, (offset, stride): (u64, u64)| {
        let mut shape = shape(1, WIDTHS, &[(1, 1)]);
        shape.page_size = page_size;
        let memory = Buffer::<u8, Cuda>::zeroed(&device, (Category::Tensors, "pool"), 1 << 20);
        let words = ViewWords {
            base: memory.unwrap().address() + offset,
            pages: 3,
            page_stride_bytes: page_size as u64 * 1152 + stride,
        };
        let view = mlakit::Device::view(&device, shape.spec().pages(), words).unwrap();
        assert_eq!(&view[..ViewWords::BYTES], &words.to_bytes());
        (view[24], view[128..].iter().any(|byte| *byte != 0))
    };
    let is_hopper = mlakit::Device::facts(&device).capability == (9, 0);
    for page_size in [16, 48, 64, 256] {
        assert_eq!(mapped(page_size, (0, 0)), (u8::from(is_hopper), is_hopper), "{page_size}");
        assert_eq!(mapped(page_size, (16, 32)), (u8::from(is_hopper), is_hopper), "{page_size}");
        assert_eq!(mapped(page_size, (2, 0)), (0, false), "{page_size}");
        assert_eq!(mapped(page_size, (0, 34)), (0, false), "{page_size}");
    }
    assert_eq!(mapped(1, (0, 0)), (0, false));
}

/// The words of a lane that the blocks of a launch meet in are left as they were found: calls in one
/// lane, of one plan and another, repeat themselves whatever lies behind the fault block.
#[test]
fn each_family_repeats_itself_in_one_lane() {
    each_family(|device| {
        let caller = mlakit::Device::own_stream(device).unwrap();
        let mut stream = mlakit::Device::stream(device, &caller).unwrap();
        for partial in [Partial::Bf16, Partial::F32] {
            let mut shape = shape(16, WIDTHS, &[(5000, 1), (63, 4), (0, 1), (2049, 2)]);
            (shape.partial, shape.page_size) = (partial, 64);
            let inputs = DenseInputs::new(&shape, 11);
            let prepared = prepare(device, &inputs.spec);
            let mut operands = Operands::new(&mut stream, &inputs, &prepared);
            let needed = operands.run(&mut stream, &prepared);
            for repeat in 1..20 {
                operands.lane.poison(repeat * 13).unwrap();
                let given = operands.run(&mut stream, &prepared);
                same_bits(&format!("repeat {repeat}, {partial:?}"), &given, &needed);
            }
        }
    });
}
