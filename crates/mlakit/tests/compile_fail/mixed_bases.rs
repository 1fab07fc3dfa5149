//! A log-sum-exp of base 2 does not merge with a natural one.
use mlakit::*;

fn main() {
    let _ = Lse::<Natural>::new(1.0).merge(Lse::<Base2>::new(1.0));
}
