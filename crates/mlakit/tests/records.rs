//! Every record, byte by byte, against `records/golden.bin`: what an independent implementation (numpy, ml_dtypes) made of the same
//! tokens. `records/make.py` writes that file and says what is in it.

use half::bf16;
use mlakit::{E2m1, E4m3, PageGeometry, RecordFormat, RecordLayout};

const TOKENS: usize = 32;
const WIDTH: usize = 576;
const PAGE: usize = 16;
const KV_SCALE: f32 = 0.37;

/// The widths of the golden tokens in a format.
fn widths(format: RecordFormat) -> (usize, usize) {
    use RecordFormat::*;
    match format {
        Fp8_528 | V41_528 | V41_288 | Nvfp4_304 => (512, 0),
        V4_584 => (448, 64),
        IndexBf16_256 | IndexFp8_132 | IndexMxfp4_68 => (128, 0),
        _ => (512, 64),
    }
}

/// The golden bytes, taken from the front.
struct Golden(&'static [u8]);

impl Golden {
    fn new() -> Self {
        Self(include_bytes!("records/golden.bin"))
    }

    fn take(&mut self, bytes: usize) -> &'static [u8] {
        let (front, rest) = self.0.split_at(bytes);
        self.0 = rest;
        front
    }

    fn tokens(&mut self) -> Vec<bf16> {
        let bytes = self.take(TOKENS * WIDTH * 2).chunks_exact(2);
        bytes.map(|b| bf16::from_le_bytes([b[0], b[1]])).collect()
    }
}

fn geometry(format: RecordFormat, page_size: usize) -> PageGeometry {
    let (latent, rope) = widths(format);
    let geometry = PageGeometry { record: RecordLayout::of(format, latent, rope), page_size };
    geometry.check().unwrap()
}

/// The elements of a golden token that a format stores.
fn elements(format: RecordFormat, token: &[bf16]) -> [&[bf16]; 2] {
    let (latent, rope) = widths(format);
    [&token[..latent], &token[WIDTH - rope..]]
}

#[test]
fn records_and_values_are_those_of_another_implementation() {
    let mut golden = Golden::new();
    let tokens = golden.tokens();
    golden.take(2 << 15);
    for format in RecordFormat::ALL {
        let pages = geometry(format, PAGE);
        let needed = golden.take(TOKENS / PAGE * pages.payload_bytes());
        let mut given = vec![0xa5; needed.len()];
        for (index, token) in tokens.chunks_exact(WIDTH).enumerate() {
            let page = &mut given[index / PAGE * pages.payload_bytes()..];
            let token = elements(format, token);
            pages.planes().encode(pages.record, (page, index % PAGE), token, KV_SCALE);
        }
        if let Some(at) = given.iter().zip(needed).position(|(g, n)| g != n) {
            let (page, byte) = (at / pages.payload_bytes(), at % pages.payload_bytes());
            let (given, needed) = (given[at], needed[at]);
            panic!("{format:?}: byte {byte} of page {page} is {given:#x}, needed {needed:#x}");
        }
        strange_records(format, &mut golden);
    }
    assert!(golden.0.is_empty());
}

/// Whatever bytes a cache has, a reader gives the golden values.
fn strange_records(format: RecordFormat, golden: &mut Golden) {
    let pages = geometry(format, 1);
    let width = pages.record.width;
    let records = golden.take(4 * pages.payload_bytes());
    for (index, record) in records.chunks_exact(pages.payload_bytes()).enumerate() {
        let mut given = vec![0.0; width];
        pages.planes().decode(pages.record, (record, 0), KV_SCALE, &mut given);
        let needed = golden.take(4 * width).chunks_exact(4);
        let needed = needed.map(|b| f32::from_le_bytes(b.try_into().unwrap()));
        for (element, (given, needed)) in given.iter().zip(needed).enumerate() {
            let same = given.to_bits() == needed.to_bits() || given.is_nan() && needed.is_nan();
            assert!(same, "{format:?} record {index} element {element}: {given}, needed {needed}");
        }
    }
}

#[test]
fn elements_of_every_bf16_are_those_of_ml_dtypes() {
    let mut golden = Golden::new();
    golden.tokens();
    let (eight, four) = (golden.take(1 << 15), golden.take(1 << 15));
    for bits in 0..1u16 << 15 {
        let (value, at) = (bf16::from_bits(bits).to_f32(), usize::from(bits));
        assert_eq!(E4m3::encode(value), eight[at], "E4M3 of {value:e}");
        assert_eq!(E4m3::encode(-value), eight[at] | 0x80, "E4M3 of -{value:e}");
        assert_eq!(E2m1::encode(value), four[at], "E2M1 of {value:e}");
        let negative = if value.is_nan() { 7 } else { four[at] | 8 };
        assert_eq!(E2m1::encode(-value), negative, "E2M1 of -{value:e}");
    }
}

/// Reading a record and writing what was read changes nothing, where all that was read is BF16.
#[test]
fn encoding_what_was_decoded_is_stable() {
    let mut tokens = Golden::new().tokens();
    // A token whose F32 scales are powers of two: 2688 x 2^-8 and 448 x 2^-7 are the largest magnitudes.
    let exact = &mut tokens[..WIDTH];
    exact.iter_mut().for_each(|v| *v = bf16::from_f32(v.to_f32().clamp(-3.0, 3.0)));
    (exact[0], exact[512]) = (bf16::from_f32(10.5), bf16::from_f32(3.5));
    for format in RecordFormat::ALL {
        let layout = geometry(format, 1).record;
        // Where a group's scale is E4M3 it must be normal: a subnormal one may be half of itself off, and then a group's largest code
        // is no 6. The other tokens have scales of a power of two.
        let wide = format.name().starts_with("nvfp4") || format == RecordFormat::V41_288;
        let indices = if wide { 0..1 } else { 0..24 };
        for (index, token) in indices.clone().zip(tokens.chunks_exact(WIDTH)) {
            let once = through(layout, &elements(format, token).concat());
            let values: Vec<bf16> = once.iter().map(|v| bf16::from_f32(*v)).collect();
            let exact = values.iter().zip(&once).all(|(v, o)| v.to_f32() == *o);
            assert!(exact, "{format:?} token {index}: values that are no BF16");
            assert_eq!(through(layout, &values), once, "{format:?} token {index}");
        }
    }
}

