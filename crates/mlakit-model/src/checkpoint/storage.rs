//! Where the bytes of a checkpoint are, and which of them are whose.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::SafeTensors;
use serde_json::Value;

use crate::error::{CheckpointError, shorten};

/// Largest index file in bytes; the index of a model of 700 billion parameters has 9 MB.
const MAX_INDEX_BYTES: u64 = 256 << 20;
const INDEX_FILE: &str = "model.safetensors.index.json";

/// The bytes of one file.
#[derive(Debug)]
pub(super) enum Part {
    Mapped(Mmap),
    Static(&'static [u8]),
    Owned(Vec<u8>),
}

impl Part {
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Static(bytes) => bytes,
            Self::Owned(bytes) => bytes,
        }
    }

    fn map(path: &Path) -> Result<Self, CheckpointError> {
        let failed = |source| CheckpointError::Io { path: path.to_path_buf(), source };
        let file = File::open(path).map_err(failed)?;
        // SAFETY: the mapping is read-only and private to this process. Another process that
        // truncates the file while it is mapped can end this one with a signal, as with every
        // mapped checkpoint; writes by others can change values, which no code trusts for safety:
        // offsets and shapes were copied out of the header when it was checked.
        let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
        Ok(Self::Mapped(map))
    }
}

/// One stored tensor.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) part: usize,
    pub(super) dtype: safetensors::Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) begin: usize,
    pub(super) end: usize,
}

/// All files of a checkpoint, and its tensors by name without the prefix `model.`.
#[derive(Debug, Default)]
pub(super) struct Storage {
    parts: Vec<Part>,
    files: Vec<String>,
    entries: HashMap<String, Entry>,
}

impl Storage {
    /// The folder's sharded or single checkpoint.
    pub(super) fn open(dir: &Path) -> Result<Self, CheckpointError> {
        let index = dir.join(INDEX_FILE);
        if index.is_file() {
            return Self::open_sharded(dir, &index);
        }
        let path = single_file(dir)?;
        let file = path.display().to_string();
        let mut storage = Self::default();
        storage.add(Part::map(&path)?, file, |_| true)?;
        Ok(storage)
    }

    /// One embedded or generated safetensors file.
    pub(super) fn from_part(part: Part, file: &str) -> Result<Self, CheckpointError> {
        let mut storage = Self::default();
        storage.add(part, file.to_string(), |_| true)?;
        Ok(storage)
    }

    pub(super) fn entry(&self, name: &str) -> Option<(&str, &Entry)> {
        self.entries.get_key_value(name).map(|(name, entry)| (name.as_str(), entry))
    }

    pub(super) fn bytes(&self, entry: &Entry) -> &[u8] {
        &self.parts[entry.part].bytes()[entry.begin..entry.end]
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.entries.iter().map(|(name, entry)| (name.as_str(), entry))
    }

    fn open_sharded(dir: &Path, index: &Path) -> Result<Self, CheckpointError> {
        let map = read_index(index)?;
        let mut shards: Vec<&String> = map.values().collect();
        shards.sort();
        shards.dedup();
        let mut storage = Self::default();
        for shard in shards {
            let part = Part::map(&dir.join(shard))?;
            storage.add(part, shard.clone(), |name| map.get(name) == Some(shard))?;
        }
        for (name, shard) in &map {
            if !storage.entries.contains_key(canonical(name)) {
                return Err(index_error(index, name, &format!("a tensor in {shard}"), "nothing"));
            }
        }
        Ok(storage)
    }

