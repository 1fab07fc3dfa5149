//! `mlakit op indexer` and `mlakit op selection`: from scores to slots, by hand.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use half::bf16;
use mlakit::Dtype;
use mlakit_cli::case::{Case, Tensor, write_file};

use crate::common::{Folder, mlakit, op_words, printed, refused};

type Tensors = Vec<(&'static str, Tensor<'static>)>;

/// One row, one head, 40 keys of two elements in pages of 16: key `t` is (t mod 7, 0), so scores are.
fn indexer() -> Tensors {
    let bf16s =
        |values: &[f32]| -> Vec<bf16> { values.iter().copied().map(bf16::from_f32).collect() };
    let keys: Vec<f32> = (0..48).flat_map(|t| [(t % 7) as f32, 0.0]).collect();
    let bytes: Vec<u8> = bf16s(&keys).iter().flat_map(|value| value.to_le_bytes()).collect();
    vec![
        ("q", Tensor::new(Dtype::Bf16, vec![1, 1, 2], &bf16s(&[1.0, 5.0]))),
        ("weights", Tensor::new(Dtype::F32, vec![1, 1], &[2.0f32])),
        ("cache", Tensor::new(Dtype::U8, vec![3, 64], &bytes)),
        ("page_table", Tensor::new(Dtype::I32, vec![1, 3], &[0i32, 1, 2])),
        ("kv_lens", Tensor::new(Dtype::I32, vec![1], &[40i32])),
        ("q_offsets", Tensor::new(Dtype::I32, vec![2], &[0i32, 1])),
    ]
}

const INDEXER: &str = r#"{"record":"index_bf16_256","page_size":16,"topk":7,"scores":true}"#;

/// 512 pools of 4 and three tokens behind, in pages of 64 whose order is turned round.
fn selection() -> Tensors {
    let pools: Vec<i32> = (0..512).map(|i| 2 * i).collect();
    let table: Vec<i32> = (0..70).map(|page| 69 - page).collect();
    vec![
        ("positions", Tensor::new(Dtype::I32, vec![1, 512], &pools)),
        ("request", Tensor::new(Dtype::I32, vec![1], &[0i32])),
        ("page_table", Tensor::new(Dtype::I32, vec![1, 70], &table)),
        ("last_position", Tensor::new(Dtype::I64, vec![1], &[4402i64])),
    ]
}

const SELECTION: &str = r#"{"page_size":64,"pool_size":4}"#;

fn save(folder: &Folder, (operation, spec): (&str, &str), tensors: &Tensors) -> PathBuf {
    let path = folder.path("case");
    let metadata: BTreeMap<String, String> =
        [("operation", operation), ("spec", spec)].map(|(k, v)| (k.into(), v.into())).into();
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (*name, tensor)).collect();
    write_file(&path, &metadata, &tensors).unwrap();
    path
}

/// Eagerly with replays, and by the oracle; both write the same.
fn run(operation: &str, spec: &str, tensors: &Tensors) -> Vec<u8> {
    let folder = Folder::new();
    let case = save(&folder, (operation, spec), tensors);
    let [device, oracle] = ["device", "oracle"].map(|name| folder.path(name));
    let mut words = op_words(operation, &case, &device);
    words.extend(["--replay", "3"].map(String::from));
    printed(&mlakit(&words));
    let mut words = op_words(operation, &case, &oracle);
    words.push("--oracle".into());
    printed(&mlakit(&words));
    let [device, oracle] = [device, oracle].map(|path| fs::read(path).unwrap());
    assert!(device == oracle, "{operation}: device and oracle");
    device
}

#[test]
fn an_indexer_takes_the_best_and_of_equal_ones_the_first() {
    let bytes = run("indexer", INDEXER, &indexer());
    let out = Case::parse(&bytes).unwrap();
    let ints = |name: &str| out.tensors.find(name).unwrap().values::<i32>().into_owned();
    // Scores of 12 at 6, 13, 20, 27 and 34, then 10 at 5 and 12.
    assert_eq!(ints("positions"), [5, 6, 12, 13, 20, 27, 34]);
    assert_eq!((ints("counts"), ints("faults")), (vec![7], vec![0]));
    let scores = out.tensors.find("scores").unwrap().values::<f32>().into_owned();
    assert_eq!(scores, [10.0, 12.0, 10.0, 12.0, 12.0, 12.0, 12.0]);
}

#[test]
fn pools_become_2051_slots() {
    let bytes = run("selection", SELECTION, &selection());
    let out = Case::parse(&bytes).unwrap();
    let slots = out.tensors.find("slots").unwrap();
    assert_eq!(slots.shape, [1, 2051]);
    let slots = slots.values::<i32>();
    let slot = |token: i32| (69 - token / 64) * 64 + token % 64;
    for (column, given) in slots.iter().enumerate() {
        let column = column as i32;
        let token = if column < 2048 { column / 4 * 8 + column % 4 } else { 4400 + column - 2048 };
        assert_eq!(*given, slot(token), "column {column}");
    }
    assert_eq!(*out.tensors.find("slot_counts").unwrap().values::<i32>(), [2051]);
}

#[test]
fn wrong_cases_are_refused_by_name() {
    let folder = Folder::new();
    let refuse = |operation: &str, spec: &str, tensors: &Tensors, needle: &str| {
        let case = save(&folder, (operation, spec), tensors);
        refused(&mlakit(op_words(operation, &case, &folder.path("out"))), needle);
        assert!(!folder.path("out").exists());
    };
    let without = |tensors: Tensors, name: &str| -> Tensors {
        tensors.into_iter().filter(|(given, _)| *given != name).collect()
    };
    refuse("indexer", &INDEXER.replace("\"topk\":7,", ""), &indexer(), "topk");
    refuse("indexer", &INDEXER.replace("index_bf16_256", "bf16"), &indexer(), "record");
    refuse("indexer", &INDEXER.replace("16,", "64,"), &indexer(), "tensor `cache`");
    refuse("indexer", &INDEXER.replace("}", ",\"pool_size\":4}"), &indexer(), "last_position");
    refuse("indexer", INDEXER, &without(indexer(), "weights"), "tensor `weights`");
    refuse("indexer", &INDEXER.replace("}", ",\"budget_bytes\":9}"), &indexer(), "budget_bytes");
    refuse("selection", SELECTION, &without(selection(), "last_position"), "last_position");
    refuse("selection", &SELECTION.replace("64", "63"), &selection(), "page_size");
    refuse("selection", &SELECTION.replace("}", ",\"topk\":9}"), &selection(), "positions");
}

/// Without running: what a plan takes stays within the budget.
#[test]
fn a_plan_keeps_to_its_budget() {
    let spec = r#"{"heads":64,"width":128,"record":"index_fp8_132","page_size":64,"topk":2048,
        "max_rows":64,"max_batch":64,"max_kv_tokens":1048576,"max_table_width":16384,
        "budget_bytes":16777216}"#;
    let words = ["plan", "--op", "indexer", "--spec", spec, "--json"];
    let text = printed(&mlakit(words));
    assert!(text.contains("candidates") && text.contains("workers"), "{text}");
}
