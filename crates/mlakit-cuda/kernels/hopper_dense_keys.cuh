// Dense decode on Hopper: shared memory, the ring of key blocks and the producer that fills it.
//
// Ring: a key block is BOXES boxes of 64 keys x 64 elements (8 KiB, rows of 128 swizzled bytes).
// They are filled two at a time, each time with a full barrier of their own, so products begin with
// the first two. The weights of a block overwrite its last box, which the value product does not
// need (widths with no such box have their own). Boxes are given back in parts of 128 columns,
// those of each half by the group that multiplies its values, and taken by producer and scores in
// that order: the first part of each half, the second of each, the rest of the key.
//
// The producer divides the work, looks up page ids ahead of their use and copies the boxes: one
// warp with tensor maps (page sizes of a multiple of 16), or all of its warps with cp.async (any
// page size).

#ifndef USE_TENSOR_MAP
#define USE_TENSOR_MAP 1
#endif

constexpr int BOX_ELEMENTS = 64;
constexpr int BOX_BYTES = BLOCK_TOKENS * BOX_ELEMENTS * 2;
constexpr int BOXES = (QK_WIDTH + BOX_ELEMENTS - 1) / BOX_ELEMENTS;
constexpr int VALUE_BOXES = VALUE_WIDTH / BOX_ELEMENTS;
constexpr int HALF_BOXES = VALUE_BOXES / 2;
constexpr int PART_BOXES = HALF_BOXES >= 2 ? 2 : 1;  // given back together
constexpr int HALF_PARTS = HALF_BOXES / PART_BOXES;
// A slot is filled part by part, the parts of both halves in turn, then the rest of the key.
constexpr int FILLS = 2 * HALF_PARTS + (BOXES > VALUE_BOXES);
constexpr int STAGE_BOXES = BOXES > VALUE_BOXES ? BOXES : VALUE_BOXES + 1;
constexpr int WEIGHT_BOX = STAGE_BOXES - 1;
constexpr int STAGE_BYTES = STAGE_BOXES * BOX_BYTES;
constexpr int QUERY_BOX_BYTES = TILE_ROWS * BOX_ELEMENTS * 2;
constexpr int QUERY_BYTES = BOXES * QUERY_BOX_BYTES;
constexpr int STATE_BYTES = 6144;
constexpr int MAX_SHARED_BYTES = 232448;
constexpr int FITTING_STAGES = (MAX_SHARED_BYTES - 1024 - STATE_BYTES - QUERY_BYTES) / STAGE_BYTES;
constexpr int STAGES = FITTING_STAGES > 4 ? 4 : FITTING_STAGES;
constexpr int SHARED_BYTES = 1024 + QUERY_BYTES + STAGES * STAGE_BYTES + STATE_BYTES;
constexpr int JOBS = STAGES + 2;  // no role can be further ahead: every job has a key block
// Narrow tiles have a group for scores and two for values. Wide tiles have two groups for both.
constexpr int SCORE_GROUPS = NARROW ? 1 : 2;
constexpr int SCORE_THREADS = 128 * SCORE_GROUPS;
constexpr int VALUE_THREADS = 256;
constexpr int PRODUCER_WARPS = 4;
constexpr int PRODUCER_THREADS = 32 * PRODUCER_WARPS;
constexpr int VALUE_THREAD = NARROW ? SCORE_THREADS : 0;       // the first of the value groups
constexpr int PRODUCER_THREAD = VALUE_THREAD + VALUE_THREADS;  // the first of the producer
constexpr int THREADS = PRODUCER_THREAD + PRODUCER_THREADS;
// Registers a thread of each role, where nothing spills. Narrow: 120 for scores, 160, 160 and 72,
// of 128 at launch. Wide: 224, 224 and 56, of 168 at launch.
constexpr int VALUE_REGISTERS = NARROW ? 160 : 224;
constexpr int PRODUCER_REGISTERS = NARROW ? 72 : 56;
constexpr int FULL_ARRIVALS = USE_TENSOR_MAP ? 1 : PRODUCER_THREADS;
constexpr int FIRST_ARRIVALS = USE_TENSOR_MAP ? 1 : 2 * PRODUCER_THREADS;  // and validity's
#ifdef HOST_SHARED_BYTES
static_assert(SHARED_BYTES == HOST_SHARED_BYTES, "the host asks for this much");
#endif
static_assert(STAGES >= 2, "the ring needs two key blocks");
static_assert(BOXES >= VALUE_BOXES, "the value is a part of the key");
static_assert(MERGE_SHARES_BYTES + MAX_MERGE_WEIGHTS * 4 <= STAGES * STAGE_BYTES, "merge space");

