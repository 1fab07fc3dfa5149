//! Text to ids and back.

use serde_json::json;

use mlakit_model::{ModelConfig, ModelFolder, TextTokenizer, TokenizerError, embedded};

fn tokenizer() -> TextTokenizer {
    ModelFolder::from_static(embedded::tiny_dsa()).unwrap().tokenizer.unwrap()
}

#[test]
fn a_text_begins_with_its_id_and_bytes_are_ids() {
    let tokenizer = tokenizer();
    assert_eq!(tokenizer.encode("").unwrap(), [256]);
    assert_eq!(tokenizer.encode("A\u{e9}\n").unwrap(), [256, 65, 0xC3, 0xA9, 10]);
    assert_eq!(tokenizer.begin_id(), Some(256));
    assert!(tokenizer.is_end(257) && !tokenizer.is_end(256));
    let text = "Tomorrow, and tomorrow \u{1F5E1} \u{4E2D}\u{6587}";
    assert_eq!(tokenizer.decode(&tokenizer.encode(text).unwrap()).unwrap(), text);
}

#[test]
fn ids_out_of_range_are_typed_errors() {
    let tokenizer = tokenizer();
    for id in [258, 1 << 20, u32::MAX] {
        let error = tokenizer.decode(&[65, id]).unwrap_err();
        assert!(matches!(error, TokenizerError::Id { id: found, .. } if found == id), "{error}");
        let mut stream = tokenizer.stream();
        assert_eq!(stream.push(65).unwrap(), "A");
        assert!(stream.push(id).is_err());
        assert_eq!(stream.push(66).unwrap(), "B");
    }
}

/// A model with fewer ids than its tokenizer.
#[test]
fn a_text_that_the_model_has_no_ids_for_is_refused() {
    let files = embedded::tiny_dsa();
    let text = std::str::from_utf8(files.config).unwrap();
    let small = text
        .replace("\"vocab_size\": 258", "\"vocab_size\": 100")
        .replace("\"bos_token_id\": 256,", "")
        .replace("\"eos_token_id\": 257,", "");
    let config = ModelConfig::from_json(small.as_bytes()).unwrap();
    let tokenizer = TextTokenizer::from_bytes(files.tokenizer, None, &config).unwrap();
    assert!(matches!(tokenizer.encode("A"), Err(TokenizerError::Id { id: 256, .. })));
}

#[test]
fn add_bos_token_is_honoured_once() {
    let files = embedded::tiny_dsa();
    let config = ModelConfig::from_json(files.config).unwrap();
    let settings = br#"{"add_bos_token": true}"#;
    let with = |tokenizer: &[u8], settings: Option<&[u8]>| {
        TextTokenizer::from_bytes(tokenizer, settings, &config).unwrap().encode("A").unwrap()
    };
    assert_eq!(with(files.tokenizer, Some(settings)), [256, 65]);
    let mut root: serde_json::Value = serde_json::from_slice(files.tokenizer).unwrap();
    root["post_processor"] = serde_json::Value::Null;
    let plain = root.to_string();
    assert_eq!(with(plain.as_bytes(), None), [65]);
    assert_eq!(with(plain.as_bytes(), Some(settings)), [256, 65]);
    for bad in ["[]", "{", r#"{"add_bos_token": 1}"#] {
        let error =
            TextTokenizer::from_bytes(files.tokenizer, Some(bad.as_bytes()), &config).unwrap_err();
        assert!(matches!(error, TokenizerError::Malformed { .. }), "{bad}: {error}");
    }
}

