//! `index_bf16_256`: an index key in BF16, as `bf16` stores a token. At 128 elements: 256 bytes.

use super::*;

pub(super) const CODEC: Codec =
    Codec { name: "index_bf16_256", rope: RopePart::Absent, ..bf16::CODEC };
