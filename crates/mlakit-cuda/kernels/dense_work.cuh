// Dense decode: what a host passes, how the blocks of a launch divide the live keys among
// themselves, and where partial results lie. No instruction here is of one architecture.
//
// Work is counted in units of BLOCK_TOKENS keys (or of one fixed split). A request of no keys
// counts as one unit, so that someone writes its result. Every block derives its own contiguous
// range of units from the lengths in device memory: there is no metadata that could go stale. All
// ranges but the last are equally long: as few blocks as the longest range allows, so that ranges
// begin with requests where they can, and a block then loads queries and stores a result once.

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

// A pool of the latent cache, in device memory; `bind` rewrites it in stream order. 256 bytes,
// aligned to 128.
struct PoolView {
  u64 tensor_map[16];      // axes: element of the key, token, page; box: 64, box_tokens, 1
  const char* base;        // first byte of page 0
  u64 page_stride_bytes;   // a multiple of 16
  u64 token_stride_bytes;  // a multiple of 16
  u32 pages;
  u32 reserved[25];
};

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
  char* partials;           // BF16 or F32 [tiles, slots_per_tile, partial_rows, VALUE_WIDTH]
  float* partial_lse;       // F32 [tiles, partial_rows, slots_per_tile], base 2
  u32* counters;            // U32 [tiles, batch, 2]: zero before the first launch, left zero
  u32* faults;              // U32 [1]: ids and lengths out of bounds, counted once each
  int batch;
  int heads;
  int table_width;
  int tiles;                // row tiles: ceil(largest rows of a request * heads / TILE_ROWS)
  int partial_rows;         // min(TILE_ROWS, largest rows of a request * heads)
  int slots_per_tile;       // twice the blocks of a tile, or the units of all requests (fixed)
  int fixed_blocks;         // BLOCK_TOKENS-sized blocks of one split; 0: divide evenly
  int page_size;            // tokens
  int box_tokens;           // tokens of one tensor-map box: 64, 32 or 16, dividing the page size
  int keep_in_cache;        // 1: several tiles read the same keys, so keep them in L2
  float scale_log2;         // softmax scale * log2(e), positive
  float lse_scale;          // ln 2 for natural results, 1 for base 2
};

// One request as one row tile sees it.
struct Request {
  int index;
  int first_unit;
  int units;
  int kv_len;     // clamped to the page table
  int first_q_row;
  int q_rows;     // query rows of the request
  int flat_row;   // first (row, head) pair of the tile, in all rows of the batch
  int rows;       // pairs of the tile: 0..TILE_ROWS; 0: no units
  bool clamped;   // the length given was out of bounds
};

// Range of units of one block of the grid, within one row tile.
struct Schedule {
  int begin;      // first unit
  int end;        // one past the last
  u32 each;       // units of every block but the last
  u32 blocks;     // blocks that have work
  u32 pages;      // of the pool
  Request first;  // that of `begin`, if this block has work
};

// A contiguous run of blocks of one request: one partial result, or the whole of it.
struct Segment {
  int first_block;
  int blocks;
  int split;  // fixed splits: which one; else 0
};

DEVICE u32 umin(u32 a, u32 b) { return a < b ? a : b; }
DEVICE int imin(int a, int b) { return a < b ? a : b; }
DEVICE int imax(int a, int b) { return a > b ? a : b; }

DEVICE Request load_request(const DenseParams& p, int index, int tile) {
  Request r;
  int first_row = p.q_offsets[index];
  int given = p.kv_lens[index];
  long long covered = (long long)p.table_width * p.page_size;
  r.index = index;
  r.first_q_row = first_row;
  r.q_rows = imax(p.q_offsets[index + 1] - first_row, 0);
  int kept = given < 0 ? 0 : given;
  r.kv_len = kept > covered ? (int)covered : kept;
  r.clamped = r.kv_len != given;
  r.flat_row = first_row * p.heads + tile * TILE_ROWS;
  r.rows = imin(imax(r.q_rows * p.heads - tile * TILE_ROWS, 0), TILE_ROWS);
  int blocks = imax((r.kv_len + BLOCK_TOKENS - 1) / BLOCK_TOKENS, 1);
  int units = p.fixed_blocks ? (blocks + p.fixed_blocks - 1) / p.fixed_blocks : blocks;
  r.units = r.rows > 0 ? units : 0;
  r.first_unit = 0;
  return r;
}

// The block whose range holds a unit.
DEVICE int block_of_unit(const Schedule& s, int unit) { return (u32)unit / s.each; }

// Of 32 requests from `base` on, each lane loads its own.
DEVICE Request load_lane_request(const DenseParams& p, int base, int tile) {
  const int index = base + threadIdx.x % 32;
  Request r = {};
  if (index < p.batch) r = load_request(p, index, tile);
  return r;
}

