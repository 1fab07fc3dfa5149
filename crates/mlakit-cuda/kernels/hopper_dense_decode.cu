// Dense MLA decode on Hopper (sm_90a), BF16 records, one launch.
//
// Computes for every query row and head: softmax(scale * q . key) . value over the keys of the row's
// request that the row sees, where the value of a key is its first VALUE_WIDTH elements; and the LSE.
// Compiled behind hopper_ptx.cuh, dense_work.cuh and dense_merge.cuh.
//
// Shapes: any batch, heads >= 1, rows a request (ragged), lengths, page table. Page size 1 or a
// multiple of 16 with USE_TENSOR_MAP 0; a multiple of 16 with USE_TENSOR_MAP 1 (faster).
// QK_WIDTH up to 576, a multiple of 32; VALUE_WIDTH 128, 256 or 512.
//
// A block takes one tile of 64 (row, head) pairs and a range of keys, 64 keys at a time:
//   warp group 0         scores: query . key, softmax against the running maximum, weights to
//                        shared memory
//   warp groups 1 and 2  values: each multiplies every block's weights into its half of the columns,
//                        stores the result, and merges
//   warp group 3         fills the ring of key blocks: one warp with tensor maps, all with cp.async
// The value groups work on a block while group 0 scores the next.
//
// Shared memory (576/512): queries 72 KiB, two key blocks of 72 KiB, 3 KiB of state: 1 block per SM.
//
// Ring: a key block is BOXES boxes of 64 keys x 64 elements (8 KiB, rows of 128 swizzled bytes),
// each with its own full barrier, so products begin with the first box. The weights of a block
// overwrite its last box, which the value product does not need (widths with no such box have their
// own). Boxes of the left value half are given back by group 1, those of the right by group 2.

#ifndef USE_TENSOR_MAP
#define USE_TENSOR_MAP 1
#endif

constexpr int BOX_ELEMENTS = 64;
constexpr int BOX_BYTES = BLOCK_TOKENS * BOX_ELEMENTS * 2;
constexpr int BOXES = (QK_WIDTH + BOX_ELEMENTS - 1) / BOX_ELEMENTS;
constexpr int VALUE_BOXES = VALUE_WIDTH / BOX_ELEMENTS;
constexpr int HALF_BOXES = VALUE_BOXES / 2;
constexpr int STAGE_BOXES = BOXES > VALUE_BOXES ? BOXES : VALUE_BOXES + 1;
constexpr int WEIGHT_BOX = STAGE_BOXES - 1;
constexpr int STAGE_BYTES = STAGE_BOXES * BOX_BYTES;
constexpr int QUERY_BYTES = BOXES * TILE_ROWS * BOX_ELEMENTS * 2;
constexpr int STATE_BYTES = 6144;
constexpr int MAX_SHARED_BYTES = 232448;
constexpr int FITTING_STAGES = (MAX_SHARED_BYTES - 1024 - STATE_BYTES - QUERY_BYTES) / STAGE_BYTES;
constexpr int STAGES = FITTING_STAGES > 4 ? 4 : FITTING_STAGES;
constexpr int SHARED_BYTES = 1024 + QUERY_BYTES + STAGES * STAGE_BYTES + STATE_BYTES;
constexpr int JOBS = STAGES + 2;  // no role can be further ahead: every job has a key block
constexpr int VALUE_THREADS = 256;
constexpr int THREADS = 512;
// Registers a thread of each role, 512 together; where nothing spills.
constexpr int SCORE_REGISTERS = USE_TENSOR_MAP ? 112 : 104;
constexpr int VALUE_REGISTERS = USE_TENSOR_MAP ? 160 : 168;
constexpr int PRODUCER_REGISTERS = USE_TENSOR_MAP ? 80 : 72;
constexpr int VALUE_THREAD = 128;     // the first of the value groups
constexpr int PRODUCER_THREAD = 384;  // the first of the producer
constexpr int PANEL_COLUMNS = VALUE_WIDTH / 2 > 128 ? 128 : VALUE_WIDTH / 2;  // of one product
constexpr int PANELS = VALUE_WIDTH / 2 / PANEL_COLUMNS;  // of one value group
constexpr int PANEL_REGISTERS = PANEL_COLUMNS / 2;       // 64 x PANEL_COLUMNS over 128 threads
constexpr int FULL_ARRIVALS = USE_TENSOR_MAP ? 1 : 128;
constexpr int FIRST_ARRIVALS = USE_TENSOR_MAP ? 1 : 256;  // the first box also carries validity
static_assert(STAGES >= 2, "the ring needs two key blocks");
static_assert(BOXES >= VALUE_BOXES, "the value is a part of the key");
static_assert(MERGE_SHARES_BYTES + MAX_MERGE_WEIGHTS * 4 <= STAGES * STAGE_BYTES, "merge space");