fn through(layout: RecordLayout, values: &[bf16]) -> Vec<f32> {
    let parts = layout.parts();
    let (mut data, mut scales) = (vec![0; parts.data_bytes], vec![0; parts.scales_bytes]);
    let mut out = vec![0.0; layout.width];
    layout.encode(&mut data, &mut scales, values, 0.5);
    layout.decode(&data, &scales, 0.5, &mut out);
    out
}

#[test]
fn bytes_are_those_of_the_names() {
    for format in RecordFormat::ALL {
        let name = format.name();
        assert_eq!(RecordFormat::parse(name).unwrap(), format);
        assert_eq!(serde_json::to_string(&format).unwrap(), format!("\"{name}\""));
        let digits = name.trim_end_matches('t').rsplit_once('_').map(|(_, digits)| digits);
        let bytes = match format {
            RecordFormat::Bf16 => 1152,
            RecordFormat::E4m3 => 576,
            _ => digits.unwrap().parse().unwrap(),
        };
        assert_eq!(geometry(format, 64).record.bytes(), bytes, "{name}");
        assert_eq!(geometry(format, 64).payload_bytes(), 64 * bytes, "{name}");
    }
    assert!(RecordFormat::parse("fp8_655").is_err());
}

#[test]
fn planes_are_where_engines_have_them() {
    let v4 = geometry(RecordFormat::V4_584, 64).planes();
    assert_eq!((v4.data.token(3), v4.scales.token(3)), (3 * 576..4 * 576, 36_888..36_896));
    let fp8 = geometry(RecordFormat::IndexFp8_132, 64).planes();
    assert_eq!((fp8.data.token(63), fp8.scales.token(63)), (8_064..8_192, 8_444..8_448));
    let mxfp4 = geometry(RecordFormat::IndexMxfp4_68, 64).planes();
    assert_eq!((mxfp4.data.token(1), mxfp4.scales.token(1)), (64..128, 4_100..4_104));
    for format in RecordFormat::ALL {
        let planes = geometry(format, 48).planes();
        let planar = ["v4_584", "index_fp8_132", "index_mxfp4_68"].contains(&format.name());
        assert_eq!(planes.scales.bytes > 0, planar, "{format:?}");
    }
}

#[test]
fn a_reader_has_the_layout_of_the_writer() {
    for format in RecordFormat::ALL.into_iter().filter(|format| !format.is_index()) {
        let (latent, rope) = widths(format);
        let written = RecordLayout::of(format, latent, rope);
        let value = if format == RecordFormat::V4_584 { 512 } else { latent };
        assert_eq!(RecordLayout::of_key(format, latent + rope, value), written, "{format:?}");
        format.check_key(latent + rope, value).unwrap();
        format.check_parts(latent, rope).unwrap();
    }
    // V4.1 quantises latent and rotary part alike, wherever the rotary part begins.
    let all = RecordLayout::of_key(RecordFormat::V41_528, 512, 512);
    assert_eq!(RecordLayout::of(RecordFormat::V41_528, 448, 64), all);
}

#[test]
fn what_a_format_cannot_store_is_refused_by_name() {
    use RecordFormat::*;
    let refused = |result: Result<(), mlakit::Error>, text: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(text), "{error}, needed {text}");
    };
    // Width alone never decides: 512 elements are a fp8_528, not a fp8_656 without a rotary part.
    refused(Fp8_656.check_parts(512, 0), "fp8_528");
    refused(Fp8_528.check_parts(512, 64), "fp8_656");
    refused(Nvfp4_304.check_parts(512, 64), "nvfp4_368");
    refused(V4_584.check_parts(512, 0), "without a rotary part");
    refused(IndexFp8_132.check_key(128, 128), "not an index key");
    for (format, latent, rope, text) in [
        (Fp8_656, 500, 64, "multiple of 128"),
        (V4_584, 500, 64, "multiple of 64"),
        (V41_528, 500, 0, "multiple of 32"),
        (Nvfp4_432, 500, 64, "multiple of 16"),
        (IndexFp8_132, 127, 0, "multiple of 4"),
        (IndexMxfp4_68, 100, 0, "multiple of 32"),
        (Bf16, 0, 0, "record_width"),
        (Nvfp4_432, 0, 64, "rotary part"),
    ] {
        refused(RecordLayout::of(format, latent, rope).check(64), text);
    }
    for format in RecordFormat::ALL {
        let layout = geometry(format, 1).record;
        for size in [0, 3, 17, 65_552, 1 << 20] {
            refused(layout.check(size), "page_size");
        }
        assert_eq!(layout.check(2).is_ok(), format == V4_584, "{format:?}");
        assert_eq!(layout.check_width(Some(layout.width + 2)).is_ok(), format.is_plain());
        layout.check_width(Some(layout.width)).unwrap();
        refused(layout.check_width(Some(layout.width - 1)), "record_width");
    }
}
