//! Instruction sets that the kernels are compiled for, and their detection.

use std::fmt;
use std::str::FromStr;

/// An instruction set that kernels of this crate are compiled for, from least to most capable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Portable code. It defines the arithmetic; it is slow.
    Scalar,
    /// AVX2 with FMA: 8 lanes, f32 multiply-add on widened BF16.
    Avx2,
    /// AVX-512 F, BW, VL and DQ: 16 lanes, f32 multiply-add on widened BF16.
    Avx512,
    /// AVX-512 with BF16 dot products and VBMI: the bits of [`Isa::Scalar`], at twice the rate of
    /// [`Isa::Avx512`].
    Avx512Bf16,
    /// AMX tiles for dense attention, beside AVX-512 with BF16 and VBMI; the rest is that of
    /// [`Isa::Avx512`]. Sums run in an order of their own, so its bits are its own.
    Amx,
}

/// Why an instruction set cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IsaUnavailable {
    /// What was asked for.
    pub asked: Isa,
    /// The fastest one that this machine has.
    pub best: Isa,
}

/// A name that is not the name of an instruction set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownIsa {
    /// The name that was given.
    pub name: String,
}

/// Whether the processor is Intel's.
fn is_intel() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let leaf = std::arch::x86_64::__cpuid(0);
        let words = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes);
        words.as_flattened() == b"GenuineIntel"
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

impl Isa {
    /// Every instruction set, least capable first.
    pub const ALL: [Isa; 5] = [Isa::Scalar, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx];

    /// The fastest instruction set of this machine: the most capable one, but on Intel's processors without AMX, where `vdpbf16ps` runs at
    /// half the rate of an f32 multiply-add (measured: 88 against 178 GF/s a core), [`Isa::Avx512`].
    pub fn detect() -> Isa {
        let slow = |isa: Isa| isa == Isa::Avx512Bf16 && is_intel();
        let usable = |isa: &Isa| isa.is_available() && !slow(*isa);
        Isa::ALL.into_iter().rev().find(usable).unwrap_or(Isa::Scalar)
    }

    /// `asked`, or the fastest one where nothing was asked for.
    ///
    /// # Errors
    /// [`IsaUnavailable`] where this machine does not have `asked`.
    pub fn choose(asked: Option<Isa>) -> Result<Isa, IsaUnavailable> {
        match asked {
            None => Ok(Isa::detect()),
            Some(isa) if isa.is_available() => Ok(isa),
            Some(isa) => Err(IsaUnavailable { asked: isa, best: Isa::detect() }),
        }
    }

    /// Whether this machine can run it. The first question about [`Isa::Amx`] asks Linux for leave to use
    /// tiles, for the whole process.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq");
            let avx512bf16 = avx512
                && is_x86_feature_detected!("avx512bf16")
                && is_x86_feature_detected!("avx512vbmi");
            match self {
                Isa::Scalar => true,
                Isa::Avx2 => avx2,
                Isa::Avx512 => avx512,
                Isa::Avx512Bf16 => avx512bf16,
                Isa::Amx => avx512bf16 && crate::kernel::tiles_are_usable(),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Isa::Scalar
        }
    }

    /// The name used in options, plans and reports.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512bf16",
            Isa::Amx => "amx",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = UnknownIsa;

    fn from_str(name: &str) -> Result<Isa, UnknownIsa> {
        let found = Isa::ALL.into_iter().find(|isa| isa.name() == name);
        found.ok_or_else(|| UnknownIsa { name: name.to_owned() })
    }
}

impl fmt::Display for IsaUnavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "this machine cannot run {} kernels; the best it has is {}",
            self.asked, self.best
        )
    }
}

impl fmt::Display for UnknownIsa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unknown instruction set {:?}; known are", self.name)?;
        Isa::ALL.iter().try_for_each(|isa| write!(f, " {isa}"))
    }
}

impl std::error::Error for IsaUnavailable {}
impl std::error::Error for UnknownIsa {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_unknown_names_are_refused() {
        for isa in Isa::ALL {
            assert_eq!(isa.name().parse::<Isa>(), Ok(isa));
        }
        let error = "avx3".parse::<Isa>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "unknown instruction set \"avx3\"; known are scalar avx2 avx512 avx512bf16 amx"
        );
    }

    #[test]
    fn the_choice_is_available_or_refused() {
        assert!(Isa::detect().is_available());
        assert_eq!(Isa::choose(None), Ok(Isa::detect()));
        assert_eq!(Isa::choose(Some(Isa::Scalar)), Ok(Isa::Scalar));
        for isa in Isa::ALL {
            match Isa::choose(Some(isa)) {
                Ok(got) => assert_eq!(got, isa),
                Err(error) => {
                    assert!(!isa.is_available());
                    assert_eq!(error, IsaUnavailable { asked: isa, best: Isa::detect() });
                }
            }
        }
    }
}
