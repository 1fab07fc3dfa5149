// Dense decode: what a host passes, how the blocks of a launch divide the live keys among
// themselves, and where partial results lie. No instruction here is of one architecture.
//
// A tile is up to TILE_ROWS (row, head) pairs of one request. Work is counted in units of
// BLOCK_TOKENS keys of a tile (or of one fixed split of it). A tile of no keys counts as one unit,
// so that someone writes its result; rows of no request are tiles of no keys. Every block derives
// its own contiguous range of units from offsets and lengths in device memory: there is no metadata
// that could go stale. All ranges but the last are equally long: as few blocks as the longest range
// allows, so that ranges begin with tiles where they can, and a block then loads queries and stores
// a result once.
//
// Where all requests have the same few tiles, the tiles are dealt to as many columns of blocks, and
// the same keys are read at the same time in all columns, so from L2 in all but one. Otherwise there
// is one column, and a request's tiles follow one another in it.

#ifndef QK_WIDTH
#define QK_WIDTH 576
#endif
#ifndef VALUE_WIDTH
#define VALUE_WIDTH 512
#endif
#ifndef NARROW
#define NARROW 0  // 1: tiles of 16 (row, head) pairs
#endif
#ifndef PARTIAL_F32
#define PARTIAL_F32 0
#endif

constexpr int BLOCK_TOKENS = 64;
constexpr int TILE_ROWS = NARROW ? 16 : 64;

// A pool of the latent cache, in device memory; `bind` rewrites it in stream order. 256 bytes.
struct alignas(128) PoolView {
  const char* base;       // first byte of page 0
  u64 pages;
  u64 page_stride_bytes;
  u32 mapped;             // 1: the tensor map is of this pool; 0: it has none (strides or alignment)
  u32 reserved[25];
  u64 tensor_map[16];     // axes: element of the key, token, page; box: 64, box_tokens, 1
};
static_assert(sizeof(PoolView) == 256, "the host writes this");

// One launch. Every pointer is an address of a slot, of scratch or of a view: contents may change
// between replays, addresses and the integers below may not.
struct DenseParams {
  const char* q;            // BF16 [rows, heads, QK_WIDTH]
  char* out;                // BF16 [rows, heads, VALUE_WIDTH]
  float* lse;               // F32 [rows, heads]
  const int* page_table;    // I32 [batch, table_width]
  const int* kv_lens;       // I32 [batch]
  const int* q_offsets;     // I32 [batch + 1]
  const int* row_kv_lens;   // I32 [rows], or null: right-aligned causal
  const PoolView* pool;     // [1]
  char* partials;           // BF16 or F32 [slots, partial_rows, VALUE_WIDTH]
  float* partial_lse;       // F32 [partial_rows, slots], base 2
  u32* faults;              // U32 [64], a lane's fault block: counts, then `COUNTER_WORD`
  int rows;
  int batch;
  int heads;
  int table_width;
  int covered;              // tokens: lengths are clamped to this
  int partial_rows;         // of a slot; 0: all pairs of the launch, and a slot is a split
  int slots;                // twice the blocks of the grid, or the most splits there may be
  int fixed_blocks;         // BLOCK_TOKENS-sized blocks of one split; 0: divide evenly
  int page_size;            // tokens
  int box_tokens;           // tokens of one tensor-map box: 64, 32 or 16, dividing the page size
  int token_stride_bytes;   // of the cache
  int most_columns;
  float scale_log2;         // softmax scale * log2(e), positive
  float lse_scale;          // ln 2 for natural results, 1 for base 2
};
static_assert(sizeof(DenseParams) == 144, "the host passes this");

// Words of the fault block.
enum Fault { FAULT_ID = 0, FAULT_LENGTH = 1, FAULT_OFFSET = 2 };
constexpr int COUNTER_WORD = 3;  // from there on, of the blocks that share a tile (dense_merge.cuh)

// One tile of a request.
struct Request {
  int index;        // batch: rows behind the last request; batch + 1: those before the first
  int tile;
  int tiles;        // of the request
  int first_unit;   // of the tile
  int units;        // of the tile; 0: there is no tile
  int kv_len;       // clamped
  int first_q_row;  // of the request
  int q_rows;       // of the request
  int flat_row;     // first (row, head) pair of the tile, in all rows of the batch
  int rows;         // pairs of the tile
};

// Range of units of one block of the grid, within one column.
struct Schedule {
  int begin;      // first unit
  int end;        // one past the last
  u32 each;       // units of every block of the column but the last
  int block;      // this block, within its column
  int column;
  int columns;
  u32 pages;      // of the pool
  bool mapped;    // the pool has a tensor map
  Request first;  // that of `begin`, if this block has work
};

