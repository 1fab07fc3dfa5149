//! The core does nothing unsafe. It declares one promise that devices make, the simulated devices
//! make it, and a model that is no part of the library uses `unsafe` to let loom look at memory.

use std::fs;
use std::path::{Path, PathBuf};

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => sources(&path, found),
            false => found.push(path),
        }
    }
}

#[test]
fn unsafe_stands_in_two_places() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    let mut found = Vec::new();
    for path in files {
        let name = path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
        if name == "clock/model.rs" {
            continue;
        }
        for line in fs::read_to_string(&path).unwrap().lines().map(str::trim) {
            let code = line.split("//").next().unwrap();
            if code.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe") {
                found.push((name.clone(), code.to_owned()));
            }
        }
    }
    let found: Vec<_> = found.iter().map(|(name, code)| (name.as_str(), code.as_str())).collect();
    let device = "pub unsafe trait Device: Clone + Send + Sync + 'static {";
    let sim = "unsafe impl<P: Pace> Device for Simulated<P> {";
    let mut needed = [("device.rs", device), ("sim/mod.rs", sim)];
    needed.sort_unstable();
    let mut given = found;
    given.sort_unstable();
    assert_eq!(given, needed);
}