struct State {
  u64 full[STAGES][BOXES];
  u64 empty[STAGES][2];    // by the warps of value group 1, of value group 2
  u64 weighted[STAGES];    // the block's weights and factors are written
  u64 job_ready[JOBS];
  u64 published[JOBS];  // a job's inverse and lse are written
  Job jobs[JOBS];
  Schedule schedule;
  alignas(16) u32 valid[STAGES][4];  // a byte of four bits for four keys: 0 where there is no page
  float factor[STAGES][TILE_ROWS];   // what the block's maximum scales earlier sums by
  float inverse[JOBS][TILE_ROWS];
  float lse[JOBS][TILE_ROWS];  // base 2
};
static_assert(sizeof(State) <= STATE_BYTES, "state outgrew its region");

// What every thread of a block knows.
struct Block {
  const DenseParams* params;
  State* state;
  u32 queries;  // shared address
  u32 ring;     // shared address
  int tile;
};

struct Ring {
  int stage;
  u32 parity;
};

struct Rings {
  Ring keys;
  Ring jobs;
};

template <int SIZE>
DEVICE void advance(Ring& ring) {
  if (++ring.stage == SIZE) {
    ring.stage = 0;
    ring.parity ^= 1;
  }
}

DEVICE u32 stage_address(const Block& b, int stage) { return b.ring + stage * STAGE_BYTES; }

DEVICE int block_index(const Block& b) { return blockIdx.x / b.params->tiles; }

DEVICE int counter_index(const Block& b, const Request& r) {
  return (b.tile * b.params->batch + r.index) * 2;
}

// 16-byte chunk of a row of a swizzled box.
DEVICE u32 swizzled(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }


// ---- producer: page ids, boxes, the ring ------------------------------------------------------

DEVICE void initialise_barriers(const Block& b) {
  for (int s = 0; s < STAGES; ++s) {
    for (int i = 0; i < BOXES; ++i) 
      mbarrier_init(shared_address(&b.state->full[s][i]), i == 0 ? FIRST_ARRIVALS : FULL_ARRIVALS);
    for (int i = 0; i < 2; ++i) mbarrier_init(shared_address(&b.state->empty[s][i]), 4);
    mbarrier_init(shared_address(&b.state->weighted[s]), 4);
  }
  for (int i = 0; i < JOBS; ++i) {
    mbarrier_init(shared_address(&b.state->job_ready[i]), 1);
    mbarrier_init(shared_address(&b.state->published[i]), 4);
  }
  mbarrier_init_fence();
}

// A page id on its way from the page table: a lookup is begun early and used late.
struct Lookup {
  int id;      // -1 also where nothing is wanted
  int offset;  // first key within the page
};

// The run of keys from `token` on, if that is before `end`.
DEVICE Lookup begin_lookup(const Block& b, const Request& r, int end, int token) {
  const u32 page_size = b.params->page_size;
  Lookup l = {-1, 0};
  if (token < end) {
    const u32 index = (u32)token / page_size;
    l.offset = token - index * page_size;
    l.id = b.params->page_table[(u64)r.index * b.params->table_width + index];
  }
  return l;
}

// A run of keys within one page: a whole box of keys, or one key.
struct PageRun {
  int page;    // `pages` (out of range, so zeros) where there is nothing to read
  int offset;
};

// Counts an id out of bounds once, where its page begins.
DEVICE PageRun finish_lookup(const Block& b, const Lookup& l) {
  const u32 pages = b.state->schedule.pages;
  if ((u32)l.id < pages) return {l.id, l.offset};
  if (l.id != -1 && l.offset == 0 && b.tile == 0 && (USE_TENSOR_MAP || threadIdx.x % 8 == 0))
    atomicAdd(b.params->faults, 1u);
  return {(int)pages, l.offset};
}

