//! What a machine may lack, and what may break: typed, with nothing left behind.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use mlakit::op::merge::Merge;
use mlakit::{Buffer, Category, Device, Error, Plan, Prepared};
use mlakit_cuda::{Cuda, Options};

use super::driver::{Driver, raw};
use super::large::merge_spec;
use super::{cuda, cuda_with};

fn merge(device: &Cuda) -> Result<Prepared<Merge, Cuda>, Error> {
    Plan::<Merge>::for_device::<Cuda>(&merge_spec(), device.facts())?.prepare(device)
}

/// A folder of its own, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let name = format!("mlakit-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn entries(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        let mut entries: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        entries.sort();
        entries
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Without NVRTC nothing can be prepared, and the error says what to install; memory and streams
/// work.
#[test]
fn a_missing_compiler_is_named() {
    let nvrtc = Some(PathBuf::from("/nowhere/libnvrtc.so.13"));
    let Some(device) = cuda_with(Options { nvrtc, ..Options::default() }) else { return };
    for _ in 0..2 {
        match merge(&device).err() {
            Some(Error::Unavailable { because, instead, .. }) => {
                assert!(because.contains("/nowhere/libnvrtc.so.13"), "{because}");
                assert!(instead.contains("install"), "{instead}");
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(device.census().lines(), []);
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let mut x = Buffer::<u8, Cuda>::zeroed(&device, (Category::Tensors, "x"), 3000).unwrap();
    let bytes: Vec<u8> = (0..2990).map(|i| i as u8).collect();
    x.write_on(&mut stream, 7, &bytes).unwrap();
    stream.wait().unwrap();
    let given = x.read().unwrap();
    assert_eq!(
        (&given[..7], &given[7..2997], &given[2997..]),
        (&[0; 7][..], &bytes[..], &[0; 3][..])
    );
}

static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// A damaged entry of the cache is said once and made anew, and so is one that is whole and no
/// code.
#[test]
fn a_damaged_cache_is_made_anew() {
    let folder = Folder::new("cache");
    let options = || Options {
        cache: Some(folder.0.clone()),
        notice: |text| SAID.lock().unwrap().push(text.into()),
        ..Options::from_environment()
    };
    let Some(device) = cuda_with(options()) else { return };
    merge(&device).unwrap();
    let entries = folder.entries();
    assert!(!entries.is_empty() && SAID.lock().unwrap().is_empty());
    let whole: Vec<_> = entries.iter().map(|path| std::fs::read(path).unwrap()).collect();

    damage(&entries, &whole, |bytes| bytes.truncate(bytes.len() / 2));
    merge(&cuda_with(options()).unwrap()).unwrap();
    damage(&entries, &whole, |bytes| *bytes.last_mut().unwrap() ^= 1);
    merge(&cuda_with(options()).unwrap()).unwrap();
    let said = SAID.lock().unwrap().clone();
    assert_eq!(said.len(), 2 * entries.len(), "{said:?}");
    assert!(said.iter().all(|text| text.contains("damaged")), "{said:?}");
    assert_eq!(folder.entries(), entries);
    for (path, whole) in entries.iter().zip(&whole) {
        assert!(std::fs::read(path).unwrap() == *whole, "{} is not as before", path.display());
    }
}

fn damage(entries: &[PathBuf], whole: &[Vec<u8>], change: impl Fn(&mut Vec<u8>)) {
    for (path, whole) in entries.iter().zip(whole) {
        let mut bytes = whole.clone();
        change(&mut bytes);
        std::fs::write(Path::new(path), bytes).unwrap();
    }
}

/// A frozen device runs what was prepared and compiles nothing, also where the kernel is at hand.
#[test]
fn a_frozen_device_keeps_its_kernels() {
    let Some(device) = cuda() else { return };
    let kept = merge(&device).unwrap();
    device.freeze();
    let again = merge(&device).unwrap();
    assert_eq!(again.plan().spec(), kept.plan().spec());
    drop((kept, again));
    assert!(matches!(merge(&device).err(), Some(Error::Frozen { .. })), "nothing has it any more");
}

/// Set in the process that breaks its context.
const BROKEN: &str = "MLAKIT_TEST_BROKEN";

/// A kernel that traps, in a process of its own: every later call says that the context is lost,
/// drops do not panic, the ledger empties, and the process ends as it should.
#[test]
fn a_lost_context_is_said_by_every_call() {
    if std::env::var_os(BROKEN).is_some() {
        return break_and_look();
    }
    if cuda().is_none() {
        return;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    let name = "failures::a_lost_context_is_said_by_every_call";
    child.env(BROKEN, "1").args(["--exact", name, "--nocapture", "--test-threads=1"]);
    let output = child.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("looked at everything"), "{text}");
}

fn break_and_look() {
    let device = cuda().unwrap();
    let driver = Driver::new(&device);
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let merge_before = merge(&device).unwrap();
    let kind = (Category::Tensors, "x");
    let mut x = Buffer::<i32, Cuda>::zeroed(&device, kind, 4).unwrap();
    driver.launch("mlakit_trap", raw(&caller), 1, None);
    x.write_on(&mut stream, 0, &[1]).unwrap();
    let lost = |error: Option<Error>| match error {
        Some(Error::Lost { because }) => assert!(because.contains("CUDA_ERROR"), "{because}"),
        other => panic!("{other:?}"),
    };
    lost(stream.wait().err());
    lost(stream.wait().err());
    lost(x.read().err());
    lost(x.write(&[1]).err());
    lost(x.write_on(&mut stream, 0, &[1]).err());
    lost(Buffer::<i32, Cuda>::zeroed(&device, kind, 4).err());
    lost(device.own_stream().err());
    lost(device.trim().err());
    lost(device.memory_bytes().err());
    lost(merge(&device).err());
    let spec = mlakit::Slots::<Cuda>::new(&device);
    lost(spec.capture(&mut stream, |_| Ok(())).err());
    drop((x, merge_before, stream));
    assert_eq!(device.census().lines(), [], "what is in flight on a lost context is over");
    drop((caller, device));
    println!("looked at everything");
}
