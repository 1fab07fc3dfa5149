//! SHA-256 as text, for the names and the check of cache entries.

use sha2::{Digest as _, Sha256};

/// Of several parts. Each is preceded by its length, so that no two lists of parts give one text.
pub(super) fn of<'p>(parts: impl IntoIterator<Item = &'p [u8]>) -> [u8; 32] {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    hasher.finalize().into()
}

/// In hexadecimal digits.
pub(super) fn text(digest: [u8; 32]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
