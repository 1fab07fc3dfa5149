//! What a layer is: its widths, its cache, its room.

use mlakit::op::dense::{DenseFields, DenseSpec, QueryDtype};
use mlakit::op::merge::Partial;
use mlakit::op::rotary::RotaryStyle;
use mlakit::op::sparse::{Selection, SparseFields, SparseSpec};
use mlakit::op::spec::Scalar;
use mlakit::splits::{Budget, Splits};
use mlakit::{Error, LseBase, PageGeometry, RecordFormat, RecordLayout};

/// What a layer of latent attention is. Widths in elements.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    /// Width of the hidden state.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// The part of a query head without position.
    pub nope: usize,
    /// The part with position, which the key shares; 0 where there is none.
    pub rope: usize,
    /// A value head.
    pub value: usize,
    /// The cached latent.
    pub rank: usize,
    /// The query's latent, if it has one.
    pub query_rank: Option<usize>,
    /// Epsilon of the query latent's norm.
    pub query_eps: f32,
    /// Epsilon of the cached latent's norm.
    pub kv_eps: f32,
    /// Multiplies the scores.
    pub softmax_scale: f32,
    /// How the rope part rotates; `None` leaves it as it is.
    pub rotary: Option<RotaryStyle>,
    /// Multiplies cosine and sine.
    pub attention_factor: f32,
    /// The newest keys that a row sees, if not all; only where it attends to all of them.
    pub window: Option<usize>,
    /// Which of the keys that it sees a row attends to.
    pub keys: KeyRule,
    /// The row capacity at which a sparse layer can also attend to all keys, for steps in which all are selected.
    pub dense_rows: Option<usize>,
    /// How many neighbouring elements of the heads' values have a gate in common: 1, or those of a head; no gate if absent.
    pub gate_span: Option<usize>,
    /// How the cache stores a token, and the choices that a deployment makes.
    pub cache: CacheSpec,
    /// How much there may be of what.
    pub capacity: Capacity,
}

/// How the cache stores a token, and how attention over it is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheSpec {
    /// The record format.
    pub record: RecordFormat,
    /// That of index keys, where a layer has an indexer.
    pub index_record: RecordFormat,
    /// Tokens of a page.
    pub page_size: usize,
    /// The dtype in which split results are stored.
    pub partial: Partial,
    /// How a row's keys are divided.
    pub splits: Splits,
}

/// How much there may be of what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Rows of one step.
    pub rows: usize,
    /// Requests of one step.
    pub batch: usize,
    /// Cached tokens of a request.
    pub kv_tokens: usize,
    /// Page table width.
    pub table_width: usize,
}

impl LayerSpec {
    /// Elements of a cached token.
    pub fn cache_width(&self) -> usize {
        self.rank + self.rope
    }

    /// Elements of the fused projection of the hidden state: query latent, if there is one, cached latent, rope key.
    pub fn down_width(&self) -> usize {
        self.query_rank.unwrap_or(0) + self.cache_width()
    }

    /// The bytes of a token and the size of a page.
    pub fn pages(&self) -> PageGeometry {
        let record = RecordLayout::of(self.cache.record, self.rank, self.rope);
        PageGeometry { record, page_size: self.cache.page_size }
    }

    /// Index keys: the bytes of one and the size of a page, which holds as many keys as a page of the latent cache has tokens.
    pub fn index_pages(&self) -> Option<PageGeometry> {
        let index = self.keys.indexer()?;
        let record = RecordLayout::of(self.cache.index_record, index.width, 0);
        Some(PageGeometry { record, page_size: self.cache.page_size })
    }

