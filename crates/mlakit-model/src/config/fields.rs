//! Reading typed values out of a JSON object, with errors that name the key.

use std::cell::RefCell;

use serde_json::{Map, Value};

use crate::error::{ConfigError, shorten};

/// A key that a file leaves out and that decides what is computed, with the value that stands for
/// it.
#[derive(Clone, Debug, PartialEq)]
pub struct AssumedKey {
    /// The key, with its enclosing object.
    pub key: String,
    /// What it is taken to be.
    pub value: Value,
}

/// The assumed keys of a file, each once, in the order in which they were asked for.
#[derive(Debug, Default)]
pub(crate) struct Assumed(RefCell<Vec<AssumedKey>>);

impl Assumed {
    pub(crate) fn into_keys(self) -> Vec<AssumedKey> {
        self.0.into_inner()
    }
}

/// A JSON object and the path that led to it; every reader names `path.key` in its error.
/// A null is the same as an absent key, except for the readers that take a default: there an absent
/// key is the default, and a null is what it is in Python.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a> {
    object: &'a Map<String, Value>,
    path: &'a str,
    assumed: Option<&'a Assumed>,
    renamed: &'static [(&'static str, &'static str)],
}

impl<'a> Fields<'a> {
    pub(crate) fn new(object: &'a Map<String, Value>, path: &'a str) -> Self {
        Self { object, path, assumed: None, renamed: &[] }
    }

    /// The same; what is assumed for absent keys is noted in `assumed`.
    pub(crate) fn noting(self, assumed: &'a Assumed) -> Self {
        Self { assumed: Some(assumed), ..self }
    }

    /// The same; each first name that is absent is looked for under the second.
    pub(crate) fn renaming(self, renamed: &'static [(&'static str, &'static str)]) -> Self {
        Self { renamed, ..self }
    }

    /// The fields of an object in these, at `path`; what is assumed is noted in the same place.
    pub(crate) fn inner(&self, object: &'a Map<String, Value>, path: &'a str) -> Self {
        Self { object, path, ..*self }
    }

    /// Notes that `key` is absent and what stands for it.
    pub(crate) fn assume(&self, key: &str, value: impl Into<Value>) {
        let Some(Assumed(keys)) = self.assumed else { return };
        let (key, mut keys) = (self.name(key), keys.borrow_mut());
        if keys.iter().all(|known| known.key != key) {
            keys.push(AssumedKey { key, value: value.into() });
        }
    }

