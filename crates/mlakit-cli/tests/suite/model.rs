//! `mlakit run`, `layer` and `eval`.

use std::fs;
use std::path::{Path, PathBuf};

use mlakit::Dtype;
use mlakit_cli::case::{Case, Tensor, Tensors, write_file};
use serde_json::{Value, json};

/// The elements of a tensor's bytes, however they are aligned.
fn elements<T: bytemuck::Pod>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

use crate::common::{Folder, mlakit, printed, printed_json, refused};

fn vectors(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../vectors").join(name);
    path.to_str().expect("UTF-8").to_owned()
}

/// The embedded checkpoint selects 128 keys: until a row sees more, sparse and dense attention are
/// the same, and a text goes on beyond, whatever the caches hold.
#[test]
fn a_text_is_continued_with_the_keys_that_indexers_select() {
    let run = |more: &str| {
        let line = format!("run MACBETH. --tokens 150 --json {more}");
        let made = printed_json(&mlakit(line.split(' ').filter(|word| !word.is_empty())));
        assert_eq!(made["new_tokens"], 150, "{more}");
        made
    };
    let text = |made: &Value| made["texts"][0]["text"].as_str().unwrap().to_owned();
    let (sparse, dense) = (run(""), run("--attention dense"));
    assert_eq!(text(&sparse)[..100], text(&dense)[..100]);
    let owners = |made: &Value| -> Vec<String> {
        let lines = made["ledger"].as_array().unwrap().iter();
        lines.map(|line| line["owner"].as_str().unwrap().to_owned()).collect()
    };
    for owner in ["layers: index keys", "layers: index q", "selected positions"] {
        assert!(owners(&sparse).iter().any(|name| name == owner), "{owner}");
        assert!(owners(&dense).iter().all(|name| name != owner), "{owner}");
    }
    run("--record fp8_656 --index-record index_fp8_132");
    run("--record nvfp4_432 --index-record index_mxfp4_68 --partial f32");
    run("--record fp8_656 --attention dense");
}

/// What the help of a bare `run` advises is not refused.
#[test]
fn the_advice_for_no_prompt_works() {
    let output = mlakit(["run"]);
    refused(&output, "no prompt");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    let advised = errors.split('`').nth(1).expect("a command in backquotes");
    let words = advised.split(' ').skip(1).map(|word| word.trim_matches('"'));
    let words: Vec<&str> = words.chain(["--json"]).collect();
    assert_eq!(printed_json(&mlakit(&words))["new_tokens"], 128, "{advised}");
}

#[test]
fn prompts_that_cannot_be_continued_are_refused() {
    for (line, needle) in [
        (&["run", ""][..], "prompt 1: needed a text"),
        (&["run", "   "], "prompt 1: needed a text, given \"   \""),
        (&["run", "a", "--prompt", "\t\n"], "prompt 2: needed a text"),
        (&["run", "a", "--seed", "-1"], "--seed"),
        (&["run", "a", "--temperature", "-1"], "0 or more"),
        (&["run", "a", "--tokens", "-5"], "--tokens"),
        (&["run", "a", "--tokens", "5000", "--attention", "dense"], "4096"),
        (&["run", "a", "--splits", "-3"], "--splits"),
        (&["run", "a", "--model", "/"], "config.json"),
        (&["run", "a", "--model", "/dev/null"], "needed a folder"),
        (&["eval", "/dev/null"], "/dev/null"),
    ] {
        refused(&mlakit(line), needle);
    }
    // A negative number alone is a prompt like others.
    assert_eq!(printed_json(&mlakit(["run", "-5", "--tokens", "2", "--json"]))["new_tokens"], 2);
}

/// Two sequences, of 5 rows and of the rest, of numbers up to `scale`.
fn layer_input(folder: &Folder, (rows, scale): (usize, f32)) -> PathBuf {
    let mut state = 7_u32;
    let mut number = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    let hidden: Vec<f32> = (0..rows * 64).map(|_| number() * scale).collect();
    let hidden = Tensor::new(Dtype::F32, vec![rows, 64], &hidden);
    let offsets = Tensor::new(Dtype::I32, vec![3], &[0, 5, rows as i32]);
    let path = folder.path("input");
    let tensors = [("hidden", &hidden), ("q_offsets", &offsets)];
    write_file(&path, &Default::default(), &tensors).unwrap();
    path
}

