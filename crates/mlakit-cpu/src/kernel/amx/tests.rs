//! The unit of the machine against the one in plain code.

use super::*;

/// Three operands of a product as bits.
struct Operands {
    a: [u32; TILE_WORDS],
    b: [u32; TILE_WORDS],
    c: [u32; TILE_WORDS],
}

/// What a unit makes of operands: `C + A B`, then one product more on top of it.
fn products<U: TileUnit>(unit: &mut U, operands: &Operands) -> [u32; TILE_WORDS] {
    let mut out = [0; TILE_WORDS];
    unit.configure();
    // SAFETY: configured, and every operand is a tile.
    unsafe {
        unit.load::<1>(operands.a.as_ptr().cast(), ROW_BYTES);
        unit.load::<2>(operands.b.as_ptr().cast(), ROW_BYTES);
        unit.load::<7>(operands.c.as_ptr().cast(), ROW_BYTES);
        unit.dot::<7, 1, 2>();
        unit.dot::<7, 2, 1>();
        unit.store::<7>(out.as_mut_ptr().cast(), ROW_BYTES);
    }
    unit.release();
    out
}

/// A generator of bits (splitmix64).
fn bits(seed: &mut u64) -> u32 {
    *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *seed;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z >> 32) as u32
}

/// Pairs of BF16 whose exponents lie in a range around 0, or anywhere.
fn pairs(seed: &mut u64, spread: u32) -> [u32; TILE_WORDS] {
    std::array::from_fn(|_| {
        let half = |bits: u32| match spread {
            0 => bits & 0xffff,
            spread => (bits & 0x807f) | (127 - spread / 2 + (bits >> 16) % spread) << 7,
        };
        half(bits(seed)) << 16 | half(bits(seed))
    })
}

fn operands(seed: u64, spread: u32) -> Operands {
    let mut seed = seed;
    let (a, b) = (pairs(&mut seed, spread), pairs(&mut seed, spread));
    let c = std::array::from_fn(|_| match spread {
        0 => bits(&mut seed),
        _ => (bits(&mut seed) as i32 as f32 / (1_u64 << 31) as f32).to_bits(),
    });
    Operands { a, b, c }
}

/// All NaN alike.
fn canonical(bits: u32) -> u32 {
    if f32::from_bits(bits).is_nan() { 0x7fc0_0000 } else { bits }
}

#[test]
fn a_product_of_small_integers_is_exact() {
    let bf16 = |x: i32| (x as f32).to_bits() >> 16;
    let pair = |x: i32, y: i32| bf16(y) << 16 | bf16(x);
    let element = |i: usize, k: usize| (i * 7 + k * 3) as i32 % 11 - 5;
    let mut operands =
        Operands { a: [0; TILE_WORDS], b: [0; TILE_WORDS], c: [1.0_f32.to_bits(); TILE_WORDS] };
    for i in 0..TILE {
        for k in 0..TILE {
            operands.a[i * TILE + k] = pair(element(i, 2 * k), element(i, 2 * k + 1));
            operands.b[k * TILE + i] = pair(element(3 * i, 2 * k), element(3 * i, 2 * k + 1));
        }
    }
    let mut unit = Emulated::new();
    let mut out = [0; TILE_WORDS];
    unit.configure();
    // SAFETY: configured, and every operand is a tile.
    unsafe {
        unit.load::<0>(operands.a.as_ptr().cast(), ROW_BYTES);
        unit.load::<1>(operands.b.as_ptr().cast(), ROW_BYTES);
        unit.load::<2>(operands.c.as_ptr().cast(), ROW_BYTES);
        unit.dot::<2, 0, 1>();
        unit.store::<2>(out.as_mut_ptr().cast(), ROW_BYTES);
    }
    for m in 0..TILE {
        for n in 0..TILE {
            let sum: i32 = (0..DEPTH).map(|k| element(m, k) * element(3 * n, k)).sum();
            assert_eq!(f32::from_bits(out[m * TILE + n]), (sum + 1) as f32, "[{m},{n}]");
        }
    }
}

#[test]
fn the_transpose_changes_rows_and_columns() {
    let words: [u32; TILE_WORDS] = std::array::from_fn(|i| i as u32 * 0x0101_0101);
    let mut out = [0; TILE_WORDS];
    // SAFETY: both are tiles.
    unsafe { Emulated::new().transpose(&rows_from(words.as_ptr().cast(), 64), out.as_mut_ptr()) };
    for i in 0..TILE_WORDS {
        assert_eq!(out[i], words[i % TILE * TILE + i / TILE], "word {i}");
    }
}

#[cfg(target_arch = "x86_64")]
mod machine {
    use super::*;
    use crate::isa::Isa;
    use crate::kernel::engine::Engine;

    /// The unit of this machine.
    fn unit() -> Option<Amx> {
        if !Isa::Amx.is_available() {
            println!("skipped: this machine has no amx");
            return None;
        }
        // SAFETY: it is available.
        Some(unsafe { Amx::assume() })
    }

    #[test]
    fn products_have_the_bits_of_plain_code() {
        let Some(mut unit) = unit() else { return };
        for spread in [2, 8, 40, 160, 254, 0] {
            for seed in 0..200 {
                let operands = operands(seed, spread);
                let given = products(&mut unit, &operands).map(canonical);
                let needed = products(&mut Emulated::new(), &operands).map(canonical);
                let differs = (0..TILE_WORDS).find(|&i| given[i] != needed[i]);
                if let Some(i) = differs {
                    panic!(
                        "spread {spread} seed {seed} [{},{}]: {:#010x}, plain code {:#010x}",
                        i / TILE,
                        i % TILE,
                        given[i],
                        needed[i]
                    );
                }
            }
        }
    }

    #[test]
    fn layouts_are_those_of_plain_code() {
        let Some(unit) = unit() else { return };
        layouts(&unit);
    }

    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
    fn compare(unit: &Amx) {
        let plain = Emulated::new();
        for seed in 0..50 {
            let words = operands(seed, 60).a;
            let rows = rows_from(words.as_ptr().cast(), ROW_BYTES);
            let (mut given, mut needed) = ([0; TILE_WORDS], [0; TILE_WORDS]);
            // SAFETY: all are tiles.
            unsafe { unit.transpose(&rows, given.as_mut_ptr()) };
            // SAFETY: as above.
            unsafe { plain.transpose(&rows, needed.as_mut_ptr()) };
            assert_eq!(given, needed, "transpose");
            // Weights as a softmax makes them: in 0 to 1, none denormal.
            let weights: [f32; 32] = std::array::from_fn(|i| {
                let exponent = 127 - words[i] % 125;
                f32::from_bits(exponent << 23 | words[i + 32] & 0x007f_ffff)
            });
            let halves = [weights.as_ptr(), weights[16..].as_ptr()];
            // SAFETY: each half has 16 weights, each place 16 words.
            unsafe {
                let e = unit.engine();
                let (even, odd) = (e.load(halves[0]), e.load(halves[1]));
                unit.store_weights(given.as_mut_ptr(), even, odd);
                let e = plain.engine();
                let (even, odd) = (e.load(halves[0]), e.load(halves[1]));
                plain.store_weights(needed.as_mut_ptr(), even, odd);
            }
            assert_eq!(given[..TILE], needed[..TILE], "weights {weights:?}");
        }
    }

    fn layouts(unit: &Amx) {
        // SAFETY: the unit proves that the machine has the instructions.
        unsafe { compare(unit) }
    }
}