// A contiguous run of blocks of one tile: one partial result, or the whole of it.
struct Segment {
  int first_block;
  int blocks;
  int split;  // fixed splits: which one; else 0
};

DEVICE u32 umin(u32 a, u32 b) { return a < b ? a : b; }
DEVICE int imin(int a, int b) { return a < b ? a : b; }
DEVICE int imax(int a, int b) { return a > b ? a : b; }
DEVICE int clamp(int value, int low, int high) { return imin(imax(value, low), high); }

DEVICE void count_faults(const DenseParams& p, Fault fault, int count) {
  if (count > 0) atomicAdd(p.faults + fault, (u32)count);
}

// Fills in tiles and units of a request whose rows and length are known, and takes a tile.
DEVICE void place_tile(const DenseParams& p, Request& r, int tile) {
  r.tile = tile;
  r.flat_row = r.first_q_row * p.heads + tile * TILE_ROWS;
  r.rows = imin(imax(r.q_rows * p.heads - tile * TILE_ROWS, 0), TILE_ROWS);
}

DEVICE void count_units(const DenseParams& p, Request& r) {
  const int blocks = imax((r.kv_len + BLOCK_TOKENS - 1) / BLOCK_TOKENS, 1);
  const int units = p.fixed_blocks ? (u32)(blocks + p.fixed_blocks - 1) / (u32)p.fixed_blocks
                                   : blocks;
  r.tiles = (r.q_rows * p.heads + TILE_ROWS - 1) / TILE_ROWS;
  r.units = r.tiles > 0 ? units : 0;
}

// The request behind one whose rows end before `first_row`, or rows that belong to none. Offsets
// are clamped to the rows and never decrease.
DEVICE Request load_request(const DenseParams& p, int index, int first_row) {
  Request r = {};
  r.index = index;
  if (index < p.batch) {
    r.first_q_row = first_row;
    r.q_rows = imax(clamp(p.q_offsets[index + 1], 0, p.rows) - first_row, 0);
    r.kv_len = clamp(p.kv_lens[index], 0, p.covered);
  } else if (index == p.batch) {
    r.first_q_row = first_row;
    r.q_rows = p.rows - first_row;
  } else {
    r.q_rows = clamp(p.q_offsets[0], 0, p.rows);
  }
  count_units(p, r);
  return r;
}

// What one pass over the requests adds up: the last two in each lane for itself.
struct Totals {
  u32 units;      // of all tiles
  int least;      // tiles of a request that has some
  int most;
  int end;        // of the last request's rows
  int lengths;    // clamped
  int offsets;    // clamped
};

// Of 32 requests from `base` on, each lane loads its own. `end`: of the rows of those before.
DEVICE Request load_lane_request(const DenseParams& p, int base, int& end, int& lengths,
                                 int& offsets) {
  const int index = base + threadIdx.x % 32, lane = threadIdx.x % 32;
  const bool there = index < p.batch;
  const int first = there ? p.q_offsets[index] : 0;
  const int last = there ? p.q_offsets[index + 1] : 0;
  const int length = there ? p.kv_lens[index] : 0;
  Request r = {};
  r.index = index;
  r.kv_len = clamp(length, 0, p.covered);
  lengths += r.kv_len != length;
  int until = there ? clamp(last, 0, p.rows) : end;
  int from = there ? first : until;
  if (__any_sync(~0u, there && (from < end || until < from || until != last))) {
    until = imax(until, end);
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, until, d);
      if (lane >= d) until = imax(until, other);
    }
    from = __shfl_up_sync(~0u, until, 1);
    if (lane == 0) from = end;
    offsets += there && until != last;
  }
  end = __shfl_sync(~0u, until, imin(p.batch - base, 32) - 1);
  if (there) {
    r.first_q_row = from;
    r.q_rows = until - from;
    count_units(p, r);
  }
  return r;
}

// Adds 32 requests.
DEVICE void add_requests(Totals& t, const Request& r) {
  t.units += __reduce_add_sync(~0u, (u32)(r.units * r.tiles));
  if (!__any_sync(~0u, r.tiles > 1)) {
    if (__any_sync(~0u, r.tiles == 1)) t.least = 1, t.most = imax(t.most, 1);
    return;
  }
  t.least = imin(t.least, __reduce_min_sync(~0u, r.tiles > 0 ? r.tiles : t.least));
  t.most = imax(t.most, __reduce_max_sync(~0u, r.tiles));
}

// Tiles of a request that one column has: the column's first, and every `columns` from there on.
DEVICE int tiles_of_column(const Schedule& s, int tiles) {
  if (s.columns == 1) return tiles;
  return tiles > s.column ? (u32)(tiles - s.column + s.columns - 1) / (u32)s.columns : 0;
}

