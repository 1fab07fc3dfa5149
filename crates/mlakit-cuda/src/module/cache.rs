//! Compiled code on disk.
//!
//! An entry is a file `FAMILY-KEY.cubin`, KEY being SHA-256 over everything that decides the code:
//! text, macros, flags, architecture, entry and the compiler's version. Bytes of a file: `[0, 8)`
//! the magic `mlakit-1`, `[8, 16)` the length of the code as u64 little-endian, `[16, 48)` SHA-256
//! of the code, then the code. It is written under another name and renamed, so that several
//! processes may write one entry: a reader sees all of it or nothing. An entry that is damaged is
//! removed, said once, and made anew.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::{Source, compiler, digest};

const MAGIC: &[u8; 8] = b"mlakit-1";
const HEAD_BYTES: usize = 8 + 8 + 32;

/// A folder of entries.
pub(crate) struct Cache {
    folder: PathBuf,
    /// Told what went wrong; never an error, since code can be compiled again.
    notice: fn(&str),
}

/// What was found under a key.
pub(crate) enum Found {
    Code(Vec<u8>),
    Nothing,
}

impl Cache {
    pub(crate) fn new(folder: &Path, notice: fn(&str)) -> Self {
        Self { folder: folder.to_owned(), notice }
    }

    /// The code of an entry, if it is there and whole.
    pub(crate) fn read(&self, source: &Source, key: &str) -> Found {
        let path = self.path(source, key);
        match fs::read(&path) {
            Ok(bytes) => match unpack(&bytes) {
                Some(code) => Found::Code(code.to_vec()),
                None => {
                    self.say(&path, "is damaged and is made anew");
                    let _ = fs::remove_file(&path); // it is overwritten in any case
                    Found::Nothing
                }
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => Found::Nothing,
            Err(error) => {
                self.say(&path, &format!("cannot be read: {error}"));
                Found::Nothing
            }
        }
    }

    /// Keeps the code of an entry.
    pub(crate) fn write(&self, source: &Source, key: &str, code: &[u8]) {
        let path = self.path(source, key);
        if let Err(error) = self.try_write(&path, code) {
            self.say(&path, &format!("cannot be written: {error}"));
        }
    }

    /// Removes an entry whose code was whole and yet cannot be loaded.
    pub(crate) fn drop_entry(&self, source: &Source, key: &str, why: &str) {
        let path = self.path(source, key);
        self.say(&path, &format!("cannot be loaded ({why}) and is made anew"));
        let _ = fs::remove_file(&path); // it is overwritten in any case
    }

    fn try_write(&self, path: &Path, code: &[u8]) -> io::Result<()> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        fs::create_dir_all(&self.folder)?;
        let name = format!(".new-{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed));
        let new = self.folder.join(name);
        let written = fs::File::create(&new).and_then(|mut file| {
            file.write_all(MAGIC)?;
            file.write_all(&(code.len() as u64).to_le_bytes())?;
            file.write_all(&digest::of([code]))?;
            file.write_all(code)?;
            file.sync_all()
        });
        let renamed = written.and_then(|()| fs::rename(&new, path));
        renamed.inspect_err(|_| {
            let _ = fs::remove_file(&new); // perhaps it was never made
        })
    }

    fn path(&self, source: &Source, key: &str) -> PathBuf {
        self.folder.join(format!("{}-{key}.cubin", source.family))
    }

    fn say(&self, path: &Path, what: &str) {
        (self.notice)(&format!("the cached kernel {} {what}", path.display()));
    }
}

/// The code of a file, if it is whole.
fn unpack(bytes: &[u8]) -> Option<&[u8]> {
    let (head, code) = bytes.split_at_checked(HEAD_BYTES)?;
    let (magic, rest) = head.split_at(8);
    let (len, check) = rest.split_at(8);
    let whole =
        magic == MAGIC && len == (code.len() as u64).to_le_bytes() && check == digest::of([code]);
    whole.then_some(code)
}

/// What decides the code of a source.
pub(crate) fn key(source: &Source, architecture: &str, compiler: (u32, u32)) -> String {
    let version = format!("{}.{}", compiler.0, compiler.1);
    let program = source.program();
    let flags = compiler::FLAGS.map(str::as_bytes);
    let defines =
        source.defines.iter().flat_map(|(name, value)| [name.as_bytes(), value.as_bytes()]);
    let fixed = [program.as_bytes(), source.entry.as_bytes(), architecture.as_bytes()];
    let parts = fixed.into_iter().chain([version.as_bytes()]).chain(flags).chain(defines);
    digest::text(digest::of(parts))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());

