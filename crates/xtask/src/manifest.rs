//! The manifest of the kernels: what each takes of a multiprocessor, by architecture.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// One kernel for one architecture.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// Entry and macros.
    pub kernel: String,
    /// As NVRTC takes it.
    pub architecture: String,
    /// The first 16 digits of what decides the code (`Source::key`).
    pub key: String,
    /// Threads of a block.
    pub threads: u32,
    /// 32-bit registers of a thread.
    pub registers: u32,
    /// Static shared memory of a block, in bytes.
    pub static_shared_bytes: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub dynamic_shared_bytes: u32,
}

/// The checked-in file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The compiler's version; another one gives other registers.
    pub nvrtc: String,
    /// By kernel, then by architecture in the order of their age.
    pub rows: Vec<Row>,
}

impl Manifest {
    /// The file.
    pub fn path() -> PathBuf {
        crate::root().join("crates/mlakit-cuda/kernels/manifest.json")
    }

    /// Reads the file.
    pub fn read() -> Result<Self, String> {
        let path = Self::path();
        let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))
    }

    /// The compiler's version, major and minor.
    pub fn compiler(&self) -> Result<(u32, u32), String> {
        let parts =
            self.nvrtc.split_once('.').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
        parts.ok_or_else(|| format!("the manifest's compiler {:?} is no version", self.nvrtc))
    }

    /// The row of a key.
    pub fn row(&self, key: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.key == key)
    }

    /// Writes the file: one row a line, so that differences are easy to read.
    pub fn write(&self) -> Result<(), String> {
        let row = |row: &Row| serde_json::to_string(row).map_err(|e| e.to_string());
        let rows: Vec<String> = self.rows.iter().map(row).collect::<Result<_, _>>()?;
        let rows = rows.join(",\n    ");
        let text =
            format!("{{\n  \"nvrtc\": {:?},\n  \"rows\": [\n    {rows}\n  ]\n}}\n", self.nvrtc);
        let path = Self::path();
        fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))
    }

    /// What differs from `old`, one line each.
    pub fn differences(&self, old: &Self) -> Vec<String> {
        let rows = |manifest: &Self| -> BTreeMap<(String, String), Row> {
            let key = |row: &Row| (row.kernel.clone(), row.architecture.clone());
            manifest.rows.iter().map(|row| (key(row), row.clone())).collect()
        };
        let (old_rows, new_rows) = (rows(old), rows(self));
        let name = |(kernel, architecture): &(String, String)| format!("{architecture} {kernel}");
        let mut found = Vec::new();
        if self.nvrtc != old.nvrtc {
            found.push(format!("nvrtc: {} was {}", self.nvrtc, old.nvrtc));
        }
        for (key, new) in &new_rows {
            match old_rows.get(key) {
                None => found.push(format!("new: {}", name(key))),
                Some(old) if old != new => {
                    let text = |row: &Row| {
                        format!(
                            "code {}, {} threads, {} registers, {} + {} bytes shared",
                            row.key,
                            row.threads,
                            row.registers,
                            row.static_shared_bytes,
                            row.dynamic_shared_bytes
                        )
                    };
                    found.push(format!("{}: {} (was {})", name(key), text(new), text(old)));
                }
                Some(_) => {}
            }
        }
        let gone = old_rows.keys().filter(|key| !new_rows.contains_key(*key));
        found.extend(gone.map(|key| format!("gone: {}", name(key))));
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(kernel: &str, registers: u32) -> Row {
        Row {
            kernel: kernel.into(),
            architecture: "sm_90a".into(),
            key: format!("{registers:016}"),
            threads: 128,
            registers,
            static_shared_bytes: 0,
            dynamic_shared_bytes: 1024,
        }
    }

    fn manifest(nvrtc: &str, rows: &[Row]) -> Manifest {
        Manifest { nvrtc: nvrtc.into(), rows: rows.to_vec() }
    }

    #[test]
    fn every_difference_is_said() {
        let old = manifest("13.0", &[row("same", 32), row("changed", 32), row("gone", 32)]);
        assert_eq!(old.differences(&old), Vec::<String>::new());
        let new = manifest("13.1", &[row("same", 32), row("changed", 40), row("new", 32)]);
        let said = new.differences(&old);
        let starts = [
            "nvrtc: 13.1 was 13.0",
            "sm_90a changed: code",
            "new: sm_90a new",
            "gone: sm_90a gone",
        ];
        assert_eq!(said.len(), starts.len(), "{said:?}");
        for (said, start) in said.iter().zip(starts) {
            assert!(said.starts_with(start), "{said}");
        }
    }

    #[test]
    fn a_version_is_two_numbers() {
        assert_eq!(manifest("13.0", &[]).compiler(), Ok((13, 0)));
        assert!(manifest("13", &[]).compiler().is_err());
    }

    /// The checked-in file, as the program reads it.
    #[test]
    fn the_manifest_has_each_kernel_once() {
        let manifest = Manifest::read().unwrap();
        assert!(!manifest.rows.is_empty());
        for (index, row) in manifest.rows.iter().enumerate() {
            let same = |other: &Row| {
                (&other.kernel, &other.architecture) == (&row.kernel, &row.architecture)
            };
            assert!(!manifest.rows[..index].iter().any(same), "{row:?} twice");
            assert_eq!(manifest.row(&row.key), Some(row), "its key is its own");
        }
    }
}
