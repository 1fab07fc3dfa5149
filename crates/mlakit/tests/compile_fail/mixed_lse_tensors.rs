//! Nor does a tensor of them pass for one of the other base.
use mlakit::op::merge::LseInput;
use mlakit::sim::Late;
use mlakit::{Base2, Input, Lse};

fn read<'a>(lses: Input<'a, Lse<Base2>, Late>) -> LseInput<'a, Late> {
    LseInput::Natural(lses)
}

fn main() {}
