//! `mlakit op`: what each operation computes, prints and writes.

use std::fs;
use std::process::Stdio;

use half::bf16;
use mlakit_cli::case::Case;
use serde_json::json;

use crate::common::{
    Folder, all, dense, mlakit, op_words, printed, printed_json, program, refused, writer,
};

/// Every operation: the device agrees with the oracle, replays have its bits, and files say what
/// was run.
#[test]
fn every_operation_runs_is_replayed_and_agrees_with_its_oracle() {
    let folder = Folder::new();
    for (index, case) in all().iter().enumerate() {
        let path = folder.save(&format!("case{index}"), case);
        let (device, oracle) = (folder.path("device"), folder.path("oracle"));
        let mut words = op_words(&case.operation, &path, &device);
        words.extend(["--replay", "5", "--json"].map(String::from));
        let summary = printed_json(&mlakit(&words));
        assert_eq!(summary["operation"], case.operation.as_str());
        assert_eq!(summary["replays"], 5);
        assert!(summary["kernel"].as_str().is_some_and(|kernel| !kernel.is_empty()));
        let mut words = op_words(&case.operation, &path, &oracle);
        words.push("--oracle".into());
        assert!(printed(&mlakit(&words)).contains("oracle (f64)"));

        let [device, oracle] = [device, oracle].map(|path| fs::read(path).unwrap());
        let (device, oracle) = (Case::parse(&device).unwrap(), Case::parse(&oracle).unwrap());
        assert_eq!(device.metadata["operation"], case.operation);
        assert_eq!(device.spec, case.spec);
        let mut names: Vec<&str> = device.tensors.names().collect();
        assert_eq!(names, oracle.tensors.names().collect::<Vec<_>>());
        assert_eq!(device.tensors.find("faults"), oracle.tensors.find("faults"));
        names.retain(|name| *name != "faults");
        for name in names {
            let [n, g] = [&oracle, &device].map(|case| case.tensors.find(name).unwrap());
            assert_eq!((n.dtype, &n.shape), (g.dtype, &g.shape));
            let values = |t: &mlakit_cli::case::Tensor<'_>| -> Vec<f32> {
                match t.dtype {
                    safetensors::Dtype::BF16 => {
                        t.values::<bf16>().iter().map(|v| v.to_f32()).collect()
                    }
                    safetensors::Dtype::F32 => t.values().into_owned(),
                    _ => t.bytes.iter().map(|byte| f32::from(*byte)).collect(),
                }
            };
            let bound = if name == "cache" { 0.0 } else { 0.01 };
            let wrong = values(n).iter().zip(values(g)).position(|(n, g)| {
                *n != g && (n - g).abs() > bound * n.abs().max(0.5) || n.is_nan() != g.is_nan()
            });
            assert_eq!(wrong, None, "{} {name}", case.operation);
        }
    }
}

/// Equal runs write equal files, whichever form the summary has.
#[test]
fn outputs_are_deterministic() {
    let folder = Folder::new();
    let case = folder.save("case", &dense());
    let files = ["a", "b"].map(|name| {
        let out = folder.path(name);
        printed(&mlakit(op_words("dense", &case, &out)));
        fs::read(out).unwrap()
    });
    assert_eq!(files[0], files[1]);
}

/// Fields that follow from the shapes may be absent or present, with the same result.
#[test]
fn a_whole_spec_and_a_short_one_are_the_same() {
    let folder = Folder::new();
    let mut whole = dense();
    let plan = |case: &Case<'_>, name: &str| {
        let path = folder.save(name, case);
        printed_json(&mlakit(
            [op_words("dense", &path, &folder.path("out")), vec!["--json".into()]].concat(),
        ))
    };
    let short = plan(&whole, "short");
    let spec = short["spec"].as_object().expect("the summary has the whole spec").clone();
    for (field, value) in [
        ("max_rows", json!(4)),
        ("max_batch", json!(2)),
        ("max_table_width", json!(6)),
        ("max_kv_tokens", json!(96)),
        ("row_lengths", json!(false)),
        ("query", json!("bf16")),
    ] {
        assert_eq!(spec[field], value, "{field}");
        assert!(!whole.spec.contains_key(field));
    }
    whole.spec = spec;
    let whole = plan(&whole, "whole");
    assert_eq!(whole["outputs"], short["outputs"]);
    assert_eq!(whole["spec"], short["spec"]);
}

/// Ids and slots out of the pool, and lengths beyond the table, are skipped or clamped and counted.
#[test]
fn faults_are_counted_and_written() {
    let folder = Folder::new();
    let mut case = dense();
    let table = case.tensors.find("page_table").unwrap().clone();
    let mut ids = table.values::<i32>().into_owned();
    ids[0] = i32::MAX;
    let table = mlakit_cli::case::Tensor::new(mlakit::Dtype::I32, table.shape, &ids);
    case.tensors.insert("page_table", table);
    let lens = mlakit_cli::case::Tensor::new(mlakit::Dtype::I32, vec![2], &[i32::MAX, -5]);
    case.tensors.insert("kv_lens", lens);
    let path = folder.save("case", &case);
    let counted = [false, true].map(|oracle| {
        let mut words = op_words("dense", &path, &folder.path("out"));
        words.push("--json".into());
        words.extend(oracle.then(|| "--oracle".to_owned()));
        let summary = printed_json(&mlakit(&words));
        let bytes = fs::read(folder.path("out")).unwrap();
        let out = Case::parse(&bytes).unwrap();
        let faults = out.tensors.find("faults").unwrap().values::<i32>().to_vec();
        assert_eq!(json!(faults), json!([summary["faults"]]));
        summary["faults_by_kind"].clone()
    });
    assert_eq!(counted[0], counted[1]);
    assert_eq!(counted[0]["ids out of the pool"], 1);
    assert_eq!(counted[0]["lengths clamped"], 2);
}