// Of a request, the tile that holds a unit; `first_unit`: of the request's first tile.
DEVICE void take_unit(const DenseParams& p, Schedule& s, Request r, int first_unit) {
  const int before = r.tiles > 1 ? (u32)(s.begin - first_unit) / (u32)r.units : 0;
  r.first_unit = first_unit + before * r.units;
  place_tile(p, r, s.column + before * s.columns);
  s.first = r;
}

// Deals the tiles to columns where all requests have the same number; the units of this one.
DEVICE u32 take_column(const DenseParams& p, Schedule& s, const Totals& t) {
  s.columns = 1;
  s.block = blockIdx.x;
  if (t.most <= 1 || t.least != t.most || t.most > p.most_columns) return t.units;
  s.columns = t.most;
  s.block = blockIdx.x / (u32)t.most;
  s.column = blockIdx.x - s.block * t.most;
  return t.units / (u32)t.most;
}

// The range of this block, from the units of its column.
DEVICE void take_range(Schedule& s, u32 units) {
  u32 blocks = gridDim.x;
  if (s.columns > 1) blocks = (blocks - s.column + s.columns - 1) / s.columns;
  s.each = (units + blocks - 1) / blocks;
  s.begin = (int)umin(s.block * s.each, units);
  s.end = (int)umin(s.begin + s.each, units);
}

// Finds the tile of the range's first unit among 32 requests; `before`: the units before them.
DEVICE bool find_first(const DenseParams& p, Schedule& s, const Request& r, int& before) {
  const int lane = threadIdx.x % 32, mine = r.units * tiles_of_column(s, r.tiles);
  int sum = before + mine;
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += other - before;
  }
  const u32 holds = __ballot_sync(~0u, s.begin < sum);
  before = __shfl_sync(~0u, sum, 31);
  if (!holds) return false;
  const bool found = lane == __ffs((int)holds) - 1;
  if (found) take_unit(p, s, r, sum - mine);
  s.first.index = found ? r.index : -1;
  return true;
}

// Finds it among the rows that belong to no request.
DEVICE void find_padding(const DenseParams& p, Schedule& s, int end, int before) {
  for (int index = p.batch; index < p.batch + 2; ++index) {
    const Request r = load_request(p, index, end);
    const int after = before + r.units * tiles_of_column(s, r.tiles);
    if (before <= s.begin && s.begin < after) take_unit(p, s, r, before);
    before = after;
  }
}

// Run by one whole warp: the units of all requests, this block's range of them, and the tile that
// it begins with. The first block counts lengths and offsets out of bounds.
DEVICE void make_schedule(const DenseParams& p, Schedule& schedule) {
  const int lane = threadIdx.x % 32;
  const u64 pages = p.pool->pages;
  Schedule s = {};
  s.pages = pages < 0x7fffffff ? (u32)pages : 0x7fffffffu;
  s.mapped = p.pool->mapped;
  const int start = p.q_offsets[0], front = clamp(start, 0, p.rows);
  Totals t = {0, 0x7fffffff, 0, front, 0, 0};
  const Request few = load_lane_request(p, 0, t.end, t.lengths, t.offsets);
  const int few_end = t.end;
  add_requests(t, few);
#pragma unroll 1
  for (int base = 32; base < p.batch; base += 32)
    add_requests(t, load_lane_request(p, base, t.end, t.lengths, t.offsets));
  if (blockIdx.x == 0) {
    count_faults(p, FAULT_LENGTH, t.lengths);
    count_faults(p, FAULT_OFFSET, t.offsets + (lane == 0 && start != front));
  }
  u32 units = take_column(p, s, t);
  for (int index = p.batch; front + p.rows > t.end && index < p.batch + 2; ++index) {
    const Request r = load_request(p, index, t.end);
    units += r.units * tiles_of_column(s, r.tiles);
  }
  take_range(s, units);
  int end = few_end, before = 0, none = 0;
  bool found = s.begin == s.end || find_first(p, s, few, before);
#pragma unroll 1
  for (int base = 32; !found && base < p.batch; base += 32) {
    found = find_first(p, s, load_lane_request(p, base, end, none, none), before);
  }
  if (!found) find_padding(p, s, t.end, before);
  if (found && s.begin < s.end ? s.first.index >= 0 : lane == 0) schedule = s;
}

