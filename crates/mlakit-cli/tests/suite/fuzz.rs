//! Mutated case files and specs through the readers of the program: an answer or a typed error,
//! never a panic.

use mlakit_cli::Failure;
use mlakit_cli::args::{DeviceArgs, DeviceName};
use mlakit_cli::case::Case;
use mlakit_cli::case::read::object;
use mlakit_cli::check::random::Random;
use mlakit_cli::device::{AnyDevice, AnyFacts, Environment, facts, open};
use mlakit_cli::op;

use crate::common::{Folder, all};

/// Changes a file in one to three ways.
fn mutate(file: &mut Vec<u8>, others: &[Vec<u8>], random: &mut Random) {
    for _ in 0..=random.below(3) {
        if file.is_empty() {
            return;
        }
        let at = random.below(file.len());
        // Most of a file is data, most of what can be wrong is in its header.
        let header = 8 + file.len().min(800);
        let near = if random.below(3) > 0 { at % header.min(file.len()) } else { at };
        match random.below(8) {
            0 => file[near] ^= 1 << random.below(8),
            1 => file[near] = random.bits() as u8,
            2 => file.truncate(near),
            3 => {
                let other = &others[random.below(others.len())];
                let (from, len) = (random.below(other.len()), random.below(64) + 1);
                let part = &other[from..other.len().min(from + len)];
                file.splice(near..near.saturating_add(part.len()).min(file.len()), part.to_vec());
            }
            4 => file[random.below(8.min(near + 1))] = random.bits() as u8,
            5 => digits(file, random),
            6 => drop(file.drain(near..file.len().min(near + 1 + random.below(16)))),
            _ => {
                let byte = b"\"{}[]:,0-.eE\0"[random.below(13)];
                file.insert(near, byte);
            }
        }
    }
}

/// Another digit somewhere in the header: shapes, offsets and fields of the spec.
fn digits(file: &mut [u8], random: &mut Random) {
    let end = file.len().min(1000);
    let places: Vec<usize> = (0..end).filter(|at| file[*at].is_ascii_digit()).collect();
    if !places.is_empty() {
        file[places[random.below(places.len())]] = b'0' + random.below(10) as u8;
    }
}

/// Reads a file as the program does; where it is still a case, and its capacities are small, the oracle
/// runs it, and the device, whose replay must have the bits of its eager run.
fn read(bytes: &[u8], device: Option<&AnyDevice>) -> Result<(), Failure> {
    let case = Case::parse(bytes)?;
    let operation = op::find(&case.operation)?;
    (operation.check)(case.clone())?;
    if case.spec.values().any(|value| value.as_u64().is_some_and(|value| value > 1 << 16)) {
        return Ok(());
    }
    let detected = || AnyFacts::Cpu(mlakit_cpu::Facts::detect());
    let facts = device.map_or_else(detected, AnyDevice::facts);
    let exact = (operation.oracle)(case.clone(), &facts)?;
    if let Some(device) = device {
        let ran = (operation.run)(case, device, 1)?;
        assert_eq!(ran.outcome.faults, exact.faults);
    }
    Ok(())
}

#[test]
fn mutated_case_files_are_read_or_refused() {
    let folder = Folder::new();
    let args =
        DeviceArgs { device: Some(DeviceName::Cpu), threads: Some(2), isa: None, ordinal: None };
    let device = open(&args, &Environment::default()).unwrap();
    let files: Vec<Vec<u8>> =
        all().iter().map(|case| std::fs::read(folder.save("case", case)).unwrap()).collect();
    assert!(files.iter().all(|file| read(file, Some(&device)).is_ok()));
    let mut random = Random::new(0x6d6c_616b);
    let (mut kept, mut refused) = (0, 0);
    for round in 0..6000 {
        let mut file = files[round % files.len()].clone();
        mutate(&mut file, &files, &mut random);
        match read(&file, (round % 4 == 0).then_some(&device)) {
            Ok(()) => kept += 1,
            Err(failure) => {
                assert_eq!(failure.status(), 2, "{}", failure.message());
                assert!(!failure.message().is_empty() && !failure.help().is_empty());
                refused += 1;
            }
        }
    }
    // Both happen often, or the mutations are too weak or too strong.
    assert!(kept > 300 && refused > 2000, "{kept} {refused}");
}

#[test]
fn mutated_specs_are_planned_or_refused() {
    let args =
        DeviceArgs { device: Some(DeviceName::Cpu), threads: None, isa: None, ordinal: None };
    let facts = facts(&args, None, &Environment::default()).unwrap();
    let specs: Vec<(String, Vec<u8>)> = all()
        .into_iter()
        .map(|case| {
            let mut spec = case.spec;
            let sizes = [("max_rows", 9), ("max_batch", 3), ("max_kv_tokens", 500)];
            let dense = [("heads", 3), ("qk_width", 32), ("max_table_width", 40)];
            let known = match case.operation.as_str() {
                "dense" => [&sizes[..], &dense[..]].concat(),
                "merge" => vec![("max_rows", 9), ("splits", 3), ("heads", 2), ("value_width", 8)],
                "writer" if case.tensors.find("key").is_some() => {
                    vec![("max_rows", 9), ("key_width", 128)]
                }
                "writer" => vec![("max_rows", 9), ("latent_width", 24), ("rope_width", 8)],
                _ => vec![("max_rows", 9), ("heads", 3), ("in_width", 16), ("out_width", 24)],
            };
            for (name, value) in known {
                spec.insert(name.into(), value.into());
            }
            if case.operation == "merge" {
                spec.insert("sink".into(), true.into());
            }
            (case.operation, serde_json::Value::Object(spec).to_string().into_bytes())
        })
        .collect();
    let texts: Vec<Vec<u8>> = specs.iter().map(|(_, text)| text.clone()).collect();
    let mut random = Random::new(0x7370_6563);
    let mut planned = 0;
    for round in 0..6000 {
        let (operation, text) = &specs[round % specs.len()];
        let mut text = text.clone();
        if round >= specs.len() {
            mutate(&mut text, &texts, &mut random);
        }
        let plan = || {
            let fields = object(&String::from_utf8_lossy(&text))?;
            (op::find(operation)?.plan)(fields, &facts)
        };
        match plan() {
            Ok(_) => planned += 1,
            Err(failure) => {
                assert_eq!(failure.status(), 2, "{}", failure.message());
                assert!(round >= specs.len(), "{operation} is valid: {}", failure.message());
            }
        }
    }
    assert!(planned > 200, "{planned}");
}
