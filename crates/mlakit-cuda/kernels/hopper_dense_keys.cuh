// Dense decode on Hopper: shared memory, the ring of key blocks and the producer that fills it.
//
// Ring: a key block is BOXES boxes of 64 keys x 64 elements (8 KiB, rows of 128 swizzled bytes),
// each with its own full barrier, so products begin with the first box. The weights of a block
// overwrite its last box, which the value product does not need (widths with no such box have their
// own). Boxes are given back in parts of 128 columns, those of the left value half by group 1, of
// the right by group 2, and taken by producer and scores in that order: the first part of each
// half, the second of each, the rest of the key.
//
// The producer divides the work, looks up page ids ahead of their use and copies the boxes: one
// warp with tensor maps (page sizes of a multiple of 16), or four with cp.async (any page size).

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
constexpr int VALUE_THREADS = 256;
constexpr int THREADS = 512;
// Registers a thread of each role, 512 together; where nothing spills.
constexpr int SCORE_REGISTERS = 120;
constexpr int VALUE_REGISTERS = 160;
constexpr int PRODUCER_REGISTERS = 72;
constexpr int VALUE_THREAD = 128;     // the first of the value groups
constexpr int PRODUCER_THREAD = 384;  // the first of the producer
constexpr int FULL_ARRIVALS = USE_TENSOR_MAP ? 1 : 128;
constexpr int FIRST_ARRIVALS = USE_TENSOR_MAP ? 1 : 256;  // the first box also carries validity
static_assert(STAGES >= 2, "the ring needs two key blocks");
static_assert(BOXES >= VALUE_BOXES, "the value is a part of the key");
static_assert(MERGE_SHARES_BYTES + MAX_MERGE_WEIGHTS * 4 <= STAGES * STAGE_BYTES, "merge space");

struct State {
  u64 full[STAGES][BOXES];
  u64 empty[STAGES][2 * HALF_PARTS];  // of a part, by the warps of the value group of its columns
  u64 weighted[STAGES];    // the block's weights and factors are written
  u64 job_ready[JOBS];
  u64 published[JOBS];  // a job's inverse and lse are written
  Job jobs[JOBS];
  Schedule schedule;
  alignas(16) u32 valid[STAGES][4];  // a byte of four bits for four keys: 0 where there is no page
  float factor[STAGES][TILE_ROWS];   // what the block's maximum scales earlier sums by
  float inverse[JOBS][TILE_ROWS];
  float lse[JOBS][TILE_ROWS];        // base 2
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

// Parts are taken from both halves in turn.
DEVICE constexpr int part_of_step(int step) { return step % 2 * HALF_PARTS + step / 2; }

// 16-byte chunk of a row of a swizzled box.
DEVICE u32 swizzled(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }


// ---- producer: page ids, boxes, the ring ------------------------------------------------------

DEVICE void initialise_barriers(const Block& b) {
  for (int s = 0; s < STAGES; ++s) {
    for (int i = 0; i < BOXES; ++i) 
      mbarrier_init(shared_address(&b.state->full[s][i]), i == 0 ? FIRST_ARRIVALS : FULL_ARRIVALS);
    for (int i = 0; i < 2 * HALF_PARTS; ++i)
      mbarrier_init(shared_address(&b.state->empty[s][i]), 4);
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

// Waits until the part of the given step of a slot was given back.
DEVICE void await_part(const Block& b, const Ring& ring, int step) {
  mbarrier_wait(shared_address(&b.state->empty[ring.stage][part_of_step(step)]), ring.parity ^ 1);
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
  await_part(b, ring, 0);
  if (lane == 0)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int tokens = b.params->box_tokens;
      const int page = tokens == 64 ? runs[0].page : tokens == 32 ? runs[i / 2].page : runs[i].page;
      state.valid[ring.stage][i] = page < (int)state.schedule.pages ? 0x0f0f0f0f : 0;
    }
#pragma unroll
  for (int step = 0; step < 2 * HALF_PARTS; ++step) {
    await_part(b, ring, step);
    if (lane < VALUE_BOXES && lane / PART_BOXES == part_of_step(step))
      issue_box(b, ring, runs, policy);
  }
  if (lane >= VALUE_BOXES && lane < BOXES) issue_box(b, ring, runs, policy);
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

DEVICE void copy_keys(const Block& b, const Ring& ring, const Sources& source, int box) {
  const int thread = threadIdx.x % 128, chunk = thread % 8;
  const u32 destination = stage_address(b, ring.stage) + box * BOX_BYTES;
  const bool inside = box * BOX_ELEMENTS + chunk * 8 < QK_WIDTH;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const char* from = source.key[i];
    const bool valid = from != nullptr && inside;
    copy_16(destination + swizzled(thread / 8 + 16 * i, chunk),
            valid ? from + box * 128 : b.params->q, valid);
  }
  copy_16_arrive(shared_address(&b.state->full[ring.stage][box]));
}

DEVICE void issue_block(const Block& b, const Ring& ring, const Sources& source) {
  const int thread = threadIdx.x % 128;
  State& state = *b.state;
  await_part(b, ring, 0);
  // Lanes 0, 8, 16 and 24 speak for four neighbouring keys: one byte of the validity words.
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 lanes = __ballot_sync(~0u, source.key[i] != nullptr);
    if (thread % 32 == 0)
      ((unsigned char*)&state.valid[ring.stage][i])[thread / 32] =
          (lanes & 1) | (lanes >> 7 & 2) | (lanes >> 14 & 4) | (lanes >> 21 & 8);
  }
  mbarrier_arrive(shared_address(&state.full[ring.stage][0]));
#pragma unroll 1
  for (int step = 0; step < 2 * HALF_PARTS; ++step) {
    await_part(b, ring, step);
    for (int i = 0; i < PART_BOXES; ++i)
      copy_keys(b, ring, source, part_of_step(step) * PART_BOXES + i);
  }
  for (int box = VALUE_BOXES; box < BOXES; ++box) copy_keys(b, ring, source, box);
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

// ---- what both tile shapes share ----------------------------------------------------------------

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
    copy_16(b.queries + chunk / 8 * QUERY_BOX_BYTES + swizzled(row, chunk % 8),
            inside ? q + (u64)row * (QK_WIDTH * 2) + chunk * 16 : q, inside);
  }
  copy_16_wait_all();
  fence_async_proxy();
  named_barrier(2, 128);
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

DEVICE int value_half() { return threadIdx.x / 128 - 1; }

// Tells the producer that this warp is done with a part of its group's half of a slot.
DEVICE void give_back_part(const Block& b, const Ring& ring, int part) {
  if (threadIdx.x % 32 == 0)
    mbarrier_arrive(
        shared_address(&b.state->empty[ring.stage][value_half() * HALF_PARTS + part]));
}

// The box that scores take i-th: in the order in which boxes are filled.
DEVICE constexpr int box_of_turn(int i) {
  return i < VALUE_BOXES ? part_of_step(i / PART_BOXES) * PART_BOXES + i % PART_BOXES : i;
}
