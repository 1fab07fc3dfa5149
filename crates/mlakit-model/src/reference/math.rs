//! f64 arithmetic of the reference: plain loops, split over threads by rows. A row's result does
//! not depend on the number of threads.

use std::num::NonZero;
use std::sync::Mutex;
use std::thread;

/// Rows that one matrix row is multiplied with before the next one is read.
const ROW_BLOCK: usize = 8;
/// Multiplications below which starting threads costs more than it saves.
const SERIAL_WORK: usize = 1 << 18;

/// A matrix [out, in] with an optional bias [out].
#[derive(Clone, Debug)]
pub(super) struct Matrix {
    pub(super) values: Vec<f64>,
    pub(super) bias: Option<Vec<f64>>,
    pub(super) width: usize,
}

impl Matrix {
    /// Number of outputs.
    pub(super) fn rows(&self) -> usize {
        self.values.len() / self.width
    }

    /// `W x + b` for every row of `x` [rows, in].
    pub(super) fn apply(&self, x: &[f64]) -> Vec<f64> {
        let (width, out) = (self.width, self.rows());
        let mut y = vec![0.0; x.len() / width * out];
        let work = y.len().saturating_mul(width);
        for_blocks(&mut y, out * ROW_BLOCK, work, |block, y| {
            let x = &x[block * ROW_BLOCK * width..];
            for (o, weights) in self.values.chunks_exact(width).enumerate() {
                let bias = self.bias.as_ref().map_or(0.0, |bias| bias[o]);
                for (x, y) in x.chunks_exact(width).zip(y.chunks_exact_mut(out)) {
                    y[o] = dot(x, weights) + bias;
                }
            }
        });
        y
    }
}

/// Calls `work(block, part)` for consecutive parts of `block_len` elements of `out` (the last may
/// be shorter), on several threads where `cost` multiplications are worth it. Threads take the next
/// block as they become free, because causal rows differ in cost.
pub(super) fn for_blocks(
    out: &mut [f64],
    block_len: usize,
    cost: usize,
    work: impl Fn(usize, &mut [f64]) + Sync,
) {
    let threads = thread::available_parallelism().map_or(1, NonZero::get).min(16);
    let blocks = out.chunks_mut(block_len.max(1)).enumerate();
    if cost < SERIAL_WORK || threads == 1 {
        for (block, part) in blocks {
            work(block, part);
        }
        return;
    }
    let queue = Mutex::new(blocks);
    let drain = || {
        loop {
            // A panic of `work` happens outside the lock, so it is never poisoned.
            let next = queue.lock().map_or(None, |mut queue| queue.next());
            let Some((block, part)) = next else { break };
            work(block, part);
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(drain);
        }
        drain();
    });
}

/// Inner product, summed in eight interleaved parts.
pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    let (a_blocks, a_tail) = a.as_chunks::<8>();
    let (b_blocks, b_tail) = b.as_chunks::<8>();
    for (a, b) in a_blocks.iter().zip(b_blocks) {
        for i in 0..8 {
            sums[i] += a[i] * b[i];
        }
    }
    let tail: f64 = a_tail.iter().zip(b_tail).map(|(a, b)| a * b).sum();
    tail + ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]))
}

/// `y += factor * x`.
pub(super) fn add_scaled(y: &mut [f64], factor: f64, x: &[f64]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += factor * x;
    }
}

/// Divides each row of `x` by its root mean square and multiplies it by `gain`.
pub(super) fn rms_norm(x: &mut [f64], gain: &[f64], eps: f64) {
    for row in x.chunks_exact_mut(gain.len()) {
        let scale = 1.0 / (dot(row, row) / row.len() as f64 + eps).sqrt();
        for (value, gain) in row.iter_mut().zip(gain) {
            *value *= scale * gain;
        }
    }
}

/// Takes the mean out of each row of `x`, divides it by its deviation, multiplies it by `gain` and
/// adds `bias`.
pub(super) fn layer_norm(x: &mut [f64], (gain, bias): (&[f64], &[f64]), eps: f64) {
    for row in x.chunks_exact_mut(gain.len()) {
        let mean = row.iter().sum::<f64>() / row.len() as f64;
        row.iter_mut().for_each(|value| *value -= mean);
        let scale = 1.0 / (dot(row, row) / row.len() as f64 + eps).sqrt();
        for (value, (gain, bias)) in row.iter_mut().zip(gain.iter().zip(bias)) {
            *value = *value * scale * gain + bias;
        }
    }
}

pub(super) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Turns scores into softmax weights in place and returns the natural logarithm of their sum of
/// exponentials; no score at all gives -inf.
pub(super) fn softmax(scores: &mut [f64]) -> f64 {
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if largest == f64::NEG_INFINITY {
        scores.fill(0.0);
        return largest;
    }
    let mut sum = 0.0;
    for score in scores.iter_mut() {
        *score = (*score - largest).exp();
        sum += *score;
    }
    for score in scores.iter_mut() {
        *score /= sum;
    }
    largest + sum.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_of_odd_sizes_match_a_plain_sum_at_any_thread_count() {
        let (rows, width, out) = (37, 83, 101);
        let value = |i: usize| ((i * 7919) % 1013) as f64 / 1013.0 - 0.5;
        let x: Vec<f64> = (0..rows * width).map(value).collect();
        let values: Vec<f64> = (0..out * width).map(|i| value(i + 5)).collect();
        let bias: Vec<f64> = (0..out).map(value).collect();
        let matrix = Matrix { values: values.clone(), bias: Some(bias.clone()), width };
        let y = matrix.apply(&x);
        for r in 0..rows {
            assert_eq!(y[r * out..(r + 1) * out], matrix.apply(&x[r * width..(r + 1) * width]));
            for o in 0..out {
                let plain: f64 = (0..width).map(|i| x[r * width + i] * values[o * width + i]).sum();
                assert!((y[r * out + o] - plain - bias[o]).abs() < 1e-13, "row {r} output {o}");
            }
        }
    }

    #[test]
    fn softmax_of_nothing_and_of_large_scores() {
        assert_eq!(softmax(&mut []), f64::NEG_INFINITY);
        let mut scores = [1000.0, 1000.0 + 3.0_f64.ln()];
        let lse = softmax(&mut scores);
        assert!((scores[0] - 0.25).abs() < 1e-12 && (scores[1] - 0.75).abs() < 1e-12);
        assert!((lse - 1000.0 - 4.0_f64.ln()).abs() < 1e-12);
    }
}
