//! `mlakit plan`.

use std::fs;

use serde_json::{Value, json};

use crate::common::{Folder, dense, mlakit, op_words, printed, printed_json};

const DENSE: &str = r#"{"heads":128,"qk_width":576,"value_width":512,"record":"bf16",
    "page_size":64,"softmax_scale":0.1352,"splits":{"count":7},"max_rows":4,"max_batch":2,
    "max_kv_tokens":65536,"max_table_width":1024}"#;

fn plan(op: &str, spec: &str, more: &[&str]) -> Value {
    let words = [&["plan", "--op", op, "--spec", spec, "--json"][..], more].concat();
    printed_json(&mlakit(words))
}

/// The regions are what splits, rows, heads and widths say, to the byte; the partial dtype changes
/// one of them alone.
#[test]
fn scratch_is_exact() {
    let narrow = plan("dense", DENSE, &[]);
    assert_eq!((&narrow["operation"], &narrow["splits"]), (&json!("dense"), &json!(7)));
    let bytes = |plan: &Value, name: &str| -> u64 {
        let regions = plan["scratch"].as_array().unwrap();
        let region = regions.iter().find(|region| region["name"] == name);
        region.map_or(0, |region| region["bytes"].as_u64().unwrap())
    };
    assert_eq!(bytes(&narrow, "partial_out"), 7 * 4 * 128 * 512 * 2);
    assert_eq!(bytes(&narrow, "partial_lse"), 7 * 4 * 128 * 4);
    let wide = DENSE.replace("\"max_rows\"", "\"partial\":\"f32\",\"max_rows\"");
    let wide = plan("dense", &wide, &[]);
    assert_eq!(bytes(&wide, "partial_out"), 2 * bytes(&narrow, "partial_out"));
    assert_eq!(bytes(&wide, "partial_lse"), bytes(&narrow, "partial_lse"));
    let one = DENSE.replace("\"count\":7", "\"count\":1");
    assert_eq!(bytes(&plan("dense", &one, &[]), "partial_out"), 0);
    for plan in [&narrow, &wide] {
        let regions = plan["scratch"].as_array().unwrap();
        let each = regions.iter().map(|r| r["bytes"].as_u64().unwrap().next_multiple_of(256));
        assert_eq!(plan["scratch_bytes"].as_u64().unwrap(), each.sum::<u64>());
        assert_eq!(regions[0], json!({"name": "fault_block", "bytes": 256}));
    }
}

/// The name of a GPU is enough: no other device could be meant.
#[test]
fn a_gpu_by_name_is_planned_for() {
    for more in [&["--gpu", "h200"][..], &["--gpu", "H200"], &["--device", "cuda", "--gpu", "h200"]]
    {
        let plan = plan("dense", DENSE, more);
        let planned_for = plan["planned_for"].as_str().unwrap();
        assert!(planned_for.starts_with("cuda (NVIDIA H200"), "{planned_for}");
        assert!(!plan["kernels"].as_array().unwrap().is_empty());
    }
}

/// An operation that divides no rows has no splits; a merge has those of its Spec.
#[test]
fn only_what_is_divided_has_splits() {
    let merge = r#"{"splits":3,"heads":4,"value_width":16,"max_rows":1}"#;
    let writer = r#"{"record":"bf16","page_size":16,"latent_width":8,"rope_width":8,"max_rows":1}"#;
    let projection = r#"{"heads":2,"in_width":8,"out_width":8,"max_rows":1}"#;
    for (op, spec) in [("merge", merge), ("writer", writer), ("projection", projection)] {
        assert_eq!(plan(op, spec, &[]).get("splits"), None, "{op}");
        let text = printed(&mlakit(["plan", "--op", op, "--spec", spec]));
        assert!(!text.contains("\n splits"), "{text}");
    }
    let spec = &plan("merge", merge, &[])["spec"];
    assert_eq!((&spec["splits"], spec.get("sink_in_lse")), (&json!(3), None));
}

/// Tokens that no table can reach are capacity for nothing.
#[test]
fn a_table_too_narrow_for_the_tokens_is_noted() {
    let narrow = DENSE.replace("\"max_table_width\":1024", "\"max_table_width\":100");
    let notes = plan("dense", &narrow, &[])["notes"].clone();
    let note = notes[0].as_str().unwrap();
    assert!(note.contains("`max_kv_tokens` is 65536") && note.contains("covers 6400"), "{note}");
    assert_eq!(notes.as_array().unwrap().len(), 1);
}

