//! `pool` in f64.

use super::spec::PoolSpec;
use crate::op::dense::{Rows, Visible};
use crate::scratch::{FAULT_NAMES, Fault};

/// The operands on the host.
#[derive(Clone, Copy, Debug)]
pub struct PoolCase<'a> {
    /// `[R, D]`.
    pub key: &'a [f32],
    /// `[R, D]`.
    pub gate: &'a [f32],
    /// `[p, D]`.
    pub ape: &'a [f32],
    /// `[B]`.
    pub kv_lens: &'a [i32],
    /// `[B + 1]`.
    pub q_offsets: &'a [i32],
    /// `[B]`.
    pub states: &'a [i32],
    /// `[B, W]`.
    pub page_table: &'a [i32],
}

/// What the oracle says.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolResult {
    /// `[R, D]`, before its rounding to BF16.
    pub pooled: Vec<f64>,
    /// `[R]`.
    pub slots: Vec<i64>,
    /// By [`Fault`].
    pub faults: [u32; FAULT_NAMES.len()],
}

/// A request of a step: its rows, and what its first row's token is.
struct Request<'o> {
    rows: std::ops::Range<usize>,
    first_position: i64,
    state: Option<usize>,
    table: &'o [i32],
}

/// Pools what is complete and moves `state` on.
pub fn oracle(spec: &PoolSpec, case: &PoolCase<'_>, state: &mut [f32]) -> PoolResult {
    let rows = case.key.len() / spec.width;
    let mut result = PoolResult {
        pooled: vec![0.0; rows * spec.width],
        slots: vec![-1; rows],
        faults: [0; FAULT_NAMES.len()],
    };
    let mut count = |fault: Fault, fine: bool| result.faults[fault as usize] += u32::from(!fine);
    let width = case.page_table.len() / case.kv_lens.len().max(1);
    let covered = spec.covered(width);
    let (mut offsets, fine) = Rows::begin(case.q_offsets[0], rows);
    count(Fault::Offset, fine);
    let mut requests = Vec::new();
    for (index, length) in case.kv_lens.iter().enumerate() {
        let (rows, fine) = offsets.until(case.q_offsets[index + 1]);
        count(Fault::Offset, fine);
        let (length, fine) = Visible::clamp_length(*length, covered);
        count(Fault::Length, fine);
        let given = case.states[index];
        let state =
            usize::try_from(given).ok().filter(|s| *s < state.len() / spec.state_elements());
        count(Fault::Id, state.is_some() || given == -1);
        let first_position = length as i64 - rows.len() as i64;
        let table = &case.page_table[index * width..(index + 1) * width];
        requests.push(Request { rows, first_position, state, table });
    }
    for request in &requests {
        for row in request.rows.clone() {
            complete(spec, case, (request, row), state, &mut result);
        }
    }
    for request in requests {
        keep(spec, case, &request, state);
    }
    result
}