DEVICE void count_clamped(const Block& b, const Schedule& s, const Request& r) {
  if (r.clamped && b.tile == 0 && r.first_unit >= s.begin) atomicAdd(b.params->faults, 1u);
}

DEVICE void hand_over_job(const Block& b, const Job& job, Ring& jobs) {
  if (threadIdx.x == PRODUCER_THREAD) {
    b.state->jobs[jobs.stage] = job;
    mbarrier_arrive(shared_address(&b.state->job_ready[jobs.stage]));
  }
  advance<JOBS>(jobs);
}

#if USE_TENSOR_MAP

// One lane's box of a ring slot. `runs` has the pages of the block's keys, `subs` of them.
DEVICE void issue_box(const Block& b, const Ring& ring, const PageRun (&runs)[4], u64 policy) {
  const DenseParams& p = *b.params;
  const int box = threadIdx.x % 32;
  const u32 full = shared_address(&b.state->full[ring.stage][box]);
  u32 destination = stage_address(b, ring.stage) + box * BOX_BYTES;
  mbarrier_arrive_expect(full, BOX_BYTES);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i * p.box_tokens >= BLOCK_TOKENS) break;
    copy_box(destination, p.pool->tensor_map, {box * BOX_ELEMENTS, runs[i].offset, runs[i].page},
             full, policy);
    destination += p.box_tokens * 128;
  }
}

// Fills a ring slot: lane l copies box l, as soon as the value group of its columns gave it back.
// The runs of the block's keys sit in the warp's lanes from `first` on.
DEVICE void issue_block(const Block& b, const Ring& ring, const PageRun& run, int first,
                        u64 policy) {
  State& state = *b.state;
  const int lane = threadIdx.x % 32;
  PageRun runs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    runs[i].page = __shfl_sync(~0u, run.page, first + i);
    runs[i].offset = __shfl_sync(~0u, run.offset, first + i);
  }
  mbarrier_wait(shared_address(&state.empty[ring.stage][0]), ring.parity ^ 1);
  if (lane == 0)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int tokens = b.params->box_tokens;
      const int page = tokens == 64 ? runs[0].page : tokens == 32 ? runs[i / 2].page : runs[i].page;
      state.valid[ring.stage][i] = page < (int)state.schedule.pages ? 0x0f0f0f0f : 0;
    }
  if (lane < HALF_BOXES) issue_box(b, ring, runs, policy);
  mbarrier_wait(shared_address(&state.empty[ring.stage][1]), ring.parity ^ 1);
  if (lane >= HALF_BOXES && lane < BOXES) issue_box(b, ring, runs, policy);
  __syncwarp();
}

// Page ids are looked up for 32 boxes at a time, one batch ahead.
DEVICE void produce_segment(const Block& b, const Request& r, const Segment& g, const Job& job,
                            Rings& rings) {
  const DenseParams& p = *b.params;
  const int lane = threadIdx.x % 32;
  const int box_tokens = p.box_tokens;
  const int subs = BLOCK_TOKENS / box_tokens, batch_blocks = 32 / subs;
  const u64 policy = p.keep_in_cache ? policy_evict_normal() : policy_evict_first();
  const int token = g.first_block * BLOCK_TOKENS + lane * box_tokens;
  const int end = imin((g.first_block + g.blocks) * BLOCK_TOKENS, r.kv_len);
  Lookup ahead = begin_lookup(b, r, end, token);
  hand_over_job(b, job, rings.jobs);
  for (int base = 0; base < g.blocks; base += batch_blocks) {
    const PageRun run = finish_lookup(b, ahead);
    const int next = base + batch_blocks;
    ahead = begin_lookup(b, r, end, token + next * BLOCK_TOKENS);
    for (int i = 0; i < batch_blocks && base + i < g.blocks; ++i) {
      issue_block(b, rings.keys, run, i * subs, policy);
      advance<STAGES>(rings.keys);
    }
  }
}

#else

// Each thread copies 16 bytes of four keys in every box: keys thread / 8 + 16 i, chunk thread % 8.
struct Sources {
  const char* key[4];  // null where there is nothing to read
};

