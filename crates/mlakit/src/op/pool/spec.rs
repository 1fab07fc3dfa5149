//! What a caller declares of a pool of keys.

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::geometry::MAX_WIDTH;
use crate::op::indexer::MAX_POOL;
use crate::op::layer::Float;
use crate::op::spec::{MAX_ROWS, checked_spec, within};

/// The fields of a [`PoolSpec`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolFields {
    /// Elements of a key.
    pub width: usize,
    /// Tokens of a pool.
    pub pool_size: usize,
    /// Tokens at the end of a request that may be taken back.
    #[serde(default)]
    pub max_draft_tokens: usize,
    /// The dtype of `key` and `gate`.
    pub input: Float,
    /// Pools of a page of the index cache: 1 or a multiple of 16.
    pub page_size: usize,
    /// Row capacity.
    pub max_rows: usize,
    /// Request capacity.
    pub max_batch: usize,
    /// Page table width at most.
    pub max_table_width: usize,
}

checked_spec! {
    /// A pool of keys that can exist.
    PoolSpec, PoolFields, "PoolFields"
}

impl PoolFields {
    /// Tokens that a request keeps.
    pub fn ring(&self) -> usize {
        self.pool_size + self.max_draft_tokens
    }

    /// F32 elements that a request keeps: `[ring, 2, width]`, a token's key and then its gate.
    pub fn state_elements(&self) -> usize {
        self.ring() * 2 * self.width
    }

    /// Where token `position` is kept, in elements from the request's state.
    pub fn place(&self, position: usize) -> usize {
        position % self.ring() * 2 * self.width
    }

    /// The pool that the token at `position` ends, if it ends one.
    pub fn ends_pool(&self, position: i64) -> Option<usize> {
        let tokens = usize::try_from(position).ok()? + 1;
        tokens.is_multiple_of(self.pool_size).then(|| tokens / self.pool_size - 1)
    }

    /// The tokens whose pools a table of this width covers, an incomplete pool behind the last included.
    pub fn covered(&self, table_width: usize) -> usize {
        let pools = table_width.saturating_mul(self.page_size);
        pools.saturating_mul(self.pool_size).saturating_add(self.pool_size - 1)
    }

    fn check(&self) -> Result<(), Error> {
        within("width", self.width, 1, MAX_WIDTH)?;
        within("pool_size", self.pool_size, 1, MAX_POOL)?;
        within("max_draft_tokens", self.max_draft_tokens, 0, MAX_POOL)?;
        within("max_rows", self.max_rows, 1, MAX_ROWS)?;
        within("max_batch", self.max_batch, 1, MAX_ROWS)?;
        within("max_table_width", self.max_table_width, 1, 1 << 30)?;
        let size = self.page_size;
        if size == 1 || (size > 0 && size.is_multiple_of(16) && size <= 1 << 16) {
            return Ok(());
        }
        Err(Error::contract("page_size", "1 or a multiple of 16, at most 65536", size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"{"width":8,"pool_size":4,"input":"f32","page_size":16,"max_rows":9,
        "max_batch":2,"max_table_width":4}"#;

    fn refused(change: impl Fn(&mut PoolFields)) -> &'static str {
        let mut fields: PoolFields = serde_json::from_str(TEXT).unwrap();
        change(&mut fields);
        match PoolSpec::new(fields) {
            Err(Error::Contract { what, .. }) => what,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn bad_fields_are_named() {
        assert_eq!(refused(|f| f.width = 0), "width");
        assert_eq!(refused(|f| f.pool_size = 0), "pool_size");
        assert_eq!(refused(|f| f.max_draft_tokens = MAX_POOL + 1), "max_draft_tokens");
        assert_eq!(refused(|f| f.page_size = 8), "page_size");
        assert_eq!(refused(|f| f.max_rows = 0), "max_rows");
    }

    #[test]
    fn drafts_lengthen_the_ring() {
        let mut fields: PoolFields = serde_json::from_str(TEXT).unwrap();
        assert_eq!((fields.ring(), fields.state_elements()), (4, 64));
        fields.max_draft_tokens = 3;
        assert_eq!((fields.ring(), fields.place(9)), (7, 32));
        assert!(serde_json::from_str::<PoolSpec>(&TEXT.replace("width", "widths")).is_err());
    }
}
