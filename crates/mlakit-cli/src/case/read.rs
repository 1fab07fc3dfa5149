//! Reading a case file.

use std::collections::BTreeMap;
use std::fmt;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use safetensors::SafeTensors;
use safetensors::tensor::{SafeTensorError, TensorInfo};
use serde::Deserialize;
use serde::de::{Error as _, MapAccess, Visitor};
use serde_json::{Map, Value};

use super::tensor::{Tensor, Tensors};
use crate::failure::Failure;
use crate::machine;

/// What a case file holds.
#[derive(Clone, Debug)]
pub struct Case<'f> {
    /// The operation that it is for.
    pub operation: String,
    /// The fields of its Spec, absent ones still absent.
    pub spec: Map<String, Value>,
    /// All metadata, for the file of outputs.
    pub metadata: BTreeMap<String, String>,
    /// The inputs.
    pub tensors: Tensors<'f>,
}

/// Reads a whole file, if it fits the memory of this machine.
///
/// # Errors
/// A file that is not there, not a file, or too large.
pub fn read_file(path: &Path) -> Result<Vec<u8>, Failure> {
    let failed = |error: std::io::Error| {
        Failure::input(
            format!("{}: cannot be read: {error}", path.display()),
            "give the path of a readable file",
        )
    };
    let found = std::fs::metadata(path).map_err(failed)?;
    if found.is_dir() {
        let text = format!("{}: needed a file, given a folder", path.display());
        return Err(Failure::input(text, "give the path of a readable file"));
    }
    if found.file_type().is_char_device() {
        let text = format!("{}: needed a file, given a device without an end", path.display());
        return Err(Failure::input(text, "give the path of a readable file"));
    }
    let bytes = usize::try_from(found.len()).unwrap_or(usize::MAX);
    machine::ensure_memory(&path.display().to_string(), bytes)?;
    std::fs::read(path).map_err(failed)
}

impl<'f> Case<'f> {
    /// Reads the bytes of a case file.
    ///
    /// # Errors
    /// Bytes that are not a safetensors file, by what is wrong with them; metadata that is absent
    /// or not what it should be, by key.
    pub fn parse(bytes: &'f [u8]) -> Result<Self, Failure> {
        let (_, header) =
            SafeTensors::read_metadata(bytes).map_err(|error| malformed(bytes, &error))?;
        let metadata: BTreeMap<String, String> =
            header.metadata().iter().flatten().map(|(k, v)| (k.clone(), v.clone())).collect();
        let operation = entry(&metadata, "operation", "the name of an operation")?.to_owned();
        let spec = object(entry(&metadata, "spec", "the operation's Spec as JSON")?)?;
        let tensors = Tensors::read(bytes)?;
        Ok(Self { operation, spec, metadata, tensors })
    }
}

impl<'f> Tensors<'f> {
    /// The tensors in the bytes of a safetensors file.
    ///
    /// # Errors
    /// Bytes that are none, by what is wrong with them.
    pub fn read(bytes: &'f [u8]) -> Result<Self, Failure> {
        let file = SafeTensors::deserialize(bytes).map_err(|error| malformed(bytes, &error))?;
        let mut tensors = Self::default();
        for (name, view) in file.tensors() {
            let (dtype, shape) = (view.dtype(), view.shape().to_vec());
            tensors.insert(name, Tensor { dtype, shape, bytes: view.data().into() });
        }
        Ok(tensors)
    }
}

fn malformed(bytes: &[u8], error: &SafeTensorError) -> Failure {
    Failure::input(
        format!("not a safetensors file: {}", explain(bytes, error)),
        "write it with a safetensors library; docs/cli.md lists its tensors",
    )
}

fn entry<'m>(
    metadata: &'m BTreeMap<String, String>,
    key: &str,
    needed: &str,
) -> Result<&'m str, Failure> {
    metadata.get(key).map(String::as_str).ok_or_else(|| {
        Failure::input(
            format!("metadata key `{key}`: needed {needed}, given nothing"),
            "write `operation` and `spec` into the file's metadata",
        )
    })
}

