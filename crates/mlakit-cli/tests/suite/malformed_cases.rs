//! Case files that are wrong, one way each: refused with status 2 and a message that names what is
//! wrong; nothing is written.

use std::collections::BTreeSet;
use std::fs;

use mlakit::Dtype;
use mlakit_cli::case::{Case, Tensor};
use serde_json::{Value, json};

use crate::common::{
    Folder, dense, dense_e4m3, key_writer, merge, mlakit, op_words, projection, refused, writer,
};

type Edit = Box<dyn Fn(&mut Case<'static>)>;

/// A wrong case: what is special, what it is made of, and what the message must name.
struct Wrong {
    base: fn() -> Case<'static>,
    edit: Edit,
    needle: String,
}

fn wrong(
    base: fn() -> Case<'static>,
    needle: &str,
    edit: impl Fn(&mut Case<'static>) + 'static,
) -> Wrong {
    Wrong { base, edit: Box::new(edit), needle: needle.into() }
}

/// A field of the spec with another value; null removes it.
fn field(base: fn() -> Case<'static>, needle: &str, name: &'static str, value: Value) -> Wrong {
    wrong(base, needle, move |case| {
        match &value {
            Value::Null => drop(case.spec.remove(name)),
            value => drop(case.spec.insert(name.into(), value.clone())),
        };
    })
}

/// A tensor of another dtype or shape, zeroed.
fn tensor(
    base: fn() -> Case<'static>,
    name: &'static str,
    dtype: Dtype,
    shape: &'static [usize],
) -> Wrong {
    wrong(base, &format!("tensor `{name}`"), move |case| {
        let bytes = vec![0u8; shape.iter().product::<usize>() * dtype.bytes()];
        case.tensors.insert(name, Tensor::new(dtype, shape.to_vec(), &bytes));
    })
}

/// A case without one of its tensors.
fn without(base: fn() -> Case<'static>, name: &'static str) -> Wrong {
    wrong(base, &format!("tensor `{name}`"), move |case| {
        let kept: Vec<String> =
            case.tensors.names().filter(|other| *other != name).map(String::from).collect();
        let old = std::mem::take(&mut case.tensors);
        for name in kept {
            let tensor = old.find(&name).expect("it was listed").clone();
            case.tensors.insert(name, tensor);
        }
    })
}

fn metadata(needle: &str, key: &'static str, value: Option<&'static str>) -> Wrong {
    wrong(dense, needle, move |case| {
        match value {
            Some(value) => drop(case.metadata.insert(key.into(), value.into())),
            None => drop(case.metadata.remove(key)),
        };
    })
}

/// Metadata. A spec that begins with `!` is written as it is.
fn metadata_cases() -> Vec<Wrong> {
    let deep: &'static str = Box::leak(format!("!{}", "[".repeat(4000)).into_boxed_str());
    vec![
        metadata("metadata key `operation`", "operation", None),
        metadata("metadata key `spec`", "spec", None),
        metadata("needed a case of dense, given one of \"merge\"", "operation", Some("merge")),
        metadata("needed a case of dense, given one of \"Dense\"", "operation", Some("Dense")),
        metadata("given one of \"\"", "operation", Some("")),
        metadata("spec: needed a JSON object", "spec", Some("!")),
        metadata("spec: needed a JSON object", "spec", Some("!{")),
        metadata("spec: needed a JSON object", "spec", Some("![]")),
        metadata("spec: needed a JSON object", "spec", Some("!null")),
        metadata("spec: needed a JSON object", "spec", Some("!{} x")),
        metadata("spec: needed a JSON object", "spec", Some(deep)),
        metadata("`heads` is given twice", "spec", Some(r#"!{"heads":3,"heads":3}"#)),
        metadata("spec: needed a JSON object", "spec", Some(r#"!{"softmax_scale":1e999}"#)),
        metadata("missing field `value_width`", "spec", Some("!{}")),
    ]
}

/// Fields of a spec.
fn field_cases() -> Vec<Wrong> {
    let dense_fields = [
        ("tensor `q`", "heads", json!(4)),
        ("tensor `q`", "heads", json!(0)),
        ("`heads`", "heads", json!("3")),
        ("`heads`", "heads", json!(-1)),
        ("`heads`", "heads", json!(1.5)),
        ("tensor `q`", "heads", json!(u64::MAX)),
        ("tensor `q`", "qk_width", json!(33)),
        ("value_width", "value_width", json!(64)),
        ("value_width", "value_width", json!(0)),
        ("value_width", "value_width", json!(15)),
        ("`value_width`", "value_width", Value::Null),
        ("`record`", "record", json!("fp7")),
        ("`record`", "record", Value::Null),
        ("`record`", "record", json!(16)),
        ("page_size", "page_size", json!(17)),
        ("page_size", "page_size", json!(0)),
        ("page_size", "page_size", json!(1 << 20)),
        ("`page_size`", "page_size", Value::Null),
        ("tensor `cache`", "page_size", json!(32)),
        ("tensor `cache`", "page_size", json!(65536)),
        ("softmax_scale", "softmax_scale", json!(0.0)),
        ("softmax_scale", "softmax_scale", json!(-0.5)),
        ("`softmax_scale`", "softmax_scale", json!(1e39)),
        ("`softmax_scale`", "softmax_scale", json!("1")),
        ("`softmax_scale`", "softmax_scale", Value::Null),
        ("`lse`", "lse", json!("base10")),
        ("`partial`", "partial", json!("f16")),
        ("`splits`", "splits", json!("many")),
        ("`splits`", "splits", json!({"counts": 3})),
        ("splits", "splits", json!({"count": "x"})),
        ("splits.count", "splits", json!({"count": 0})),
        ("splits.count", "splits", json!({"count": 1u64 << 40})),
        ("splits.fixed_tokens", "splits", json!({"fixed_tokens": 65})),
        ("splits.fixed_tokens", "splits", json!({"fixed_tokens": 0})),
        ("`budget", "budget", json!({"max_bytes": 1})),
        ("`budget", "budget", json!(7)),
        ("window", "window", json!(0)),
        ("`window`", "window", json!([1])),
        ("max_rows", "max_rows", json!(3)),
        ("max_rows", "max_rows", json!(1u64 << 40)),
        ("max_batch", "max_batch", json!(1)),
        ("max_table_width", "max_table_width", json!(1)),
        ("max_kv_tokens", "max_kv_tokens", json!(0)),
        ("`max_kv_tokens`", "max_kv_tokens", json!(true)),
        ("record_width", "record_width", json!(16)),
        ("record_width", "record_width", json!(1 << 20)),
        ("tensor `cache`", "record_width", json!(40)),
        ("sink_in_lse", "sink_in_lse", json!(true)),
        ("record: needed e4m3", "quantize_query", json!(true)),
        ("record: needed e4m3", "query", json!("e4m3")),
        ("unknown field `head`", "head", json!(3)),
        ("unknown field `sink`", "sink", json!(false)),
        ("tensor `row_kv_lens`", "row_lengths", json!(true)),
    ];
    let mut list: Vec<Wrong> = dense_fields
        .into_iter()
        .map(|(needle, name, value)| field(dense, needle, name, value))
        .collect();
    list.extend([
        wrong(dense, "splits", |case| {
            case.spec.insert("splits".into(), json!({"fixed_tokens": 64}));
            case.spec.insert("budget".into(), json!({"max_splits": 1}));
        }),
        field(dense_e4m3, "tensor `q`", "query", json!("bf16")),
        field(dense_e4m3, "quantize_query", "quantize_query", json!(true)),
        field(dense_e4m3, "tensor `row_kv_lens`", "row_lengths", json!(false)),
        field(dense_e4m3, "record: needed e4m3", "record", json!("bf16")),
        field(merge, "tensor `outs`", "splits", json!(2)),
        field(merge, "tensor `outs`", "value_width", json!(8)),
        field(merge, "tensor `outs`", "partial", json!("bf16")),
        field(merge, "sink_in_lse", "sink", json!(false)),
        wrong(merge, "tensor `sink`", |case| {
            case.spec.remove("sink_in_lse");
            case.spec.insert("sink".into(), json!(false));
        }),
        field(merge, "unknown field `page_size`", "page_size", json!(16)),
        field(merge, "tensor `outs`", "max_rows", json!(1)),
        field(writer, "tensor `latent`", "latent_width", json!(23)),
        field(writer, "tensor `rope`", "rope_width", json!(0)),
        field(writer, "tensor `slots`", "max_rows", json!(2)),
        field(writer, "record_width", "record_width", json!(8)),
        field(writer, "unknown field `heads`", "heads", json!(8)),
        field(writer, "record_width", "record", json!("index_bf16_256")),
        wrong(writer, "tensor `latent`", |case| {
            case.spec.remove("record_width");
            case.spec.insert("record".into(), json!("index_bf16_256"));
        }),
        wrong(writer, "multiple of 128", |case| {
            case.spec.remove("record_width");
            case.spec.insert("record".into(), json!("fp8_656"));
        }),
        wrong(writer, "fp8_656", |case| {
            case.spec.remove("record_width");
            case.spec.insert("record".into(), json!("fp8_528"));
        }),
        field(key_writer, "tensor `key`", "key_width", json!(64)),
        field(key_writer, "latent_width", "latent_width", json!(64)),
        field(key_writer, "multiple of 16", "page_size", json!(2)),
        field(key_writer, "tensor `latent`", "record", json!("bf16")),
        field(projection, "tensor `x`", "in_width", json!(18)),
        field(projection, "tensor `weight`", "out_width", json!(26)),
        field(projection, "in_stride", "in_stride", json!(8)),
        field(projection, "out_stride", "out_stride", json!(8)),
        field(projection, "in_stride", "in_stride", json!(u64::MAX)),
        field(projection, "tensor `x`", "max_rows", json!(4)),
    ]);
    list
}

/// Tensors that are absent, of another dtype, of another shape, or too many.
fn tensor_cases() -> Vec<Wrong> {
    let mut list = Vec::new();
    for name in ["q", "cache", "page_table", "kv_lens", "q_offsets"] {
        list.push(without(dense, name));
    }
    for name in ["kv_scale", "q_scale"] {
        list.push(without(dense_e4m3, name));
    }
    for name in ["outs", "lses"] {
        list.push(without(merge, name));
    }
    for name in ["latent", "slots", "cache"] {
        list.push(without(writer, name));
    }
    list.push(without(key_writer, "key"));
    list.push(without(projection, "x"));
    list.push(without(projection, "weight"));
    list.extend([
        tensor(dense, "q", Dtype::F32, &[4, 3, 32]),
        tensor(dense, "q", Dtype::Bf16, &[4, 96]),
        tensor(dense, "q", Dtype::Bf16, &[4, 2, 32]),
        tensor(dense, "q", Dtype::Bf16, &[4, 3, 32, 1]),
        tensor(dense, "q", Dtype::Bf16, &[]),
        tensor(dense, "cache", Dtype::Bf16, &[8, 1024]),
        tensor(dense, "cache", Dtype::U8, &[8192]),
        tensor(dense, "cache", Dtype::U8, &[8, 1023]),
        tensor(dense, "cache", Dtype::U8, &[8, 0]),
        tensor(dense, "page_table", Dtype::I64, &[2, 6]),
        tensor(dense, "page_table", Dtype::I32, &[12]),
        tensor(dense, "kv_lens", Dtype::I32, &[3]),
        tensor(dense, "kv_lens", Dtype::U32, &[2]),
        tensor(dense, "q_offsets", Dtype::I32, &[2]),
        tensor(dense, "q_offsets", Dtype::I32, &[0]),
        tensor(dense, "q_offsets", Dtype::F32, &[3]),
        tensor(dense, "row_kv_lens", Dtype::I32, &[3]),
        tensor(dense, "row_kv_lens", Dtype::I64, &[4]),
        tensor(dense, "kv_scale", Dtype::F32, &[1]),
        tensor(dense, "q_scale", Dtype::F32, &[1]),
        tensor(dense, "sink", Dtype::F32, &[3]),
        tensor(dense, "Q", Dtype::Bf16, &[4, 3, 32]),
        tensor(dense_e4m3, "kv_scale", Dtype::F32, &[2]),
        tensor(dense_e4m3, "kv_scale", Dtype::F32, &[1]),
        tensor(merge, "outs", Dtype::F32, &[3, 2, 4]),
        tensor(merge, "lses", Dtype::Bf16, &[3, 2, 4]),
        tensor(merge, "lses", Dtype::F32, &[3, 2, 5]),
        tensor(merge, "sink", Dtype::F32, &[5]),
        tensor(merge, "sink", Dtype::Bf16, &[4]),
        tensor(writer, "latent", Dtype::F32, &[9, 24]),
        tensor(writer, "rope", Dtype::Bf16, &[8, 8]),
        tensor(writer, "slots", Dtype::I32, &[9]),
        tensor(writer, "slots", Dtype::I64, &[10]),
        tensor(writer, "kv_scale", Dtype::F32, &[1]),
        tensor(writer, "key", Dtype::Bf16, &[9, 24]),
        tensor(writer, "cache", Dtype::U8, &[3, 1151]),
        tensor(key_writer, "latent", Dtype::Bf16, &[9, 128]),
        tensor(key_writer, "rope", Dtype::Bf16, &[9, 64]),
        tensor(key_writer, "cache", Dtype::U8, &[3, 2111]),
        tensor(projection, "x", Dtype::Bf16, &[5, 48]),
        tensor(projection, "weight", Dtype::Bf16, &[2, 16, 24]),
        tensor(projection, "weight", Dtype::F32, &[3, 16, 24]),
        tensor(projection, "bias", Dtype::F32, &[24]),
    ]);
    // Of two tensors that disagree the second is named, and the first as the origin of the size.
    list.push(wrong(dense, "tensor `kv_lens`: needed I32 [B=3 (page_table)]", |case| {
        let table = Tensor::new(Dtype::I32, vec![3, 2], &[0i32; 6]);
        case.tensors.insert("page_table", table);
    }));
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        list.push(wrong(dense_e4m3, "tensor `q_scale`", move |case| {
            case.tensors.insert("q_scale", Tensor::new(Dtype::F32, vec![1], &[scale]));
        }));
    }
    list
}

/// Files whose bytes are wrong before any tensor is.
fn byte_cases(file: &[u8]) -> Vec<(Vec<u8>, &'static str)> {
    let header = |text: &str, data: usize| {
        let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(text.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    };
    let length = |length: u64| [&length.to_le_bytes()[..], &file[8..]].concat();
    let mut longer = file.to_vec();
    longer.push(0);
    let mut not_text = file.to_vec();
    not_text[12] = 0xff;
    vec![
        (Vec::new(), "not a safetensors file"),
        (file[..7].to_vec(), "not a safetensors file"),
        (file[..100].to_vec(), "not a safetensors file"),
        (file[..file.len() - 1].to_vec(), "not a safetensors file"),
        (longer, "not a safetensors file"),
        (length(0), "not a safetensors file"),
        (length(1 << 20), "not a safetensors file"),
        (length(u64::MAX), "not a safetensors file"),
        (length(u64::MAX - 7), "not a safetensors file"),
        (not_text, "not a safetensors file"),
        (header("[]", 0), "not a safetensors file"),
        (header("{", 0), "not a safetensors file"),
        (header("{}", 0), "metadata key `operation`"),
        (header(r#"{"__metadata__":{"operation":7}}"#, 0), "not a safetensors file"),
        (header(r#"{"q":{"dtype":"BF17","shape":[1],"data_offsets":[0,2]}}"#, 2), "tensor `q`"),
        (header(r#"{"q":{"dtype":"BF16","shape":[-1],"data_offsets":[0,2]}}"#, 2), "tensor `q`"),
        (header(r#"{"q":{"dtype":"BF16","shape":[2],"data_offsets":[0,2]}}"#, 2), "tensor `q`"),
        (header(r#"{"q":{"dtype":"BF16","shape":[1],"data_offsets":[2,0]}}"#, 2), "tensor `q`"),
        (header(r#"{"q":{"dtype":"BF16","shape":[1],"data_offsets":[2,4]}}"#, 4), "`q`"),
        (header(r#"{"q":{"dtype":"BF16","shape":[1]}}"#, 2), "tensor `q`"),
        (header(r#"{"q":7}"#, 2), "tensor `q`"),
        (
            header(
                r#"{"q":{"dtype":"U8","shape":[4294967296,4294967296,2],"data_offsets":[0,2]}}"#,
                2,
            ),
            "tensor `q`",
        ),
        (
            header(
                r#"{"q":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,2]}}"#,
                2,
            ),
            "tensor `q`",
        ),
    ]
}

#[test]
fn every_wrong_file_is_refused_by_name() {
    let folder = Folder::new();
    let valid = fs::read(folder.save("case", &dense())).unwrap();
    let out = folder.path("out");
    for (bytes, needle) in byte_cases(&valid) {
        let path = folder.path("case");
        fs::write(&path, bytes).unwrap();
        for more in [&[][..], &["--oracle"]] {
            let output = mlakit(
                [
                    &op_words("dense", &path, &out)[..],
                    &more.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>(),
                ]
                .concat(),
            );
            refused(&output, needle);
        }
        assert_eq!(folder.files(), ["case"]);
    }
}

#[test]
fn every_wrong_case_is_refused_by_name() {
    let folder = Folder::new();
    let out = folder.path("out");
    let mut list = metadata_cases();
    list.extend(field_cases());
    list.extend(tensor_cases());
    let kinds: BTreeSet<String> = list.iter().map(|wrong| wrong.needle.clone()).collect();
    assert!(list.len() >= 140 && kinds.len() >= 55, "{} {}", list.len(), kinds.len());
    for Wrong { base, edit, needle } in &list {
        let mut case = base();
        let operation = case.operation.clone();
        edit(&mut case);
        let path = folder.save("case", &case);
        let output = mlakit(op_words(&operation, &path, &out));
        assert!(!output.status.success(), "{operation} runs: {needle} in {:?}", case.spec);
        refused(&output, needle);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(errors.contains("\nhelp: "), "{errors}");
        assert_eq!(folder.files(), ["case"], "{errors}");
    }
}

/// Sizes that a file can claim without holding them are refused before anything is allocated.
#[test]
fn more_than_the_machine_has_is_refused() {
    let folder = Folder::new();
    let out = folder.path("out");
    let mut huge_scratch = dense();
    for (name, value) in [
        ("max_rows", json!(1 << 24)),
        ("splits", json!({"count": 65536})),
        ("max_kv_tokens", json!(1 << 30)),
    ] {
        huge_scratch.spec.insert(name.into(), value);
    }
    let mut huge_pages = writer();
    huge_pages.spec.insert("page_size".into(), json!(65536));
    huge_pages.spec.insert("record_width".into(), json!(65536));
    let none = Tensor::new::<u8>(Dtype::U8, vec![0, 1 << 40], &[]);
    huge_pages.tensors.insert("cache", none);
    for (case, needle) in [(huge_scratch, "scratch"), (huge_pages, "pages")] {
        let path = folder.save("case", &case);
        let output = mlakit(op_words(&case.operation, &path, &out));
        refused(&output, needle);
        assert_eq!(folder.files(), ["case"]);
    }
}

/// With --json, errors are objects too.
#[test]
fn errors_are_json_where_results_are() {
    let folder = Folder::new();
    let mut case = dense();
    case.spec.insert("heads".into(), json!(4));
    let path = folder.save("case", &case);
    let mut words = op_words("dense", &path, &folder.path("out"));
    words.push("--json".into());
    let output = mlakit(words);
    assert_eq!(output.status.code(), Some(2));
    let error: Value = serde_json::from_slice(&output.stderr).unwrap();
    assert_eq!(error["status"], 2);
    let message = error["error"].as_str().unwrap();
    let needed = "tensor `q`: needed BF16 or F8_E4M3 [R, H=4 (spec), K=32 (spec)]";
    assert!(message.contains(needed) && message.ends_with("given BF16 [4, 3, 32]"), "{message}");
    assert!(!error["help"].as_str().unwrap().is_empty());
}