DEVICE Sources find_sources(const Block& b, const Request& r, int token) {
  const PoolView* pool = b.params->pool;
  Lookup lookup[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) lookup[i] = begin_lookup(b, r, r.kv_len, token + 16 * i);
  Sources source;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const PageRun run = finish_lookup(b, lookup[i]);
    source.key[i] = run.page < (int)b.state->schedule.pages
                        ? pool->base + (u64)run.page * pool->page_stride_bytes +
                              (u64)run.offset * pool->token_stride_bytes + threadIdx.x % 8 * 16
                        : nullptr;
  }
  return source;
}

DEVICE void issue_block(const Block& b, const Ring& ring, const Sources& source) {
  const int thread = threadIdx.x % 128, chunk = thread % 8;
  State& state = *b.state;
#pragma unroll 1
  for (int box = 0; box < BOXES; ++box) {
    if (box == 0 || box == HALF_BOXES)
      mbarrier_wait(shared_address(&state.empty[ring.stage][box / HALF_BOXES]), ring.parity ^ 1);
    if (box == 0) {
      // Lanes 0, 8, 16 and 24 speak for four neighbouring keys: one byte of the validity words.
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 lanes = __ballot_sync(~0u, source.key[i] != nullptr);
        if (thread % 32 == 0)
          ((unsigned char*)&state.valid[ring.stage][i])[thread / 32] =
              (lanes & 1) | (lanes >> 7 & 2) | (lanes >> 14 & 4) | (lanes >> 21 & 8);
      }
      mbarrier_arrive(shared_address(&state.full[ring.stage][0]));
    }
    const u32 destination = stage_address(b, ring.stage) + box * BOX_BYTES;
    const bool inside = box * BOX_ELEMENTS + chunk * 8 < QK_WIDTH;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      copy_16(destination + swizzled(thread / 8 + 16 * i, chunk),
              source.key[i] ? source.key[i] + box * 128 : b.params->q, source.key[i] != nullptr && inside);
    copy_16_arrive(shared_address(&state.full[ring.stage][box]));
  }
}

// Page ids are looked up one block ahead.
DEVICE void produce_segment(const Block& b, const Request& r, const Segment& g, const Job& job,
                            Rings& rings) {
  hand_over_job(b, job, rings.jobs);
  const int token = g.first_block * BLOCK_TOKENS + threadIdx.x % 128 / 8;
  Sources ahead = find_sources(b, r, token);
  for (int i = 0; i < g.blocks; ++i) {
    const Sources now = ahead;
    if (i + 1 < g.blocks) ahead = find_sources(b, r, token + (i + 1) * BLOCK_TOKENS);
    issue_block(b, rings.keys, now);
    advance<STAGES>(rings.keys);
  }
}

#endif

DEVICE void produce_request(const Block& b, const Schedule& s, const Request& r, Rings& rings) {
  const DenseParams& p = *b.params;
  const Sharing h = sharing_of(p, s, r);
  SegmentWalk walk = walk_segments(s, r);
  Segment g;
  bool first = true;
  while (next_segment(p, r, walk, g)) {
    Job job = make_job(r, g);
    const int split = p.fixed_blocks ? g.split : block_index(b) - h.first_block;
    if (h.splits > 1) job.slot = slot_of_split(p, r, h, split);
    if (h.splits > 1 && walk.unit >= walk.end) job.counter = counter_index(b, r);
    job.new_queries = first;
    first = false;
    produce_segment(b, r, g, job, rings);
  }
}

// The producer's first warp, before the roles part: divides the work.
DEVICE void divide_work(const Block& b) {
  const DenseParams& p = *b.params;
  if (USE_TENSOR_MAP) prefetch_tensor_map(p.pool->tensor_map);
  const Schedule s = make_schedule(p, b.tile, block_index(b), gridDim.x / p.tiles);
  if (threadIdx.x == PRODUCER_THREAD) b.state->schedule = s;
  if (USE_TENSOR_MAP) tensor_map_acquire(p.pool->tensor_map);
}