    /// Checks the header of `part` and adds the tensors that `wanted` names.
    fn add(
        &mut self,
        part: Part,
        file: String,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<(), CheckpointError> {
        let malformed = |reason: String| CheckpointError::Malformed { file: file.clone(), reason };
        let bytes = part.bytes();
        // The header reader checks that offsets are contiguous, fill the file and agree with the
        // shapes without overflow.
        let (header, metadata) =
            SafeTensors::read_metadata(bytes).map_err(|error| malformed(error.to_string()))?;
        let data = header + 8;
        for (name, info) in metadata.tensors() {
            if !wanted(&name) {
                continue;
            }
            let (begin, end) = (data + info.data_offsets.0, data + info.data_offsets.1);
            if end > bytes.len() {
                return Err(malformed(format!("tensor `{}` ends past the file", shorten(&name))));
            }
            let shape = info.shape.clone();
            let entry = Entry { part: self.parts.len(), dtype: info.dtype, shape, begin, end };
            let key = canonical(&name).to_string();
            if let Some(first) = self.entries.insert(key.clone(), entry) {
                let first = self.files.get(first.part).unwrap_or(&file).clone();
                return Err(CheckpointError::Duplicate { tensor: key, first, second: file });
            }
        }
        self.parts.push(part);
        self.files.push(file);
        Ok(())
    }
}

/// Causal-LM checkpoints prefix the decoder's tensors with `model.`, models of more than text also
/// with `language_model.`, bare decoders not at all.
fn canonical(name: &str) -> &str {
    const PREFIXES: [&str; 3] = ["model.language_model.", "language_model.model.", "model."];
    PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name)
}

/// The one file of weights in `dir`.
fn single_file(dir: &Path) -> Result<PathBuf, CheckpointError> {
    for name in ["model.safetensors", "weights.safetensors"] {
        let path = dir.join(name);
        if path.is_file() {
            return Ok(path);
        }
    }
    let failed = |source| CheckpointError::Io { path: dir.to_path_buf(), source };
    let mut found = Vec::new();
    for item in std::fs::read_dir(dir).map_err(failed)? {
        let path = item.map_err(failed)?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            found.push(path);
        }
    }
    match found.as_slice() {
        [path] => Ok(path.clone()),
        _ => {
            found.sort();
            let names: Vec<_> =
                found.iter().filter_map(|p| p.file_name()?.to_str().map(String::from)).collect();
            let found = if names.is_empty() { "none".to_string() } else { names.join(", ") };
            Err(CheckpointError::NoWeights { dir: dir.to_path_buf(), found })
        }
    }
}

/// The map from tensor names to shard files. A shard is a file beside the index: a name with a
/// folder in it could reach any file of the machine.
fn read_index(path: &Path) -> Result<HashMap<String, String>, CheckpointError> {
    const MAP: &str = "weight_map";
    let failed = |source| CheckpointError::Io { path: path.to_path_buf(), source };
    let bytes = std::fs::metadata(path).map_err(failed)?.len();
    if bytes > MAX_INDEX_BYTES {
        let needed = format!("at most {MAX_INDEX_BYTES} bytes");
        return Err(index_error(path, INDEX_FILE, &needed, &format!("{bytes} bytes")));
    }
    let text = std::fs::read(path).map_err(failed)?;
    let root: Value = serde_json::from_slice(&text)
        .map_err(|error| index_error(path, INDEX_FILE, "a JSON object", &error.to_string()))?;
    let Some(Value::Object(map)) = root.get(MAP) else {
        let given = root.get(MAP).map_or("nothing".to_string(), Value::to_string);
        return Err(index_error(path, MAP, "an object", &given));
    };
    if map.is_empty() {
        return Err(index_error(path, MAP, "at least one tensor", "none"));
    }
    map.iter()
        .map(|(name, shard)| match shard.as_str() {
            Some(shard) if is_plain_file_name(shard) => Ok((name.clone(), shard.to_string())),
            _ => Err(index_error(
                path,
                name,
                "the name of a *.safetensors file beside the index",
                &shard.to_string(),
            )),
        })
        .collect()
}

fn is_plain_file_name(name: &str) -> bool {
    name.ends_with(".safetensors")
        && name.len() <= 255
        && !name.starts_with('.')
        && !name.contains(['/', '\\', ':', '\0'])
}

fn index_error(path: &Path, key: &str, needed: &str, given: &str) -> CheckpointError {
    CheckpointError::Index {
        file: path.display().to_string(),
        key: shorten(key),
        needed: needed.to_string(),
        given: shorten(given),
    }
}
