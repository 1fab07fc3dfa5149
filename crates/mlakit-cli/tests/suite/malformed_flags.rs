//! Flags and variables that are wrong: status 2, and a message that names them.

use std::fs;

use serde_json::Value;

use crate::common::{Folder, dense, mlakit, program, refused};

const SPEC: &str = r#"{"splits":2,"heads":4,"value_width":16,"max_rows":1}"#;

#[test]
fn every_wrong_flag_is_refused_by_name() {
    let folder = Folder::new();
    let case = folder.save("case", &dense());
    fs::write(folder.path("config.json"), mlakit_model::embedded::tiny_dsa().config).unwrap();
    fs::write(folder.path("latin1"), [0xff, 0xfe]).unwrap();
    let path = |name: &str| folder.path(name).to_str().unwrap().to_owned();
    let (case, out, config) = (case.to_str().unwrap().to_owned(), path("out"), path("config.json"));
    let op = |more: &str| format!("op dense --case {case} --out {out} {more}");
    let plan = |more: &str| format!("plan --config {config} {more}");
    let tries = [
        ("".into(), "Usage"),
        ("frobnicate".into(), "frobnicate"),
        ("op".into(), "OPERATION"),
        ("op dense".into(), "--case"),
        (format!("op dense --case {case}"), "--out"),
        (format!("op dense --out {out}"), "--case"),
        (format!("op sparce --case {case} --out {out}"), "`sparce`"),
        (format!("op merge --case {case} --out {out}"), "merge"),
        (format!("op dense --case {} --out {out}", path("absent")), "absent"),
        (format!("op dense --case {} --out {out}", path("")), "folder"),
        (format!("op dense --case {case} --out {}", path("")), "--out"),
        (format!("op dense --case {case} --out {}", path("absent/out")), "--out"),
        (format!("op dense --case {case} --out /"), "--out"),
        (format!("op dense --case {case} --case {case} --out {out}"), "--case"),
        (op("--device gpu"), "--device"),
        (op("--device cuda"), "--device cuda"),
        (op("--threads 0"), "--threads"),
        (op("--threads -1"), "-1"),
        (op("--threads many"), "--threads"),
        (op("--threads 1000000"), "--threads"),
        (op("--isa mmx"), "mmx"),
        (op("--replay 0"), "--replay"),
        (op("--replay 1.5"), "--replay"),
        (op("--replay 99999999999999999999"), "--replay"),
        (op("--replay 2 --oracle"), "--oracle"),
        (op("--format xml"), "--format"),
        (op("--orcale"), "--orcale"),
        (op("extra"), "extra"),
        ("plan".into(), "--config"),
        ("plan --op merge".into(), "--spec"),
        (format!("plan --spec {SPEC}"), "--op"),
        (format!("plan --op merg --spec {SPEC}"), "`merg`"),
        ("plan --op merge --spec {".into(), "spec"),
        ("plan --op merge --spec {}".into(), "`splits`"),
        (format!("plan --op dense --spec {SPEC}"), "splits"),
        (format!("plan --op merge --spec @{}", path("absent")), "absent"),
        (format!("plan --op merge --spec @{}", path("latin1")), "UTF-8"),
        (format!("plan --op merge --spec {SPEC} --config {config}"), "--config"),
        (format!("plan --op merge --spec {SPEC} --heads 4"), "--heads"),
        (format!("plan --op merge --spec {SPEC} --isa avx9"), "avx9"),
        (format!("plan --op merge --spec {SPEC} --device cuda"), "--device cuda"),
        (format!("plan --config {}", path("absent")), "absent"),
        (format!("plan --config {case}"), "JSON"),
        (plan("--heads 0"), "--heads"),
        (plan("--tp 0"), "--tp"),
        (plan("--tp 3"), "--tp"),
        (plan("--memory-gib 0"), "--memory-gib"),
        (plan("--memory-gib nan"), "--memory-gib"),
        (plan("--memory-gib inf"), "--memory-gib"),
        (plan("--memory-gib 0.001"), "--memory-gib"),
        (plan("--memory-gib 1 --page-size 17"), "needed 1 or a multiple of 16"),
        (plan("--page-size 17"), "needed 1 or a multiple of 16"),
        (plan("--memory-gib 1e300"), "at most 1073741824"),
        (plan("--gpu foo"), "--gpu \"foo\": needed one of"),
        (plan("--isa foo"), "--isa: unknown instruction set"),
        (plan("--ordinal 9"), "--ordinal 9"),
        (plan("--device cuda --threads 2"), "--threads"),
        (plan("--device cpu --gpu h200"), "--gpu: needed --device cuda"),
        ("plan --op merge --spec @".into(), "the name of a file behind @"),
        (format!("plan --op merge --spec {SPEC} --device cpu --gpu h200"), "--gpu"),
        (format!("plan --op merge --spec {SPEC} --gpu h200 --ordinal 1"), "--ordinal"),
        (format!("plan --op merge --spec {SPEC} --gpu h200 --isa avx2"), "given --gpu"),
        (plan("--page-size 0"), "--page-size"),
        (plan("--record fp6"), "fp6"),
        (plan("--weight-bits 65"), "--weight-bits"),
        ("check --op sparce".into(), "`sparce`"),
        ("check --quick=yes".into(), "--quick"),
        ("bench --heads 0".into(), "--heads"),
        ("bench --heads 16,".into(), "--heads"),
        ("bench --tokens 0".into(), "--tokens"),
        ("bench --tokens x".into(), "--tokens"),
        ("bench --rows 0".into(), "--rows"),
        ("bench --batch 0".into(), "--batch"),
        ("bench --samples 0".into(), "--samples"),
        ("bench --splits fixed:65".into(), "--splits"),
        ("bench --splits 0".into(), "--splits"),
        (
            "bench --splits 70000".into(),
            "'--splits <SPLITS>': needed auto, a number from 1 to 65536",
        ),
        ("bench --partial f16".into(), "--partial"),
        ("bench --record fp6".into(), "--record"),
        ("bench --tokens 64 --qk-width 33".into(), "qk_width"),
        ("bench --tokens 64 --value-width 600".into(), "value_width"),
        ("bench --tokens 64 --page-size 17".into(), "needed 1 or a multiple of 16"),
        ("bench --tokens 1073741824 --batch 65536".into(), "cache"),
        ("bench --isa mmx".into(), "mmx"),
        ("doctor --threads x".into(), "--threads"),
    ];
    let before = folder.files();
    for (line, needle) in &tries {
        let output = mlakit(line.split_whitespace());
        if line.is_empty() {
            // No command at all shows the help, as an error.
            assert_eq!(output.status.code(), Some(2));
            assert!(String::from_utf8_lossy(&output.stderr).contains(needle));
        } else {
            assert_ne!(output.status.code(), Some(0), "{line}");
            refused(&output, needle);
        }
        assert_eq!(folder.files(), before, "{line}");
    }
    assert!(tries.len() >= 70);
}