/// The fields of a Spec.
///
/// # Errors
/// Text that is not one JSON object, or has a field twice.
pub fn object(text: &str) -> Result<Map<String, Value>, Failure> {
    serde_json::from_str::<Once>(text).map(|once| once.0).map_err(|error| {
        let why = match serde_json::from_str::<Value>(text) {
            Ok(Value::Object(_)) | Err(_) => format!(": {error}"),
            Ok(Value::Array(_)) => ", given an array".to_owned(),
            Ok(value) => format!(", given {value}"),
        };
        Failure::input(
            format!("spec: needed a JSON object{why}"),
            "`mlakit plan --op NAME --spec JSON` prints a whole one",
        )
    })
}

/// An object whose fields are there once: the usual reader keeps the last one and forgets the
/// others.
struct Once(Map<String, Value>);

impl<'de> Deserialize<'de> for Once {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = Once;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Once, A::Error> {
                let mut fields = Map::new();
                while let Some((name, value)) = map.next_entry::<String, Value>()? {
                    if fields.insert(name.clone(), value).is_some() {
                        return Err(A::Error::custom(format!("field `{name}` is given twice")));
                    }
                }
                Ok(Once(fields))
            }
        }
        from.deserialize_map(Fields)
    }
}

/// The text of an error, with the tensor that it is about where the header can be read far enough
/// to find it.
fn explain(bytes: &[u8], error: &SafeTensorError) -> String {
    let guilty = header(bytes).and_then(|header| {
        header
            .iter()
            .filter(|(name, _)| *name != "__metadata__")
            .find_map(|(name, value)| wrong(value).map(|why| format!("tensor `{name}`: {why}")))
    });
    guilty.unwrap_or_else(|| error.to_string())
}

fn header(bytes: &[u8]) -> Option<Map<String, Value>> {
    let length: [u8; 8] = bytes.get(..8)?.try_into().ok()?;
    let end = usize::try_from(u64::from_le_bytes(length)).ok()?.checked_add(8)?;
    serde_json::from_slice(bytes.get(8..end)?).ok()
}

/// What is wrong with the header's entry of a tensor by itself.
fn wrong(entry: &Value) -> Option<String> {
    let info = match TensorInfo::deserialize(entry) {
        Ok(info) => info,
        Err(error) => return Some(error.to_string()),
    };
    let elements = info.shape.iter().copied().try_fold(1usize, usize::checked_mul);
    let Some(bits) = elements.and_then(|elements| elements.checked_mul(info.dtype.bitsize()))
    else {
        return Some(format!("its shape {:?} has more elements than can be counted", info.shape));
    };
    let (first, end) = info.data_offsets;
    let given = end.checked_sub(first);
    (given != Some(bits / 8)).then(|| {
        let needed = format!("{} {:?} takes {} bytes", info.dtype, info.shape, bits / 8);
        format!("{needed}, its offsets are [{first}, {end}]")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    #[test]
    fn errors_name_the_tensor() {
        let cases = [
            (r#"{"q":{"dtype":"F7","shape":[1],"data_offsets":[0,4]}}"#, "tensor `q`: unknown"),
            (
                r#"{"q":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#,
                "tensor `q`: F32 [2] takes 8 bytes, its offsets are [0, 4]",
            ),
            (
                r#"{"q":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}"#,
                "tensor `q`: its shape [4294967296, 4294967296] has more elements",
            ),
            (
                r#"{"q":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#,
                "tensor `q`: F32 [1] takes 4 bytes, its offsets are [4, 0]",
            ),
        ];
        for (header, needed) in cases {
            let failure = Case::parse(&file(header, 4)).unwrap_err();
            assert!(failure.message().contains(needed), "{}", failure.message());
        }
    }

    #[test]
    fn a_field_is_given_once() {
        assert!(object(r#"{"heads":1,"heads":2}"#).unwrap_err().message().contains("`heads`"));
        let array = object("[1]").unwrap_err();
        assert_eq!(array.message(), "spec: needed a JSON object, given an array");
        assert!(object("{} {}").is_err());
        assert_eq!(object(r#"{"heads":1}"#).unwrap().len(), 1);
    }
}
