//! A key knows the elements of its slot: a table of ids is not read as numbers.
use mlakit::sim::Late;
use mlakit::*;

fn read(graph: &Graph<Late>, table: Key<i32>) -> Result<Vec<f32>, Error> {
    graph.read(table)
}

fn record(rec: &Recorder<'_, Late>, table: Key<i32>) -> Result<Input<'static, f32, Late>, Error> {
    rec.input(table)
}

fn main() {}
