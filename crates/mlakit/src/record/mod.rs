//! Cache record formats: the bytes of one token. Reader, writer and oracle all go through here.

use serde::{Deserialize, Serialize};

use crate::{E4m3, Error};

pub mod bf16;
pub mod e4m3;

/// How the elements of a token lie in the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecordFormat {
    /// Two bytes an element, exact: [`bf16`].
    #[default]
    Bf16,
    /// One byte an element and one scale for the whole cache: [`e4m3`].
    E4m3,
}

impl RecordFormat {
    /// All formats.
    pub const ALL: [Self; 2] = [Self::Bf16, Self::E4m3];

    /// Its name in files and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::E4m3 => "e4m3",
        }
    }

    /// The format of this name.
    pub fn parse(name: &str) -> Result<Self, Error> {
        let names = || Self::ALL.map(Self::name).join(", ");
        let found = Self::ALL.into_iter().find(|format| format.name() == name);
        found.ok_or_else(|| Error::contract("record", format!("one of {}", names()), name))
    }

    /// Whether values are stored divided by a scale of the whole cache.
    pub fn is_scaled(self) -> bool {
        self == Self::E4m3
    }
}

/// A record format at a width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RecordLayout {
    /// The format.
    pub format: RecordFormat,
    /// Elements of a record, those included that pad it.
    pub width: usize,
}

impl RecordLayout {
    /// Bytes of a record.
    pub fn bytes(self) -> usize {
        self.bytes_of(self.width)
    }

    /// Bytes of the first `elements` elements of a record.
    pub fn bytes_of(self, elements: usize) -> usize {
        match self.format {
            RecordFormat::Bf16 => bf16::bytes(elements),
            RecordFormat::E4m3 => e4m3::bytes(elements),
        }
    }

    /// Element `index` of a record; `scale` is that of the cache and unused where the format has none.
    pub fn decode(self, record: &[u8], index: usize, scale: f32) -> f64 {
        match self.format {
            RecordFormat::Bf16 => f64::from(bf16::decode(record, index)),
            RecordFormat::E4m3 => f64::from(E4m3::decode(record[index])) * f64::from(scale),
        }
    }

    /// Writes the first `values.len()` elements of a record; what is behind them keeps its bytes.
    pub fn encode(self, record: &mut [u8], values: &[half::bf16], scale: f32) {
        match self.format {
            RecordFormat::Bf16 => bf16::encode(record, values),
            RecordFormat::E4m3 => e4m3::encode(record, values, scale),
        }
    }
}
