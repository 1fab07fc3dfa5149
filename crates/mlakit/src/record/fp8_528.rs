//! `fp8_528`: the latent of `fp8_656` without a rotary part (GLM-5.3 Flash). At 512 elements: `[0, 512)` codes, `[512, 528)` 4 F32 scales.

use super::*;

pub(super) const CODEC: Codec = Codec { name: "fp8_528", rope: RopePart::Absent, ..fp8_656::CODEC };
