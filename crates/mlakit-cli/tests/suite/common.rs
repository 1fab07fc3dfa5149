//! Running the program, and case files for it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use mlakit::RecordFormat;
use mlakit_cli::case::{Case, Tensor, write_file};
use mlakit_cli::check::cases::{
    DenseShape, MergeShape, ProjectionShape, Query, Shape, WriterShape,
};
use serde_json::{Value, json};
use tempfile::TempDir;

/// The program with the variables that it reads unset, except for the number of threads.
pub fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mlakit"));
    command.env_remove("MLAKIT_ISA").env("MLAKIT_THREADS", "2");
    command
}

/// Runs it.
pub fn mlakit<S: AsRef<std::ffi::OsStr>>(words: impl IntoIterator<Item = S>) -> Output {
    program().args(words).output().expect("the program starts")
}

/// What it printed, after it succeeded.
pub fn printed(output: &Output) -> String {
    let text = String::from_utf8(output.stdout.clone()).expect("UTF-8");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{text}\n{errors}");
    assert_eq!(errors, "");
    text
}

/// The same as JSON.
pub fn printed_json(output: &Output) -> Value {
    serde_json::from_str(&printed(output)).expect("one JSON object")
}

/// Checks that it refused: status 2, nothing on stdout, a message with `needle` and a help line on
/// stderr, no panic.
pub fn refused(output: &Output, needle: &str) {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
    assert!(!errors.contains("panicked"), "{errors}");
    assert!(errors.starts_with("error: "), "{errors}");
    assert!(errors.contains(needle), "needed {needle:?} in:\n{errors}");
    assert!(errors.contains("\nhelp: "), "{errors}");
}

/// A folder for one test.
pub struct Folder(TempDir);

impl Folder {
    pub fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary folder"))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Saves a case; its spec is written from its fields.
    pub fn save(&self, name: &str, case: &Case<'_>) -> PathBuf {
        let path = self.path(name);
        let metadata = metadata(case);
        let tensors: Vec<(&str, &Tensor<'_>)> = case
            .tensors
            .names()
            .map(|name| (name, case.tensors.find(name).expect("it has it")))
            .collect();
        write_file(&path, &metadata, &tensors).expect("a case is saved");
        path
    }

    /// What is in it.
    pub fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.0.path()).expect("a folder");
        let name = |entry: fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
        let mut names: Vec<_> = entries.map(|entry| name(entry.expect("an entry"))).collect();
        names.sort();
        names
    }
}

fn metadata(case: &Case<'_>) -> std::collections::BTreeMap<String, String> {
    let mut metadata = case.metadata.clone();
    if metadata.contains_key("spec") && !metadata["spec"].starts_with('!') {
        metadata.insert("spec".into(), Value::Object(case.spec.clone()).to_string());
    }
    if let Some(raw) = metadata.get("spec").and_then(|spec| spec.strip_prefix('!')) {
        let raw = raw.to_owned();
        metadata.insert("spec".into(), raw);
    }
    metadata
}

/// The words of `mlakit op`.
pub fn op_words(operation: &str, case: &Path, out: &Path) -> Vec<String> {
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    ["op", operation, "--case", &text(case), "--out", &text(out)].map(String::from).into()
}

/// A small dense case: 2 requests, 3 heads.
pub fn dense() -> Case<'static> {
    Shape::Dense(DenseShape {
        heads: 3,
        widths: (32, 16),
        rows: 2,
        kv_lens: vec![70, 5],
        page_size: 16,
        ..DenseShape::default()
    })
    .build(1)
}

/// The same with an E4M3 cache and query.
pub fn dense_e4m3() -> Case<'static> {
    Shape::Dense(DenseShape {
        heads: 3,
        widths: (32, 16),
        kv_lens: vec![70, 5],
        page_size: 16,
        record: RecordFormat::E4m3,
        query: Query::E4m3,
        padding: (8, 32),
        row_lengths: true,
        options: json!({"splits": {"count": 2}, "lse": "base2"}),
        ..DenseShape::default()
    })
    .build(2)
}

/// A small merge with a sink.
pub fn merge() -> Case<'static> {
    let options = json!({"lse": "natural", "sink_in_lse": true});
    let shape = [3, 2, 4, 16];
    let merge = MergeShape { shape, partial: mlakit::Dtype::F32, sink: true, options };
    Shape::Merge(merge).build(3)
}

/// A small writer.
pub fn writer() -> Case<'static> {
    let (widths, padding) = ((24, 8), (4, 10));
    let record = RecordFormat::Bf16;
    let writer = WriterShape { widths, rows: 9, pages: (3, 16), record, padding };
    Shape::Writer(writer).build(4)
}

/// A small writer of index keys.
pub fn key_writer() -> Case<'static> {
    let (widths, padding) = ((128, 0), (0, 0));
    let record = RecordFormat::IndexFp8_132;
    let writer = WriterShape { widths, rows: 9, pages: (3, 16), record, padding };
    Shape::Writer(writer).build(6)
}

/// A small projection with gaps.
pub fn projection() -> Case<'static> {
    let options = json!({"in_stride": 20, "out_stride": 30});
    Shape::Projection(ProjectionShape { shape: [5, 3, 16, 24], options }).build(5)
}

/// One case of each operation, and a second dense one.
pub fn all() -> Vec<Case<'static>> {
    vec![dense(), dense_e4m3(), merge(), writer(), key_writer(), projection()]
}