struct State {
  u64 full[STAGES][FILLS];
  u64 empty[STAGES][2 * HALF_PARTS];  // of a part, by the warps of the value groups of its columns
  u64 weighted[STAGES];               // the block's weights and factors are written
  u64 topped[2][4];                   // wide tiles: a warp's `handed_top` is written
  u64 job_ready[JOBS];
  u64 published[JOBS];  // narrow tiles: a job's inverses and LSEs are written
  Job jobs[JOBS];
  Schedule schedule;
  alignas(16) u32 valid[STAGES][4];  // a byte of four bits for four keys: 0 where there is no page
  float factor[STAGES][TILE_ROWS];   // what the block's maximum scales earlier outputs by
  // Wide tiles: the running maximum, from one score group to the other; and each group's
  // denominators of a job and the maxima they are relative to (base-2 units), of two jobs in turn.
  float handed_top[2][NARROW ? 1 : TILE_ROWS];
  float sum[2][2][NARROW ? 1 : TILE_ROWS];
  float top[2][2][NARROW ? 1 : TILE_ROWS];
  // Narrow tiles: a job's results.
  float inverse[JOBS][NARROW ? TILE_ROWS : 1];
  float lse[JOBS][NARROW ? TILE_ROWS : 1];  // base 2
  float warp_top[2][4][NARROW ? TILE_ROWS : 1];  // narrow tiles: a block's maxima by warp
  float warp_sum[4][NARROW ? TILE_ROWS : 1];     // narrow tiles: denominators by warp
};
static_assert(sizeof(State) <= STATE_BYTES, "state outgrew its region");

