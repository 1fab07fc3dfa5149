//! What is refused of a `tokenizer.json` before the library sees it: texts and values on which the
//! library panics instead of returning an error, found by the mutation tests.

use serde_json::Value;

use crate::error::shorten;

/// Says what is wrong with the text, if anything is.
pub(super) fn check(text: &[u8]) -> Result<(), String> {
    // Some texts that are not JSON end in a panic of the library.
    let root: Value = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    let part = |key: &str| root.get(key).unwrap_or(&Value::Null);
    // SentencePiece's compiled table is used without bounds checks; no architecture of this crate
    // has one. It is found by its table too, because the library does not need the type.
    let precompiled = |object: &Value| {
        object.get("type").is_some_and(|kind| kind == "Precompiled")
            || object.get("precompiled_charsmap").is_some()
    };
    if any(part("normalizer"), &precompiled) {
        return Err("normalizer: Precompiled is not supported".to_string());
    }
    // Stripping the end of a token that is shorter underflows. Tokenizers strip the beginning.
    let strips_end = |object: &Value| {
        object.get("stop").is_some_and(|stop| *stop != 0) && object.get("start").is_some()
    };
    if any(part("decoder"), &strips_end) {
        return Err("decoder: Strip with a `stop` other than 0 is not supported".to_string());
    }
    match broken_template(part("post_processor")) {
        Some(reason) => Err(format!("post_processor: {reason}")),
        None => Ok(()),
    }
}

/// True where `test` holds of the value or of any value in it.
fn any(value: &Value, test: &impl Fn(&Value) -> bool) -> bool {
    test(value)
        || match value {
            Value::Object(object) => object.values().any(|value| any(value, test)),
            Value::Array(values) => values.iter().any(|value| any(value, test)),
            _ => false,
        }
}

/// What is wrong with a template of a single text in a post-processor, or in one that it is made
/// of: a second text, or a special token that its table lacks.
fn broken_template(processor: &Value) -> Option<String> {
    let pieces = processor.get("single").and_then(Value::as_array).into_iter().flatten();
    for piece in pieces {
        if piece.pointer("/Sequence/id").is_some_and(|id| id != "A") {
            return Some("a template of one text names a second one".to_string());
        }
        let Some(token) = piece.pointer("/SpecialToken/id").and_then(Value::as_str) else {
            continue;
        };
        if processor.get("special_tokens").and_then(|tokens| tokens.get(token)).is_none() {
            return Some(format!("no special token `{}`", shorten(token)));
        }
    }
    let parts = processor.get("processors").and_then(Value::as_array);
    parts.into_iter().flatten().find_map(broken_template)
}