#[test]
fn malformed_tokenizers() {
    let files = embedded::tiny_dsa();
    let config = ModelConfig::from_json(files.config).unwrap();
    let root: serde_json::Value = serde_json::from_slice(files.tokenizer).unwrap();
    let with = |key: &str, value: serde_json::Value| {
        let mut root = root.clone();
        root[key] = value;
        root.to_string()
    };
    let template = |piece| {
        let sequence = json!({"Sequence": {"id": "A", "type_id": 0}});
        json!({
            "type": "TemplateProcessing", "single": [sequence, piece], "pair": [],
            "special_tokens": {}
        })
    };
    let table = json!({"type": "Precompiled", "precompiled_charsmap": "/////w=="});
    let untyped = json!({"type": "Sequence", "normalizers": [{"precompiled_charsmap": ""}]});
    for text in [
        String::new(),
        "[]".to_string(),
        "{}".to_string(),
        with("model", json!(null)),
        with("model", json!({"type": "Unknown"})),
        with("model", json!({"type": "BPE", "vocab": {"a": -1}, "merges": []})),
        with("model", json!({"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]})),
        with("decoder", json!({"type": "Unknown"})),
        with("pre_tokenizer", json!({"type": "Split", "pattern": {"Regex": "("}})),
        with("added_tokens", json!([{"id": 1}])),
        with("version", json!("0.0")),
        with("post_processor", template(json!({"SpecialToken": {"id": "<s>", "type_id": 0}}))),
        with("post_processor", template(json!({"Sequence": {"id": "B", "type_id": 0}}))),
        with(
            "post_processor",
            json!({
                "type": "Sequence",
                "processors": [template(json!({"SpecialToken": {"id": "<s>", "type_id": 0}}))]
            }),
        ),
        with("decoder", json!({"type": "Strip", "content": " ", "start": 0, "stop": 1})),
        with("normalizer", table),
        with("normalizer", untyped),
    ] {
        let error = TextTokenizer::from_bytes(text.as_bytes(), None, &config).unwrap_err();
        assert!(matches!(error, TokenizerError::Malformed { .. }), "{text}: {error}");
    }
}

/// Streams every id and returns the pieces, the last one from the end of the stream.
fn pieces(tokenizer: &TextTokenizer, ids: &[u32]) -> Vec<String> {
    let mut stream = tokenizer.stream();
    let mut pieces: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    pieces.push(stream.finish().unwrap());
    pieces
}

#[test]
fn a_stream_never_splits_a_character() {
    let tokenizer = tokenizer();
    let text = "a\u{e9}\u{4E2D}\u{1F5E1}z".repeat(20);
    let ids = tokenizer.encode(&text).unwrap();
    let pieces = pieces(&tokenizer, &ids);
    assert!(pieces.iter().all(|piece| !piece.contains('\u{FFFD}')));
    assert!(pieces.iter().all(|piece| piece.chars().count() <= 1));
    assert_eq!(pieces.concat(), text);
    assert_eq!(pieces.last().unwrap(), "");
}

/// A tokenizer that writes spaces as U+2581, takes the first one of a text away when it decodes,
/// and falls back to tokens of single bytes.
pub fn spaced_tokenizer() -> serde_json::Value {
    let mut vocab = serde_json::Map::new();
    for (id, token) in ["<unk>", "\u{2581}", "a", "b", "ab", "\u{2581}ab"].iter().enumerate() {
        vocab.insert(token.to_string(), json!(id));
    }
    for byte in 0..=255 {
        vocab.insert(format!("<0x{byte:02X}>"), json!(vocab.len()));
    }
    let bar = |content: &str, pattern: &str| {
        let pattern = json!({"String": pattern});
        json!({"type": "Replace", "pattern": pattern, "content": content})
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u{2581}"}, bar("\u{2581}", " ")
        ]},
        "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            bar(" ", "\u{2581}"), {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        ]},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unk>", "fuse_unk": true,
            "byte_fallback": true, "ignore_merges": false, "vocab": vocab,
            "merges": ["a b", "\u{2581} ab"]
        }
    })
}

/// A decoder that treats the beginning of a text differently is given one token of context.
#[test]
fn a_stream_keeps_spaces_between_its_windows() {
    let config = ModelConfig::from_json(embedded::tiny_dsa().config).unwrap();
    let config = ModelConfig { vocab_size: 262, ..config };
    let text = spaced_tokenizer().to_string();
    let tokenizer = TextTokenizer::from_bytes(text.as_bytes(), None, &config).unwrap();
    let text = "ab ab  \u{e9}a b\u{4E2D} ab".repeat(30);
    let ids = tokenizer.encode(&text).unwrap();
    assert!(ids.contains(&5) && ids.iter().any(|id| *id > 200), "{ids:?}");
    assert_eq!(tokenizer.decode(&ids).unwrap(), text);
    let pieces = pieces(&tokenizer, &ids);
    assert_eq!(pieces.concat(), text);
    assert!(pieces.iter().all(|piece| !piece.contains('\u{FFFD}')));
}

#[test]
fn bytes_that_are_no_character_are_replaced_where_they_stand() {
    let tokenizer = tokenizer();
    // A lone continuation, a lead without its rest, and an unfinished character at the end.
    assert_eq!(pieces(&tokenizer, &[0x80, 65]), ["", "\u{FFFD}A", ""]);
    assert_eq!(pieces(&tokenizer, &[0xC3, 65]), ["", "\u{FFFD}A", ""]);
    assert_eq!(pieces(&tokenizer, &[65, 0xE4, 0xB8]), ["A", "", "", "\u{FFFD}"]);
}

/// Any bytes at all: the pieces together are the lossy text of the whole.
#[test]
fn streams_of_random_bytes_equal_the_lossy_text() {
    let tokenizer = tokenizer();
    let mut state = 1_u64;
    for round in 0..200 {
        let mut bytes: Vec<u8> = Vec::new();
        while bytes.len() < 60 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let random = (state >> 33) as u32;
            match random % 4 {
                0 => bytes.push((random >> 8) as u8),
                1 => bytes.push(0x80 | (random >> 8) as u8 & 0x3F),
                2 => bytes.extend("\u{1F5E1}".as_bytes()),
                _ => bytes.extend("\u{e9}".as_bytes()),
            }
        }
        let ids: Vec<u32> = bytes.iter().map(|&byte| u32::from(byte)).collect();
        let text = pieces(&tokenizer, &ids).concat();
        assert_eq!(text, String::from_utf8_lossy(&bytes), "round {round}: {bytes:x?}");
    }
}
