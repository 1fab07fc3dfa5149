//! There is no way to put another buffer in the place of a slot of a graph.
use mlakit::sim::Late;
use mlakit::*;

fn replace(graph: &mut Graph<Late>, slot: Key<f32>, other: Slot<f32, Late>) -> Result<(), Error> {
    *graph.slot_mut(slot)? = other;
    Ok(())
}

fn swap(graph: &mut Graph<Late>, slot: Key<f32>, mut other: Slot<f32, Late>) -> Result<(), Error> {
    std::mem::swap(&mut graph.slot_mut(slot)?, &mut other);
    Ok(())
}

fn main() {}
