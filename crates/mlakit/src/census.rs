//! The ledger: every live byte by category, owner and phase. Touched when memory is obtained, retired or freed; never in `run`.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use serde::{Serialize, Serializer};

use crate::Name;

/// What an allocation is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Category {
    Weights,
    Cache,
    Scratch,
    Slots,
    Tensors,
    Probe,
    Retiring,
    Foreign,
    Code,
}

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Weights => "weights",
            Self::Cache => "cache",
            Self::Scratch => "scratch",
            Self::Slots => "slots",
            Self::Tensors => "tensors",
            Self::Probe => "probe",
            Self::Retiring => "retiring",
            Self::Foreign => "foreign",
            Self::Code => "code",
        })
    }
}

/// One line of the ledger, carried by whoever owns the bytes.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) category: Category,
    pub(crate) owner: Name,
    pub(crate) phase: &'static str,
    pub(crate) bytes: usize,
}

/// One line as it is shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Line {
    /// What it is for.
    pub category: Category,
    /// Who owns it.
    #[serde(serialize_with = "text")]
    pub owner: Name,
    /// The phase in which it was obtained.
    pub phase: &'static str,
    /// Live bytes.
    pub bytes: usize,
}

fn text<S: Serializer>(name: &Name, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(name.as_str())
}

/// The ledger of one device.
#[derive(Debug)]
pub struct Census(Mutex<Counts>);

#[derive(Debug)]
struct Counts {
    live: BTreeMap<(Category, Name, &'static str), usize>,
    sums: BTreeMap<Category, usize>,
    peak: BTreeMap<Category, usize>,
    phase: &'static str,
    obtained: u64,
}

impl Default for Census {
    fn default() -> Self {
        Self(Mutex::new(Counts {
            live: BTreeMap::new(),
            sums: BTreeMap::new(),
            peak: BTreeMap::new(),
            phase: "start",
            obtained: 0,
        }))
    }
}

impl Census {
    /// What is obtained from now on belongs to this phase.
    pub fn enter(&self, phase: &'static str) {
        self.with(|counts| counts.phase = phase);
    }

    /// The phase now.
    pub fn phase(&self) -> &'static str {
        self.with(|counts| counts.phase)
    }

    /// Live bytes of a category.
    pub fn live(&self, category: Category) -> usize {
        self.with(|counts| counts.sums.get(&category).copied().unwrap_or(0))
    }

    /// The most bytes that a category ever had.
    pub fn peak(&self, category: Category) -> usize {
        self.with(|counts| counts.peak.get(&category).copied().unwrap_or(0))
    }

    /// Allocations ever made; a test that `run` obtains nothing compares this.
    pub fn obtained(&self) -> u64 {
        self.with(|counts| counts.obtained)
    }

    /// Every line, by category, owner and phase.
    pub fn lines(&self) -> Vec<Line> {
        self.with(|counts| {
            let line = |(key, bytes): (&(Category, Name, &'static str), &usize)| Line {
                category: key.0,
                owner: key.1.clone(),
                phase: key.2,
                bytes: *bytes,
            };
            counts.live.iter().map(line).collect()
        })
    }

    pub(crate) fn add(&self, entry: &Entry) {
        self.with(|counts| {
            let key = (entry.category, entry.owner.clone(), entry.phase);
            *counts.live.entry(key).or_default() += entry.bytes;
            let sum = counts.sums.entry(entry.category).or_default();
            *sum += entry.bytes;
            let peak = counts.peak.entry(entry.category).or_default();
            *peak = (*sum).max(*peak);
            counts.obtained += u64::from(entry.category != Category::Retiring);
        });
    }

    pub(crate) fn remove(&self, entry: &Entry) {
        self.with(|counts| {
            let key = (entry.category, entry.owner.clone(), entry.phase);
            // Called by destructors, so it must not panic; the tests check the sums.
            let left = counts.live.get(&key).map_or(0, |live| live.saturating_sub(entry.bytes));
            if left == 0 {
                counts.live.remove(&key);
            } else {
                counts.live.insert(key, left);
            }
            if let Some(sum) = counts.sums.get_mut(&entry.category) {
                *sum = sum.saturating_sub(entry.bytes);
            }
        });
    }

    fn with<R>(&self, f: impl FnOnce(&mut Counts) -> R) -> R {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