// Walks this block's range of work: the one role that reads lengths and pages.
DEVICE void produce(const Block& b) {
  const DenseParams& p = *b.params;
  const Schedule s = b.state->schedule;
  Rings rings = {{0, 0}, {0, 0}};
  int first_unit = s.request_begin;
  for (int index = s.request; index < p.batch && first_unit < s.end; ++index) {
    Request r = load_request(p, index, b.tile);
    r.first_unit = first_unit;
    first_unit += r.units;
    if (threadIdx.x == PRODUCER_THREAD) count_clamped(b, s, r);
    if (r.units > 0) produce_request(b, s, r, rings);
  }
  Job none = {};
  hand_over_job(b, none, rings.jobs);
  if (!USE_TENSOR_MAP) copy_16_wait_all();
}

DEVICE Job take_job(const Block& b, const Ring& jobs) {
  mbarrier_wait(shared_address(&b.state->job_ready[jobs.stage]), jobs.parity);
  Job job = b.state->jobs[jobs.stage];
  job.blocks = uniform(job.blocks);
  job.rows = uniform(job.rows);
  return job;
}

// ---- scores and softmax (group 0) ---------------------------------------------------------------

// The two rows of the tile that a thread of group 0 holds in its accumulators.
struct Rows {
  int row[2];
  int visible[2];  // keys that the row sees; 0 beyond the tile's rows
  float top[2];    // running maximum, base-2 units
  float sum[2];    // this thread's share of the softmax denominator, relative to top
  bool live;       // the warp has rows of the tile
};

DEVICE void start_rows(const Block& b, const Job& j, Rows& rows) {
  const int warp_row = threadIdx.x / 32 * 16;
  rows.live = uniform(warp_row < j.rows);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    rows.row[h] = warp_row + threadIdx.x % 32 / 4 + 8 * h;
    rows.visible[h] = visible_keys(*b.params, j, b.tile, rows.row[h]);
  }
}

// Copies the tile's queries into shared memory, in the layout of the key boxes. Rows beyond the
// tile's keep what was there: they reach no other row and are never stored.
DEVICE void load_queries(const Block& b, const Job& j) {
  constexpr int CHUNKS = BOXES * 8;
  named_barrier(2, 128);  // no warp may still read the last ones
  const char* q = b.params->q + (u64)j.flat_row * (QK_WIDTH * 2);
#pragma unroll 3
  for (int i = threadIdx.x; i < j.rows * CHUNKS; i += 128) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    const bool inside = chunk * 8 < QK_WIDTH;
    copy_16(b.queries + chunk / 8 * (TILE_ROWS * 128) + swizzled(row, chunk % 8),
            inside ? q + (u64)row * (QK_WIDTH * 2) + chunk * 16 : q, inside);
  }
  copy_16_wait_all();
  fence_async_proxy();
  named_barrier(2, 128);
}

DEVICE void score_block(const Block& b, const Ring& ring, float (&s)[32]) {
  const u32 keys = stage_address(b, ring.stage);
  wgmma_fence();
#pragma unroll
  for (int box = 0; box < BOXES; ++box) {
    mbarrier_wait(shared_address(&b.state->full[ring.stage][box]), ring.parity);
    if (!USE_TENSOR_MAP) fence_async_proxy();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      wgmma_64x64(s, operand(b.queries + box * (TILE_ROWS * 128) + k * 32, 1024, 16),
                  operand(keys + box * BOX_BYTES + k * 32, 1024, 16), box + k);
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin_registers(s);
}

// Sets scores of keys that a row does not see, or whose page was out of bounds, to -inf.
DEVICE void mask_scores(const uint4& valid, int first_key, const Rows& rows, float (&s)[32]) {
  const int column = threadIdx.x % 4 * 2;
  const u32 words[4] = {valid.x, valid.y, valid.z, valid.w};
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int key = i / 4 * 8 + column + (i & 1);
    const u32 nibble = words[i / 8] >> (i / 4 % 2 * 16 + column / 4 * 8);
    const bool good = nibble >> (key % 4) & 1;
    if (first_key + key >= rows.visible[i / 2 % 2] || !good) s[i] = NEGATIVE_INFINITY;
  }
}

