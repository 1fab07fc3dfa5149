// Portable dense attention: what a host passes, and how the blocks of a launch divide the rows and
// keys among themselves.
//
// A tile is up to TILE_ROWS pairs (row, head) of one request: pairs lie row by row, so a tile takes
// all heads of several rows, or some of the heads of a row. The launch has room for every way in
// which the rows may belong to requests; each block finds its tile from the offsets in device
// memory, so there is no metadata that could go stale. The rows before the first request and behind
// the last are padding: they are tiled like a request that has no keys.

#ifndef QK_WIDTH
#define QK_WIDTH 576
#define VALUE_WIDTH 512
#define RECORD_E4M3 0      // 0: BF16 records; 1: E4M3
#define QUERY 0            // 0: BF16; 1: E4M3; 2: BF16 that is rounded to E4M3 first
#define TILE_MATRICES 1    // 16 pairs each: 1 or 2
#define KEYS 32            // of a step: 16 or 32
#define STAGES 2           // steps in shared memory
#define BLOCKS_PER_SM 2    // that registers must allow
#endif

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int TILE_ROWS = 16 * TILE_MATRICES;
constexpr int SPLIT_BLOCK = 64;  // positions that are never divided

// One launch. Addresses are those of slots, scratch or a view: what lies there may change between
// replays; the addresses and numbers may not.
struct DenseParams {
  const u8* q;             // [rows, heads, QK_WIDTH]: BF16, or E4M3
  const PoolView* view;    // [1]
  const int* page_table;   // [batch, table_width]
  const int* kv_lens;      // [batch]
  const int* q_offsets;    // [batch + 1]
  const int* row_kv_lens;  // [rows], or null: the right-aligned causal rule
  const float* kv_scale;   // [1], or null: 1
  const float* q_scale;    // [1], or null: 1
  u8* out;                 // BF16 or F32 [splits, rows, heads, VALUE_WIDTH]
  float* lse;              // F32 [splits, rows, heads]
  u32* faults;
  double softmax_scale;
  u32 tiles;               // there is room for
  int splits;
  int rows;
  int batch;
  int heads;
  int table_width;
  int page_size;           // tokens
  int step_pages;          // KEYS / page_size
  int step_tokens;         // KEYS % page_size
  int record_bytes;        // from one token to the next
  int covered;             // tokens that a page table covers
  int window;              // 0: a row sees all keys
  int fixed_tokens;        // of a split cut at absolute positions; 0: splits are balanced
  int rows_apart;          // 1: a tile has heads of one row only
  int out_f32;             // 1: F32 partial results
  float lse_scale;         // from base 2 to the base of `lse`
};
static_assert(sizeof(DenseParams) == 160, "the host mirrors this");

// A half-open range of positions.
struct Range {
  int begin;
  int end;
  DEVICE bool empty() const { return begin >= end; }
};

DEVICE Range intersect(Range a, Range b) {
  return {maximum(a.begin, b.begin), minimum(a.end, b.end)};
}

// One request, or padding, and the tile of it that is this block's.
struct Tile {
  int request;      // -1: padding
  int first_row;    // of the request
  int rows;         // of the request
  int kv_len;       // clamped
  u32 index;        // of this tile among those of the request
  u32 tiles;        // of the request
  i64 first_pair;   // of this tile, counted in the request
  int pairs;        // 1..TILE_ROWS
};

// What the threads of a block tell each other while they find their work.
struct WorkShared {
  Tile tile;
  int found;
  Range span;                // what some row of the request sees
  Range keys;                // what some row of the tile sees in this split
  Range rows[TILE_ROWS];     // what each row of the tile sees in this split
  int ends[THREADS + 1];
  u32 totals[WARPS];
};

// Inclusive maximum over the threads up to this one.
DEVICE int scan_maximum(int value, u32* totals) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, value, d);
    if (lane >= d) value = maximum(value, other);
  }
  if (lane == 31) totals[warp] = (u32)value;
  __syncthreads();
  for (int w = 0; w < warp; ++w) value = maximum(value, (int)totals[w]);
  __syncthreads();
  return value;
}