    /// The value of `key`, unless it is absent or null.
    pub(crate) fn value(&self, key: &str) -> Option<&'a Value> {
        self.entry(key).filter(|value| !value.is_null())
    }

    /// Whether `key` is there, if only with a null.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.entry(key).is_some()
    }

    /// The value of `key` under either name.
    fn entry(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).or_else(|| {
            let (_, other) = self.renamed.iter().find(|(name, _)| *name == key)?;
            self.object.get(*other)
        })
    }

    /// The full name of `key` in an error.
    pub(crate) fn name(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_string() } else { format!("{}.{key}", self.path) }
    }

    pub(crate) fn missing(&self, key: &str, needed: impl Into<String>) -> ConfigError {
        ConfigError::Missing { key: self.name(key), needed: needed.into() }
    }

    pub(crate) fn invalid(&self, key: &str, needed: impl Into<String>) -> ConfigError {
        let given = match self.value(key) {
            Some(value) => shorten(&value.to_string()),
            None => return self.missing(key, needed),
        };
        ConfigError::Invalid { key: self.name(key), needed: needed.into(), given }
    }

    pub(crate) fn unsupported(&self, key: &str, supported: impl Into<String>) -> ConfigError {
        let given = self.value(key).map_or("null".to_string(), |value| shorten(&value.to_string()));
        ConfigError::Unsupported { key: self.name(key), given, supported: supported.into() }
    }

    /// An integer from `least` to `most`, where there is one.
    pub(crate) fn size_or_none(
        &self,
        key: &str,
        least: usize,
        most: usize,
    ) -> Result<Option<usize>, ConfigError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        integer(value)
            .filter(|&size| size >= least as u64 && size <= most as u64)
            .map(|size| Some(size as usize))
            .ok_or_else(|| self.invalid(key, format!("an integer from {least} to {most}")))
    }

    /// An integer from `least` to `most`.
    pub(crate) fn size(&self, key: &str, least: usize, most: usize) -> Result<usize, ConfigError> {
        self.size_or_none(key, least, most)?
            .ok_or_else(|| self.missing(key, format!("an integer from {least} to {most}")))
    }

    /// An integer from `least` to `most`: `default` where the key is absent, nothing for a null.
    pub(crate) fn size_or(
        &self,
        key: &str,
        default: Option<usize>,
        (least, most): (usize, usize),
    ) -> Result<Option<usize>, ConfigError> {
        match default.filter(|_| !self.has(key)) {
            Some(size) if size >= least && size <= most => {
                self.assume(key, size);
                Ok(Some(size))
            }
            Some(_) => Err(self.missing(key, format!("an integer from {least} to {most}"))),
            None => self.size_or_none(key, least, most),
        }
    }

    /// A finite number above `above`, where there is one.
    pub(crate) fn number_or_none(&self, key: &str, above: f64) -> Result<Option<f64>, ConfigError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        value
            .as_f64()
            .filter(|number| number.is_finite() && *number > above && *number < 1e30)
            .map(Some)
            .ok_or_else(|| self.invalid(key, format!("a finite number above {above}")))
    }

    /// A finite number above `above`.
    pub(crate) fn number(&self, key: &str, above: f64) -> Result<f64, ConfigError> {
        self.number_or_none(key, above)?
            .ok_or_else(|| self.missing(key, format!("a finite number above {above}")))
    }

    /// A finite number above `above`: `default` where the key is absent, nothing for a null.
    pub(crate) fn number_or(
        &self,
        key: &str,
        default: f64,
        above: f64,
    ) -> Result<Option<f64>, ConfigError> {
        if self.has(key) {
            return self.number_or_none(key, above);
        }
        self.assume(key, default);
        Ok(Some(default))
    }

    /// A finite number that is not negative; zero counts as absent, because Python's code that
    /// defined these keys tests them for truth.
    pub(crate) fn truthy(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        value
            .as_f64()
            .filter(|number| number.is_finite() && *number >= 0.0 && *number < 1e30)
            .map(|number| (number != 0.0).then_some(number))
            .ok_or_else(|| self.invalid(key, "a finite number that is not negative"))
    }

    /// As [`Fields::flag`], for a flag whose default differs between models.
    pub(crate) fn flag_or(&self, key: &str, default: bool) -> Result<bool, ConfigError> {
        if !self.has(key) {
            self.assume(key, default);
        }
        self.flag(key, default)
    }

    /// `default` where the key is absent, false for a null. Nothing is noted: the default is that
    /// of every model.
    pub(crate) fn flag(&self, key: &str, default: bool) -> Result<bool, ConfigError> {
        match self.entry(key) {
            None => Ok(default),
            Some(Value::Null) => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(self.invalid(key, "true or false")),
        }
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.invalid(key, "a string")),
        }
    }

    pub(crate) fn array(&self, key: &str) -> Result<Option<&'a [Value]>, ConfigError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Array(values)) => Ok(Some(values)),
            Some(_) => Err(self.invalid(key, "an array")),
        }
    }

    pub(crate) fn object(&self, key: &str) -> Result<Option<&'a Map<String, Value>>, ConfigError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Object(object)) => Ok(Some(object)),
            Some(_) => Err(self.invalid(key, "an object")),
        }
    }

    /// The keys whose values are not null.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.object.iter().filter(|(_, value)| !value.is_null()).map(|(key, _)| key.as_str())
    }
}

/// An unsigned integer; writers that keep every number as a float (`4096.0`) are understood.
fn integer(value: &Value) -> Option<u64> {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    value.as_u64().or_else(|| {
        let number = value.as_f64()?;
        (number.fract() == 0.0 && (0.0..=EXACT).contains(&number)).then_some(number as u64)
    })
}
