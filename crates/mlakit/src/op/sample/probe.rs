//! The probe of `sample`: rows with a few high logits, whose shares of the distribution are wide.

use super::bind::SampleArgs;
use super::oracle::{SampleCase, oracle};
use super::plan::Sample;
use super::spec::{SampleFields, SampleSpec};
use crate::op::layer::eighths;
use crate::{Error, Runs, Warm};

/// The temperature of the drawn rows. The shares of the high logits are then 2, 12 and 87 %, and at
/// temperature 1 they would be 9, 24 and 67 %; all others together have next to nothing.
const TEMPERATURE: f32 = 0.5;

/// Three high logits among low ones, the largest last; `tied`: all three equal, another is NaN and
/// one is -inf.
fn high(spec: &SampleFields, seed: usize, tied: bool) -> Vec<f32> {
    let vocab = spec.vocab;
    let mut row: Vec<f32> = (0..vocab).map(|i| eighths(seed + i)).collect();
    if tied {
        row[0] = f32::NAN;
        row[vocab / 3] = f32::NEG_INFINITY;
    }
    for (i, at) in [vocab / 5, vocab / 2, vocab - 1].into_iter().enumerate() {
        row[at] = if tied { 9.0 } else { 8.0 + i as f32 };
    }
    row
}

/// How far, as a probability, a random number of the probe stays from the ends of its id's share.
const CLEAR: f64 = 0.03;

/// Random numbers to try, by row in turn. In the first row the second of the high logits wins, in
/// the second, where they are equal, the second, in the third the largest.
const RANDOM: [&[f32]; 3] = [&[0.05, 0.35, 0.65, 0.95], &[0.45, 0.75, 0.15], &[0.25, 0.55, 0.85]];

/// The first random number of a turn that is clear.
fn clear_random(spec: &SampleSpec, logits: &[f32], turn: usize) -> f32 {
    let is_clear = |random: &&f32| {
        let case = SampleCase { logits, temperature: TEMPERATURE, random: &[**random] };
        oracle(spec, &case).gaps[0] >= CLEAR
    };
    RANDOM[turn % RANDOM.len()].iter().find(is_clear).copied().unwrap_or(0.5)
}

/// Runs on probes, greedy and drawn, as many rows at a time as the `Spec` allows, and compares.
pub(super) fn probe<'w, D: Runs<Sample>>(warm: &mut Warm<'w, Sample, D>) -> Result<(), Error> {
    let spec = warm.spec();
    let mut lowest = vec![f32::NEG_INFINITY; spec.vocab];
    lowest[0] = f32::NAN;
    let drawn = [high(&spec, 0, false), high(&spec, 1, true), high(&spec, 2, false)];
    let greedy = [&drawn[..], &[vec![f32::NAN; spec.vocab], lowest]].concat();
    if spec.temperature {
        compare(warm, TEMPERATURE, &drawn)?;
    }
    for temperature in [0.0, -1.0] {
        compare(warm, temperature, &greedy)?;
    }
    Ok(())
}

fn compare<'w, D: Runs<Sample>>(
    warm: &mut Warm<'w, Sample, D>,
    temperature: f32,
    rows: &[Vec<f32>],
) -> Result<(), Error> {
    let spec = warm.spec();
    let random: Vec<f32> =
        rows.iter().enumerate().map(|(turn, row)| clear_random(&spec, row, turn)).collect();
    for (rows, random) in rows.chunks(spec.max_rows).zip(random.chunks(spec.max_rows)) {
        let logits = rows.concat();
        let needed = oracle(&spec, &SampleCase { logits: &logits, temperature, random });

        let logits = warm.probe::<f32>(&logits)?;
        let (temperature, random) =
            (warm.probe::<f32>(&[temperature])?, warm.probe::<f32>(random)?);
        let mut ids = warm.probe::<i32>(&vec![i32::MIN; rows.len()])?;
        let mut scratch = warm.scratch()?;
        warm.run(SampleArgs {
            logits: (&logits).into(),
            temperature: spec.temperature.then(|| (&temperature).into()),
            random: spec.temperature.then(|| (&random).into()),
            ids: (&mut ids).into(),
            scratch: (&mut scratch).into(),
        })?;
        let given = warm.read(&ids)?;
        Warm::<Sample, D>::expect(&needed.ids, &given, |n, g| n == g)?;
        Warm::<Sample, D>::expect(&[0; 3], &warm.faults(&scratch)?, |n, g| n == g)?;
    }
    Ok(())
}
