//! How a device is opened.

use std::path::PathBuf;

/// The variable that names NVRTC: the library, or the folder that has it.
pub const NVRTC_VARIABLE: &str = "MLAKIT_NVRTC";
/// The variable that names the folder of compiled kernels; `off` keeps none.
pub const CACHE_VARIABLE: &str = "MLAKIT_CACHE_DIR";

/// The variable that allows one family of kernels of dense attention alone: `portable` or `hopper`.
pub const DENSE_VARIABLE: &str = "MLAKIT_CUDA_DENSE";

/// A family of kernels of dense attention. Without a wish, a plan takes that for Hopper where it
/// applies and says why where it does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DenseFamily {
    /// For every architecture.
    Portable,
    /// For compute capability 9.0; other devices and `Spec`s are refused.
    Hopper,
}

impl DenseFamily {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Portable, Self::Hopper];

    /// As [`DENSE_VARIABLE`] has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Hopper => "hopper",
        }
    }
}

/// How a device is opened. The default reads no environment, keeps nothing on disk, and looks for
/// NVRTC where the loader does.
#[derive(Clone, Debug)]
pub struct Options {
    /// Which of the driver's devices.
    pub ordinal: u32,
    /// NVRTC: the library, or the folder that has it.
    pub nvrtc: Option<PathBuf>,
    /// The folder of compiled kernels; none keeps them in memory alone.
    pub cache: Option<PathBuf>,
    /// The one family of kernels of dense attention that plans may take, to compare or to test them.
    pub dense: Option<DenseFamily>,
    /// Is told, in one line, of what went wrong without being an error: a damaged cache entry, for
    /// instance.
    pub notice: fn(&str),
}

impl Default for Options {
    fn default() -> Self {
        let notice = |text: &str| eprintln!("{text}");
        Self { ordinal: 0, nvrtc: None, cache: None, dense: None, notice }
    }
}

impl Options {
    /// What the environment says: [`NVRTC_VARIABLE`], [`DENSE_VARIABLE`], [`CACHE_VARIABLE`], or
    /// else `mlakit` below `XDG_CACHE_HOME`, or else below `HOME/.cache`. A family that there is not
    /// is none, and said so. For the edge of a program, to be called once.
    pub fn from_environment() -> Self {
        Self::from_variables(|name| std::env::var_os(name).filter(|value| !value.is_empty()))
    }

    fn from_variables(read: impl Fn(&str) -> Option<std::ffi::OsString>) -> Self {
        let below_home = || read("HOME").map(|home| PathBuf::from(home).join(".cache"));
        let usual = || read("XDG_CACHE_HOME").map(PathBuf::from).or_else(below_home);
        let cache = match read(CACHE_VARIABLE) {
            Some(off) if off == "off" => None,
            Some(folder) => Some(PathBuf::from(folder)),
            None => usual().map(|folder| folder.join("mlakit")),
        };
        let rest = Self::default();
        let family = |given: std::ffi::OsString| {
            let known = DenseFamily::ALL.into_iter().find(|family| given == family.name());
            if known.is_none() {
                let given = given.to_string_lossy();
                (rest.notice)(&format!(
                    "{DENSE_VARIABLE}: needed portable or hopper, given {given:?}: all are allowed"
                ));
            }
            known
        };
        let dense = read(DENSE_VARIABLE).and_then(family);
        Self { nvrtc: read(NVRTC_VARIABLE).map(PathBuf::from), cache, dense, ..rest }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(variables: &[(&str, &str)]) -> Option<String> {
        let read = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).into())
        };
        Options::from_variables(read).cache.map(|path| path.display().to_string())
    }

    #[test]
    fn the_nearest_variable_says_where_the_cache_is() {
        let (home, xdg) = (("HOME", "/h"), ("XDG_CACHE_HOME", "/x"));
        assert_eq!(cache(&[]), None);
        assert_eq!(cache(&[home]).unwrap(), "/h/.cache/mlakit");
        assert_eq!(cache(&[home, xdg]).unwrap(), "/x/mlakit");
        assert_eq!(cache(&[home, xdg, (CACHE_VARIABLE, "/c")]).unwrap(), "/c");
        assert_eq!(cache(&[home, xdg, (CACHE_VARIABLE, "off")]), None);
    }

    #[test]
    fn a_variable_allows_one_family() {
        let dense = |value: &'static str| {
            let read = |name: &str| (name == DENSE_VARIABLE).then(|| value.into());
            Options::from_variables(read).dense
        };
        assert_eq!(dense("portable"), Some(DenseFamily::Portable));
        assert_eq!(dense("hopper"), Some(DenseFamily::Hopper));
        assert_eq!(dense("fastest"), None);
    }
}