    /// Attention over all keys, at a row capacity.
    pub fn dense(&self, rows: usize) -> Result<DenseSpec, Error> {
        DenseSpec::new(DenseFields {
            heads: self.heads,
            qk_width: self.cache_width(),
            value_width: self.rank,
            record: self.cache.record,
            record_width: None,
            page_size: self.cache.page_size,
            softmax_scale: Scalar::try_from(self.softmax_scale)?,
            lse: LseBase::Natural,
            sink_in_lse: false,
            query: QueryDtype::Bf16,
            quantize_query: false,
            partial: self.cache.partial,
            splits: self.cache.splits,
            budget: Budget::default(),
            window: self.window,
            row_lengths: false,
            max_rows: rows,
            max_batch: self.capacity.batch.min(rows),
            max_kv_tokens: self.capacity.kv_tokens,
            max_table_width: self.capacity.table_width,
        })
    }
    /// Attention over the selected keys, at a row capacity; nothing where rows attend to all.
    pub fn sparse(&self, rows: usize) -> Result<Option<SparseSpec>, Error> {
        let Some((width, selection)) = self.keys.selected() else { return Ok(None) };
        let fields = SparseFields {
            heads: self.heads,
            qk_width: self.cache_width(),
            value_width: self.rank,
            record: self.cache.record,
            record_width: None,
            page_size: self.cache.page_size,
            softmax_scale: Scalar::try_from(self.softmax_scale)?,
            lse: LseBase::Natural,
            sink: false,
            sink_in_lse: false,
            query: QueryDtype::Bf16,
            quantize_query: false,
            partial: self.cache.partial,
            splits: self.cache.splits,
            budget: Budget::default(),
            window: self.window,
            selection,
            width,
            extra_record: None,
            extra_record_width: None,
            extra_page_size: None,
            extra_width: None,
            max_rows: rows,
            max_batch: self.capacity.batch.min(rows),
            max_kv_tokens: self.capacity.kv_tokens,
            max_table_width: self.capacity.table_width,
        };
        SparseSpec::new(fields).map(Some)
    }
}

/// Which of the keys that it sees a row attends to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KeyRule {
    /// All.
    All,
    /// Those of a list: another layer's selection, or one from outside.
    Listed {
        /// Entries of a row at most.
        width: usize,
        /// What the entries are.
        entries: Selection,
    },
    /// Those that the layer's own indexer selects.
    Indexed(IndexSpec),
}

/// An indexer. Widths in elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IndexSpec {
    /// Index heads.
    pub heads: usize,
    /// An index query and the index key.
    pub width: usize,
    /// How many of them, the first ones, rotate.
    pub rope: usize,
    /// How they rotate.
    pub rotary: RotaryStyle,
    /// Tokens that a row selects at most, the tail of pools not counted.
    pub topk: usize,
    /// Epsilon of the index key's norm.
    pub key_eps: f32,
    /// How keys are pooled, if they are.
    pub pool: Option<PooledKeys>,
}

/// How index keys are pooled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PooledKeys {
    /// Tokens of a pool.
    pub size: usize,
    /// Whether the tokens behind a row's last complete pool are selected too.
    pub tail: bool,
}

impl KeyRule {
    /// The indexer.
    pub fn indexer(&self) -> Option<&IndexSpec> {
        match self {
            Self::Indexed(index) => Some(index),
            Self::All | Self::Listed { .. } => None,
        }
    }

    /// Entries of a row at most, and what they are; nothing where a row attends to all keys.
    pub fn selected(&self) -> Option<(usize, Selection)> {
        match self {
            Self::All => None,
            Self::Listed { width, entries } => Some((*width, *entries)),
            Self::Indexed(index) => Some((index.selected(), index.entries())),
        }
    }

    /// For the layers that share this one's selection.
    pub fn shared(&self) -> Self {
        match self.selected() {
            Some((width, entries)) => Self::Listed { width, entries },
            None => Self::All,
        }
    }
}

impl IndexSpec {
    /// Tokens of a key.
    pub fn pool_size(&self) -> usize {
        self.pool.map_or(1, |pool| pool.size)
    }

    /// Keys that a row selects at most.
    pub fn selected_keys(&self) -> usize {
        self.topk / self.pool_size()
    }

    /// Tokens that a row selects at most.
    pub fn selected(&self) -> usize {
        self.topk + self.pool_size() - 1
    }

    /// Tokens are selected by position; those of pools by slot.
    pub fn entries(&self) -> Selection {
        if self.pool.is_some() { Selection::Slots } else { Selection::Positions }
    }
}
