//! Mutated files of every kind that is read: a typed error or a result, never a panic.
//!
//! The mutations are a function of the round, so that a failure can be repeated.

use mlakit_model::vectors::VectorConfig;
use mlakit_model::{Checkpoint, ModelConfig, RopeTable, TextTokenizer, embedded};
use serde_json::{Value, json};

use crate::checkpoint::{serialize, stored, write_shards};
use crate::common::vectors;
use crate::tokenizer::spaced_tokenizer;

/// xorshift64*.
struct Random(u64);

impl Random {
    fn new(round: u64) -> Self {
        Self(round.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }
}

/// Pieces of text at which readers of JSON and of sizes tend to fail.
const PIECES: [&str; 18] = [
    "0",
    "-1",
    "1e999",
    "18446744073709551615",
    "9223372036854775808",
    "NaN",
    "null",
    "[]",
    "{}",
    "\"\"",
    "[[[[[[[[",
    "\u{0}",
    "\u{FFFD}",
    "true",
    "1.5",
    ",",
    "\\ud800",
    "4294967296",
];

/// Changes the first `region` bytes of `bytes` in one to four places.
fn mutate(bytes: &mut Vec<u8>, region: usize, random: &mut Random) {
    for _ in 0..1 + random.below(4) {
        let at = random.below(region.min(bytes.len()));
        let value = random.next();
        if bytes.is_empty() {
            return;
        }
        match random.below(7) {
            0 => bytes[at] ^= 1 << (value % 8),
            1 => bytes[at] = (value >> 8) as u8,
            2 => bytes.truncate(at),
            3 => bytes.insert(at, (value >> 16) as u8),
            4 => {
                let end = (at + 1 + random.below(20)).min(bytes.len());
                bytes.drain(at..end);
            }
            5 => {
                let piece = PIECES[random.below(PIECES.len())];
                let end = (at + random.below(6)).min(bytes.len());
                bytes.splice(at..end, piece.bytes());
            }
            _ => {
                // The value after a colon becomes another one.
                if let Some(colon) = bytes[at..].iter().position(|byte| *byte == b':') {
                    let begin = at + colon + 1;
                    let rest = bytes[begin..].iter();
                    let end = begin + rest.take_while(|b| !b",}\n".contains(b)).count();
                    let piece = PIECES[random.below(PIECES.len())];
                    bytes.splice(begin..end, piece.bytes());
                }
            }
        }
    }
}

/// Calls `read` with `rounds` mutations of `original` and returns how many it accepted.
fn fuzz(original: &[u8], region: usize, rounds: u64, read: impl Fn(Vec<u8>) -> bool) -> u64 {
    assert!(read(original.to_vec()), "the original is accepted");
    (0..rounds)
        .filter(|&round| {
            let mut bytes = original.to_vec();
            mutate(&mut bytes, region, &mut Random::new(round));
            read(bytes)
        })
        .count() as u64
}

/// Replaces, removes or repeats values of a JSON text, which stays one: these reach what is behind
/// the JSON reader. Returns how many of `rounds` changed texts `read` accepted.
fn fuzz_values(original: &[u8], rounds: u64, read: impl Fn(Vec<u8>) -> bool) -> u64 {
    let root: Value = serde_json::from_slice(original).unwrap();
    (0..rounds)
        .filter(|&round| {
            let (mut root, mut random) = (root.clone(), Random::new(round));
            for _ in 0..1 + random.below(3) {
                change_value(&mut root, &mut random);
            }
            read(root.to_string().into_bytes())
        })
        .count() as u64
}

/// Walks down to a random value and changes it: more often a leaf than what holds it.
fn change_value(value: &mut Value, random: &mut Random) {
    let choice = random.below(10);
    match value {
        Value::Object(object) if !object.is_empty() && choice < 9 => {
            let key = object.keys().nth(random.below(object.len())).unwrap().clone();
            match choice {
                0 => {
                    object.remove(&key);
                }
                1 => {
                    let copied = object[&key].clone();
                    object.insert(format!("{key}_"), copied);
                }
                _ => change_value(object.get_mut(&key).unwrap(), random),
            }
        }
        Value::Array(values) if !values.is_empty() && choice < 9 => {
            let at = random.below(values.len());
            change_value(&mut values[at], random);
        }
        other => *other = other_value(random),
    }
}

fn other_value(random: &mut Random) -> Value {
    match random.below(14) {
        0 => Value::Null,
        1 => json!(-1),
        2 => json!(0),
        3 => json!(1),
        4 => json!(u64::MAX),
        5 => json!(1e300),
        6 => json!(0.5),
        7 => json!(random.below(300)),
        8 => json!(""),
        9 => json!("\u{1F5E1}"),
        10 => json!([]),
        11 => json!({}),
        12 => json!(true),
        _ => json!([[1, "a"], {"type": "ByteLevel"}]),
    }
}

/// Both outcomes occur, so the mutations reach past the first check.
fn assert_mixed(accepted: u64, rounds: u64) {
    println!("{accepted} of {rounds} accepted");
    assert!(accepted > 0 && accepted < rounds, "{accepted} of {rounds} accepted");
}

#[test]
fn configurations() {
    for name in ["deepseek_v2", "deepseek_v3", "deepseek_v32", "minicpm3"] {
        let original = std::fs::read(vectors(name).join("config.json")).unwrap();
        let root: serde_json::Value = serde_json::from_slice(&original).unwrap();
        let original = root["hf_config"].to_string().into_bytes();
        let read = |bytes: Vec<u8>| {
            let Ok(config) = ModelConfig::from_json(&bytes) else { return false };
            for layer in config.layers.iter().take(2) {
                let attention = &layer.attention;
                assert!(attention.softmax_scale.is_finite() && attention.softmax_scale > 0.0);
                let Some(rope) = &attention.rope else { continue };
                let table = RopeTable::new(rope, attention.qk_rope_head_dim);
                assert!(table.inverse_frequencies().iter().all(|f| !f.is_nan()), "{rope:?}");
            }
            true
        };
        assert_mixed(fuzz(&original, original.len(), 4000, read), 4000);
        assert_mixed(fuzz_values(&original, 8000, read), 8000);
    }
}

#[test]
fn descriptions_of_vectors() {
    let original = std::fs::read(vectors("full_minicpm3_h40").join("config.json")).unwrap();
    let read = |bytes: Vec<u8>| {
        let Ok(config) = VectorConfig::from_json(&bytes) else { return false };
        let norm = config.generate("full_minicpm3_h40.kv_a_layernorm.weight");
        config.attention("L0").is_ok() && norm.is_ok()
    };
    assert_mixed(fuzz(&original, original.len(), 2000, read), 2000);
    assert_mixed(fuzz_values(&original, 4000, read), 4000);
}

#[test]
fn safetensors_headers() {
    let folder = mlakit_model::ModelFolder::open(&vectors("deepseek_v3")).unwrap();
    let original = serialize(&stored(&folder.checkpoint));
    let header = 8 + u64::from_le_bytes(original[..8].try_into().unwrap()) as usize;
    let read = |bytes: Vec<u8>| {
        let Ok(checkpoint) = Checkpoint::from_bytes(bytes) else { return false };
        for name in checkpoint.names() {
            if let Ok(weight) = checkpoint.tensor(name) {
                assert_eq!(weight.to_f32().len(), weight.shape().iter().product::<usize>());
            }
        }
        // A result or a typed error: names and shapes may have changed.
        let _ = checkpoint.verify(&folder.config);
        true
    };
    assert_mixed(fuzz(&original, 16, 1000, read), 1000);
    assert_mixed(fuzz(&original, header, 6000, read), 6000);
    let accepted = fuzz_values(&original[8..header], 6000, |text| {
        let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
        bytes.extend(text);
        bytes.extend_from_slice(&original[header..]);
        read(bytes)
    });
    assert_mixed(accepted, 6000);
}

#[test]
fn shard_indexes() {
    let folder = mlakit_model::ModelFolder::open(&vectors("deepseek_v3")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let index = write_shards(dir.path(), &stored(&folder.checkpoint)).to_string();
    let path = dir.path().join("model.safetensors.index.json");
    let read = |bytes: Vec<u8>| {
        std::fs::write(&path, bytes).unwrap();
        match Checkpoint::open(dir.path()) {
            Ok(checkpoint) => checkpoint.verify(&folder.config).is_ok(),
            Err(_) => false,
        }
    };
    assert_mixed(fuzz(index.as_bytes(), index.len(), 1000, read), 1000);
    let accepted = fuzz_values(index.as_bytes(), 1000, read);
    assert!(accepted < 1000);
}

#[test]
fn tokenizers() {
    let files = embedded::tiny_dsa();
    let config = ModelConfig::from_json(files.config).unwrap();
    let read = |bytes: Vec<u8>| {
        let Ok(tokenizer) = TextTokenizer::from_bytes(&bytes, None, &config) else { return false };
        let Ok(ids) = tokenizer.encode("To be, or not to be\u{e9}\n") else { return false };
        let mut stream = tokenizer.stream();
        ids.iter().all(|&id| stream.push(id).is_ok()) && stream.finish().is_ok()
    };
    assert_mixed(fuzz(files.tokenizer, files.tokenizer.len(), 5_000, read), 150_000);
    assert_mixed(fuzz_values(files.tokenizer, 5_000, read), 150_000);
    let spaced = spaced_tokenizer().to_string();
    assert_mixed(fuzz(spaced.as_bytes(), spaced.len(), 5_000, read), 150_000);
    assert_mixed(fuzz_values(spaced.as_bytes(), 5_000, read), 150_000);
    let settings = files.tokenizer_config;
    let accepted = fuzz(settings, settings.len(), 1000, |bytes| {
        TextTokenizer::from_bytes(files.tokenizer, Some(&bytes), &config).is_ok()
    });
    assert_mixed(accepted, 1000);
}