    fn source(value: &str) -> Source {
        Source {
            family: "test",
            entry: "k",
            text: &["a", "b"],
            defines: vec![("N", value.into())],
            threads: 32,
            dynamic_shared_bytes: 0,
            registers: 32,
        }
    }

    #[test]
    fn the_key_knows_everything_that_decides_the_code() {
        let of = |source: &Source| key(source, "sm_90a", (13, 0));
        let one = of(&source("1"));
        assert_eq!(one, of(&source("1")));
        assert_eq!(one.len(), 64);
        let others = [
            of(&source("2")),
            key(&source("1"), "sm_80", (13, 0)),
            key(&source("1"), "sm_90a", (12, 9)),
            of(&Source { entry: "l", ..source("1") }),
            of(&Source { text: &["a", "c"], ..source("1") }),
            of(&Source { defines: vec![("N1", String::new())], ..source("1") }),
        ];
        assert!(others.iter().all(|other| *other != one));
        let limits = Source { threads: 64, registers: 99, ..source("1") };
        assert_eq!(of(&limits), one, "what is no part of the code is no part of the key");
    }

    #[test]
    fn a_damaged_entry_is_said_once_and_made_anew() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(folder.path(), |text| SAID.lock().unwrap().push(text.into()));
        let (source, code) = (source("1"), [7u8; 100]);
        assert!(matches!(cache.read(&source, "key"), Found::Nothing));
        cache.write(&source, "key", &code);
        assert!(matches!(cache.read(&source, "key"), Found::Code(found) if found == code));
        let path = folder.path().join("test-key.cubin");
        let whole = fs::read(&path).unwrap();
        assert_eq!(whole.len(), HEAD_BYTES + code.len());
        for damage in 0..whole.len() + 2 {
            let mut bytes = whole.clone();
            match bytes.get_mut(damage) {
                Some(byte) => *byte ^= 1,
                None if damage == whole.len() => bytes.truncate(HEAD_BYTES - 1),
                None => bytes.push(0),
            }
            fs::write(&path, bytes).unwrap();
            SAID.lock().unwrap().clear();
            assert!(matches!(cache.read(&source, "key"), Found::Nothing), "{damage}");
            assert!(matches!(cache.read(&source, "key"), Found::Nothing), "it is gone");
            assert_eq!(SAID.lock().unwrap().len(), 1);
        }
        cache.write(&source, "key", &code);
        assert!(matches!(cache.read(&source, "key"), Found::Code(found) if found == code));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is left");
    }

    #[test]
    fn writers_of_one_entry_do_not_meet() {
        let folder = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for byte in 0..8u8 {
                let folder = folder.path();
                scope.spawn(move || {
                    let cache = Cache::new(folder, |text| panic!("{text}"));
                    for _ in 0..20 {
                        cache.write(&source("1"), "key", &[byte; 5000]);
                        match cache.read(&source("1"), "key") {
                            Found::Code(code) => assert!(code.iter().all(|b| *b == code[0])),
                            Found::Nothing => panic!("an entry was there"),
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_no_error() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, b"").unwrap();
        let cache = Cache::new(&file.join("below"), |_| {});
        cache.write(&source("1"), "key", &[1]);
        assert!(matches!(cache.read(&source("1"), "key"), Found::Nothing));
    }
}