// Zeroes the values of keys past the request's end: their weight is 0, but 0 * NaN is not.
DEVICE void clear_values(u32 keys, int first_row) {
  for (int i = threadIdx.x; i < (BLOCK_TOKENS - first_row) * VALUE_BOXES * 8; i += 128) {
    const int row = first_row + i / (VALUE_BOXES * 8), chunk = i % (VALUE_BOXES * 8);
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(
                     keys + chunk / 8 * BOX_BYTES + row * 128 + chunk % 8 * 16),
                 "r"(0)
                 : "memory");
  }
}

// Softmax of one block against the running maximum; leaves weights and factors in shared memory.
DEVICE void weigh_block(const Block& b, const Ring& ring, int first_key, Rows& rows,
                        float (&s)[32]) {
  State& state = *b.state;
  const int lane = threadIdx.x % 32;
  const float scale = b.params->scale_log2;
  const uint4 valid = *(const uint4*)state.valid[ring.stage];
  const bool whole = (valid.x & valid.y & valid.z & valid.w) == 0x0f0f0f0f;
  if (!whole || first_key + BLOCK_TOKENS > imin(rows.visible[0], rows.visible[1]))
    mask_scores(valid, first_key, rows, s);
  float top[2], base[2], factor[2], sum[2] = {};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float tops[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      tops[i] = fmaxf(fmaxf(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]),
                      fmaxf(s[4 * i + 2 * h + 16], s[4 * i + 2 * h + 17]));
    top[h] = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
  }
#pragma unroll
  for (int d = 1; d < 4; d *= 2) {
    const float other[2] = {__shfl_xor_sync(~0u, top[0], d), __shfl_xor_sync(~0u, top[1], d)};
    top[0] = fmaxf(top[0], other[0]);
    top[1] = fmaxf(top[1], other[1]);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    top[h] = fmaxf(top[h] * scale, rows.top[h]);
    base[h] = top[h] == NEGATIVE_INFINITY ? 0.f : top[h];
    factor[h] = exp2_fast(rows.top[h] - base[h]);
    rows.top[h] = top[h];
    if (lane % 4 == 0) state.factor[ring.stage][rows.row[h]] = factor[h];
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    s[i] = exp2_fast(fmaf(s[i], scale, -base[i / 2 % 2]));
    sum[i / 2 % 2] += s[i];
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) rows.sum[h] = rows.sum[h] * factor[h] + sum[h];
  const int tile_row = threadIdx.x / 32 * 16 + lane % 16;
  const u32 weights = stage_address(b, ring.stage) + WEIGHT_BOX * BOX_BYTES;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    store_tiles(weights + swizzled(tile_row, 2 * i + lane / 16),
                pack_bf16(s[8 * i], s[8 * i + 1]), pack_bf16(s[8 * i + 2], s[8 * i + 3]),
                pack_bf16(s[8 * i + 4], s[8 * i + 5]), pack_bf16(s[8 * i + 6], s[8 * i + 7]));
}

// Publishes each row's 1 / denominator and LSE of a segment to the value groups.
DEVICE void publish_rows(const Block& b, const Ring& result, Rows& rows) {
  State& state = *b.state;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = rows.sum[h];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const bool some = rows.top[h] != NEGATIVE_INFINITY;
    if (threadIdx.x % 4 == 0) {
      state.inverse[result.stage][rows.row[h]] = some ? 1.f / sum : 0.f;
      state.lse[result.stage][rows.row[h]] = some ? rows.top[h] + log2_fast(sum)
                                                  : NEGATIVE_INFINITY;
    }
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&state.published[result.stage]));
}

DEVICE void score_segment(const Block& b, const Job& job, Rows& rows, Ring& ring) {
  float s[32];
#pragma unroll 1
  for (int j = 0; j < job.blocks; ++j) {
    const int first_key = (job.first_block + j) * BLOCK_TOKENS;
    score_block(b, ring, s);
    if (rows.live) weigh_block(b, ring, first_key, rows, s);
    if (first_key + BLOCK_TOKENS > job.kv_len)
      clear_values(stage_address(b, ring.stage), imax(job.kv_len - first_key, 0));
    fence_async_proxy();
    __syncwarp();
    if (threadIdx.x % 32 == 0)
      mbarrier_arrive(shared_address(&b.state->weighted[ring.stage]));
    advance<STAGES>(ring);
  }
}