/// Cases with nothing in them are legal.
#[test]
fn empty_cases_run() {
    use mlakit_cli::case::Tensor;
    let folder = Folder::new();
    let empty = |case: &mut Case<'static>, name: &str, dtype: mlakit::Dtype, shape: &[usize]| {
        case.tensors.insert(name, Tensor::new::<u8>(dtype, shape.to_vec(), &[]));
    };
    let mut rows = dense();
    empty(&mut rows, "q", mlakit::Dtype::Bf16, &[0, 3, 32]);
    let mut pages = dense();
    let stride = pages.tensors.find("cache").unwrap().shape[1];
    empty(&mut pages, "cache", mlakit::Dtype::U8, &[0, stride]);
    let mut requests = dense();
    empty(&mut requests, "page_table", mlakit::Dtype::I32, &[0, 4]);
    empty(&mut requests, "kv_lens", mlakit::Dtype::I32, &[0]);
    let offsets = Tensor::new(mlakit::Dtype::I32, vec![1], &[0i32]);
    requests.tensors.insert("q_offsets", offsets);
    let mut slots = writer();
    empty(&mut slots, "slots", mlakit::Dtype::I64, &[0]);
    for (name, case) in [("rows", rows), ("pages", pages), ("requests", requests), ("slots", slots)]
    {
        let path = folder.save(name, &case);
        for more in [&["--replay", "2"][..], &["--oracle"]] {
            let mut words = op_words(&case.operation, &path, &folder.path("out"));
            words.extend(more.iter().map(|word| (*word).to_owned()));
            printed(&mlakit(&words));
        }
    }
}

/// Every instruction set that this machine has runs every case, scalar among them.
#[test]
fn instructions_can_be_chosen() {
    let folder = Folder::new();
    let path = folder.save("case", &dense());
    let doctor = printed_json(&mlakit(["doctor", "--json"]));
    for set in doctor["instruction_sets"].as_array().unwrap() {
        let name = set["name"].as_str().unwrap();
        let words = op_words("dense", &path, &folder.path("out"));
        let run = program().args(&words).args(["--isa", name, "--json"]).output().unwrap();
        if set["available"] == true {
            let kernel = printed_json(&run)["kernel"].clone();
            assert!(kernel.as_str().unwrap().contains(name), "{kernel}");
            let by_variable = program().args(&words).env("MLAKIT_ISA", name).output().unwrap();
            assert!(printed(&by_variable).contains(name));
        } else {
            let has = "needed instructions of this processor, which has scalar";
            let bench = ["bench", "--heads", "1", "--tokens", "64"].map(String::from).to_vec();
            let check = ["check", "--quick"].map(String::from).to_vec();
            let run = ["run", "a", "--tokens", "1"].map(String::from).to_vec();
            for words in [words.clone(), bench, check, run] {
                let by_flag = program().args(&words).args(["--isa", name]).output().unwrap();
                refused(&by_flag, &format!("--isa {name}: {has}"));
                let by_variable = program().args(&words).env("MLAKIT_ISA", name).output().unwrap();
                refused(&by_variable, &format!("MLAKIT_ISA {name}: {has}"));
            }
        }
    }
}

/// An output that is no file is written to, not replaced; an older file is replaced.
#[test]
fn the_output_may_be_there_already() {
    let folder = Folder::new();
    let case = folder.save("case", &writer());
    let out = folder.path("out");
    fs::write(&out, "older").unwrap();
    printed(&mlakit(op_words("writer", &case, &out)));
    assert!(fs::read(&out).unwrap().len() > 100);
    printed(&mlakit(op_words("writer", &case, std::path::Path::new("/dev/null"))));
    assert!(!fs::metadata("/dev/null").unwrap().is_file());
    assert_eq!(folder.files(), ["case", "out"]);
}

/// A result does not replace the case that it came from, under no name of it.
#[test]
fn the_case_is_not_overwritten() {
    let folder = Folder::new();
    let case = folder.save("case", &writer());
    let link = folder.path("link");
    std::os::unix::fs::symlink(&case, &link).unwrap();
    let before = fs::read(&case).unwrap();
    for out in [&case, &link, &folder.path("./case")] {
        refused(&mlakit(op_words("writer", &case, out)), "needed another file than --case");
        assert_eq!(fs::read(&case).unwrap(), before);
    }
}

/// The oracle runs on the host: instructions that it does not have are those of another machine.
#[test]
fn the_oracle_takes_every_instruction_set() {
    let folder = Folder::new();
    let case = folder.save("case", &dense());
    for isa in ["scalar", "avx512bf16", "amx"] {
        let words = op_words("dense", &case, &folder.path("out"));
        let more = ["--oracle", "--isa", isa].map(String::from);
        assert!(printed(&mlakit([words, more.into()].concat())).contains("oracle (f64)"));
    }
}

/// Whoever reads the output may stop at any time.
#[test]
fn a_closed_pipe_is_no_error() {
    let mut child = program()
        .args(["doctor", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert_eq!(output.status.code(), Some(0));
}