fn attn_out(path: &Path) -> Vec<f64> {
    let bytes = fs::read(path).unwrap();
    let tensors = Tensors::read(&bytes).unwrap();
    tensors.values::<f32>("attn_out").iter().map(|v| f64::from(*v)).collect()
}

/// RMS of the difference over RMS of `exact`.
fn relative(given: &[f64], exact: &[f64]) -> f64 {
    assert_eq!(given.len(), exact.len());
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let error = square(&mut given.iter().zip(exact).map(|(g, e)| g - e));
    (error / square(&mut exact.iter().copied())).sqrt()
}

/// The f64 layer uses the record that was asked for: with an E4M3 cache it is nearer to the device
/// with one than the exact layer is.
#[test]
fn the_oracle_of_a_layer_honours_its_record() {
    let folder = Folder::new();
    let input = layer_input(&folder, (40, 1.0));
    let run = |record: &str, precision: &str| {
        let out = folder.path("out");
        let (model, input) = (vectors("deepseek_v3"), input.to_str().unwrap().to_owned());
        let line = format!(
            "layer --model {model} --layer 1 --input {input} --out {} --record {record} \
             --precision {precision} --chunk 7",
            out.display()
        );
        printed(&mlakit(line.split_whitespace()));
        attn_out(&out)
    };
    let (exact, narrow) = (run("bf16", "f64"), run("e4m3", "f64"));
    let moved = relative(&narrow, &exact);
    let device = relative(&run("e4m3", "bf16"), &narrow);
    assert!(moved > 5e-3, "{moved}");
    assert!(device < 1e-2 && device < moved / 2.0, "{device} {moved}");
}

#[test]
fn layers_that_cannot_be_run_are_refused() {
    let folder = Folder::new();
    let (input, out) = (layer_input(&folder, (40, 1.0)), folder.path("out"));
    let (input, out) = (input.to_str().unwrap(), out.to_str().unwrap());
    let model = vectors("deepseek_v3");
    let line = |more: &str| format!("layer --model {model} --input {input} --out {out} {more}");
    let before = folder.files();
    for (more, needle) in [
        ("--layer 2", "layer 2"),
        ("--layer -1", "--layer"),
        ("--layer 0 --chunk 0", "--chunk"),
        ("--layer 0 --record fp6", "fp6"),
        ("--layer 0 --precision f64 --isa mmx", "mmx"),
        ("--layer 0 --index-record bf16", "index_fp8_132"),
        ("--layer 0 --record index_fp8_132", "index key"),
    ] {
        refused(&mlakit(line(more).split_whitespace()), needle);
        assert_eq!(folder.files(), before, "{more}");
    }
    let onto_itself = format!("layer --model {model} --layer 0 --input {input} --out {input}");
    refused(&mlakit(onto_itself.split_whitespace()), "needed another file than --input");
    // What is wrong with a width is wrong with the model's; there is no spec.
    let wide = vectors("full_v3_h16");
    let wide = format!("layer --model {wide} --layer 0 --input {input} --out {out}");
    let output = mlakit(wide.split_whitespace());
    refused(&output, "(model)");
    assert!(!String::from_utf8_lossy(&output.stderr).contains("spec"));
}