DEVICE void score(const Block& b) {
  Rings rings = {{0, 0}, {0, 0}};
  Rows rows;
  for (Job job = take_job(b, rings.jobs); job.blocks > 0; job = take_job(b, rings.jobs)) {
    if (job.new_queries) {
      load_queries(b, job);
      start_rows(b, job, rows);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      rows.top[h] = NEGATIVE_INFINITY;
      rows.sum[h] = 0.f;
    }
    score_segment(b, job, rows, rings.keys);
    publish_rows(b, rings.jobs, rows);
    advance<JOBS>(rings.jobs);
  }
}

// ---- values (groups 1 and 2) --------------------------------------------------------------------

// One value group's outputs: 64 rows, half of the columns.
struct Outputs {
  float panel[PANELS][PANEL_REGISTERS];
};

DEVICE int value_half() { return threadIdx.x / 128 - 1; }
DEVICE int value_row(int h) { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + 8 * h; }

DEVICE void pin_outputs(Outputs& out) {
#pragma unroll
  for (int n = 0; n < PANELS; ++n) pin_registers(out.panel[n]);
}

// Multiplies one block's weights into this group's half of the columns, and gives the boxes back.
DEVICE void add_values(const Block& b, const Ring& ring, bool live, Outputs& out) {
  State& state = *b.state;
  mbarrier_wait(shared_address(&state.weighted[ring.stage]), ring.parity);
  if (live) {
    const float factor[2] = {state.factor[ring.stage][value_row(0)],
                             state.factor[ring.stage][value_row(1)]};
    if (__any_sync(~0u, factor[0] != 1.f || factor[1] != 1.f)) {
#pragma unroll
      for (int n = 0; n < PANELS; ++n)
#pragma unroll
        for (int i = 0; i < PANEL_REGISTERS; ++i) out.panel[n][i] *= factor[i / 2 % 2];
    }
  }
  const u32 keys = stage_address(b, ring.stage);
  const u32 half = keys + value_half() * (HALF_BOXES * BOX_BYTES);
  pin_outputs(out);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int n = 0; n < PANELS; ++n)
      wgmma_values(out.panel[n], operand(keys + WEIGHT_BOX * BOX_BYTES + k * 32, 1024, 16),
                   operand(half + n * (PANEL_COLUMNS * 128) + k * 2048, 1024, BOX_BYTES));
  wgmma_commit();
  wgmma_wait<0>();
  pin_outputs(out);
  if (threadIdx.x % 32 == 0)
    mbarrier_arrive(shared_address(&state.empty[ring.stage][value_half()]));
}

// Stores one row of a segment, to the output or as a partial.
DEVICE void store_row(const Block& b, const Job& j, int h,
                      const Outputs& out, float inverse) {
  const DenseParams& p = *b.params;
  const int row = value_row(h), quad = threadIdx.x % 4, column = value_half() * (VALUE_WIDTH / 2);
  const bool empty = inverse == 0.f;
  if (j.slot < 0) {
    u32* to = (u32*)(p.out + (((u64)j.flat_row + row) * VALUE_WIDTH + column) * 2) + quad;
#pragma unroll
    for (int i = 0; i < VALUE_WIDTH / 16; ++i) {
      const float* pair = out.panel[i / (PANEL_COLUMNS / 8)] + i % (PANEL_COLUMNS / 8) * 4 + 2 * h;
      to[4 * i] = empty ? 0 : pack_bf16(pair[0] * inverse, pair[1] * inverse);
    }
    return;
  }
  char* to = partial_row(p, b.tile, j.slot, row) + (column + quad * 8) * PARTIAL_BYTES;
#pragma unroll
  for (int c = 0; c < VALUE_WIDTH / 64; ++c) {
    const float* chunk = out.panel[c / (PANEL_COLUMNS / 32)] + c % (PANEL_COLUMNS / 32) * 16;
    float v[GROUP_COLUMNS];
#pragma unroll
    for (int i = 0; i < GROUP_COLUMNS; ++i)
      v[i] = empty ? 0.f : chunk[i / 2 * 4 + 2 * h + i % 2] * inverse;
    store_group(to + c * (32 * PARTIAL_BYTES), v);
  }
}

