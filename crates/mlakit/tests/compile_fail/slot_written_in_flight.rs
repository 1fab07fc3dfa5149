//! A slot cannot be written while the submission that uses it is held.
use mlakit::sim::Late;
use mlakit::*;

fn step(
    graph: &mut Graph<Late>,
    slot: Key<f32>,
    stream: &mut Stream<'_, Late>,
) -> Result<(), Error> {
    let submission = graph.replay(stream)?;
    graph.slot_mut(slot)?.write(&[1.0])?;
    submission.wait(stream)
}

fn main() {}
