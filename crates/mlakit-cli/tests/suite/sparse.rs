//! `mlakit op sparse`, `plan` and `bench` of it.

use mlakit::{Dtype, RecordFormat};
use mlakit_cli::case::{Case, Tensor};
use mlakit_cli::check::cases::Shape;
use mlakit_cli::check::sparse::SparseShape;
use serde_json::{Value, json};

use crate::common::{Folder, mlakit, op_words, printed_json, refused};

/// Two rows of two requests, three heads, an E4M3 second scope, a sink.
fn sparse() -> Case<'static> {
    Shape::Sparse(SparseShape {
        heads: 3,
        widths: (66, 34),
        width: 70,
        page_size: 16,
        extra: Some(RecordFormat::E4m3),
        sink: true,
        ..SparseShape::default()
    })
    .build(7)
}

fn field(case: &mut Case<'_>, name: &str, value: Value) {
    case.spec.insert(name.into(), value);
}

fn tensor(case: &mut Case<'static>, name: &'static str, dtype: Dtype, shape: &[usize]) {
    let bytes = vec![0u8; shape.iter().product::<usize>() * dtype.bytes()];
    case.tensors.insert(name, Tensor::new(dtype, shape.to_vec(), &bytes));
}

fn remove(case: &mut Case<'static>, name: &str) {
    let names: Vec<String> =
        case.tensors.names().filter(|other| *other != name).map(String::from).collect();
    let old = std::mem::take(&mut case.tensors);
    for name in names {
        let tensor = old.find(&name).expect("it was listed").clone();
        case.tensors.insert(name, tensor);
    }
}

type Edit = fn(&mut Case<'static>);

#[test]
fn wrong_cases_are_refused_by_name() {
    let wrong: [(&str, Edit); 18] = [
        ("tensor `positions`: needed one", |case| remove(case, "positions")),
        ("tensor `counts`: needed one", |case| remove(case, "counts")),
        ("tensor `request`: needed one", |case| remove(case, "request")),
        ("tensor `page_table`: needed one", |case| remove(case, "page_table")),
        ("tensor `extra_slots`: needed one", |case| remove(case, "extra_slots")),
        ("tensor `extra_cache`: needed one", |case| remove(case, "extra_cache")),
        ("tensor `kv_scale`: needed one", |case| remove(case, "kv_scale")),
        ("tensor `sink`: needed F32 [H=3", |case| tensor(case, "sink", Dtype::F32, &[4])),
        ("tensor `counts`: needed I32 [R=2", |case| tensor(case, "counts", Dtype::I32, &[3])),
        ("tensor `positions`: needed I32", |case| tensor(case, "positions", Dtype::I64, &[2, 70])),
        ("extra_page_size", |case| drop(case.spec.remove("extra_page_size"))),
        ("absent without extra_record", |case| drop(case.spec.remove("extra_record"))),
        ("tensor `positions`: needed none", |case| field(case, "selection", json!("slots"))),
        ("`selection`: needed `\"positions\"` or", |case| field(case, "selection", json!(3))),
        ("T <= width = 69", |case| field(case, "width", json!(69))),
        ("not an index key", |case| field(case, "record", json!("index_fp8_132"))),
        ("window", |case| field(case, "window", json!(5))),
        ("tensor `extra_cache`: needed", |case| tensor(case, "extra_cache", Dtype::U8, &[3, 9])),
    ];
    let folder = Folder::new();
    let out = folder.path("out");
    for (needle, edit) in wrong {
        let mut case = sparse();
        edit(&mut case);
        let path = folder.save("case", &case);
        refused(&mlakit(op_words("sparse", &path, &out)), needle);
        assert_eq!(folder.files(), ["case"]);
    }
}

/// A case in slots has the outputs of the case in positions; both count what is out of bounds.
#[test]
fn slots_and_positions_agree() {
    let case = sparse();
    let mut by_slot = sparse();
    let values = |name: &str| case.tensors.find(name).unwrap().values::<i32>().into_owned();
    let (positions, request, table) =
        (values("positions"), values("request"), values("page_table"));
    let pages = table.len() / 2;
    let slot = |(at, position): (usize, &i32)| match usize::try_from(*position) {
        Err(_) => -1,
        Ok(position) if position / 16 >= pages => i32::MAX,
        Ok(position) => {
            let row = request[at / 70] as usize;
            table[row * pages + position / 16] * 16 + (position % 16) as i32
        }
    };
    let slots: Vec<i32> = positions.iter().enumerate().map(slot).collect();
    let counts = values("counts");
    for name in ["positions", "counts", "request", "page_table"] {
        remove(&mut by_slot, name);
    }
    by_slot.tensors.insert("slots", Tensor::new(Dtype::I32, vec![2, 70], &slots));
    by_slot.tensors.insert("slot_counts", Tensor::new(Dtype::I32, vec![2], &counts));
    let folder = Folder::new();
    let checksums = [case, by_slot].map(|case| {
        let path = folder.save("case", &case);
        let mut words = op_words("sparse", &path, &folder.path("out"));
        words.extend(["--replay", "3", "--json"].map(String::from));
        let printed = printed_json(&mlakit(words));
        assert!(printed["faults"].as_u64() > Some(0), "{printed}");
        (printed["outputs"].clone(), printed["faults"].clone())
    });
    assert_eq!(checksums[0], checksums[1]);
}

/// A plan has regions for partial results and workers, and none that grows with a list.
#[test]
fn a_plan_has_no_room_for_slots() {
    let plan = |width: usize| {
        let spec = json!({
            "heads": 16, "qk_width": 576, "value_width": 512, "record": "fp8_656",
            "page_size": 64, "softmax_scale": 0.1, "width": width, "max_rows": 4, "max_batch": 2,
            "max_kv_tokens": 65536, "max_table_width": 1024, "splits": {"count": 2}
        });
        let words = ["plan", "--op", "sparse", "--spec", &spec.to_string(), "--json"];
        printed_json(&mlakit(words.map(String::from)))
    };
    let (narrow, wide) = (plan(128), plan(4096));
    assert_eq!(narrow["scratch"], wide["scratch"]);
    let names: Vec<&str> =
        wide["scratch"].as_array().unwrap().iter().filter_map(|r| r["name"].as_str()).collect();
    assert_eq!(names, ["fault_block", "partial_out", "partial_lse", "workers"]);
}

#[test]
fn bench_times_it() {
    let words = "bench --op sparse --heads 2 --tokens 300 --selected 100 --samples 2 --json";
    let printed = printed_json(&mlakit(words.split(' ').map(String::from)));
    assert_eq!((&printed["operation"], &printed["selected"]), (&json!("sparse"), &json!(100)));
    assert!(printed["shapes"][0]["gflops"].as_f64() > Some(0.0), "{printed}");
}
