//! What the `Spec`s of all operations share: checked construction, and numbers that can be compared and hashed.

use std::hash::{Hash, Hasher};

use serde::{Deserialize, Serialize};

use crate::Error;

/// A finite `f32` with equality and hash of its bits, for `Spec`s.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(try_from = "f32", into = "f32")]
pub struct Scalar(f32);

impl Scalar {
    /// The number.
    pub fn value(self) -> f32 {
        self.0
    }
}

impl TryFrom<f32> for Scalar {
    type Error = Error;

    fn try_from(value: f32) -> Result<Self, Error> {
        if value.is_finite() {
            return Ok(Self(value));
        }
        Err(Error::contract("number", "a finite f32", value))
    }
}

impl From<Scalar> for f32 {
    fn from(scalar: Scalar) -> Self {
        scalar.0
    }
}

impl PartialEq for Scalar {
    fn eq(&self, other: &Self) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}

impl Eq for Scalar {}

impl Hash for Scalar {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.to_bits().hash(state);
    }
}

/// Checks a capacity or a width.
pub(crate) fn within(
    what: &'static str,
    value: usize,
    low: usize,
    high: usize,
) -> Result<(), Error> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(Error::contract(what, format!("{low} to {high}"), value))
}

/// Rows that an operation may have at most.
pub const MAX_ROWS: usize = 1 << 24;

/// The whole number of rows of `width` elements in `len` elements.
pub(crate) fn rows_of(
    what: &'static str,
    len: usize,
    width: usize,
    max_rows: usize,
) -> Result<usize, Error> {
    let rows = len / width.max(1);
    if rows * width != len || rows > max_rows {
        let needed = format!("a whole number of rows of {width} elements, at most {max_rows}");
        return Err(Error::contract(what, needed, format!("{len} elements")));
    }
    Ok(rows)
}

/// Declares `$spec`, a checked `$fields`: it can be made only by `new` (or by reading it, which calls `new`), and reads like the fields.
/// `$text` is the name of `$fields` once more, as serde wants it.
macro_rules! checked_spec {
    ($(#[$doc:meta])* $spec:ident, $fields:ident, $text:literal) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
        #[serde(try_from = $text, into = $text)]
        pub struct $spec($fields);

        impl $spec {
            /// Checks the fields.
            ///
            /// # Errors
            /// [`Error::Contract`](crate::Error::Contract) names the field, what was needed and what was given.
            pub fn new(fields: $fields) -> Result<Self, crate::Error> {
                fields.check()?;
                Ok(Self(fields))
            }
        }

        impl std::ops::Deref for $spec {
            type Target = $fields;

            fn deref(&self) -> &$fields {
                &self.0
            }
        }

        impl TryFrom<$fields> for $spec {
            type Error = crate::Error;

            fn try_from(fields: $fields) -> Result<Self, crate::Error> {
                Self::new(fields)
            }
        }

        impl From<$spec> for $fields {
            fn from(spec: $spec) -> Self {
                spec.0
            }
        }
    };
}
pub(crate) use checked_spec;
