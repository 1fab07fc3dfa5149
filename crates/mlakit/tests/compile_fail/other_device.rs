//! An operand of one kind of device is none on another.
use mlakit::Input;
use mlakit::sim::{AtOnce, Late};

fn mix(x: Input<'static, f32, AtOnce>) -> Input<'static, f32, Late> {
    x
}

fn main() {}
