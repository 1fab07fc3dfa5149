//! `route` and `sample` on the CPU: which experts, which token.

use mlakit::op::layer::descending;
use mlakit::op::route::{GroupScore, Route, RouteRegions, RouteSpec, Scoring};
use mlakit::op::sample::{Sample, SampleRegions, SampleSpec};
use mlakit::scratch::RegionSpec;
use mlakit::{Choice, Error, Plan, Refusal, Region, Runs};

use super::layer::elementwise;
use super::{read, scale, write};
use crate::device::{Cpu, Facts, Queue};
use crate::pool::Pool;

/// The region of the scores of one row, as they are and as they are compared, and of the scores of groups.
const SCORES: &str = "scores";

impl Runs<Route> for Cpu {
    type Code = std::sync::Arc<RouteSpec>;

    fn choose(_: &Facts, spec: &RouteSpec) -> Result<Choice, Refusal> {
        let floats = 2 * spec.experts + spec.groups;
        let work = vec![RegionSpec::new(SCORES, floats * 4)];
        Ok(Choice { work, ..Choice::of("route_scalar") })
    }

    fn prepare(&self, plan: &Plan<Route>) -> Result<Self::Code, Error> {
        Ok(std::sync::Arc::new(plan.spec().clone()))
    }

    fn launch(
        &self,
        code: &Self::Code,
        plan: &Plan<Route>,
        regions: &RouteRegions,
        queue: &mut Queue,
    ) -> Result<(), Error> {
        let scores = plan.region(regions.scratch, SCORES);
        let (spec, r) = (code.clone(), *regions);
        self.enqueue(queue, move |_: &Pool| route(&spec, &r, scores))
    }
}

fn route(spec: &RouteSpec, r: &RouteRegions, scratch: Region) {
    let (experts, used) = (spec.experts, spec.used);
    // SAFETY: operands and scratch of this launch, bound at these sizes.
    let (x, weight, bias): (&[f32], &[f32], &[f32]) = unsafe {
        (
            read(r.x, r.rows * spec.hidden),
            read(r.weight, experts * spec.hidden),
            read(r.bias, if spec.bias { experts } else { 0 }),
        )
    };
    // SAFETY: as above; each is written by this task alone.
    let (ids, gates, scores): (&mut [i32], &mut [f32], &mut [f32]) = unsafe {
        (
            write(r.ids, r.rows * used),
            write(r.gates, r.rows * used),
            write(scratch, 2 * experts + spec.groups),
        )
    };
    let (scores, rest) = scores.split_at_mut(experts);
    let (compared, groups) = rest.split_at_mut(experts);
    for (row, x) in x.chunks_exact(spec.hidden).enumerate() {
        for (score, weight) in scores.iter_mut().zip(weight.chunks_exact(spec.hidden)) {
            *score = dot(x, weight);
        }
        score(spec.scoring, scores);
        compared.copy_from_slice(scores);
        compared.iter_mut().zip(bias).for_each(|(compared, bias)| *compared += bias);
        score_groups(spec, compared, groups);
        let allowed = Groups::new(spec, groups);
        let range = row * used..(row + 1) * used;
        let out = (&mut ids[range.clone()], &mut gates[range.clone()]);
        pick((scores, compared), &allowed, out);
        let sum: f32 = gates[range.clone()].iter().sum();
        let factor = if spec.normalize { 1.0 / (sum + 1e-20) } else { 1.0 };
        gates[range].iter_mut().for_each(|gate| *gate = *gate * factor * spec.scale.value());
    }
}

/// Sixteen running sums in F32, so that the loop is not one chain of additions.
fn dot(x: &[f32], weight: &[f32]) -> f32 {
    let mut sums = [0.0f32; 16];
    let (chunks, rest) = (x.chunks_exact(16), x.chunks_exact(16).remainder());
    for (x, w) in chunks.zip(weight.chunks_exact(16)) {
        sums.iter_mut().zip(x.iter().zip(w)).for_each(|(sum, (x, w))| *sum += x * w);
    }
    let whole: f64 = sums.iter().map(|sum| f64::from(*sum)).sum();
    let end = &weight[weight.len() - rest.len()..];
    let part: f64 = rest.iter().zip(end).map(|(x, w)| f64::from(x * w)).sum();
    (whole + part) as f32
}

/// Logits to scores, in place.
fn score(scoring: Scoring, scores: &mut [f32]) {
    match scoring {
        Scoring::Sigmoid => scores.iter_mut().for_each(|z| *z = 1.0 / (1.0 + (-*z).exp())),
        Scoring::Softmax => {
            let top = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            scores.iter_mut().for_each(|z| *z = (*z - top).exp());
            let sum: f32 = scores.iter().sum();
            scores.iter_mut().for_each(|z| *z /= sum);
        }
    }
}