// Inclusive sum over the threads up to this one; `all` becomes that of the block.
DEVICE u32 scan_sum(u32 value, u32* totals, u32& all) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int d = 1; d < 32; d *= 2) {
    const u32 other = __shfl_up_sync(~0u, value, d);
    if (lane >= d) value += other;
  }
  if (lane == 31) totals[warp] = value;
  __syncthreads();
  all = 0;
  for (int w = 0; w < WARPS; ++w) {
    if (w < warp) value += totals[w];
    all += totals[w];
  }
  __syncthreads();
  return value;
}

DEVICE u32 tiles_of(const DenseParams& p, int rows) {
  if (p.rows_apart) return (u32)rows * (u32)ceil_div(p.heads, TILE_ROWS);
  return (u32)(((i64)rows * p.heads + TILE_ROWS - 1) / TILE_ROWS);
}

// Fills in the pairs of a tile whose request and index are known.
DEVICE void place_pairs(const DenseParams& p, Tile& t) {
  if (p.rows_apart) {
    const u32 per_row = ceil_div(p.heads, TILE_ROWS);
    const int first_head = (int)(t.index % per_row) * TILE_ROWS;
    t.first_pair = (i64)(t.index / per_row) * p.heads + first_head;
    t.pairs = minimum(p.heads - first_head, TILE_ROWS);
  } else {
    t.first_pair = (i64)t.index * TILE_ROWS;
    const i64 left = (i64)t.rows * p.heads - t.first_pair;
    t.pairs = left < TILE_ROWS ? (int)left : TILE_ROWS;
  }
}

// Finds tile number `wanted` of the launch; false if there are fewer. Segment 0 is the padding in
// front, segment i request i - 1, segment batch + 1 the padding behind. Offsets are clamped to the
// rows and never decrease. The block that counts also counts what was out of bounds.
DEVICE bool find_tile(const DenseParams& p, WorkShared& s, u32 wanted, bool counts) {
  if (threadIdx.x == 0) s.found = 0, s.ends[0] = 0;
  u32 before = 0;
  for (int first = 0; first < p.batch + 2; first += THREADS) {
    const int segment = first + (int)threadIdx.x;
    const bool is_offset = segment <= p.batch;
    const bool is_request = is_offset && segment > 0;
    const int given = is_offset ? p.q_offsets[segment] : p.rows;
    const int length = is_request ? p.kv_lens[segment - 1] : 0;
    __syncthreads();
    const int end = scan_maximum(maximum(clamp(given, 0, p.rows), s.ends[0]), s.totals);
    s.ends[threadIdx.x + 1] = end;
    __syncthreads();
    const int begin = s.ends[threadIdx.x];
    const u32 tiles = tiles_of(p, end - begin);
    u32 all;
    const u32 last = before + scan_sum(tiles, s.totals, all);
    const bool mine = last - tiles <= wanted && wanted < last;
    if (mine || (counts && is_request)) {
      const int kv_len = clamp(length, 0, p.covered);
      if (counts) count_fault(p.faults, FAULT_LENGTH, length != kv_len);
      if (mine) {
        Tile t = {is_request ? segment - 1 : -1, begin, end - begin, kv_len};
        t.index = wanted - (last - tiles);
        t.tiles = tiles;
        place_pairs(p, t);
        s.tile = t;
        s.found = 1;
      }
    }
    if (counts) count_fault(p.faults, FAULT_OFFSET, is_offset && given != end);
    if (threadIdx.x == THREADS - 1) s.ends[0] = end;
    before += all;
    __syncthreads();
    if (s.found && !counts) break;
  }
  return s.found;
}

// The keys that a row of the request sees.
DEVICE Range keys_of_row(const DenseParams& p, const Tile& t, int row) {
  int end = t.kv_len + row + 1 - t.rows;
  if (p.row_kv_lens) end = p.row_kv_lens[t.first_row + row];
  end = clamp(end, 0, t.kv_len);
  return {p.window ? maximum(end - p.window, 0) : 0, end};
}

