//! What `check` compares: each shape differs from an ordinary one in what its name says.

use mlakit::{Dtype, RecordFormat, RecordLayout};
use serde_json::{Value, json};

use super::cases::{DenseShape, MergeShape, ProjectionShape, Query, Shape, WriterShape};

/// A case with the name that says what is special about it.
pub struct Named {
    /// The name.
    pub name: String,
    /// The case.
    pub shape: Shape,
    /// Whether `--quick` has it.
    pub quick: bool,
}

/// Every case.
pub fn all() -> Vec<Named> {
    let mut list = dense();
    list.extend(records());
    list.extend(super::sparse::all());
    list.extend(others());
    list
}

fn named(name: impl Into<String>, quick: bool, shape: Shape) -> Named {
    Named { name: name.into(), shape, quick }
}

fn short() -> DenseShape {
    DenseShape { heads: 8, kv_lens: vec![100, 0, 65], ..DenseShape::default() }
}

/// Heads, rows, lengths, pages, widths, splits, partials, windows.
fn dense() -> Vec<Named> {
    let mut list = Vec::new();
    let mut add = |name: String, quick: bool, shape: DenseShape| {
        list.push(named(name, quick, Shape::Dense(shape)));
    };
    for heads in [1, 3, 8, 11, 16, 99, 128] {
        let quick = matches!(heads, 1 | 16);
        add(format!("heads {heads}"), quick, DenseShape { heads, ..short() });
    }
    for rows in [2, 4, 5, 64] {
        let shape = DenseShape { rows, kv_lens: vec![130, 64, 3], heads: 4, ..short() };
        add(format!("rows {rows}"), rows == 5, shape);
    }
    for tokens in [0, 1, 63, 64, 65, 2049, 4097] {
        let shape = DenseShape { kv_lens: vec![tokens], heads: 3, ..short() };
        add(format!("tokens {tokens}"), matches!(tokens, 0 | 65), shape);
    }
    for page_size in [1, 16, 48, 256] {
        add(format!("pages of {page_size}"), page_size != 256, DenseShape { page_size, ..short() });
    }
    for widths in [(512, 512), (320, 256), (288, 256), (160, 128), (1088, 1024), (34, 2)] {
        let shape = DenseShape { widths, heads: 5, ..short() };
        add(format!("widths {}/{}", widths.0, widths.1), widths.0 == 160, shape);
    }
    let splits = [
        ("2", json!({"count": 2})),
        ("7", json!({"count": 7})),
        ("fixed 128", json!({"fixed_tokens": 128})),
    ];
    for (name, splits) in splits {
        for partial in ["bf16", "f32"] {
            let options = json!({"splits": splits.clone(), "partial": partial});
            let shape = DenseShape { kv_lens: vec![700, 90], heads: 6, options, ..short() };
            add(format!("splits {name}, partial {partial}"), name == "2", shape);
        }
    }
    for window in [1, 66, 514] {
        let options = json!({"window": window, "splits": {"count": 3}});
        let shape = DenseShape { kv_lens: vec![900, 40], rows: 2, heads: 4, options, ..short() };
        add(format!("window {window}"), window == 66, shape);
    }
    let shape = DenseShape { rows: 4, row_lengths: true, ..short() };
    add("row lengths".into(), true, shape);
    add("lse base 2".into(), true, DenseShape { options: json!({"lse": "base2"}), ..short() });
    list
}

/// Record formats with and without padding.
fn records() -> Vec<Named> {
    let mut list = Vec::new();
    for (record, query) in [
        (RecordFormat::Bf16, Query::Bf16),
        (RecordFormat::E4m3, Query::Bf16),
        (RecordFormat::E4m3, Query::Quantized),
        (RecordFormat::E4m3, Query::E4m3),
    ] {
        for padding in [(0, 0), (64, 192)] {
            for rows in [1, 5] {
                let text = if padding == (0, 0) { "" } else { ", padded" };
                let name = format!("{} query {query:?}{text}, rows {rows}", record.name());
                let options = json!({"splits": {"count": 2}});
                let shape = DenseShape { record, query, padding, rows, options, ..short() };
                list.push(named(name, rows == 1, Shape::Dense(shape)));
            }
        }
    }
    list
}

/// Writers of the tokens that a format can store.
fn writers(record: RecordFormat) -> Vec<Named> {
    let mut list = Vec::new();
    for (widths, page_size) in [((512, 64), 64), ((256, 0), 1), ((128, 32), 16), ((128, 0), 64)] {
        let fits = record.check_parts(widths.0, widths.1).is_ok()
            && RecordLayout::of(record, widths.0, widths.1).check(page_size).is_ok();
        if !fits || (record.is_plain() && widths == (128, 0)) {
            continue;
        }
        let padding = match (record.is_plain(), page_size) {
            (true, 16) => (16, 48),
            (false, _) => (0, 48),
            _ => (0, 0),
        };
        let shape = WriterShape { widths, rows: 40, pages: (60, page_size), record, padding };
        let name = format!("{} {}+{}, pages of {page_size}", record.name(), widths.0, widths.1);
        list.push(named(name, page_size == 16, Shape::Writer(shape)));
    }
    list
}

/// Merge, writer, projection.
fn others() -> Vec<Named> {
    let mut list = Vec::new();
    for (splits, partial) in [(1, Dtype::Bf16), (2, Dtype::F32), (7, Dtype::Bf16), (64, Dtype::F32)]
    {
        for (sink, lse) in [(false, "natural"), (true, "base2")] {
            let shape = [splits, 5, 11, 64];
            let options = json!({"lse": lse, "sink_in_lse": sink});
            let name = format!("{splits} parts {partial}, sink {sink}, {lse}");
            let merge = MergeShape { shape, partial, sink, options };
            list.push(named(name, splits == 7, Shape::Merge(merge)));
        }
    }
    list.extend(RecordFormat::ALL.into_iter().flat_map(writers));
    let wide = ProjectionShape { shape: [5, 3, 64, 48], options: json!({"output": "f32"}) };
    list.push(named("output F32", true, Shape::Projection(wide)));
    for shape in [[1, 16, 128, 512], [5, 3, 512, 128], [64, 2, 128, 512], [7, 11, 34, 70]] {
        let [rows, heads, p, n] = shape;
        for gap in [0, 64] {
            let options = match gap {
                0 => Value::Null,
                gap => json!({"in_stride": p + gap, "out_stride": n + gap}),
            };
            let name = format!("{rows} rows, {heads} heads, {p} to {n}, gaps {gap}");
            let projection = ProjectionShape { shape, options };
            list.push(named(name, rows == 5, Shape::Projection(projection)));
        }
    }
    list
}