DEVICE void store_segment(const Block& b, const Job& j, const Ring& jobs, const Outputs& out) {
  const DenseParams& p = *b.params;
  State& state = *b.state;
  mbarrier_wait(shared_address(&state.published[jobs.stage]), jobs.parity);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = value_row(h);
    if (row >= j.rows) continue;
    store_row(b, j, h, out, state.inverse[jobs.stage][row]);
    if (value_half() != 0 || threadIdx.x % 4 != 0) continue;
    const float lse = state.lse[jobs.stage][row];
    if (j.slot < 0)
      p.lse[(u64)j.flat_row + row] = lse * p.lse_scale;
    else
      *partial_lse(p, b.tile, j.slot, row) = lse;
  }
}

DEVICE void weigh_values(const Block& b) {
  Rings rings = {{0, 0}, {0, 0}};
  for (Job job = take_job(b, rings.jobs); job.blocks > 0; job = take_job(b, rings.jobs)) {
    const bool live = uniform(threadIdx.x / 32 % 4 * 16 < job.rows);
    Outputs out;
#pragma unroll
    for (int n = 0; n < PANELS; ++n)
#pragma unroll
      for (int i = 0; i < PANEL_REGISTERS; ++i) out.panel[n][i] = 0.f;
#pragma unroll 1
    for (int j = 0; j < job.blocks; ++j) {
      add_values(b, rings.keys, live, out);
      advance<STAGES>(rings.keys);
    }
    store_segment(b, job, rings.jobs, out);
    advance<JOBS>(rings.jobs);
    if (job.counter < 0) continue;
    named_barrier(1, VALUE_THREADS);
    if (threadIdx.x == VALUE_THREAD) add_release(b.params->counters + job.counter, 1);
  }
}

// ---- merge --------------------------------------------------------------------------------------

// After all of this block's partials are out: its slices of the requests that it shares.
DEVICE void merge_requests(const Block& b, char* shared) {
  const DenseParams& p = *b.params;
  const Schedule s = b.state->schedule;
  int first_unit = s.request_begin;
  for (int index = s.request; index < p.batch && first_unit < s.end; ++index) {
    Request r = load_request(p, index, b.tile);
    r.first_unit = first_unit;
    first_unit += r.units;
    if (r.units == 0) continue;
    const Sharing h = sharing_of(p, s, r);
    if (h.splits == 1) continue;
    u32* counter = p.counters + counter_index(b, r);
    if (threadIdx.x == VALUE_THREAD) await_partials(counter, h.blocks);
    named_barrier(1, VALUE_THREADS);
    merge_slice(p, r, h, make_int2(b.tile, block_index(b) - h.first_block), shared);
    if (threadIdx.x == VALUE_THREAD) leave_counter(counter, h.blocks);
  }
}

// Dynamic shared memory that a launch needs, for the host to read.
extern "C" __constant__ int mlakit_dense_decode_shared_bytes = SHARED_BYTES;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mlakit_dense_decode(const __grid_constant__ DenseParams params) {
  extern __shared__ char shared_bytes[];
  Block b;
  b.params = &params;
  b.queries = (shared_address(shared_bytes) + 1023) & ~1023u;
  b.ring = b.queries + QUERY_BYTES;
  char* aligned = shared_bytes + (b.queries - shared_address(shared_bytes));
  b.state = (State*)(aligned + QUERY_BYTES + STAGES * STAGE_BYTES);
  b.tile = blockIdx.x % params.tiles;
  const int warp = uniform(threadIdx.x / 32);
  allow_next_launch();
  if (threadIdx.x == 0) initialise_barriers(b);
  await_earlier_kernels();
  if (warp == PRODUCER_THREAD / 32) divide_work(b);
  __syncthreads();
  if (warp >= PRODUCER_THREAD / 32) {
    release_registers<PRODUCER_REGISTERS>();
    if (!USE_TENSOR_MAP || warp == PRODUCER_THREAD / 32) produce(b);
  } else if (warp < VALUE_THREAD / 32) {
    release_registers<SCORE_REGISTERS>();
    score(b);
  } else {
    take_registers<VALUE_REGISTERS>();
    weigh_values(b);
    merge_requests(b, aligned + QUERY_BYTES);
  }
}
