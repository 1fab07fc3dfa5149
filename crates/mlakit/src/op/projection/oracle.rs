//! `projection` in f64, and the absorption of `kv_b_proj`.

use half::bf16;

use super::spec::ProjectionSpec;

/// `[R, H, out_width]` without gaps, before the rounding to BF16; `x` is `[R, H, in_width]` without gaps.
pub fn oracle(spec: &ProjectionSpec, x: &[bf16], weight: &[bf16]) -> Vec<f64> {
    let (p, n) = (spec.in_width, spec.out_width);
    let heads = x.chunks_exact(p).zip((0..spec.heads).cycle());
    let mut y = Vec::with_capacity(x.len() / p * n);
    for (x, head) in heads {
        let matrix = &weight[head * p * n..][..p * n];
        for j in 0..n {
            y.push((0..p).map(|i| x[i].to_f64() * matrix[i * n + j].to_f64()).sum());
        }
    }
    y
}

/// Splits `kv_b_proj` `[H * (nope + value), rank]` into the weights of the two projections: W_UK^T as `[H, nope, rank]` (its rows as
/// they are) and W_UV as `[H, rank, value]` (transposed).
pub fn absorb(
    kv_b_proj: &[bf16],
    (heads, nope, value, rank): (usize, usize, usize, usize),
) -> (Vec<bf16>, Vec<bf16>) {
    let mut query = Vec::with_capacity(heads * nope * rank);
    let mut lift = vec![bf16::ZERO; heads * rank * value];
    for head in 0..heads {
        let rows = &kv_b_proj[head * (nope + value) * rank..][..(nope + value) * rank];
        query.extend_from_slice(&rows[..nope * rank]);
        let matrix = &mut lift[head * rank * value..][..rank * value];
        for (v, row) in rows[nope * rank..].chunks_exact(rank).enumerate() {
            for (r, weight) in row.iter().enumerate() {
                matrix[r * value + v] = *weight;
            }
        }
    }
    (query, lift)
}