/// A sparse layer writes what it selected; a layer that shares a selection must be given it.
#[test]
fn sparse_layers_write_their_selection() {
    let folder = Folder::new();
    let (input, out) = (layer_input(&folder, (40, 1.0)), folder.path("out"));
    let model = vectors("glm_moe_dsa");
    let run = |input: &Path, more: &str| {
        let (input, out) = (input.display(), out.display());
        let line = format!("layer --model {model} --input {input} --out {out} {more}");
        mlakit(line.split_whitespace())
    };
    let read = |name: &str| {
        let bytes = std::fs::read(&out).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let tensor = tensors.tensor(name).unwrap();
        (tensor.shape().to_vec(), tensor.data().to_vec())
    };
    for more in ["--precision f64", "--chunk 7", "--record e4m3"] {
        printed(&run(&input, &format!("--layer 0 {more}")));
        let (shape, keys) = read("topk");
        assert_eq!(shape, [40, 32], "{more}");
        let keys: Vec<i32> = elements(&keys);
        assert_eq!((keys[0], &keys[1..32]), (0, &[-1; 31][..]), "{more}");
        assert!(keys.chunks(32).all(|row| row.iter().is_sorted_by_key(|key| *key as u32)));
    }
    refused(&run(&input, "--layer 1"), "tensor `topk`: needed [R, T]");
    refused(&run(&input, "--layer 1 --precision f64"), "tensor `topk`: needed [R, T]");
    printed(&run(&input, "--layer 0 --precision f64"));
    let (shape, keys) = read("topk");
    let keys: Vec<i32> = elements(&keys);
    let bytes = std::fs::read(&input).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let hidden: Vec<f32> = elements(tensors.tensor("hidden").unwrap().data());
    let hidden = Tensor::new(Dtype::F32, vec![40, 64], &hidden);
    let offsets = Tensor::new(Dtype::I32, vec![2], &[0, 40]);
    let topk = Tensor::new(Dtype::I32, shape, &keys);
    let shared = folder.path("shared");
    let tensors = [("hidden", &hidden), ("q_offsets", &offsets), ("topk", &topk)];
    write_file(&shared, &Default::default(), &tensors).unwrap();
    printed(&run(&shared, "--layer 1 --precision f64"));
    let exact = attn_out(&out);
    assert!(read("topk").1 == bytemuck::cast_slice::<i32, u8>(&keys));
    printed(&run(&shared, "--layer 1"));
    let error = relative(&attn_out(&out), &exact);
    assert!(error < 1.5e-2, "{error}");
}

/// Rows so large that F32 does not hold their squares are normalised like others.
#[test]
fn large_rows_are_not_zeros() {
    let folder = Folder::new();
    let input = layer_input(&folder, (40, 1e20));
    let run = |precision: &str| {
        let out = folder.path("out");
        let (model, input) = (vectors("deepseek_v3"), input.display());
        let out_path = out.display();
        let line = format!(
            "layer --model {model} --layer 1 --input {input} --out {out_path} --precision {precision}"
        );
        printed(&mlakit(line.split_whitespace()));
        attn_out(&out)
    };
    let (exact, device) = (run("f64"), run("bf16"));
    assert!(exact.iter().any(|value| value.abs() > 0.1));
    let error = relative(&device, &exact);
    assert!(error < 2e-2, "{error}");
}

/// The f64 layer needs no device, whichever is named.
#[test]
fn the_exact_layer_needs_no_device() {
    let folder = Folder::new();
    let (input, out) = (layer_input(&folder, (8, 1.0)), folder.path("out"));
    let (model, input, out) = (vectors("deepseek_v3"), input.display(), out.display());
    for more in ["--device cuda", "--device cuda --ordinal 3", "--isa amx"] {
        let line = format!(
            "layer --model {model} --layer 0 --input {input} --out {out} --precision f64 {more}"
        );
        printed(&mlakit(line.split_whitespace()));
    }
    let line = format!(
        "layer --model {model} --layer 0 --input {input} --out {out} --precision f64 --isa foo"
    );
    refused(&mlakit(line.split_whitespace()), "--isa: unknown instruction set");
}

/// -1 is the one mark for no key, and a position that the model does not have is an error.
#[test]
fn keys_and_positions_that_are_none_are_refused() {
    let folder = Folder::new();
    let hidden = Tensor::new(Dtype::F32, vec![4, 64], &[0.5f32; 256]);
    let offsets = Tensor::new(Dtype::I32, vec![2], &[0, 4]);
    let keys = |unused: i32| {
        let topk = [[0, unused], [0, 1], [1, 2], [3, unused]].concat();
        Tensor::new(Dtype::I32, vec![4, 2], &topk)
    };
    let first = |at: i32| Tensor::new(Dtype::I32, vec![1], &[at]);
    let run = |model: &str, name: &str, tensor: &Tensor<'_>| {
        let (path, out) = (folder.path("input"), folder.path("out"));
        let tensors = [("hidden", &hidden), ("q_offsets", &offsets), (name, tensor)];
        write_file(&path, &Default::default(), &tensors).unwrap();
        let (model, path, out) = (vectors(model), path.display(), out.display());
        let line = format!("layer --model {model} --layer 0 --input {path} --out {out}");
        mlakit(line.split_whitespace())
    };
    refused(&run("deepseek_v32", "topk", &keys(-2)), "-1 for none, given -2 in row 0");
    printed(&run("deepseek_v32", "topk", &keys(-1)));
    let config = mlakit_model::ModelConfig::from_file(
        &Path::new(&vectors("deepseek_v3")).join("config.json"),
    );
    let most = config.unwrap().max_position_embeddings.expect("it says") as i32;
    printed(&run("deepseek_v3", "first_position", &first(most - 4)));
    let output = run("deepseek_v3", "first_position", &first(most - 3));
    refused(&output, &format!("needed positions below {most}"));
}

