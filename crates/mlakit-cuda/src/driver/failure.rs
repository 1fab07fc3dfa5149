//! What the driver's results mean.

use std::ffi::CStr;

use super::Api;

/// A result of the driver that is not a success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) u32);

impl Code {
    pub(crate) const OUT_OF_MEMORY: Self = Self(2);
    pub(crate) const NOT_READY: Self = Self(600);

    /// After one of these the context answers every call with the same code, and no work of it
    /// runs. From the list of errors in the driver's documentation of which it says that the
    /// process must be started anew.
    pub(crate) fn is_sticky(self) -> bool {
        const STICKY: [u32; 16] = [
            214, // ECC_UNCORRECTABLE
            220, // NVLINK_UNCORRECTABLE
            226, // ECC errors that were contained
            700, // ILLEGAL_ADDRESS
            702, // LAUNCH_TIMEOUT
            709, // CONTEXT_IS_DESTROYED
            710, // ASSERT
            714, // HARDWARE_STACK_ERROR
            715, // ILLEGAL_INSTRUCTION
            716, // MISALIGNED_ADDRESS
            717, // INVALID_ADDRESS_SPACE
            718, // INVALID_PC
            719, // LAUNCH_FAILED
            721, // CONTAINED
            802, // SYSTEM_NOT_READY
            999, // UNKNOWN
        ];
        STICKY.contains(&self.0)
    }

    /// The driver's name and text for it.
    pub(crate) fn text(self, api: &Api) -> String {
        let one = |function: unsafe extern "C" fn(u32, *mut *const std::ffi::c_char) -> u32| {
            let mut text = std::ptr::null();
            // SAFETY: the signature is the driver's, and the pointer is to a live pointer.
            let known = unsafe { function(self.0, &mut text) };
            if known != 0 || text.is_null() {
                return "unknown".to_owned();
            }
            // SAFETY: on success the driver stores a pointer to a text of its own that lives as
            // long as the library and ends with 0.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        format!("{} ({}): {}", one(api.error_name), self.0, one(api.error_text))
    }
}