/// The pool that a row's token ends, if it ends one whose tokens are all known and whose page is there.
fn complete(
    spec: &PoolSpec,
    case: &PoolCase<'_>,
    (request, row): (&Request<'_>, usize),
    state: &[f32],
    result: &mut PoolResult,
) {
    let position = request.first_position + (row - request.rows.start) as i64;
    let Some(pool) = spec.ends_pool(position) else { return };
    let first = pool * spec.pool_size;
    if (first as i64) < request.first_position && request.state.is_none() {
        return;
    }
    match request.table[pool / spec.page_size] {
        page if page >= 0 => {
            result.slots[row] =
                i64::from(page) * spec.page_size as i64 + (pool % spec.page_size) as i64;
        }
        page => {
            result.faults[Fault::Id as usize] += u32::from(page != -1);
            return;
        }
    }
    for channel in 0..spec.width {
        let token = |place: usize| -> (f64, f64) {
            let position = (first + place) as i64;
            let ape = case.ape[place * spec.width + channel];
            let (key, gate) = match usize::try_from(position - request.first_position) {
                Ok(local) => {
                    let at = (request.rows.start + local) * spec.width + channel;
                    (case.key[at], case.gate[at])
                }
                Err(_) => {
                    let states = request.state.unwrap_or(0) * spec.state_elements();
                    let at = states + spec.place(position as usize) + channel;
                    (state[at], state[at + spec.width])
                }
            };
            (f64::from(key), f64::from(gate) + f64::from(ape))
        };
        let tokens: Vec<_> = (0..spec.pool_size).map(token).collect();
        let top = tokens.iter().map(|(_, gate)| *gate).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = tokens.iter().map(|(_, gate)| (gate - top).exp()).sum();
        let weighted = tokens.iter().map(|(key, gate)| (gate - top).exp() / sum * key);
        result.pooled[row * spec.width + channel] = weighted.sum();
    }
}

/// Puts the last tokens of a step into the request's ring.
fn keep(spec: &PoolSpec, case: &PoolCase<'_>, request: &Request<'_>, state: &mut [f32]) {
    let Some(index) = request.state else { return };
    let state = &mut state[index * spec.state_elements()..][..spec.state_elements()];
    for row in request.rows.clone().rev().take(spec.ring()) {
        let position = request.first_position + (row - request.rows.start) as i64;
        let Ok(position) = usize::try_from(position) else { continue };
        let (at, from) = (spec.place(position), row * spec.width..(row + 1) * spec.width);
        state[at..at + spec.width].copy_from_slice(&case.key[from.clone()]);
        state[at + spec.width..at + 2 * spec.width].copy_from_slice(&case.gate[from]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> PoolSpec {
        let text = r#"{"width":1,"pool_size":2,"max_draft_tokens":1,"input":"f32","page_size":1,
            "max_rows":9,"max_batch":2,"max_table_width":4}"#;
        serde_json::from_str(text).unwrap()
    }

    /// Weights 1/4 and 3/4 by a gate of ln 3, halves by equal gates.
    #[test]
    fn pools_by_hand_over_two_steps() {
        let (spec, mut state) = (spec(), vec![f32::NAN; 6]);
        let ln3 = 3f32.ln();
        let case = PoolCase {
            key: &[4.0, 8.0, 5.0],
            gate: &[0.0, 0.0, 1.0],
            ape: &[0.0, ln3],
            kv_lens: &[3],
            q_offsets: &[0, 3],
            states: &[0],
            page_table: &[7, 9],
        };
        let result = oracle(&spec, &case, &mut state);
        assert!((result.pooled[1] - 7.0).abs() < 1e-6, "{:?}", result.pooled);
        assert_eq!((result.pooled[0], result.pooled[2]), (0.0, 0.0));
        assert_eq!(result.slots, [-1, 7, -1]);
        assert_eq!(state, [4.0, 0.0, 8.0, 0.0, 5.0, 1.0]);

        let next =
            PoolCase { key: &[9.0], gate: &[1.0 - ln3], kv_lens: &[4], q_offsets: &[0, 1], ..case };
        // Twice: taking the token back is a change of length.
        for _ in 0..2 {
            let result = oracle(&spec, &next, &mut state);
            assert!((result.pooled[0] - 7.0).abs() < 1e-6, "{:?}", result.pooled);
            assert_eq!(result.slots, [9]);
            assert_eq!(state[2..], [8.0, 0.0, 5.0, 1.0]);
        }
    }

    #[test]
    fn a_pool_whose_tokens_or_page_are_missing_is_left_out() {
        let (spec, mut state) = (spec(), vec![1.0; 12]);
        let case = PoolCase {
            key: &[1.0; 4],
            gate: &[1.0; 4],
            ape: &[0.0, 0.0],
            kv_lens: &[2, 4],
            q_offsets: &[0, 1, 3],
            states: &[-1, 5],
            page_table: &[0, 1, 2, -3],
        };
        let result = oracle(&spec, &case, &mut state);
        assert_eq!(result.slots, [-1; 4]);
        assert_eq!(result.faults, [2, 0, 0]);
        assert_eq!(state, [1.0; 12]);
    }
}