/// A budget that allows fewer splits than were asked for is said, and so is a short cache.
#[test]
fn fewer_splits_than_asked_for_are_noted() {
    let notes = |spec: &str| plan("dense", spec, &[])["notes"].clone();
    assert_eq!(notes(DENSE), Value::Null);
    let budget = DENSE.replace("\"max_rows\"", "\"budget\":{\"max_splits\":3},\"max_rows\"");
    assert_eq!(plan("dense", &budget, &[])["splits"], 3);
    assert_eq!(
        notes(&budget),
        json!(["7 splits were asked for, the plan has 3: `budget` allows no more"])
    );
    let rows = DENSE.replace("\"max_rows\"", "\"budget\":{\"max_partial_rows\":9},\"max_rows\"");
    assert!(notes(&rows)[0].as_str().unwrap().contains("the plan has 2: `budget`"));
    let short = DENSE.replace("65536", "100");
    let touched = "the plan has 2: a row touches at most 2 blocks of 64 tokens";
    assert!(notes(&short)[0].as_str().unwrap().ends_with(touched));
    let text = printed(&mlakit(["plan", "--op", "dense", "--spec", &budget]));
    assert!(text.contains("7 splits were asked for"), "{text}");
}

/// Machines that are not here are planned for; what they have decides.
#[test]
fn facts_can_be_described() {
    for isa in ["scalar", "avx2", "avx512", "avx512bf16"] {
        let plan = plan("dense", DENSE, &["--isa", isa, "--threads", "96"]);
        assert!(plan["kernel"].as_str().unwrap().contains(isa));
        assert!(plan["planned_for"].as_str().unwrap().contains("96 threads"));
    }
    let auto = DENSE.replace("{\"count\":7}", "\"auto\"");
    let splits = |threads| {
        let plan = plan("dense", &auto, &["--threads", threads]);
        plan["splits"].as_u64().unwrap()
    };
    assert!(splits("512") > splits("2"), "{} {}", splits("512"), splits("2"));
}

/// A printed Spec is one that a file, a case and another plan take.
#[test]
fn a_printed_spec_is_a_spec() {
    let folder = Folder::new();
    let first = plan("dense", DENSE, &[]);
    let path = folder.path("spec.json");
    fs::write(&path, first["spec"].to_string()).unwrap();
    let again = plan("dense", &format!("@{}", path.display()), &[]);
    assert_eq!(first, again);

    let case = folder.save("case", &dense());
    let out = folder.path("out");
    let words = |case| [op_words("dense", case, &out), vec!["--json".into()]].concat();
    let ran = printed_json(&mlakit(words(&case)));
    let planned = plan("dense", &ran["spec"].to_string(), &["--threads", "2"]);
    for key in ["spec", "kernel", "splits", "scratch", "scratch_bytes"] {
        assert_eq!(planned[key], ran[key], "{key}");
    }
}

#[test]
fn a_model_is_planned_from_its_config_alone() {
    let folder = Folder::new();
    fs::write(folder.path("config.json"), mlakit_model::embedded::tiny_dsa().config).unwrap();
    let config = folder.path("config.json").to_str().unwrap().to_owned();
    let ask = |more: &str| {
        let line = format!("plan --config {config} --json {more}");
        printed_json(&mlakit(line.split_whitespace()))
    };
    let plain = ask("");
    assert_eq!(plain["layers"], 3);
    assert_eq!(plain["record_width"], 576);
    assert_eq!(
        plain["cache"][0],
        json!({
            "record": "bf16", "layer_bytes_per_token": 1152, "bytes_per_token": 3456,
        })
    );
    assert_eq!(plain["fit"], Value::Null);
    let fit = |more: &str| {
        let report = ask(&format!("--memory-gib 1 {more}"));
        (report["fit"]["tokens"].as_u64().unwrap(), report["weight_bytes"].as_u64().unwrap())
    };
    let (tokens, weights) = fit("");
    // A token has a record and an index key in each of three layers.
    let room = |record: u64, key: u64| ((1 << 30) - weights) / (64 * 3 * (record + key)) * 64;
    assert_eq!(tokens, room(1152, 256));
    assert_eq!(fit("--record e4m3").0, room(576, 256));
    assert_eq!(fit("--record fp8_656 --index-record index_fp8_132").0, room(656, 132));
    assert!(fit("--tp 4").1 < weights);
    assert!(fit("--heads 16").1 > weights);
    assert!(fit("--weight-bits 8").1 * 2 == weights);
    // The folder does as well as the file, and the table has the same numbers.
    let folder = config.strip_suffix("/config.json").unwrap();
    let text = printed(&mlakit(["plan", "--config", folder, "--memory-gib", "1"]));
    assert!(text.contains(&tokens.to_string()) && text.contains(&weights.to_string()), "{text}");
}

