//! How one row's keys are divided.
//!
//! A row attends to the positions `[low, high)`. Blocks of [`BLOCK`] absolute positions are never divided. `Auto` and `Count` balance:
//! of the blocks that some row of the request touches now, each split gets the same number (the last ones fewer or none).
//! `FixedTokens` cuts at multiples of a fixed number of absolute positions, so that a row's bits do not depend on anything else.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::op::spec::within;

/// Tokens of a block.
pub const BLOCK: usize = 64;

/// The policy that a `Spec` declares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Splits {
    /// As many as fill the device, balanced over the live length.
    #[default]
    Auto,
    /// This many, balanced over the live length.
    Count(usize),
    /// One for every so many tokens, a multiple of 64, cut at absolute positions.
    FixedTokens(usize),
}

/// Upper bounds on what splitting may cost. They count splits and partial rows, never bytes, so they do not depend on the partial dtype.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Budget {
    /// The most splits of a row, 1 or more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_splits: Option<usize>,
    /// The most partial rows: row capacity times splits. Fewer than two for each row means one split.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_partial_rows: Option<usize>,
}

impl Budget {
    /// A row always has one split; no partial rows at all are a budget: then nothing is divided.
    pub(crate) fn check(&self) -> Result<(), Error> {
        match self.max_splits {
            Some(0) => Err(Error::contract("budget.max_splits", "1 or more", 0)),
            _ => Ok(()),
        }
    }
}

/// What of a `Spec` decides how many splits there may be.
#[derive(Clone, Copy, Debug)]
pub struct Capacity {
    /// The policy.
    pub splits: Splits,
    /// The bounds.
    pub budget: Budget,
    /// Rows at most.
    pub max_rows: usize,
    /// Cached tokens of a request at most.
    pub max_kv_tokens: usize,
    /// The window, if any.
    pub window: Option<usize>,
}

impl Capacity {
    /// Blocks that a row may touch: a window that begins late in a block reaches into one more, hence `window + 63`.
    pub fn blocks(&self) -> usize {
        let reach = self.window.map_or(self.max_kv_tokens, |w| w.saturating_add(BLOCK - 1));
        reach.min(self.max_kv_tokens).div_ceil(BLOCK).max(1)
    }

    /// Checks the policy and the budget.
    ///
    /// # Errors
    /// A size that is no multiple of a block, or splits that the budget does not allow.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.budget.check()?;
        match self.splits {
            Splits::Auto => Ok(()),
            Splits::Count(count) => within("splits.count", count, 1, 1 << 16),
            Splits::FixedTokens(tokens) if tokens > 0 && tokens.is_multiple_of(BLOCK) => {
                self.resolve(1).map(drop)
            }
            Splits::FixedTokens(tokens) => {
                Err(Error::contract("splits.fixed_tokens", "a positive multiple of 64", tokens))
            }
        }
    }

    /// The number of splits, given what the device would like for `Auto`. At least 1, and never more than there are blocks.
    ///
    /// # Errors
    /// `FixedTokens` that breaks the budget: to use fewer splits would change bits.
    pub fn resolve(&self, wanted: usize) -> Result<usize, Error> {
        let blocks = self.blocks();
        let budget = self.bound();
        match self.splits {
            Splits::Auto => Ok(wanted.clamp(1, blocks).min(budget)),
            Splits::Count(count) => Ok(count.clamp(1, blocks).min(budget)),
            Splits::FixedTokens(tokens) => {
                // A range of n positions touches at most ceil((n - 1) / tokens) + 1 cuts; one that begins at 0 touches fewer.
                let whole = self.max_kv_tokens.div_ceil(tokens).max(1);
                let needed = match self.window {
                    Some(w) => whole.min((w - 1).div_ceil(tokens) + 1),
                    None => whole,
                };
                if needed > budget {
                    let text = format!("at most {budget} splits of {} rows", self.max_rows);
                    let given = format!("{needed} splits of {tokens} tokens");
                    return Err(Error::contract("splits", text, given));
                }
                Ok(needed)
            }
        }
    }

    fn bound(&self) -> usize {
        let rows = self.budget.max_partial_rows.map(|rows| {
            let each = rows / self.max_rows.max(1);
            if each < 2 { 1 } else { each }
        });
        let splits = self.budget.max_splits.unwrap_or(usize::MAX).max(1);
        splits.min(rows.unwrap_or(usize::MAX))
    }
}