#[test]
fn variables_are_refused_by_name() {
    for (name, value) in [
        ("MLAKIT_ISA", "mmx"),
        ("MLAKIT_THREADS", "0"),
        ("MLAKIT_THREADS", "two"),
        ("MLAKIT_THREADS", "-2"),
        ("MLAKIT_THREADS", "18446744073709551616"),
    ] {
        let output = program().args(["check", "--quick"]).env(name, value).output().unwrap();
        refused(&output, name);
        let config = Folder::new();
        let tiny = mlakit_model::embedded::tiny_dsa().config;
        fs::write(config.path("config.json"), tiny).unwrap();
        let words = ["plan", "--config", config.path("").to_str().unwrap()].map(String::from);
        refused(&program().args(words).env(name, value).output().unwrap(), name);
    }
    let output = program().args(["doctor"]).env("MLAKIT_THREADS", "").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "an empty variable is an absent one");
}

#[test]
fn usage_errors_are_json_where_results_are() {
    for words in [
        &["op", "dense", "--json"][..],
        &["op", "dense", "--format", "json"],
        &["doctor", "--format", "table", "--json"],
        &["--format=json", "bench", "--heads", "0"],
    ] {
        let output = mlakit(words);
        assert_eq!(output.status.code(), Some(2));
        let error: Value = serde_json::from_slice(&output.stderr).unwrap();
        assert!(!error["error"].as_str().unwrap().is_empty());
        assert!(!error["help"].as_str().unwrap().is_empty());
    }
}

#[test]
fn help_and_version_are_results() {
    for (words, needle) in [
        (&["--help"][..], "doctor"),
        (&["--version"], env!("CARGO_PKG_VERSION")),
        (&["op", "--help"], "--replay"),
        (&["plan", "--help", "--json"], "--memory-gib"),
    ] {
        let output = mlakit(words);
        assert_eq!(output.status.code(), Some(0));
        assert!(String::from_utf8_lossy(&output.stdout).contains(needle));
    }
}