// The tile after one, within a block's range; units is 0 where there is none.
DEVICE void next_request(const DenseParams& p, const Schedule& s, Request& r) {
  const int unit = r.first_unit + r.units;
  if (unit >= s.end) {
    r.units = 0;
    return;
  }
  int tile = r.tile + s.columns;
  if (tile >= r.tiles) {
    tile = s.column;
    do {
      if (r.index > p.batch) {
        r.units = 0;
        return;
      }
      r = load_request(p, r.index + 1, r.first_q_row + r.q_rows);
    } while (r.tiles <= tile);
  }
  r.first_unit = unit;
  place_tile(p, r, tile);
}

// How a tile is shared: the blocks that hold a part of it, and the number of partials.
struct Sharing {
  int first_block;  // within the column
  int blocks;
  int splits;
  int counter;      // the first block, within the grid: no other tile goes on beyond it
  int slot_step;
};

DEVICE Sharing sharing_of(const DenseParams& p, const Schedule& s, const Request& r) {
  Sharing h;
  h.first_block = (u32)r.first_unit / s.each;
  h.blocks = (u32)(r.first_unit + r.units - 1) / s.each - h.first_block + 1;
  h.splits = p.fixed_blocks ? r.units : h.blocks;
  h.counter = h.first_block * s.columns + s.column;
  h.slot_step = 2 * s.columns;
  return h;
}

// Slot of one partial. Where slots are of blocks, a block holds at most one tile that an earlier
// block began (slot 2 * block) and one that a later block ends (slot 2 * block + 1).
DEVICE int slot_of_split(const DenseParams& p, const Sharing& h, int split) {
  if (p.partial_rows == 0) return split;
  return 2 * h.counter + (split == 0 ? 1 : split * h.slot_step);
}

// Segments of a tile within a range of units: one, or one for each fixed split.
struct SegmentWalk {
  int unit;
  int end;
};

DEVICE SegmentWalk walk_segments(const Schedule& s, const Request& r) {
  SegmentWalk w;
  w.unit = imax(s.begin - r.first_unit, 0);
  w.end = imin(s.end - r.first_unit, r.units);
  return w;
}

DEVICE bool next_segment(const DenseParams& p, const Request& r, SegmentWalk& w, Segment& segment) {
  if (w.unit >= w.end) return false;
  if (p.fixed_blocks) {
    int blocks = imax((r.kv_len + BLOCK_TOKENS - 1) / BLOCK_TOKENS, 1);
    segment.first_block = w.unit * p.fixed_blocks;
    segment.blocks = imin(p.fixed_blocks, blocks - segment.first_block);
    segment.split = w.unit;
    w.unit += 1;
  } else {
    segment.first_block = w.unit;
    segment.blocks = w.end - w.unit;
    segment.split = 0;
    w.unit = w.end;
  }
  return true;
}

// One segment, in full: what the producer hands to the other roles.
struct Job {
  int blocks;        // of keys; 0: there are no more jobs
  int first_block;
  int kv_len;        // of the request
  int first_q_row;   // of the request
  int q_rows;        // of the request
  int first_pair;    // of the tile, in its request
  int flat_row;      // the same in all rows of the batch
  int rows;          // pairs of the tile
  int slot;          // of the partial; negative: the segment is all of the tile
  int shared;        // several tiles read the same keys
  int counter;       // of the tile, if this ends the block's part of one that it shares; or -1
  int new_queries;   // the queries differ from the last job's
};

DEVICE Job make_job(const Request& r, const Segment& g) {
  Job j;
  j.blocks = g.blocks;
  j.first_block = g.first_block;
  j.kv_len = r.kv_len;
  j.first_q_row = r.first_q_row;
  j.q_rows = r.q_rows;
  j.first_pair = r.tile * TILE_ROWS;
  j.flat_row = r.flat_row;
  j.rows = r.rows;
  j.slot = -1;
  j.shared = r.tiles > 1;
  j.counter = -1;
  j.new_queries = 1;
  return j;
}

// Keys that a row of the tile sees; 0 beyond the tile's rows.
DEVICE int visible_keys(const DenseParams& p, const Job& j, int row) {
  if (row >= j.rows) return 0;
  const int q_row = (u32)(j.first_pair + row) / (u32)p.heads;
  int visible = j.kv_len - (j.q_rows - 1 - q_row);
  if (p.row_kv_lens) visible = p.row_kv_lens[j.first_q_row + q_row];
  return imin(imax(visible, 0), j.kv_len);
}

// One warp: the keys that every row of the tile sees, from the first on.
DEVICE int keys_seen_by_all(const DenseParams& p, const Job& j) {
  int least = j.kv_len;
#pragma unroll 1
  for (int row = threadIdx.x % 32; row < j.rows; row += 32)
    least = imin(least, visible_keys(p, j, row));
  return __reduce_min_sync(~0u, least);
}
