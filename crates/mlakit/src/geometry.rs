//! The widths of latent attention: heads, the width of a key, and of the value that is its beginning.

use serde::{Deserialize, Serialize};

use crate::Error;

/// The most heads of an operation.
pub const MAX_HEADS: usize = 1 << 14;
/// The most elements of a key.
pub const MAX_WIDTH: usize = 1 << 13;

/// What the heads of one layer have in common. The value of a token is the first `value_width` elements of its key record.
/// Widths in use: 576/512 (most models), 512/512, 320/256, 288/256, 160/128, 1088/1024.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Geometry {
    /// Query heads; all share the one latent.
    pub heads: usize,
    /// Elements of a query and a key: latent, then rotary part.
    pub qk_width: usize,
    /// Elements of a value and of an output.
    pub value_width: usize,
}

impl Geometry {
    /// Checks `1 <= heads`, `1 <= value_width <= qk_width`, an even `qk_width` and `value_width`, and the limits.
    pub fn check(self) -> Result<Self, Error> {
        let Self { heads, qk_width, value_width } = self;
        if !(1..=MAX_HEADS).contains(&heads) {
            return Err(Error::contract("heads", format!("1 to {MAX_HEADS}"), heads));
        }
        if !(2..=MAX_WIDTH).contains(&qk_width) || !qk_width.is_multiple_of(2) {
            return Err(Error::contract("qk_width", format!("even, 2 to {MAX_WIDTH}"), qk_width));
        }
        if value_width == 0 || value_width > qk_width || !value_width.is_multiple_of(2) {
            let needed = format!("even, 2 to qk_width ({qk_width})");
            return Err(Error::contract("value_width", needed, value_width));
        }
        Ok(self)
    }
}
