//! Comparing the outputs of two runs bit by bit, and a short name for their bytes.

use super::Outcome;
use crate::case::Tensor;
use crate::failure::Failure;

/// FNV-1a of 64 bits, as 16 digits.
pub fn checksum(bytes: &[u8]) -> String {
    let mix = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    format!("{:016x}", bytes.iter().fold(0xcbf2_9ce4_8422_2325, mix))
}

/// Replay `number` must have the bits of the eager run, and its faults.
///
/// # Errors
/// An internal one with the first element that differs.
pub fn same_bits(number: usize, needed: &Outcome, given: &Outcome) -> Result<(), Failure> {
    let report = |text: String| {
        Failure::internal(
            format!("replay {number}: {text}"),
            "report this with the case file and `mlakit doctor --json`",
        )
    };
    for ((name, needed), (_, given)) in needed.outputs.iter().zip(&given.outputs) {
        if let Some(text) = first_difference(name, needed, given) {
            return Err(report(text));
        }
    }
    if needed.faults != given.faults {
        let text = format!("faults: needed {:?}, given {:?}", needed.faults, given.faults);
        return Err(report(text));
    }
    Ok(())
}

fn first_difference(name: &str, needed: &Tensor<'_>, given: &Tensor<'_>) -> Option<String> {
    let size = (needed.dtype.bitsize() / 8).max(1);
    let (a, b) = (needed.bytes.chunks(size), given.bytes.chunks(size));
    let index = a.zip(b).position(|(a, b)| a != b).or_else(|| {
        let (a, b) = (needed.bytes.len(), given.bytes.len());
        (a != b).then_some(a.min(b) / size)
    })?;
    let hex = |tensor: &Tensor<'_>| {
        let bytes = tensor.bytes.chunks(size).nth(index).unwrap_or_default();
        bytes.iter().rev().map(|byte| format!("{byte:02x}")).collect::<String>()
    };
    let at = coordinate(index, &needed.shape);
    Some(format!("{name} at {at:?}: needed 0x{}, given 0x{}", hex(needed), hex(given)))
}

/// Where a flat index is.
pub fn coordinate(mut index: usize, shape: &[usize]) -> Vec<usize> {
    let mut at = vec![0; shape.len()];
    for (place, size) in at.iter_mut().zip(shape).rev() {
        *place = index % size.max(&1);
        index /= size.max(&1);
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(values: [f32; 6], faults: u32) -> Outcome {
        let tensor = Tensor::new(mlakit::Dtype::F32, vec![2, 3], &values);
        Outcome { outputs: vec![("out", tensor)], faults: [faults, 0, 0] }
    }

    #[test]
    fn the_first_difference_is_shown() {
        let eager = outcome([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], 1);
        assert_eq!(same_bits(1, &eager, &eager.clone()), Ok(()));
        let other = outcome([0.0, 1.0, 2.0, 3.0, 4.5, 6.0], 1);
        let failure = same_bits(3, &eager, &other).unwrap_err();
        assert_eq!(failure.status(), 1);
        assert_eq!(
            failure.message(),
            "replay 3: out at [1, 1]: needed 0x40800000, given 0x40900000"
        );
        // Zeros of both signs are equal numbers and other bits.
        let zero = outcome([-0.0, 1.0, 2.0, 3.0, 4.0, 5.0], 1);
        assert!(same_bits(1, &eager, &zero).is_err());
        let skipped = outcome([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], 2);
        assert!(same_bits(1, &eager, &skipped).unwrap_err().message().contains("faults"));
    }

    #[test]
    fn checksums_are_those_of_the_algorithm() {
        assert_eq!(checksum(b""), "cbf29ce484222325");
        assert_eq!(checksum(b"a"), "af63dc4c8601ec8c");
        assert_eq!(checksum(b"foobar"), "85944171f73967e8");
    }
}
