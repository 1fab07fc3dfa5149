//! Operations are a closed set: a foreign one would see regions.
struct Mine;

impl mlakit::op::sealed::Sealed for Mine {}

fn main() {}
