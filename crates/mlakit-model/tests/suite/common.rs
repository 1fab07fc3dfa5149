//! Reading expected values and comparing with them.

use std::path::{Path, PathBuf};

use mlakit_model::checkpoint::Checkpoint;
use mlakit_model::config::AttentionConfig;
use mlakit_model::{AttentionReference, Selected};
use safetensors::{Dtype, SafeTensors};

/// The repository: where it was when this was built, or else the current folder, for a test program that was
/// carried to another machine.
fn repository() -> PathBuf {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    if built.is_dir() { built } else { PathBuf::from(".") }
}

pub fn vectors(name: &str) -> PathBuf {
    repository().join("vectors").join(name)
}

pub fn tiny_dsa() -> PathBuf {
    repository().join("models/tiny-dsa")
}

/// The attention of layer `layer` alone, its weights from `checkpoint`.
pub fn attention(
    checkpoint: &Checkpoint,
    config: &AttentionConfig,
    layer: usize,
    hidden: usize,
) -> AttentionReference {
    AttentionReference::new(config, &checkpoint.attention(layer, hidden, config).unwrap())
}

/// A file of expected values.
pub struct Expected {
    bytes: Vec<u8>,
}

impl Expected {
    pub fn open(path: &Path) -> Self {
        Self { bytes: std::fs::read(path).unwrap() }
    }

    pub fn fp32(name: &str) -> Self {
        Self::open(&vectors(name).join("vectors_fp32.safetensors"))
    }

    pub fn has(&self, name: &str) -> bool {
        self.file().tensor(name).is_ok()
    }

    pub fn f64(&self, name: &str) -> Vec<f64> {
        self.words(name, Dtype::F32, |b| f64::from(f32::from_le_bytes(b)))
    }

    /// Integers stored in 32 or 16 bits.
    pub fn i32(&self, name: &str) -> Vec<i32> {
        let file = self.file();
        let tensor = file.tensor(name).unwrap_or_else(|_| panic!("no tensor {name}"));
        if tensor.dtype() == Dtype::I16 {
            let halves = tensor.data().as_chunks::<2>().0.iter();
            return halves.map(|b| i32::from(i16::from_le_bytes(*b))).collect();
        }
        self.words(name, Dtype::I32, i32::from_le_bytes)
    }

    pub fn ids(&self, name: &str) -> Vec<u32> {
        self.i32(name).into_iter().map(|id| u32::try_from(id).unwrap()).collect()
    }

    pub fn width(&self, name: &str) -> usize {
        *self.file().tensor(name).unwrap().shape().last().unwrap()
    }

    fn file(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).unwrap()
    }

    fn words<T>(&self, name: &str, dtype: Dtype, read: impl Fn([u8; 4]) -> T) -> Vec<T> {
        let file = self.file();
        let tensor = file.tensor(name).unwrap_or_else(|_| panic!("no tensor {name}"));
        assert_eq!(tensor.dtype(), dtype, "{name}");
        tensor.data().as_chunks::<4>().0.iter().map(|b| read(*b)).collect()
    }
}

/// How close values must be.
#[derive(Clone, Copy)]
pub struct Bound {
    /// RMS of the error over RMS of the expected values.
    pub relative: f64,
    /// Largest absolute error.
    pub absolute: f64,
}

/// `models.md` 9.1: f64 against the fp32 vectors.
pub const LAYER: Bound = Bound { relative: 3e-6, absolute: 1e-5 };

/// Compares selections: equal in every row whose `gap` between the last key selected and the first
/// left out exceeds 1e-5.
pub fn equal_selections(what: &str, given: &Selected, expected: &[i32], gaps: &[f64]) {
    assert_eq!(given.keys.len(), expected.len(), "{what}: number of entries");
    let rows = given.keys.chunks_exact(given.width).zip(expected.chunks_exact(given.width));
    let mut compared = 0;
    for (row, ((given, expected), gap)) in rows.zip(gaps).enumerate() {
        if *gap > 1e-5 {
            assert_eq!(given, expected, "{what}: row {row}, gap {gap:e}");
            compared += 1;
        }
    }
    println!("{what}: {compared} of {} rows compared, equal", gaps.len());
    assert!(compared > 0, "{what}: no rows");
}

/// The share of the `expected` keys that are among the given ones, over the rows that are expected
/// to leave some out: those of at least `full` keys.
pub fn overlap(given: &Selected, expected: &[i32], full: usize) -> f64 {
    let rows = given.keys.chunks_exact(given.width).zip(expected.chunks_exact(given.width));
    let (mut found, mut all) = (0, 0);
    for (given, expected) in rows {
        let keys = || expected.iter().filter(|key| **key >= 0);
        if keys().count() >= full {
            all += keys().count();
            found += keys().filter(|key| given.contains(key)).count();
        }
    }
    assert!(all > 0, "no row selects");
    found as f64 / all as f64
}

/// Compares rows of `width` values, prints both errors, and fails at the worst value.
pub fn close(what: &str, given: &[f64], expected: &[f64], width: usize, bound: Bound) {
    assert_eq!(given.len(), expected.len(), "{what}: number of values");
    assert!(!given.is_empty(), "{what}: no values");
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let differences = || given.iter().zip(expected).map(|(g, e)| g - e);
    let relative = (square(&mut differences()) / square(&mut expected.iter().copied())).sqrt();
    let (worst, error) =
        differences().map(f64::abs).enumerate().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
    println!("{what}: relative {relative:.2e}, absolute {error:.2e}");
    assert!(
        relative <= bound.relative && error <= bound.absolute,
        "{what}: relative {relative:e} (bound {:e}), worst at row {} column {}: given {}, expected \
         {}, difference {error:e} (bound {:e})",
        bound.relative,
        worst / width,
        worst % width,
        given[worst],
        expected[worst],
        bound.absolute
    );
}
