//! What the assembler says of a kernel's resources, read from its log.

use std::fmt;

/// Resources of one entry, as `ptxas -v` prints them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Assembled {
    /// 32-bit registers of a thread.
    pub registers: u32,
    /// Static shared memory of a block, in bytes.
    pub static_shared_bytes: u32,
    /// The stack frame of a thread, in bytes: local memory.
    pub stack_bytes: u32,
    /// Bytes of registers that are spilled by stores.
    pub spill_store_bytes: u32,
    /// Bytes of registers that are loaded back.
    pub spill_load_bytes: u32,
}

/// A log without the lines that are looked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogUnread(String);

impl fmt::Display for LogUnread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the assembler's log says nothing of the kernel's resources: {:?}", self.0)
    }
}

impl std::error::Error for LogUnread {}

impl Assembled {
    /// Reads the log of a program with one entry.
    pub fn read(log: &str) -> Result<Self, LogUnread> {
        let unread = || LogUnread(log.to_owned());
        let before = |unit: &str| {
            let at = log.rfind(unit)?; // what the assembler remarks about the code comes before
            log[..at].split([' ', ',']).rfind(|word| !word.is_empty())?.parse().ok()
        };
        Ok(Self {
            registers: before("registers").ok_or_else(unread)?,
            static_shared_bytes: before("bytes smem").unwrap_or(0),
            stack_bytes: before("bytes stack frame").ok_or_else(unread)?,
            spill_store_bytes: before("bytes spill stores").ok_or_else(unread)?,
            spill_load_bytes: before("bytes spill loads").ok_or_else(unread)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_the_assembler_are_read() {
        let log = "ptxas info    : 0 bytes gmem\n\
            ptxas info    : Compiling entry function 'k' for 'sm_90a'\n\
            ptxas info    : Function properties for k\n\
            \u{20}   8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n\
            ptxas info    : Used 40 registers, used 1 barriers, 8 bytes cumulative stack size, \
            1056 bytes smem\n";
        let needed = Assembled {
            registers: 40,
            static_shared_bytes: 1056,
            stack_bytes: 8,
            spill_store_bytes: 4,
            spill_load_bytes: 12,
        };
        assert_eq!(Assembled::read(log), Ok(needed));
        assert!(Assembled::read("").is_err());
    }
}
