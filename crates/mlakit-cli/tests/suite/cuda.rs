//! A driver that is absent or broken is an answer with its reason. Broken ones are built here:
//! small libraries under the driver's name.

#![cfg(target_os = "linux")]

use std::fs;
use std::process::Command;

use crate::common::{Folder, dense, op_words, printed_json, program, refused};

/// A library with these functions, each of which returns a number. `cuDriverGetVersion` first
/// stores a version, `cuDeviceGetCount` 0.
fn source(version: i32, init: u32, functions: &[&str]) -> String {
    let mut text = String::new();
    for name in functions {
        let (args, store, code) = match *name {
            "cuInit" => ("_: u32", String::new(), init),
            "cuDriverGetVersion" => ("v: *mut i32", format!("unsafe {{ *v = {version} }}"), 0),
            "cuDeviceGetCount" => ("n: *mut i32", "unsafe { *n = 0 }".into(), 0),
            _ => ("", String::new(), 1),
        };
        text += &format!(
            "#[unsafe(no_mangle)] pub extern \"C\" fn {name}({args}) -> u32 {{ {store}; {code} }}\n"
        );
    }
    text
}

const ALL: [&str; 8] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDeviceTotalMem_v2",
    "cuGetErrorName",
];

#[test]
fn a_broken_driver_is_named() {
    let rustc = std::env::var_os("RUSTC").unwrap_or("rustc".into());
    for (index, (version, init, functions, needle)) in [
        (13_000, 0, &ALL[..7], "has no function cuGetErrorName"),
        (13_000, 0, &ALL[1..], "has no function cuInit"),
        (13_000, 0, &[][..], "has no function cuInit"),
        (11_040, 0, &ALL, "runs CUDA 11.4, needed is 12.0 or newer"),
        (13_000, 100, &ALL, "finds no device"),
        (13_000, 0, &ALL, "finds no device"),
        (13_000, 999, &ALL, "cuInit failed with code 999"),
    ]
    .into_iter()
    .enumerate()
    {
        let folder = Folder::new();
        let (text, library) = (folder.path("driver.rs"), folder.path("libcuda.so"));
        fs::write(&text, source(version, init, functions)).unwrap();
        let built = Command::new(&rustc)
            .args([
                "--edition",
                "2024",
                "--crate-type",
                "cdylib",
                "-C",
                "panic=abort",
                "-A",
                "warnings",
                "-o",
            ])
            .args([&library, &text])
            .status()
            .expect("the compiler that built this test");
        assert!(built.success(), "{index}");
        let folder_path = library.parent().unwrap();
        let doctor = program().arg("doctor").env("LD_LIBRARY_PATH", folder_path).output().unwrap();
        let text = String::from_utf8_lossy(&doctor.stdout);
        assert_eq!(doctor.status.code(), Some(0), "{}", String::from_utf8_lossy(&doctor.stderr));
        assert!(text.contains(needle), "{index}: {text}");

        let case = folder.save("case", &dense());
        let run = program()
            .args(op_words("dense", &case, &folder.path("out")))
            .args(["--device", "cuda"])
            .env("LD_LIBRARY_PATH", folder_path)
            .output()
            .unwrap();
        refused(&run, needle);
        let errors = String::from_utf8_lossy(&run.stderr).into_owned();
        assert_eq!(errors.matches("the CPU").count(), 1, "one remedy, once: {errors}");
        assert!(errors.contains("(--device cpu)"), "{errors}");
        assert!(!folder.path("out").exists());
    }
}

/// Without a driver that is what is said first, of whatever else is wrong; doctor reports it.
#[test]
fn the_missing_device_comes_first() {
    let folder = Folder::new();
    fs::write(folder.path("libcuda.so"), "text").unwrap();
    fs::write(folder.path("libcuda.so.1"), "text").unwrap();
    let path = folder.path("libcuda.so");
    let program = |line: &str| {
        let words = line.split(' ');
        let library = path.parent().unwrap();
        program().args(words).env("LD_LIBRARY_PATH", library).output().unwrap()
    };
    // 128 new tokens are more than what top-k covers, and so is this text.
    fs::write(folder.path("text"), "a".repeat(500)).unwrap();
    let eval = format!("eval {} --device cuda", folder.path("text").display());
    for line in ["run a --device cuda", &eval] {
        refused(&program(line), "--device cuda: the CUDA device is not available");
    }
    let doctor = printed_json(&program("doctor --device cuda --json"));
    assert_eq!(doctor["cuda"]["used"], false);
    let problem = doctor["problems"][0]["error"].as_str().unwrap();
    assert!(problem.starts_with("--device cuda: the CUDA device is not available"), "{problem}");
    // A GPU by name needs none that is here, and says so with a command that works.
    let help = String::from_utf8(program("run a --device cuda").stderr).unwrap();
    let advised = help.split('`').nth(1).unwrap();
    assert_eq!(advised, "mlakit plan --op NAME --spec JSON --gpu h200");
}

/// Not a library at all.
#[test]
fn a_file_that_is_no_library_is_no_driver() {
    let folder = Folder::new();
    fs::write(folder.path("libcuda.so"), "text").unwrap();
    let path = folder.path("libcuda.so");
    let doctor =
        program().arg("doctor").env("LD_LIBRARY_PATH", path.parent().unwrap()).output().unwrap();
    assert_eq!(doctor.status.code(), Some(0), "{}", String::from_utf8_lossy(&doctor.stderr));
}