// Run by one whole warp: the sum of the units, then the request of our first unit, whose lane
// writes the schedule. The first block counts lengths out of bounds.
DEVICE void make_schedule(const DenseParams& p, int tile, int block, u32 grid_blocks,
                          Schedule& schedule) {
  const int lane = threadIdx.x % 32;
  Schedule s = {0, 0, 0, 0, p.pool->pages, {}};
  Request r = load_lane_request(p, 0, tile);
  u32 total = __reduce_add_sync(~0u, (u32)r.units);
  int clamped = r.clamped;
#pragma unroll 1
  for (int base = 32; base < p.batch; base += 32) {
    const Request other = load_lane_request(p, base, tile);
    total += __reduce_add_sync(~0u, (u32)other.units);
    clamped += other.clamped;
  }
  if (clamped && tile == 0 && block == 0) atomicAdd(p.faults, (u32)clamped);
  if (total > 0) {
    s.each = (total + grid_blocks - 1) / grid_blocks;
    s.blocks = (total + s.each - 1) / s.each;
    s.begin = umin(block * s.each, total);
    s.end = umin(s.begin + s.each, total);
  }
  if (s.begin == s.end) {
    if (lane == 0) schedule = s;
    return;
  }
  int before = 0;
#pragma unroll 1
  for (int base = 0;; base += 32) {
    if (base > 0) r = load_lane_request(p, base, tile);
    int sum = before + r.units;
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other - before;
    }
    const u32 holds = __ballot_sync(~0u, s.begin < sum);
    if (holds) {
      s.first = r;
      s.first.first_unit = sum - r.units;
      if (lane == __ffs((int)holds) - 1) schedule = s;
      return;
    }
    before = __shfl_sync(~0u, sum, 31);
  }
}

// The request after one, within a block's range; units is 0 where there is none.
DEVICE void next_request(const DenseParams& p, const Schedule& s, int tile, Request& r) {
  const int unit = r.first_unit + r.units;
  do {
    if (r.index + 1 >= p.batch || unit >= s.end) {
      r.units = 0;
      return;
    }
    r = load_request(p, r.index + 1, tile);
  } while (r.units == 0);
  r.first_unit = unit;
}

// How a request is shared: the blocks that hold a part of it, and the number of partials.
struct Sharing {
  int first_block;
  int blocks;
  int splits;
};

DEVICE Sharing sharing_of(const DenseParams& p, const Schedule& s, const Request& r) {
  Sharing h;
  h.first_block = block_of_unit(s, r.first_unit);
  h.blocks = block_of_unit(s, r.first_unit + r.units - 1) - h.first_block + 1;
  h.splits = p.fixed_blocks ? r.units : h.blocks;
  return h;
}

// Slot of one partial. Evenly divided work: a block holds at most one request that an earlier block
// began (slot 2 * block) and one that a later block ends (slot 2 * block + 1).
DEVICE int slot_of_split(const DenseParams& p, const Request& r, const Sharing& h, int split) {
  if (p.fixed_blocks) return r.first_unit + split;
  return split == 0 ? 2 * h.first_block + 1 : 2 * (h.first_block + split);
}

// Segments of a request within a range of units: one, or one for each fixed split.
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
  int flat_row;      // first (row, head) pair of the tile, in all rows of the batch
  int rows;          // pairs of the tile
  int slot;          // of the partial; negative: the segment is all of the request
  int counter;       // index of the request's counter, if this ends the block's part of it; or -1
  int new_queries;   // the queries differ from the last job's
};

DEVICE Job make_job(const Request& r, const Segment& g) {
  Job j;
  j.blocks = g.blocks;
  j.first_block = g.first_block;
  j.kv_len = r.kv_len;
  j.first_q_row = r.first_q_row;
  j.q_rows = r.q_rows;
  j.flat_row = r.flat_row;
  j.rows = r.rows;
  j.slot = -1;
  j.counter = -1;
  j.new_queries = 1;
  return j;
}

// Keys that a row of the tile sees; 0 beyond the tile's rows.
DEVICE int visible_keys(const DenseParams& p, const Job& j, int tile, int row) {
  if (row >= j.rows) return 0;
  const int q_row = (u32)(tile * TILE_ROWS + row) / (u32)p.heads;
  int visible = j.kv_len - (j.q_rows - 1 - q_row);
  if (p.row_kv_lens) visible = p.row_kv_lens[j.first_q_row + q_row];
  return imin(imax(visible, 0), j.kv_len);
}

// One warp: the keys that every row of the tile sees, from the first on.
DEVICE int keys_seen_by_all(const DenseParams& p, const Job& j, int tile) {
  int least = j.kv_len;
#pragma unroll 1
  for (int row = threadIdx.x % 32; row < j.rows; row += 32)
    least = imin(least, visible_keys(p, j, tile, row));
  return __reduce_min_sync(~0u, least);
}
