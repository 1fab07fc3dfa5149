//! Results: a table for people, one JSON object for programs.

use std::io::{self, Write};

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use crate::args::Format;
use crate::failure::Failure;

/// A result that can be printed both ways.
pub trait Report: Serialize {
    /// The lines for people.
    fn lines(&self) -> Vec<String>;
}

/// Prints a result to standard output.
///
/// # Errors
/// A closed pipe, quietly; any other error of standard output.
pub fn print(report: &impl Report, format: Format) -> Result<(), Failure> {
    let text = match format {
        Format::Json => serde_json::to_string_pretty(report).map_err(|error| {
            Failure::internal(format!("the result is not JSON: {error}"), "use --format table")
        })?,
        Format::Table => report.lines().join("\n"),
    };
    let mut out = io::stdout().lock();
    writeln!(out, "{text}").and_then(|()| out.flush()).map_err(|error| Failure::output(&error))
}

/// A table with a header; the columns named in `right` hold numbers.
pub fn table(header: &[&str], right: &[usize], rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header.to_vec()).add_rows(rows);
    for index in right {
        if let Some(column) = table.column_mut(*index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.trim_fmt()
}

/// Two columns without a header: a name and its value.
pub fn pairs(rows: &[(&str, String)]) -> String {
    let mut table = Table::new();
    let rows = rows.iter().map(|(name, value)| vec![(*name).to_owned(), value.clone()]);
    table.load_style(presets::NOTHING).add_rows(rows);
    table.trim_fmt()
}

/// Bytes as people read them; exact below 1 KiB and in JSON.
pub fn bytes(count: usize) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    let mut value = count as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_short() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(3 << 30), "3.0 GiB");
        assert_eq!(bytes(usize::MAX), "16384.0 PiB");
    }

    #[test]
    fn tables_align_numbers() {
        let rows = vec![vec!["a".into(), "1".into()], vec!["b".into(), "100".into()]];
        let text = table(&["name", "bytes"], &[1], rows);
        let ends: Vec<&str> = text.lines().map(|line| &line[line.len() - 1..]).collect();
        assert_eq!(ends, ["s", "1", "0"], "{text}");
    }
}