// Widens a range in shared memory, which begins as {max, 0}.
DEVICE void widen(Range& range, Range by) {
  if (by.empty()) return;
  atomicMin(&range.begin, by.begin);
  atomicMax(&range.end, by.end);
}

// What some row of the request sees. Without lengths of their own the first row that sees anything
// begins first and the last ends last. Where rows have lengths, the block that counts counts those
// out of bounds.
DEVICE void find_span(const DenseParams& p, WorkShared& s, bool counts) {
  const Tile& t = s.tile;
  if (!p.row_kv_lens) {
    const int first_seeing = maximum(t.rows - t.kv_len, 0);
    if (threadIdx.x == 0 && first_seeing < t.rows) {
      widen(s.span, keys_of_row(p, t, first_seeing));
      widen(s.span, keys_of_row(p, t, t.rows - 1));
    }
    return;
  }
  for (int row = threadIdx.x; row < t.rows; row += THREADS) {
    widen(s.span, keys_of_row(p, t, row));
    const int length = p.row_kv_lens[t.first_row + row];
    count_fault(p.faults, FAULT_LENGTH, counts && length != clamp(length, 0, t.kv_len));
  }
}

// The positions of a split: balanced over the 64-blocks of the span, or cut at multiples of a fixed
// size from the one in which the keys of the row begin. A window with fixed cuts has rows apart;
// without a window all rows begin at 0.
DEVICE Range cut_of_split(const DenseParams& p, Range span, int first_key, int split) {
  i64 first, step;
  if (p.fixed_tokens) {
    step = p.fixed_tokens;
    first = first_key / p.fixed_tokens * step;
  } else {
    const int begin = span.begin / SPLIT_BLOCK;
    const int blocks = maximum(ceil_div(span.end, SPLIT_BLOCK) - begin, 0);
    step = (i64)maximum((blocks + p.splits - 1) / p.splits, 1) * SPLIT_BLOCK;
    first = (i64)begin * SPLIT_BLOCK;
  }
  const i64 begin = first + split * step, end = begin + step, limit = 1 << 30;
  return {(int)(begin < limit ? begin : limit), (int)(end < limit ? end : limit)};
}

// Counts page ids that are neither -1 nor in the pool, among those that some row of the request
// needs. All blocks of the request share the entries, so each is counted once.
DEVICE void count_pages(const DenseParams& p, const WorkShared& s, int split) {
  if (s.span.empty()) return;
  const u64 pages = p.view->pages;
  const int* table = p.page_table + (i64)s.tile.request * p.table_width;
  const i64 part = (i64)s.tile.index * p.splits + split, parts = (i64)s.tile.tiles * p.splits;
  const int end = ceil_div(s.span.end, p.page_size);
  for (i64 i = s.span.begin / p.page_size + part * THREADS + threadIdx.x; i < end;
       i += parts * THREADS) {
    const int id = table[i];
    count_fault(p.faults, FAULT_ID, id != -1 && (id < 0 || (u64)id >= pages));
  }
}

// Finds this block's tile and the ranges of its rows; false if there is nothing to do.
DEVICE bool find_work(const DenseParams& p, WorkShared& s, u32 tile, int split) {
  const bool first_block = tile == 0 && split == 0;
  if (threadIdx.x == 0) s.span = s.keys = {0x7fffffff, 0};
  if (!find_tile(p, s, tile, first_block)) return false;
  const Tile& t = s.tile;
  find_span(p, s, t.request >= 0 && t.index == 0 && split == 0);
  __syncthreads();
  if (threadIdx.x < TILE_ROWS) {
    Range keys = {0, 0};
    if ((int)threadIdx.x < t.pairs) {
      keys = keys_of_row(p, t, (int)((t.first_pair + threadIdx.x) / p.heads));
      keys = intersect(keys, cut_of_split(p, s.span, keys.begin, split));
    }
    s.rows[threadIdx.x] = keys;
    widen(s.keys, keys);
  }
  __syncthreads();
  return true;
}
