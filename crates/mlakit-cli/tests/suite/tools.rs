//! `mlakit check`, `bench` and `doctor`.

use serde_json::Value;

use crate::common::{mlakit, printed, printed_json, program};

#[test]
fn this_device_agrees_with_the_oracle() {
    let checked = printed_json(&mlakit(["check", "--quick", "--json"]));
    assert_eq!((&checked["ok"], &checked["failed"]), (&Value::Bool(true), &0.into()));
    let cases = checked["cases"].as_array().unwrap();
    for operation in ["dense", "merge", "writer", "projection"] {
        assert!(cases.iter().any(|case| case["operation"] == operation), "{operation}");
    }
    // A kernel that rounds is not the oracle: its error is above 0 and within the bound.
    let mut largest = 0f64;
    for output in cases.iter().flat_map(|case| case["outputs"].as_array().unwrap()) {
        let number = |key: &str| output[key].as_f64().unwrap();
        assert!(number("rel_error") <= number("bound"), "{output}");
        assert!(number("max_rel_error") <= number("row_bound"), "{output}");
        largest = largest.max(number("rel_error"));
    }
    assert!(largest > 1e-4);
    let one = printed(&mlakit(["check", "--quick", "--op", "merge"]));
    assert!(one.contains("merge") && !one.contains("writer"), "{one}");
}

#[test]
fn bench_prints_every_sample() {
    let line = "bench --heads 2,5 --tokens 64,200 --rows 2 --batch 2 --samples 7 --json";
    let timed = printed_json(&mlakit(line.split_whitespace()));
    let shapes = timed["shapes"].as_array().unwrap();
    assert_eq!(shapes.len(), 4);
    for shape in shapes {
        let samples: Vec<f64> =
            shape["samples_ms"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
        let [median, min] = ["median_ms", "min_ms"].map(|key| shape[key].as_f64().unwrap());
        assert_eq!(samples.len(), 7);
        assert!(samples.contains(&median) && samples.iter().all(|sample| *sample >= min));
        // 2 requests of 2 rows: the first row sees one key less.
        let (heads, tokens) = (shape["heads"].as_f64().unwrap(), shape["tokens"].as_f64().unwrap());
        let flops = 2.0 * (576.0 + 512.0) * heads * 2.0 * (2.0 * tokens - 1.0);
        let rate = flops / median / 1e6;
        assert!((shape["gflops"].as_f64().unwrap() / rate - 1.0).abs() < 1e-9);
        let bytes = 2.0 * tokens * 1152.0;
        let rate = bytes / median / 1e6;
        assert!((shape["gbytes_per_s"].as_f64().unwrap() / rate - 1.0).abs() < 1e-9);
    }
}

#[test]
fn doctor_says_what_is_used_and_why() {
    let found = printed_json(&mlakit(["doctor", "--json", "--isa", "scalar", "--threads", "1"]));
    assert_eq!(found["used"]["isa"], "scalar");
    assert_eq!(found["used"]["isa_because"], "--isa says so");
    assert_eq!(found["used"]["threads"], 1);
    let sets = found["instruction_sets"].as_array().unwrap();
    assert_eq!(sets.iter().filter(|set| set["used"] == true).count(), 1);
    assert!(sets.iter().all(|set| !set["because"].as_str().unwrap().is_empty()));
    assert!(!found["cuda"]["because"].as_str().unwrap().is_empty());
    let text = printed(&mlakit(["doctor"]));
    assert!(text.contains("MLAKIT_THREADS says so") && text.contains("CUDA"), "{text}");
}

/// What a command would be refused for is part of the report, not the end of it.
#[test]
fn doctor_reports_what_others_refuse() {
    let found = |words: &[&str], isa: Option<&str>| {
        let mut command = program();
        command.args(["doctor", "--json"]).args(words);
        if let Some(isa) = isa {
            command.env("MLAKIT_ISA", isa);
        }
        printed_json(&command.output().unwrap())
    };
    for (words, isa, needle) in [
        (&["--isa", "mmx"][..], None, "--isa: unknown instruction set \"mmx\""),
        (&[], Some("foo"), "MLAKIT_ISA: unknown instruction set \"foo\""),
    ] {
        let found = found(words, isa);
        assert_eq!(found["used"], Value::Null);
        assert!(!found["problems"][0]["help"].as_str().unwrap().contains("doctor"), "{found}");
        assert!(found["problems"][0]["error"].as_str().unwrap().starts_with(needle), "{found}");
        let sets = found["instruction_sets"].as_array().unwrap();
        assert!(sets.iter().all(|set| set["used"] == false));
    }
    let ordinal = found(&["--ordinal", "5"], None);
    let problem = ordinal["problems"][0]["error"].as_str().unwrap();
    assert!(problem.starts_with("--ordinal 5: needed --device cuda"), "{problem}");
    assert!(ordinal["used"]["isa"].is_string());
    assert_eq!(found(&[], None).get("problems"), None);
    // Instructions that are not here, if there are any.
    let sets = ordinal["instruction_sets"].as_array().unwrap();
    for set in sets.iter().filter(|set| set["available"] == false) {
        let name = set["name"].as_str().unwrap();
        let found = found(&["--isa", name], None);
        let problem = found["problems"][0]["error"].as_str().unwrap();
        assert!(problem.starts_with(&format!("--isa {name}: needed instructions")), "{problem}");
    }
    let text = printed(&mlakit(["doctor", "--ordinal", "5"]));
    assert!(text.contains("\nproblem: --ordinal 5") && text.contains("\n   help: "), "{text}");
}
