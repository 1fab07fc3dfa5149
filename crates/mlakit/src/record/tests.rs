//! What each format does at its edges; whole records are compared in `tests/records.rs`.

use super::*;

fn encoded(layout: RecordLayout, values: &[half::bf16]) -> Vec<u8> {
    let Parts { data_bytes, scales_bytes, .. } = layout.parts();
    let (mut data, mut scales) = (vec![0xa5; data_bytes], vec![0xa5; scales_bytes]);
    layout.encode(&mut data, &mut scales, values, 1.0);
    [data, scales].concat()
}

fn repeated(value: f32, width: usize) -> Vec<half::bf16> {
    vec![half::bf16::from_f32(value); width]
}

#[test]
fn padding_of_plain_records_stays() {
    for format in RecordFormat::PLAIN {
        let layout = RecordLayout::of(format, 8, 4).padded(Some(20));
        let values = repeated(1.0, 12);
        let record = encoded(layout, &values);
        let own = RecordLayout { width: 12, ..layout }.bytes();
        assert_eq!(record.len(), layout.bytes());
        assert!(record[own..].iter().all(|byte| *byte == 0xa5), "{format:?}");
        assert!(record[..own].iter().all(|byte| *byte != 0xa5), "{format:?}");
    }
}

#[test]
fn bits_of_bf16_survive() {
    let values = [0x7fc1u16, 0x8000, 0x0001, 0xff80].map(half::bf16::from_bits);
    let record = encoded(RecordLayout::of(RecordFormat::Bf16, 4, 0), &values);
    let back = record.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    assert!(back.eq(values.map(half::bf16::to_bits)));
}

#[test]
fn zeros_have_the_scales_of_the_floors() {
    let of = |format, latent: usize, rope| {
        let layout = RecordLayout::of(format, latent, rope);
        encoded(layout, &repeated(0.0, latent + rope))
    };
    // 1e-4 rounded up is 2^-13; 1e-4 / 448 rounded up is 2^-22.
    let fp8 = of(RecordFormat::Fp8_656, 128, 64);
    assert_eq!(fp8[128..132], 2f32.powi(-13).to_le_bytes());
    assert_eq!(of(RecordFormat::V4_584, 64, 8)[80..], [127 - 22, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(of(RecordFormat::V41_528, 32, 0)[32], 127 - 22);
    assert_eq!(of(RecordFormat::V41_288, 16, 0)[16], 1, "2^-9, the smallest E4M3");
    assert_eq!(of(RecordFormat::IndexFp8_132, 128, 0)[128..], 2f32.powi(-22).to_le_bytes());
    assert_eq!(of(RecordFormat::IndexMxfp4_68, 32, 0)[16], 1, "2^-126");
    for format in [RecordFormat::Nvfp4_432, RecordFormat::Nvfp4_368, RecordFormat::Nvfp4_368t] {
        assert!(of(format, 64, 16).iter().all(|byte| *byte == 0), "{format:?}");
    }
    assert!(of(RecordFormat::Nvfp4_304, 64, 0).iter().all(|byte| *byte == 0));
}

#[test]
fn no_scale_of_the_token_is_lost_to_rounding() {
    // The group of the largest magnitude has the largest scale, 448, whatever the magnitude.
    for magnitude in [1e-30, 3.0, 1e30] {
        let layout = RecordLayout::of(RecordFormat::Nvfp4_304, 512, 0);
        let record = encoded(layout, &repeated(magnitude, 512));
        assert_eq!(record[layout.parts().scales][0], 0x7e, "{magnitude}");
    }
}

#[test]
fn an_infinity_counts_as_the_largest_number_and_nan_as_none() {
    let layout = RecordLayout::of(RecordFormat::V41_528, 64, 0);
    let mut values = repeated(1.0, 64);
    values[3] = half::bf16::INFINITY;
    values[40] = half::bf16::NAN;
    let record = encoded(layout, &values);
    let mut out = [0.0; 64];
    layout.decode(&record, &[], 1.0, &mut out);
    // Their group is far below its scale; the other has its own.
    assert_eq!(out[3], 448.0 * 2f32.powi(120));
    assert_eq!(out[..3], [0.0; 3]);
    assert!(out[40].is_nan() && out[32..40].iter().all(|value| *value == 1.0));
}

#[test]
fn some_elements_are_decoded_like_all() {
    for format in RecordFormat::ALL {
        let rope = if format.rope() == RopePart::Apart { 64 } else { 0 };
        let layout = RecordLayout::of(format, 128, rope);
        let values: Vec<half::bf16> =
            (0..layout.width).map(|i| half::bf16::from_f32((i * 37 % 91) as f32 - 45.0)).collect();
        let record = encoded(layout, &values);
        let (data, scales) = record.split_at(layout.parts().data_bytes);
        let decode = |count: usize| {
            let mut out = vec![f32::NAN; count];
            layout.decode(data, scales, 1.0, &mut out);
            out
        };
        let all = decode(layout.width);
        for count in [0, 1, 15, 16, 33, 127, 128, layout.width - 1] {
            assert_eq!(decode(count), all[..count], "{format:?} {count}");
        }
    }
}

#[test]
fn pieces_are_one_token_wherever_they_are_cut() {
    for format in RecordFormat::ALL {
        let rope = if format.rope() == RopePart::Apart { 64 } else { 0 };
        let layout = RecordLayout::of(format, 128, rope);
        let values: Vec<half::bf16> =
            (0..layout.width).map(|i| half::bf16::from_f32((i * 29 % 83) as f32 / 7.0)).collect();
        let whole = encoded(layout, &values);
        for cut in [0, 1, 50, 128, layout.width] {
            let mut record = vec![0xa5; whole.len()];
            let (data, scales) = record.split_at_mut(layout.parts().data_bytes);
            let (low, high) = values.split_at(cut);
            layout.encode_parts(data, scales, [low, high], 1.0);
            assert_eq!(record, whole, "{format:?} cut at {cut}");
        }
    }
}