/// The number of splits of a plan, with the policy: what a kernel divides by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Division {
    /// Splits that there is room for.
    pub splits: usize,
    /// The fixed size, where the policy has one.
    pub fixed_tokens: Option<usize>,
}

impl Division {
    /// Of a policy that resolved to `splits`.
    pub fn new(policy: Splits, splits: usize) -> Self {
        let fixed_tokens = match policy {
            Splits::FixedTokens(tokens) => Some(tokens),
            Splits::Auto | Splits::Count(_) => None,
        };
        Self { splits, fixed_tokens }
    }

    /// The positions of split `split` of a row that attends to `keys`, of a request whose rows attend to `span` taken together; may be
    /// empty.
    pub fn range(self, span: &Range<usize>, keys: &Range<usize>, split: usize) -> Range<usize> {
        let (first, step) = match self.fixed_tokens {
            Some(tokens) => (keys.start / tokens * tokens, tokens),
            None => {
                let first = span.start / BLOCK;
                let blocks = span.end.div_ceil(BLOCK).saturating_sub(first);
                (first * BLOCK, blocks.div_ceil(self.splits.max(1)).max(1) * BLOCK)
            }
        };
        let begin = first.saturating_add(split.saturating_mul(step));
        let end = begin.saturating_add(step).min(keys.end);
        let begin = begin.max(keys.start);
        begin..end.max(begin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn capacity(splits: Splits, window: Option<usize>, max_kv_tokens: usize) -> Capacity {
        Capacity { splits, budget: Budget::default(), max_rows: 2, max_kv_tokens, window }
    }

    #[test]
    fn every_key_is_in_exactly_one_split() {
        let policies = [Splits::Auto, Splits::Count(7), Splits::FixedTokens(128)];
        for splits in policies {
            for window in [None, Some(1), Some(66), Some(514)] {
                let capacity = capacity(splits, window, 1100);
                let division = Division::new(splits, capacity.resolve(5).unwrap());
                for high in [0, 1, 63, 64, 65, 130, 577, 1024, 1100] {
                    let keys = window.map_or(0, |w| high.max(w) - w)..high;
                    let mut next = keys.start;
                    for split in 0..division.splits {
                        let range = division.range(&keys, &keys, split);
                        if range.is_empty() {
                            continue;
                        }
                        assert_eq!(range.start, next, "{splits:?} {window:?} {keys:?}");
                        assert!(range.start == keys.start || range.start.is_multiple_of(BLOCK));
                        next = range.end;
                    }
                    assert_eq!(next, keys.end, "{splits:?} {window:?} {keys:?}");
                }
            }
        }
    }

    #[test]
    fn a_window_is_sized_by_what_it_may_touch() {
        assert_eq!(capacity(Splits::Auto, Some(514), 1 << 20).blocks(), 10);
        assert_eq!(capacity(Splits::Auto, Some(66), 1 << 20).blocks(), 3);
        assert_eq!(capacity(Splits::Auto, Some(1), 1 << 20).blocks(), 1);
        assert_eq!(capacity(Splits::Auto, None, 0).blocks(), 1);
    }

    #[test]
    fn budgets_count_splits_and_rows() {
        let mut capacity = capacity(Splits::Auto, None, 64 * 100);
        assert_eq!(capacity.resolve(94).unwrap(), 94);
        capacity.budget.max_splits = Some(10);
        assert_eq!(capacity.resolve(94).unwrap(), 10);
        capacity.budget.max_partial_rows = Some(7);
        assert_eq!(capacity.resolve(94).unwrap(), 3);
        capacity.budget.max_partial_rows = Some(3);
        assert_eq!(capacity.resolve(94).unwrap(), 1);
        capacity.splits = Splits::FixedTokens(64);
        assert!(capacity.resolve(94).is_err());
    }
}