// What every thread of a block knows.
struct Block {
  const DenseParams* params;
  State* state;
  u32 queries;  // shared address
  u32 ring;     // shared address
  int half;  // of the columns, in the value groups
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

// Parts are filled from both halves in turn.
DEVICE constexpr int part_of_step(int step) { return step % 2 * HALF_PARTS + step / 2; }

DEVICE constexpr int boxes_of_fill(int fill) {
  return fill < 2 * HALF_PARTS ? PART_BOXES : BOXES - VALUE_BOXES;
}

DEVICE constexpr int box_of_fill(int fill, int n) {
  return fill < 2 * HALF_PARTS ? part_of_step(fill) * PART_BOXES + n : VALUE_BOXES + n;
}

// 16-byte chunk of a row of a swizzled box.
DEVICE u32 swizzled(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// ---- producer: page ids, boxes, the ring ------------------------------------------------------

DEVICE void initialise_barriers(const Block& b) {
  for (int s = 0; s < STAGES; ++s) {
    for (int i = 0; i < FILLS; ++i)
      mbarrier_init(shared_address(&b.state->full[s][i]), i == 0 ? FIRST_ARRIVALS : FULL_ARRIVALS);
    for (int i = 0; i < 2 * HALF_PARTS; ++i)
      mbarrier_init(shared_address(&b.state->empty[s][i]), 4);
    mbarrier_init(shared_address(&b.state->weighted[s]), 4);
  }
  for (int i = 0; i < JOBS; ++i) {
    mbarrier_init(shared_address(&b.state->job_ready[i]), 1);
    mbarrier_init(shared_address(&b.state->published[i]), 4);
  }
  for (int i = 0; i < 8; ++i) mbarrier_init(shared_address(&b.state->topped[i / 4][i % 4]), 1);
  mbarrier_init_fence();
}

// A page id on its way from the page table: a lookup is begun early and used late.
struct Lookup {
  int id;      // -1 also where nothing is wanted
  int offset;  // first key within the page
};

// The run of keys from `token` on, if that is before `end`. A row of padding has no pages.
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

// Counts an id out of bounds once, where its page begins in a request's first tile.
DEVICE PageRun finish_lookup(const Block& b, const Request& r, const Lookup& l) {
  const u32 pages = b.state->schedule.pages;
  if ((u32)l.id < pages) return {l.id, l.offset};
  const bool counts = r.tile == 0 && (USE_TENSOR_MAP || threadIdx.x % 8 == 0);
  count_faults(*b.params, FAULT_ID, l.id != -1 && l.offset == 0 && counts);
  return {(int)pages, l.offset};
}

DEVICE void write_job(const Block& b, const Job& job, const Ring& jobs) {
  if (threadIdx.x == PRODUCER_THREAD) b.state->jobs[jobs.stage] = job;
}

DEVICE void hand_over_job(const Block& b, Ring& jobs) {
  if (threadIdx.x == PRODUCER_THREAD)
    mbarrier_arrive(shared_address(&b.state->job_ready[jobs.stage]));
  advance<JOBS>(jobs);
}

// Where a segment is among those of its tile in this block.
struct SegmentPlace {
  bool first;
  bool last;
};

DEVICE Job job_of_segment(const Block& b, const Request& r, const Segment& g,
                          const SegmentPlace& place) {
  const DenseParams& p = *b.params;
  const Schedule& s = b.state->schedule;
  const Sharing h = sharing_of(p, s, r);
  Job job = make_job(r, g);
  const int split = p.fixed_blocks ? g.split : s.block - h.first_block;
  if (h.splits > 1) job.slot = slot_of_split(p, h, split);
  if (h.blocks > 1 && place.last) job.counter = h.counter;
  // Those of the block's first tile are loaded when its schedule is known.
  job.new_queries = place.first && r.first_unit != s.first.first_unit;
  return job;
}

// Waits until the part of the given step of a slot was given back.
DEVICE void await_part(const Block& b, const Ring& ring, int step) {
  const u32 empty = shared_address(&b.state->empty[ring.stage][part_of_step(step)]);
  mbarrier_wait(empty, ring.parity ^ 1);
}

// 16 bytes of a key that lies anywhere; zeros where there is none.
DEVICE uint4 gather_16(const char* from, bool valid) {
  u32 words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (valid) words[i / 2] |= (u32)((const unsigned short*)from)[i] << (i % 2 * 16);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

DEVICE const char* address_of_key(const Block& b, const PageRun& run, int key) {
  const PoolView* pool = b.params->pool;
  return pool->base + (u64)run.page * pool->page_stride_bytes +
         (u64)(run.offset + key) * (u32)b.params->token_stride_bytes;
}

#if USE_TENSOR_MAP

// The pages of a key block: the runs sit in the warp's lanes from `at` on.
struct BlockRuns {
  PageRun first;
  const PageRun* lane;
  int at;
};

DEVICE PageRun run_of_block(const BlockRuns& runs, int i) {
  return {__shfl_sync(~0u, runs.lane->page, runs.at + i),
          __shfl_sync(~0u, runs.lane->offset, runs.at + i)};
}

// One box of a pool without a tensor map, whose address or strides are not multiples of 16 bytes:
// slow, and right.
DEVICE void gather_box(const Block& b, u32 destination, int box, const BlockRuns& runs) {
  const int tokens = b.params->box_tokens;
#pragma unroll 1
  for (int i = 0; i < BLOCK_TOKENS; i += 4) {
    const int key = i + threadIdx.x % 32 / 8, chunk = threadIdx.x % 8;
    const PageRun run = run_of_block(runs, key / tokens);
    const bool valid = run.page < (int)b.state->schedule.pages;
    const char* from = address_of_key(b, run, key % tokens) + box * 128 + chunk * 16;
    store_shared_16(destination + swizzled(key, chunk), gather_16(from, valid));
  }
}

DEVICE void gather_block(const Block& b, const Ring& ring, const BlockRuns& runs) {
#pragma unroll 1
  for (int fill = 0; fill < FILLS; ++fill) {
    if (fill < 2 * HALF_PARTS) await_part(b, ring, fill);
#pragma unroll 1
    for (int n = 0; n < boxes_of_fill(fill); ++n) {
      const int box = box_of_fill(fill, n);
      gather_box(b, stage_address(b, ring.stage) + box * BOX_BYTES, box, runs);
    }
    fence_async_proxy();
    __syncwarp();
    mbarrier_arrive_expect(shared_address(&b.state->full[ring.stage][fill]), 0);
  }
}

// The boxes of one fill of a ring slot, once they were given back. WHOLE: a box is one run.
template <bool WHOLE>
DEVICE void issue_fill(const Block& b, const Ring& ring, int fill, const BlockRuns& runs,
                       u64 policy) {
  const int tokens = WHOLE ? BLOCK_TOKENS : b.params->box_tokens;
  const u32 full = shared_address(&b.state->full[ring.stage][fill]);
  if (fill < 2 * HALF_PARTS) await_part(b, ring, fill);
  mbarrier_arrive_expect(full, boxes_of_fill(fill) * BOX_BYTES);
#pragma unroll
  for (int n = 0; n < boxes_of_fill(fill); ++n) {
    const int box = box_of_fill(fill, n);
    u32 destination = stage_address(b, ring.stage) + box * BOX_BYTES;
    for (int key = 0, i = 0; key < BLOCK_TOKENS; key += tokens, ++i) {
      const PageRun run = WHOLE ? runs.first : run_of_block(runs, i);
      copy_box(destination, b.params->pool->tensor_map,
               {box * BOX_ELEMENTS, run.offset, run.page}, full, policy);
      destination += tokens * 128;
    }
  }
}

// Fills a ring slot.
DEVICE void issue_block(const Block& b, const Ring& ring, const BlockRuns& runs, u64 policy) {
  State& state = *b.state;
  const int word = threadIdx.x % 4;
  const PageRun run = run_of_block(runs, word * 16 / b.params->box_tokens);
  await_part(b, ring, 0);
  if (threadIdx.x % 32 < 4)
    state.valid[ring.stage][word] = run.page < (int)state.schedule.pages ? 0x0f0f0f0f : 0;
  __syncwarp();
  if (!state.schedule.mapped) {
    gather_block(b, ring, runs);
  } else if (b.params->box_tokens == BLOCK_TOKENS) {
#pragma unroll
    for (int fill = 0; fill < FILLS; ++fill) issue_fill<true>(b, ring, fill, runs, policy);
  } else {
#pragma unroll 1
    for (int fill = 0; fill < FILLS; ++fill) issue_fill<false>(b, ring, fill, runs, policy);
  }
}

// Page ids are looked up for 32 boxes at a time, one batch ahead. The job is written while the first
// of them come; the first copies are on their way before the other roles hear of it.
DEVICE void produce_segment(const Block& b, const Request& r, const Segment& g,
                            const SegmentPlace& place, Rings& rings) {
  const DenseParams& p = *b.params;
  const int lane = threadIdx.x % 32;
  const int box_tokens = p.box_tokens;
  const int subs = BLOCK_TOKENS / box_tokens, batch_blocks = 32 / subs;
  const u64 policy = r.tiles > 1 ? policy_evict_normal() : policy_evict_first();
  const int token = g.first_block * BLOCK_TOKENS + lane * box_tokens;
  const int end = imin((g.first_block + g.blocks) * BLOCK_TOKENS, r.kv_len);
  Lookup ahead = begin_lookup(b, r, end, token);
  write_job(b, job_of_segment(b, r, g, place), rings.jobs);
  for (int base = 0; base < g.blocks; base += batch_blocks) {
    const PageRun run = finish_lookup(b, r, ahead);
    const int next = base + batch_blocks;
    ahead = begin_lookup(b, r, end, token + next * BLOCK_TOKENS);
    for (int i = 0; i < batch_blocks && base + i < g.blocks; ++i) {
      BlockRuns runs = {{0, 0}, &run, i * subs};
      runs.first = run_of_block(runs, 0);
      issue_block(b, rings.keys, runs, policy);
      advance<STAGES>(rings.keys);
      if (base + i == 0) hand_over_job(b, rings.jobs);
    }
  }
}

#else

constexpr int STEP_KEYS = PRODUCER_THREADS / 8;
constexpr int THREAD_KEYS = BLOCK_TOKENS / STEP_KEYS;

// Each thread copies 16 bytes of some keys in every box: keys thread / 8 + STEP_KEYS i, chunk
// thread % 8.
struct Sources {
  const char* key[THREAD_KEYS];  // null where there is nothing to read
  bool aligned;                  // to 16 bytes, all of them
};

DEVICE Sources find_sources(const Block& b, const Request& r, int token) {
  const PoolView* pool = b.params->pool;
  Lookup lookup[THREAD_KEYS];
#pragma unroll
  for (int i = 0; i < THREAD_KEYS; ++i)
    lookup[i] = begin_lookup(b, r, r.kv_len, token + STEP_KEYS * i);
  Sources source;
  const u64 strides = pool->page_stride_bytes | (u32)b.params->token_stride_bytes;
  source.aligned = (((u64)pool->base | strides) & 15) == 0;
#pragma unroll
  for (int i = 0; i < THREAD_KEYS; ++i) {
    const PageRun run = finish_lookup(b, r, lookup[i]);
    source.key[i] = run.page < (int)b.state->schedule.pages
                        ? address_of_key(b, run, 0) + threadIdx.x % 8 * 16
                        : nullptr;
  }
  return source;
}

DEVICE void copy_keys(const Block& b, const Ring& ring, const Sources& source, int box) {
  const int thread = threadIdx.x % PRODUCER_THREADS, chunk = thread % 8;
  const u32 destination = stage_address(b, ring.stage) + box * BOX_BYTES;
  const bool inside = box * BOX_ELEMENTS + chunk * 8 < QK_WIDTH;
#pragma unroll
  for (int i = 0; i < THREAD_KEYS; ++i) {
    const char* from = source.key[i];
    const bool valid = from != nullptr && inside;
    const u32 to = destination + swizzled(thread / 8 + STEP_KEYS * i, chunk);
    if (source.aligned)
      copy_16(to, valid ? from + box * 128 : b.params->q, valid);
    else
      store_shared_16(to, gather_16(from + box * 128, valid));
  }
}

DEVICE void issue_block(const Block& b, const Ring& ring, const Sources& source) {
  const int thread = threadIdx.x % PRODUCER_THREADS;
  State& state = *b.state;
  await_part(b, ring, 0);
  // Lanes 0, 8, 16 and 24 speak for four neighbouring keys: one byte of the validity words.
#pragma unroll
  for (int i = 0; i < THREAD_KEYS; ++i) {
    const u32 lanes = __ballot_sync(~0u, source.key[i] != nullptr);
    if (thread % 32 == 0)
      ((unsigned char*)state.valid[ring.stage])[i * PRODUCER_WARPS + thread / 32] =
          (lanes & 1) | (lanes >> 7 & 2) | (lanes >> 14 & 4) | (lanes >> 21 & 8);
  }
  mbarrier_arrive(shared_address(&state.full[ring.stage][0]));
#pragma unroll 1
  for (int fill = 0; fill < FILLS; ++fill) {
    if (fill < 2 * HALF_PARTS) await_part(b, ring, fill);
    for (int n = 0; n < boxes_of_fill(fill); ++n)
      copy_keys(b, ring, source, box_of_fill(fill, n));
    const u32 full = shared_address(&state.full[ring.stage][fill]);
    if (source.aligned)
      copy_16_arrive(full);
    else
      mbarrier_arrive(full);
  }
}

// Page ids are looked up one block ahead.
DEVICE void produce_segment(const Block& b, const Request& r, const Segment& g,
                            const SegmentPlace& place, Rings& rings) {
  write_job(b, job_of_segment(b, r, g, place), rings.jobs);
  hand_over_job(b, rings.jobs);
  const int token = g.first_block * BLOCK_TOKENS + threadIdx.x % PRODUCER_THREADS / 8;
  Sources ahead = find_sources(b, r, token);
  for (int i = 0; i < g.blocks; ++i) {
    const Sources now = ahead;
    if (i + 1 < g.blocks) ahead = find_sources(b, r, token + (i + 1) * BLOCK_TOKENS);
    issue_block(b, rings.keys, now);
    advance<STAGES>(rings.keys);
  }
}

#endif

// The keys up to the last that some row of a request sees: no page behind them is looked up. Where
// rows have lengths, one block counts those out of bounds.
DEVICE int keys_seen_by_any(const Block& b, const Request& r) {
  const DenseParams& p = *b.params;
  if (p.row_kv_lens == nullptr) return r.kv_len;
  int most = 0, bad = 0;
#pragma unroll 1
  for (int first = 0; first < r.q_rows; first += 32) {
    const int row = first + threadIdx.x % 32;
    const int given = row < r.q_rows ? p.row_kv_lens[r.first_q_row + row] : 0;
    const int seen = clamp(given, 0, r.kv_len);
    most = imax(most, seen);
    bad += given != seen;
  }
  const bool counts = r.tile == 0 && b.state->schedule.begin <= r.first_unit && r.index < p.batch;
  if (counts && threadIdx.x / 32 == PRODUCER_THREAD / 32) count_faults(p, FAULT_LENGTH, bad);
  return __reduce_max_sync(~0u, most);
}

DEVICE void produce_request(const Block& b, const Request& r, Rings& rings) {
  SegmentWalk walk = walk_segments(b.state->schedule, r);
  Request seen = r;
  seen.kv_len = keys_seen_by_any(b, r);
  Segment g;
  SegmentPlace place = {true, false};
  while (next_segment(*b.params, r, walk, g)) {
    place.last = walk.unit >= walk.end;
    produce_segment(b, seen, g, place, rings);
    place.first = false;
  }
}

// The producer's first warp, before the roles part: divides the work.
DEVICE void divide_work(const Block& b) {
  const DenseParams& p = *b.params;
  if (USE_TENSOR_MAP) prefetch_tensor_map(p.pool->tensor_map);
  make_schedule(p, b.state->schedule);
  if (USE_TENSOR_MAP) tensor_map_acquire(p.pool->tensor_map);
}

// Walks this block's range of work: the one role that reads lengths and pages.
DEVICE void produce(const Block& b) {
  const DenseParams& p = *b.params;
  const Schedule& s = b.state->schedule;
  Rings rings = {{0, 0}, {0, 0}};
  for (Request r = s.first; r.units > 0; next_request(p, s, r)) produce_request(b, r, rings);
  Job none = {};
  write_job(b, none, rings.jobs);
  hand_over_job(b, rings.jobs);
  if (!USE_TENSOR_MAP) copy_16_wait_all();
}

DEVICE Job take_job(const Block& b, const Ring& jobs) {
  mbarrier_wait(shared_address(&b.state->job_ready[jobs.stage]), jobs.parity);
  Job job = b.state->jobs[jobs.stage];
  job.blocks = uniform(job.blocks);
  job.rows = uniform(job.rows);
  return job;
}

// ---- what both tile shapes share ----------------------------------------------------------------

// Starts to copy the tile's queries into shared memory, in the layout of the key boxes. Rows beyond
// the tile's keep what was there: they reach no other row and are never stored.
DEVICE void begin_queries(const Block& b, const Job& j) {
  constexpr int CHUNKS = BOXES * 8;
  named_barrier(2, SCORE_THREADS);  // no warp may still read the last ones
  const char* q = b.params->q + (u64)j.flat_row * (QK_WIDTH * 2);
  const bool aligned = ((u64)q & 15) == 0;  // they may begin at any element
#pragma unroll 3
  for (int i = threadIdx.x; i < j.rows * CHUNKS; i += SCORE_THREADS) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    const bool inside = chunk * 8 < QK_WIDTH;
    const u32 to = b.queries + chunk / 8 * QUERY_BOX_BYTES + swizzled(row, chunk % 8);
    const char* from = inside ? q + (u64)row * (QK_WIDTH * 2) + chunk * 16 : q;
    if (aligned)
      copy_16(to, from, inside);
    else
      store_shared_16(to, gather_16(from, inside));
  }
}

DEVICE void finish_queries() {
  copy_16_wait_all();
  fence_async_proxy();
  named_barrier(2, SCORE_THREADS);
}

// Two BF16 with those that are not finite replaced by 0.
DEVICE u32 finite_pair(u32 pair) {
  if ((pair & 0x7f80) == 0x7f80) pair &= 0xffff0000u;
  if ((pair & 0x7f800000) == 0x7f800000) pair &= 0xffff;
  return pair;
}

// Zeroes what is not finite in the values of the keys from `first` on, which some row of the tile
// does not see: its weight there is 0, but 0 * NaN is not. (A row that sees such a key is NaN by
// its score.) By the group that did the block's scores, after all of its warps are done with them.
DEVICE void clear_values(u32 keys, int first) {
  constexpr int CHUNKS = VALUE_BOXES * 8;
  for (int i = threadIdx.x % 128; i < (BLOCK_TOKENS - first) * CHUNKS; i += 128) {
    const int key = first + i / CHUNKS, chunk = i % CHUNKS;
    const u32 at = keys + chunk / 8 * BOX_BYTES + key * 128 + chunk % 8 * 16;
    const uint4 was = load_shared_16(at);
    const uint4 kept = make_uint4(finite_pair(was.x), finite_pair(was.y), finite_pair(was.z),
                                  finite_pair(was.w));
    if ((was.x ^ kept.x) | (was.y ^ kept.y) | (was.z ^ kept.z) | (was.w ^ kept.w))
      store_shared_16(at, kept);
  }
}

// Hands a block's weights over to the value groups. `seen_by_all`: keys that all rows see.
DEVICE void hand_over_weights(const Block& b, const Ring& ring, int first_key, int seen_by_all) {
  if (first_key + BLOCK_TOKENS > seen_by_all)
    clear_values(stage_address(b, ring.stage), imax(seen_by_all - first_key, 0));
  fence_async_proxy();
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&b.state->weighted[ring.stage]));
}

// What a segment's row is scaled by in the end, and its LSE in base 2.
struct RowResult {
  float inverse;  // 0: no key; NaN: a score was not finite
  float lse;
};

// `sum` is relative to `top`.
DEVICE RowResult finish_row(float sum, float top) {
  const bool number = sum > 0.f && sum < -NEGATIVE_INFINITY;
  const float lse = top + log2_fast(sum);
  return {number ? reciprocal_fast(sum) : sum == 0.f ? 0.f : NOT_A_NUMBER,
          number ? lse : sum == 0.f ? NEGATIVE_INFINITY : NOT_A_NUMBER};
}

// Tells the producer that this warp is done with a part of its group's half of a slot.
DEVICE void give_back_part(const Block& b, const Ring& ring, int part) {
  const u32 empty = shared_address(&b.state->empty[ring.stage][b.half * HALF_PARTS + part]);
  if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
}

// Counts this block in the counter of a tile that it shares, after its last partial of the tile.
DEVICE void announce_partials(const Block& b, const Job& job) {
  if (job.counter < 0) return;
  named_barrier(1, VALUE_THREADS);
  if (threadIdx.x == VALUE_THREAD)
    add_release(counter_word(*b.params, job.counter), counter_one(job.counter));
}
