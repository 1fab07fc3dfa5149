//! Bounds, and what a failure prints: the first mismatch with its place.

use half::bf16;
use mlakit::op::dense::DenseResult;
use mlakit::op::merge::Partial;
use mlakit::splits::Division;

use super::dense_inputs::DenseInputs;
use super::dense_run::Outcome;

/// RMS of the error over RMS of the oracle's outputs: rounding weights, partial results and the
/// output to BF16 costs about 1.1e-3 each, in quadrature.
pub const RMS_BOUND: f64 = 4e-3;

/// Absolute and relative bound of a log-sum-exp.
pub const LSE_BOUND: (f64, f64) = (2e-5, 1e-6);

/// Root of the mean square.
pub fn rms(values: impl IntoIterator<Item = f64>) -> f64 {
    let (mut sum, mut count) = (0.0, 0usize);
    for value in values {
        sum += value * value;
        count += 1;
    }
    (sum / count.max(1) as f64).sqrt()
}

/// The distance between the BF16 numbers next to `value`.
pub fn bf16_unit(value: f64) -> f64 {
    let exponent = value.abs().max(f64::from(f32::MIN_POSITIVE)).log2().floor();
    (exponent - 7.0).exp2()
}

/// What an oracle says.
#[derive(Clone, Copy)]
pub struct Needed<'n> {
    pub out: &'n [f64],
    pub lse: &'n [f64],
    pub faults: &'n [u32],
}

/// How far results may be from it.
#[derive(Clone, Copy)]
pub struct Bounds {
    /// Elements of an output.
    pub width: usize,
    /// Whether partial results are rounded to BF16.
    pub rounded: bool,
    /// Absolute and relative, of a log-sum-exp.
    pub lse: (f64, f64),
}

/// Compares with the oracle: faults exactly, log-sum-exps and elements by their bounds, the whole
/// output by [`RMS_BOUND`]. An element may err by one BF16 unit (the output's) plus 1/128 of the
/// row's RMS, which is six times what the rounded weights of its keys add up to. Where partial
/// results are BF16 the oracle rounds them too, perhaps the other way: that is a unit of the
/// largest element of a part, 1/64 of a row's RMS where one key of normal numbers dominates it.
/// `place` says where a result comes from, or what the whole case is.
#[track_caller]
pub fn results_agree(
    given: &Outcome,
    needed: Needed<'_>,
    bounds: Bounds,
    place: &dyn Fn(Option<usize>) -> String,
) {
    assert_eq!(given.faults[..], *needed.faults, "faults\n{}", place(None));
    for (index, (g, n)) in given.lse.iter().zip(needed.lse).enumerate() {
        let bound = bounds.lse.0 + bounds.lse.1 * n.abs();
        let close = f64::from(*g) == *n || (f64::from(*g) - n).abs() <= bound;
        assert!(close, "lse: given {g}, needed {n}, bound {bound:.1e}\n{}", place(Some(index)));
    }
    let share = if bounds.rounded { 1.0 / 128.0 + 1.0 / 64.0 } else { 1.0 / 128.0 };
    let mut errors = Vec::with_capacity(given.out.len());
    let rows = given.out.chunks_exact(bounds.width).zip(needed.out.chunks_exact(bounds.width));
    for (index, (given, needed)) in rows.enumerate() {
        let scale = rms(needed.iter().copied());
        for (element, (g, n)) in given.iter().zip(needed).enumerate() {
            let (g, bound) = (g.to_f64(), bf16_unit(*n) + scale * share);
            let error = (g - n).abs();
            assert!(
                error <= bound,
                "out element {element}: given {g}, needed {n}, bound {bound:.2e}\n{}",
                place(Some(index))
            );
            errors.push(error);
        }
    }
    let (error, size) = (rms(errors), rms(needed.out.iter().copied()));
    assert!(
        error <= RMS_BOUND * size,
        "out: RMS of the error {error:.3e}, of the output {size:.3e}, bound {RMS_BOUND:.0e}\n{}",
        place(None)
    );
}

/// [`results_agree`] for dense attention.
#[track_caller]
pub fn dense_agrees(
    inputs: &DenseInputs,
    division: Division,
    (given, needed): (&Outcome, &DenseResult),
) {
    let place = Place { inputs, division };
    let bounds = Bounds {
        width: inputs.spec.value_width,
        rounded: division.splits > 1 && inputs.spec.partial == Partial::Bf16,
        lse: LSE_BOUND,
    };
    let needed = Needed { out: &needed.out, lse: &needed.lse, faults: &needed.faults };
    results_agree(given, needed, bounds, &|index| {
        index.map_or_else(|| place.whole(), |index| place.of(index))
    });
}

/// Fails at the first result whose bits differ.
#[track_caller]
pub fn same_bits(what: &str, given: &Outcome, needed: &Outcome) {
    assert_eq!(given.faults, needed.faults, "{what}: faults");
    same_lse(what, &given.lse, &needed.lse);
    same_out(what, &given.out, &needed.out);
}

#[track_caller]
pub fn same_lse(what: &str, given: &[f32], needed: &[f32]) {
    assert_eq!(given.len(), needed.len(), "{what}: log-sum-exps");
    let differs = given.iter().zip(needed).position(|(g, n)| g.to_bits() != n.to_bits());
    if let Some(i) = differs {
        panic!("{what}: lse {i} is {:e}, needed the bits of {:e}", given[i], needed[i]);
    }
}

#[track_caller]
pub fn same_out(what: &str, given: &[bf16], needed: &[bf16]) {
    assert_eq!(given.len(), needed.len(), "{what}: outputs");
    let differs = given.iter().zip(needed).position(|(g, n)| g.to_bits() != n.to_bits());
    if let Some(i) = differs {
        panic!("{what}: out {i} is {:e}, needed the bits of {:e}", given[i], needed[i]);
    }
}

/// Where a result comes from, in words.
struct Place<'p> {
    inputs: &'p DenseInputs,
    division: Division,
}

impl Place<'_> {
    fn whole(&self) -> String {
        format!("{:?}\nin {:?}", self.inputs.shape, self.division)
    }

    /// Of the result `row * heads + head`.
    fn of(&self, index: usize) -> String {
        let (inputs, heads) = (self.inputs, self.inputs.spec.heads);
        let (row, head) = (index / heads, index % heads);
        let owner = inputs.q_offsets.windows(2).position(|bounds| {
            (bounds[0] as usize..bounds[1].max(bounds[0]) as usize).contains(&row)
        });
        let Some(request) = owner else {
            return format!("row {row}, a padding row, head {head} of {}", self.whole());
        };
        let local = row - inputs.q_offsets[request] as usize;
        let (span, keys) = (inputs.span(request), inputs.keys(request, local));
        let splits = (0..self.division.splits)
            .map(|split| self.division.range(&span, &keys, split))
            .enumerate()
            .filter(|(_, range)| !range.is_empty());
        let splits: Vec<_> = splits.take(8).collect();
        let (size, width) = (inputs.shape.page_size, inputs.table_width());
        let pages = keys.start / size..keys.end.div_ceil(size);
        let ids = &inputs.table[request * width..][pages.start..pages.end.min(pages.start + 12)];
        format!(
            "row {row} (row {local} of request {request}), head {head}, keys {keys:?}\nsplits \
             {splits:?}, pages {pages:?} with ids {ids:?}\nof {}",
            self.whole()
        )
    }
}
