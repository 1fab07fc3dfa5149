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
        assert_eq!(plan["scratch_bytes"].as_u64().unwrap(), 256 + each.sum::<u64>());
    }
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
    assert_eq!(tokens, ((1 << 30) - weights) / (64 * 3456) * 64);
    assert!(fit("--record e4m3").0 > 2 * tokens - 128);
    assert!(fit("--tp 4").1 < weights);
    assert!(fit("--heads 16").1 > weights);
    assert!(fit("--weight-bits 8").1 * 2 == weights);
    // The folder does as well as the file, and the table has the same numbers.
    let folder = config.strip_suffix("/config.json").unwrap();
    let text = printed(&mlakit(["plan", "--config", folder, "--memory-gib", "1"]));
    assert!(text.contains(&tokens.to_string()) && text.contains(&weights.to_string()), "{text}");
}