/// The index of the best that `free` allows: larger first, of equal ones the smaller index.
fn best(values: &[f32], free: impl Fn(usize) -> bool) -> Option<usize> {
    (0..values.len()).filter(|i| free(*i)).min_by(|a, b| descending(values[*a], values[*b]))
}

/// The score of each group.
fn score_groups(spec: &RouteSpec, compared: &[f32], groups: &mut [f32]) {
    for (group, members) in groups.iter_mut().zip(compared.chunks_exact(spec.group_size())) {
        let first = best(members, |_| true).unwrap_or(0);
        let second = best(members, |i| i != first);
        *group = match (spec.group_score, second) {
            (GroupScore::TopTwoSum, Some(second)) => members[first] + members[second],
            _ => members[first],
        };
    }
}

/// Which groups a row uses: the one that is the last in, and those before it.
struct Groups<'g> {
    scores: &'g [f32],
    size: usize,
    last: usize,
}

impl<'g> Groups<'g> {
    fn new(spec: &RouteSpec, scores: &'g [f32]) -> Self {
        let mut groups = Self { scores, size: spec.group_size(), last: 0 };
        let ahead = |group| (0..scores.len()).filter(|other| groups.before(*other, group)).count();
        let last = (0..scores.len()).find(|group| ahead(*group) + 1 == spec.used_groups());
        groups.last = last.unwrap_or(0);
        groups
    }

    fn before(&self, a: usize, b: usize) -> bool {
        let order = descending(self.scores[a], self.scores[b]);
        order.is_lt() || (order.is_eq() && a < b)
    }

    /// Whether an expert is of a group that is used.
    fn allow(&self, expert: usize) -> bool {
        let group = expert / self.size;
        group == self.last || self.before(group, self.last)
    }
}

/// The best experts by what is compared, with their scores.
fn pick(
    (scores, compared): (&[f32], &[f32]),
    groups: &Groups<'_>,
    (ids, gates): (&mut [i32], &mut [f32]),
) {
    for place in 0..ids.len() {
        let free = |expert: usize| !ids[..place].contains(&(expert as i32)) && groups.allow(expert);
        let expert = best(compared, free).unwrap_or(0);
        ids[place] = expert as i32;
        gates[place] = scores[expert];
    }
}

elementwise!(Sample, SampleSpec, SampleRegions, "sample_scalar", sample);

fn sample(_: &Pool, spec: &SampleSpec, r: &SampleRegions) {
    let random_rows = if spec.temperature { r.rows } else { 0 };
    // SAFETY: operands of this launch, bound at these sizes.
    let (logits, random): (&[f32], &[f32]) =
        unsafe { (read(r.logits, r.rows * spec.vocab), read(r.random, random_rows)) };
    // SAFETY: as above, with one element where the spec has it.
    let temperature = unsafe { scale(spec.temperature, r.temperature) };
    // SAFETY: as above; written by this task alone.
    let ids: &mut [i32] = unsafe { write(r.ids, r.rows) };
    for (row, (id, logits)) in ids.iter_mut().zip(logits.chunks_exact(spec.vocab)).enumerate() {
        let greedy = largest(logits);
        let drawn = (spec.temperature && temperature > 0.0)
            .then(|| draw(logits, (logits[greedy], temperature), random[row]))
            .flatten();
        *id = drawn.unwrap_or(greedy) as i32;
    }
}

/// The largest logit, NaN below -inf, of equal ones the first.
fn largest(logits: &[f32]) -> usize {
    let mut found = 0;
    for (i, logit) in logits.iter().enumerate() {
        if *logit > logits[found] || (logits[found].is_nan() && !logit.is_nan()) {
            found = i;
        }
    }
    found
}

/// The first id whose running weight exceeds the part `random` of all weight; `None` if there is no weight.
fn draw(logits: &[f32], (top, temperature): (f32, f32), random: f32) -> Option<usize> {
    let weight = |logit: f32| {
        let scaled = (f64::from(logit) - f64::from(top)) / f64::from(temperature);
        if logit == top {
            1.0
        } else if scaled.is_nan() {
            0.0
        } else {
            scaled.exp()
        }
    };
    let total: f64 = logits.iter().map(|logit| weight(*logit)).sum();
    let bound = f64::from(random).max(0.0) * total;
    let (mut sum, mut last) = (0.0, None);
    for (id, logit) in logits.iter().enumerate() {
        let weight = weight(*logit);
        if weight > 0.0 {
            last = Some(id);
        }
        sum += weight;
        if weight > 0.0 && sum > bound {
            return Some(id);
        }
    }
    last
}
