//! Reading a Spec, with errors in the words of its fields.

use mlakit::Op;
use serde_json::{Map, Value};

use crate::failure::Failure;

/// What a field must be, where its type alone does not say it. The `splits` of a merge are a number.
const FORMS: [(&str, &str); 8] = [
    ("splits", "`\"auto\"`, `{\"count\": n}` or `{\"fixed_tokens\": n}`"),
    ("budget", "`{\"max_splits\": n, \"max_partial_rows\": n}`, both optional"),
    ("record", "`\"bf16\"` or `\"e4m3\"`"),
    ("selection", "`\"positions\"` or `\"slots\"`"),
    ("query", "`\"bf16\"` or `\"e4m3\"`"),
    ("partial", "`\"bf16\"` or `\"f32\"`"),
    ("output", "`\"bf16\"` or `\"f32\"`"),
    ("lse", "`\"natural\"` or `\"base2\"`"),
];

/// Makes a Spec from its fields.
///
/// # Errors
/// A field that is unknown, absent, of another type or out of its bounds, by name.
pub fn read_spec<O: Op>(fields: Map<String, Value>) -> Result<O::Spec, Failure> {
    let given = Value::Object(fields);
    serde_path_to_error::deserialize(&given).map_err(|error| {
        let path = error.path().to_string();
        let place = if path == "." { String::new() } else { format!(" field `{path}`") };
        let inner = error.inner().to_string();
        let text = needed((O::NAME, &path), &inner).map_or(inner, |needed| {
            let pointer = format!("/{}", path.replace('.', "/"));
            let value = given.pointer(&pointer).map_or("nothing".to_owned(), Value::to_string);
            format!("needed {needed}, given {}", shorten(&value))
        });
        Failure::input(
            format!("spec{place}: {text}"),
            format!("`mlakit plan --op {} --spec JSON` checks a spec", O::NAME),
        )
    })
}

/// What a value must be that has the wrong type, or no name that it may be; `None` for an error
/// that says it itself.
fn needed((op, path): (&str, &str), error: &str) -> Option<&'static str> {
    // A number that the text has and 32 bits do not.
    if error.starts_with("number: needed a finite f32") {
        return Some("a number that 32 bits hold (below 3.4e38)");
    }
    let wrong = ["invalid type:", "invalid value:", "unknown variant"];
    if !wrong.iter().any(|start| error.starts_with(start)) {
        return None;
    }
    let form = FORMS.iter().find(|(name, _)| *name == path && (op, path) != ("merge", "splits"));
    if let Some((_, form)) = form {
        return Some(form);
    }
    // The names of types in the program, which mean nothing to who writes a spec.
    const TYPES: [(&str, &str); 8] = [
        ("usize", "a whole number, 0 or more"),
        ("u64", "a whole number, 0 or more"),
        ("u32", "a whole number, 0 or more"),
        ("i64", "a whole number"),
        ("f32", "a number"),
        ("f64", "a number"),
        ("a boolean", "true or false"),
        ("struct", "an object"),
    ];
    let (_, expected) = error.rsplit_once("expected ")?;
    let word = |name: &str| expected.split(' ').next() == Some(name) || expected == name;
    TYPES.iter().find(|(name, _)| word(name)).map(|(_, form)| *form)
}

fn shorten(value: &str) -> String {
    const LIMIT: usize = 60;
    match value.char_indices().nth(LIMIT) {
        Some((end, _)) => format!("{}...", &value[..end]),
        None => value.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mlakit::op::dense::Dense;
    use mlakit::op::merge::Merge;
    use serde_json::json;

    /// The message for a dense spec with one field changed.
    fn message(field: &str, value: Value) -> String {
        let mut spec = json!({
            "heads": 1, "qk_width": 4, "value_width": 4, "record": "bf16", "page_size": 16,
            "softmax_scale": 0.5, "max_rows": 1, "max_batch": 1, "max_kv_tokens": 1,
            "max_table_width": 1
        });
        spec[field] = value;
        let Value::Object(spec) = spec else { unreachable!() };
        read_spec::<Dense>(spec).unwrap_err().message().to_owned()
    }

    #[test]
    fn errors_are_in_the_words_of_the_fields() {
        let whole = "a whole number, 0 or more";
        for (field, value, needed) in [
            ("heads", json!("x"), format!("`heads`: needed {whole}, given \"x\"")),
            ("heads", json!(-1), format!("`heads`: needed {whole}, given -1")),
            ("heads", json!(1.5), format!("`heads`: needed {whole}, given 1.5")),
            ("heads", json!(null), format!("`heads`: needed {whole}, given null")),
            ("softmax_scale", json!([]), "`softmax_scale`: needed a number, given []".into()),
            (
                "softmax_scale",
                json!(1e39),
                "needed a number that 32 bits hold (below 3.4e38), given 1e+39".into(),
            ),
            ("softmax_scale", json!(-1), "softmax_scale: needed above 0, given -1".into()),
            (
                "budget",
                json!({"max_splits": 0}),
                "budget.max_splits: needed 1 or more, given 0".into(),
            ),
            ("row_lengths", json!(1), "`row_lengths`: needed true or false, given 1".into()),
            ("splits", json!(4), "`splits`: needed `\"auto\"`, `{\"count\": n}`".into()),
            ("splits", json!("all"), "given \"all\"".into()),
            ("budget", json!(4), "`budget`: needed `{\"max_splits\": n,".into()),
            ("budget", json!({"max_splits": "a"}), "`budget.max_splits`: needed a whole".into()),
            ("partial", json!("f16"), "needed `\"bf16\"` or `\"f32\"`, given \"f16\"".into()),
            ("lse", json!(2), "needed `\"natural\"` or `\"base2\"`, given 2".into()),
            ("record", json!(8), "`record`: needed `\"bf16\"` or `\"e4m3\"`, given 8".into()),
        ] {
            let message = message(field, value);
            assert!(message.contains(&needed), "{message}");
            for word in ["usize", "f32,", "struct", "Fields", "boolean", "enum"] {
                assert!(!message.contains(word), "{message}");
            }
        }
        assert!(message("head", json!(1)).contains("unknown field `head`"));
        assert!(
            message("heads", json!(0)).contains("1 to 16384"),
            "{}",
            message("heads", json!(0))
        );
    }

    #[test]
    fn the_splits_of_a_merge_are_a_number() {
        let spec = json!({"splits": "auto", "heads": 4, "value_width": 16, "max_rows": 1});
        let Value::Object(spec) = spec else { unreachable!() };
        let failure = read_spec::<Merge>(spec).unwrap_err();
        let needed = "spec field `splits`: needed a whole number, 0 or more, given \"auto\"";
        assert_eq!(failure.message(), needed);
    }
}