/// Folder with the embedded config, changed.
fn config_with(change: impl FnOnce(&mut Value)) -> (Folder, String) {
    let mut config: Value =
        serde_json::from_slice(mlakit_model::embedded::tiny_dsa().config).unwrap();
    change(&mut config);
    let folder = Folder::new();
    fs::write(folder.path("config.json"), config.to_string()).unwrap();
    let path = folder.path("config.json").to_str().unwrap().to_owned();
    (folder, path)
}

/// Keys that decide what is computed are named where the file leaves them out.
#[test]
fn what_a_config_leaves_out_is_said() {
    let (_folder, path) = config_with(|_| ());
    let whole = printed_json(&mlakit(["plan", "--config", &path, "--json"]));
    assert_eq!((whole.get("assumed"), whole.get("notes")), (None, None));
    let (_folder, path) = config_with(|config| {
        for key in ["q_lora_rank", "first_k_dense_replace", "rope_theta", "norm_topk_prob"] {
            config.as_object_mut().unwrap().remove(key);
        }
    });
    let partial = printed_json(&mlakit(["plan", "--config", &path, "--json"]));
    let needed = json!({
        "q_lora_rank": 1536, "first_k_dense_replace": 3, "rope_theta": 10000.0,
    });
    // With three dense layers of three there is no router to assume anything for.
    assert_eq!(partial["assumed"], needed);
    let text = printed(&mlakit(["plan", "--config", &path]));
    assert!(text.contains("config.json leaves out") && text.contains("q_lora_rank = 1536"));
}

/// Flags of a device say nothing of a model's memory; names among them must still be names.
#[test]
fn flags_without_effect_are_noted() {
    let (_folder, path) = config_with(|_| ());
    let ask = |more: &[&str]| {
        printed_json(&mlakit([&["plan", "--config", &path, "--json"][..], more].concat()))
    };
    let notes = ask(&["--isa", "scalar", "--threads", "2"])["notes"].clone();
    assert!(notes[0].as_str().unwrap().starts_with("--isa, --threads: without effect"), "{notes}");
    let notes = ask(&["--gpu", "h200"])["notes"].clone();
    assert!(notes[0].as_str().unwrap().starts_with("--gpu: without effect"), "{notes}");
    let shared = ask(&["--tp", "5", "--heads", "5"])["notes"].clone();
    assert!(shared[0].as_str().unwrap().starts_with("5 devices cannot share evenly"), "{shared}");
}

/// FP8 checkpoints are counted as they are; of other forms it is said what is counted.
#[test]
fn quantised_weights_are_counted_or_noted() {
    let bytes = |form: Value| {
        let (_folder, path) = config_with(|config| config["quantization_config"] = form);
        let report = printed_json(&mlakit(["plan", "--config", &path, "--json"]));
        (report["weight_bytes"].as_u64().unwrap(), report["notes"].clone())
    };
    let (plain, none) = bytes(Value::Null);
    let (narrow, no_note) = bytes(json!({"quant_method": "fp8", "weight_block_size": [128, 128]}));
    assert_eq!((none, no_note), (Value::Null, Value::Null));
    assert!(narrow < plain * 3 / 5 && narrow > plain / 2, "{narrow} {plain}");
    let (other, note) = bytes(json!({"quant_method": "gptq", "bits": 4}));
    assert_eq!(other, plain);
    assert!(note[0].as_str().unwrap().contains("`gptq`"), "{note}");
}
