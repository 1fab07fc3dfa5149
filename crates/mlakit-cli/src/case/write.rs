//! Writing a file of outputs: whole, or not at all.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::tensor::Tensor;
use crate::failure::Failure;

/// Writes a safetensors file. The bytes go to a file beside it, which then takes its name, so that
/// an error leaves no file, and an older file whole.
///
/// # Errors
/// A path that cannot be written.
pub fn write_file(
    path: &Path,
    metadata: &BTreeMap<String, String>,
    tensors: &[(&str, &Tensor<'_>)],
) -> Result<(), Failure> {
    write(path, &header(metadata, tensors), tensors).map_err(|error| {
        Failure::input(
            format!("--out {}: cannot be written: {error}", path.display()),
            "give a path in a folder that exists and can be written",
        )
    })
}

/// A path that cannot become a file is refused before any work is done.
///
/// # Errors
/// A folder, or a file in a folder that is not there.
pub fn check_path(path: &Path) -> Result<(), Failure> {
    let refuse = |why: &str| {
        Failure::input(
            format!("--out {}: {why}", path.display()),
            "give the path of a file in a folder that exists",
        )
    };
    if path.is_dir() {
        return Err(refuse("needed a file, given a folder"));
    }
    if path.file_name().is_none() || !folder(path).is_dir() {
        return Err(refuse("its folder does not exist"));
    }
    Ok(())
}

/// A result does not take the place of an input, under whatever name.
///
/// # Errors
/// An output path that is the file of `input`, which `flag` gave.
pub fn keep_input(out: &Path, (flag, input): (&str, &Path)) -> Result<(), Failure> {
    match (fs::canonicalize(out), fs::canonicalize(input)) {
        (Ok(to), Ok(from)) if to == from && to.is_file() => Err(Failure::input(
            format!(
                "--out {}: needed another file than {flag}, which it would replace",
                out.display()
            ),
            "give a new path to --out",
        )),
        _ => Ok(()),
    }
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The header with everything in one order, so that equal outputs are equal files.
fn header(metadata: &BTreeMap<String, String>, tensors: &[(&str, &Tensor<'_>)]) -> Vec<u8> {
    let mut entries = Map::new();
    if !metadata.is_empty() {
        entries.insert("__metadata__".into(), json!(metadata));
    }
    let mut end = 0;
    for (name, tensor) in tensors {
        let first = end;
        end += tensor.bytes.len();
        let dtype = tensor.dtype.to_string();
        let entry = json!({"dtype": dtype, "shape": tensor.shape, "data_offsets": [first, end]});
        entries.insert((*name).into(), entry);
    }
    let mut text = Value::Object(entries).to_string().into_bytes();
    // Data begins at a multiple of 8, as readers that map the file expect.
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.append(&mut text);
    header
}

fn write(path: &Path, header: &[u8], tensors: &[(&str, &Tensor<'_>)]) -> io::Result<()> {
    // Something that is not a file (a pipe, a terminal) cannot be replaced, only written to.
    if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        return fill(&mut OpenOptions::new().write(true).open(path)?, header, tensors);
    }
    // Through a link, so that the link stays.
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    let (mut file, partial) = beside(&path)?;
    let written = fill(&mut file, header, tensors).and_then(|()| fs::rename(&partial, &path));
    if written.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_file(&partial);
    }
    written
}

/// A new file in the same folder, under a name that nothing has.
fn beside(path: &Path) -> io::Result<(File, PathBuf)> {
    let name = path.file_name().unwrap_or_default();
    for attempt in 0..100 {
        let mut partial = std::ffi::OsString::from(".");
        partial.push(name);
        partial.push(format!(".{}-{attempt}.partial", std::process::id()));
        let partial = path.with_file_name(partial);
        match OpenOptions::new().write(true).create_new(true).open(&partial) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            opened => return opened.map(|file| (file, partial)),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

fn fill(file: &mut File, header: &[u8], tensors: &[(&str, &Tensor<'_>)]) -> io::Result<()> {
    file.write_all(header)?;
    tensors.iter().try_for_each(|(_, tensor)| file.write_all(&tensor.bytes))?;
    file.flush()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Case;

    #[test]
    fn what_is_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.safetensors");
        fs::write(&path, "older").unwrap();
        let metadata: BTreeMap<_, _> =
            [("operation", "dense"), ("spec", "{}")].map(|(k, v)| (k.into(), v.into())).into();
        let a = Tensor::new(mlakit::Dtype::I32, vec![2], &[1i32, -2]);
        let b = Tensor::new(mlakit::Dtype::U8, vec![1, 3], &[7u8, 8, 9]);
        write_file(&path, &metadata, &[("b", &b), ("a", &a)]).unwrap();
        let bytes = fs::read(&path).unwrap();
        let case = Case::parse(&bytes).unwrap();
        assert_eq!(case.metadata, metadata);
        assert_eq!(case.tensors.find("a"), Some(&a));
        assert_eq!(case.tensors.find("b"), Some(&b));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no partial file stays");
    }

    #[test]
    fn a_path_that_cannot_be_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert!(check_path(&folder.path().join("new")).is_ok());
        assert!(check_path(Path::new("new-file-in-this-folder")).is_ok());
        for wrong in [folder.path().to_path_buf(), folder.path().join("no/file"), "".into()] {
            assert_eq!(check_path(&wrong).unwrap_err().status(), 2, "{}", wrong.display());
        }
    }
}
