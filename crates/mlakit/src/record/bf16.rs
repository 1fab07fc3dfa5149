//! `bf16`: element `i` of the latent, then of the rotary part, at bytes `[2 i, 2 i + 2)`, little-endian.

use half::bf16;

/// Bytes of a record of `width` elements.
pub const fn bytes(width: usize) -> usize {
    2 * width
}

/// Element `index`.
pub fn decode(record: &[u8], index: usize) -> f32 {
    bf16::from_le_bytes([record[2 * index], record[2 * index + 1]]).to_f32()
}

/// Writes the elements, bit for bit.
pub fn encode(record: &mut [u8], values: &[bf16]) {
    for (bytes, value) in record.chunks_exact_mut(2).zip(values) {
        bytes.copy_from_slice(&value.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_survive_and_padding_stays() {
        let values = [0x7fc1u16, 0x8000, 0x0001, 0xff80].map(bf16::from_bits);
        let mut record = [0xaa; 10];
        encode(&mut record, &values);
        let back = [0, 1, 2, 3].map(|i| u16::from_le_bytes([record[2 * i], record[2 * i + 1]]));
        assert_eq!(back, values.map(bf16::to_bits));
        assert_eq!(record[8..], [0xaa, 0xaa]);
        assert_eq!(decode(&record, 3), f32::NEG_INFINITY);
    }
}
