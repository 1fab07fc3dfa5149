//! The model that every program built on this crate can start with: `models/tiny-dsa`.

use crate::folder::EmbeddedFiles;

/// Embedded weights begin at a multiple of 64 bytes, so that aligned tensors in the file are
/// aligned in memory.
#[repr(C, align(64))]
struct Aligned<T: ?Sized>(T);

static WEIGHTS: &Aligned<[u8]> =
    &Aligned(*include_bytes!("../../../models/tiny-dsa/model.safetensors"));

/// The files of `models/tiny-dsa`.
pub fn tiny_dsa() -> EmbeddedFiles {
    EmbeddedFiles {
        config: include_bytes!("../../../models/tiny-dsa/config.json"),
        weights: &WEIGHTS.0,
        tokenizer: include_bytes!("../../../models/tiny-dsa/tokenizer.json"),
        tokenizer_config: include_bytes!("../../../models/tiny-dsa/tokenizer_config.json"),
    }
}