/// Keys that a config leaves out are said before the text; a config.json stands for its folder.
#[test]
fn what_a_config_leaves_out_is_said_first() {
    let folder = Folder::new();
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-dsa");
    for name in ["model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(tiny.join(name), folder.path(name)).unwrap();
    }
    let text = fs::read(tiny.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&text).unwrap();
    let run = |config: &Value, more: &[&str]| {
        let path = folder.path("config.json");
        fs::write(&path, config.to_string()).unwrap();
        let words = ["run", "a", "--tokens", "2", "--model", path.to_str().unwrap()];
        mlakit([&words[..], more].concat())
    };
    printed(&run(&config, &[]));
    let removed = config.as_object_mut().unwrap().remove("rope_theta");
    assert!(removed.is_some());
    let output = run(&config, &[]);
    assert_eq!(output.status.code(), Some(0));
    let note = String::from_utf8(output.stderr).unwrap();
    assert_eq!(note.lines().count(), 1);
    assert!(note.starts_with("note: config.json leaves out"), "{note}");
    assert!(note.contains("rope_theta = 10000"), "{note}");
    let made = printed_json(&run(&config, &["--json"]));
    assert_eq!(made["assumed"], json!({"rope_theta": 10000.0}));
    // A rank that is assumed and wrong: the note says why the tensor does not fit.
    config.as_object_mut().unwrap().remove("q_lora_rank");
    let output = run(&config, &[]);
    assert_eq!(output.status.code(), Some(2));
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.contains("q_lora_rank = 1536") && errors.contains("error: "), "{errors}");
}

/// A layer of multi-token prediction is not run as a decoder layer.
#[test]
fn a_config_that_counts_the_draft_layer_is_refused() {
    let folder = Folder::new();
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-dsa");
    for name in ["model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(tiny.join(name), folder.path(name)).unwrap();
    }
    let text = fs::read(tiny.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&text).unwrap();
    config["num_hidden_layers"] = json!(4);
    fs::write(folder.path("config.json"), config.to_string()).unwrap();
    let dir = folder.path("");
    let words = ["run", "a", "--tokens", "2", "--model", dir.to_str().unwrap()];
    refused(&mlakit(words), "set `num_hidden_layers` to at most 3");
}

/// The oracle rounds where the device's plan does: with several splits by `auto` it is not the
/// oracle of one split.
#[test]
fn the_oracle_has_the_splits_of_the_plan() {
    use mlakit_cli::check::cases::{DenseShape, Shape};
    let folder = Folder::new();
    let shape = |splits: Value| {
        Shape::Dense(DenseShape {
            kv_lens: vec![1500],
            options: json!({"splits": splits}),
            ..DenseShape::default()
        })
    };
    let out = |splits: Value, threads: &str| -> Vec<u8> {
        let case = folder.save("case", &shape(splits).build(3));
        let out = folder.path("out");
        let mut words = crate::common::op_words("dense", &case, &out);
        words.extend(["--oracle", "--threads", threads].map(String::from));
        printed(&mlakit(&words));
        let bytes = fs::read(out).unwrap();
        Case::parse(&bytes).unwrap().tensors.find("out").unwrap().bytes.to_vec()
    };
    let case = folder.save("case", &shape(json!("auto")).build(3));
    let mut words = crate::common::op_words("dense", &case, &folder.path("out"));
    words.extend(["--threads", "8", "--json"].map(String::from));
    let splits = printed_json(&mlakit(&words))["splits"].as_u64().unwrap();
    assert!(splits > 1, "{splits} splits on 8 threads");
    let auto = out(json!("auto"), "8");
    assert_eq!(auto, out(json!({"count": splits}), "8"));
    assert_ne!(auto, out(json!({"count": 1}), "8"));
}
