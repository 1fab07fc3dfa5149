// Dense MLA decode on Hopper (sm_90a), BF16 records, one launch.
//
// Computes for every query row and head: softmax(scale * q . key) . value over the keys of the
// row's request that the row sees, where the value of a key is its first VALUE_WIDTH elements; and
// the LSE. Compiled as hopper_ptx.cuh, dense_work.cuh, dense_merge.cuh, hopper_dense_keys.cuh, this
// file, hopper_dense_main.cuh: one text, nothing is included.
//
// Shapes: any batch, heads >= 1, rows a request (ragged), lengths, page table. Page size 1 or a
// multiple of 16 with USE_TENSOR_MAP 0; a multiple of 16 with USE_TENSOR_MAP 1 (faster).
// QK_WIDTH up to 576, a multiple of 32; VALUE_WIDTH 128, 256 or 512.
//
// A block takes one tile of 64 (row, head) pairs and a range of keys, 64 keys at a time:
//   warp groups 0 and 1  scores of every second block each: query . key, softmax against the
//                        running maximum, weights to shared memory; and of every block half of the
//                        columns of the values, which they store and merge
//   warp group 2         fills the ring of key blocks: one warp with tensor maps, all with cp.async
// The running maximum goes from one group to the other as soon as it is known. One group's softmax
// runs beside the other's products.
//
// Shared memory (576/512): queries 72 KiB, two key blocks of 72 KiB, 6 KiB of state: 1 block per
// SM.

// ---- scores and softmax -------------------------------------------------------------------------

constexpr int PANEL_COLUMNS = VALUE_WIDTH / 2 > 128 ? 128 : VALUE_WIDTH / 2;  // of one product
constexpr int PANELS = VALUE_WIDTH / 2 / PANEL_COLUMNS;  // of one value group
constexpr int PANEL_REGISTERS = PANEL_COLUMNS / 2;       // 64 x PANEL_COLUMNS over 128 threads
static_assert(PANELS == HALF_PARTS, "a panel's columns are given back together");
constexpr int SCORES = 32;                               // 64 rows x 64 keys over 128 threads

// A running maximum is raised when a block's is larger by more than this (base-2 units): a weight
// is then at most 256, which costs no accuracy, and outputs are rarely scaled anew.
constexpr float TOP_SLACK = 8.f;

// The two rows of the tile that a thread holds in its accumulators.
struct Rows {
  int visible[2];    // keys that the row sees; 0 beyond the tile's rows
  int seen_by_all;   // keys that every row of the tile sees
  float top[2];      // running maximum after this group's last block, base-2 units
  float sum[2];      // this thread's share of the softmax denominator, relative to top
  bool live;         // the warp has rows of the tile
};

DEVICE int tile_row(int h) { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + 8 * h; }

DEVICE void start_rows(const Block& b, const Job& j, Rows& rows) {
  rows.live = uniform(threadIdx.x / 32 % 4 * 16 < j.rows);
  rows.seen_by_all = keys_seen_by_all(*b.params, j);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    rows.visible[h] = visible_keys(*b.params, j, tile_row(h));
  }
}

DEVICE void reset_rows(Rows& rows) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    rows.top[h] = NEGATIVE_INFINITY;
    rows.sum[h] = 0.f;
  }
}

// Starts the products of one key block, as its boxes come.
DEVICE void begin_scores(const Block& b, const Ring& ring, float (&s)[SCORES]) {
  const Operand queries = operand(b.queries, 1024, 16);
  const Operand keys = operand(stage_address(b, ring.stage), 1024, 16);
  wgmma_fence();
#pragma unroll
  for (int fill = 0; fill < FILLS; ++fill) {
    mbarrier_wait(shared_address(&b.state->full[ring.stage][fill]), ring.parity);
    if (!USE_TENSOR_MAP) fence_async_proxy();
#pragma unroll
    for (int i = 0; i < boxes_of_fill(fill) * 4; ++i) {
      const int box = box_of_fill(fill, i / 4), k = i % 4;
      wgmma_64x64(s, further(queries, box * QUERY_BOX_BYTES + k * 32),
                  further(keys, box * BOX_BYTES + k * 32), fill + i);
    }
  }
  wgmma_commit();
}

// Sets scores of keys that a row does not see, or whose page was out of bounds, to -inf.
DEVICE void mask_scores(const uint4& valid, int first_key, const Rows& rows, float (&s)[SCORES]) {
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

// The largest score of each of the thread's two rows, all lanes of the row alike.
DEVICE void find_tops(const float (&s)[SCORES], float (&top)[2]) {
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
}

// A key block on its way through a score group.
struct KeyBlock {
  Ring ring;
  int first_key;
  bool first;  // of its segment
  u32 before;  // how many maxima the other group hands on before the one of the block before
};

// Waits until the other group has handed on the running maximum of the block before.
DEVICE void await_top(const Block& b, const KeyBlock& k) {
  if (k.first) return;
  mbarrier_wait(shared_address(&b.state->topped[1 - b.half][threadIdx.x / 32 % 4]), k.before % 2);
}

DEVICE void hand_top_on(const Block& b) {
  __syncwarp();
  if (threadIdx.x % 32 == 0)
    mbarrier_arrive(shared_address(&b.state->topped[b.half][threadIdx.x / 32 % 4]));
}

// Raises the running maxima by the block's and hands them on; `base`: what weights are relative to.
DEVICE void raise_tops(const Block& b, const KeyBlock& k, const float (&s)[SCORES], Rows& rows,
                       float (&base)[2]) {
  State& state = *b.state;
  float top[2];
  find_tops(s, top);
  await_top(b, k);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float before = k.first ? NEGATIVE_INFINITY : state.handed_top[1 - b.half][tile_row(h)];
    const float raised = top[h] * b.params->scale_log2;
    top[h] = raised > before + TOP_SLACK ? raised : before;
    base[h] = top[h] == NEGATIVE_INFINITY ? 0.f : top[h];
    if (threadIdx.x % 4 == 0) {
      state.handed_top[b.half][tile_row(h)] = top[h];
      state.factor[k.ring.stage][tile_row(h)] = exp2_fast(before - base[h]);
    }
  }
  hand_top_on(b);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    rows.sum[h] *= exp2_fast(rows.top[h] - base[h]);
    rows.top[h] = top[h];
  }
}

// Softmax of one block against the running maximum; leaves weights and factors in shared memory.
// The weights lie over a box of keys, so all warps of the group are done with its products by now.
DEVICE void weigh_block(const Block& b, const KeyBlock& k, Rows& rows, float (&s)[SCORES]) {
  if (!rows.live) {
    await_top(b, k);
    hand_top_on(b);
    return;
  }
  const int lane = threadIdx.x % 32;
  const float scale = b.params->scale_log2;
  const uint4 valid = *(const uint4*)b.state->valid[k.ring.stage];
  const bool whole = (valid.x & valid.y & valid.z & valid.w) == 0x0f0f0f0f;
  if (!whole || k.first_key + BLOCK_TOKENS > imin(rows.visible[0], rows.visible[1]))
    mask_scores(valid, k.first_key, rows, s);
  float base[2];
  raise_tops(b, k, s, rows, base);
#pragma unroll
  for (int i = 0; i < SCORES; ++i) s[i] = exp2_fast(fmaf(s[i], scale, -base[i / 2 % 2]));
  const int stored_row = threadIdx.x / 32 % 4 * 16 + lane % 16;
  const u32 weights = stage_address(b, k.ring.stage) + WEIGHT_BOX * BOX_BYTES;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    store_tiles(weights + swizzled(stored_row, 2 * i + lane / 16),
                pack_bf16(s[8 * i], s[8 * i + 1]), pack_bf16(s[8 * i + 2], s[8 * i + 3]),
                pack_bf16(s[8 * i + 4], s[8 * i + 5]), pack_bf16(s[8 * i + 6], s[8 * i + 7]));
}

// Adds a block's weights to the denominators, after they are on their way to the value groups.
DEVICE void add_to_sums(float (&s)[SCORES], Rows& rows) {
  pin_registers(s);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < SCORES / 4; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) sum[i % 2 * 2 + e] += s[4 * i + 2 * h + e];
    rows.sum[h] += (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }
}

DEVICE void finish_scores(const Block& b, float (&s)[SCORES]) {
  wgmma_wait<0>();
  pin_registers(s);
  named_barrier(3 + b.half, 128);
}

// Softmax of this group's block, and its weights to both groups.
DEVICE void weigh_and_hand_over(const Block& b, const KeyBlock& k, Rows& rows, float (&s)[SCORES]) {
  weigh_block(b, k, rows, s);
  hand_over_weights(b, k.ring, k.first_key, rows.seen_by_all);
  add_to_sums(s, rows);
}

// Both groups' shares of each row's denominator, through shared memory. Two sets in turn, and a
// barrier between their uses.
DEVICE void exchange_sums(const Block& b, int set, Rows& rows) {
  State& state = *b.state;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = rows.sum[h];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (threadIdx.x % 4 != 0) continue;
    state.sum[set][b.half][tile_row(h)] = sum;
    state.top[set][b.half][tile_row(h)] = rows.top[h];
  }
  named_barrier(1, VALUE_THREADS);
}

DEVICE RowResult result_of_row(const Block& b, int set, int row) {
  const State& state = *b.state;
  const float first = state.top[set][0][row], second = state.top[set][1][row];
  const float top = fmaxf(first, second), base = top == NEGATIVE_INFINITY ? 0.f : top;
  return finish_row(state.sum[set][0][row] * exp2_fast(first - base) +
                        state.sum[set][1][row] * exp2_fast(second - base),
                    base);
}

// ---- values --------------------------------------------------------------------

// One value group's outputs: 64 rows, half of the columns.
struct Outputs {
  float panel[PANELS][PANEL_REGISTERS];
};

DEVICE void clear_outputs(Outputs& out) {
#pragma unroll
  for (int n = 0; n < PANELS; ++n)
#pragma unroll
    for (int i = 0; i < PANEL_REGISTERS; ++i) out.panel[n][i] = 0.f;
}

DEVICE void pin_outputs(Outputs& out) {
#pragma unroll
  for (int n = 0; n < PANELS; ++n) pin_registers(out.panel[n]);
}

// Multiplies one block's weights into this group's half of the columns, and gives the boxes back.
DEVICE void add_values(const Block& b, const Ring& ring, int rows, Outputs& out) {
  State& state = *b.state;
  mbarrier_wait(shared_address(&state.weighted[ring.stage]), ring.parity);
  if (uniform(threadIdx.x / 32 % 4 * 16 < rows)) {
    const float factor[2] = {state.factor[ring.stage][tile_row(0)],
                             state.factor[ring.stage][tile_row(1)]};
    if (__any_sync(~0u, factor[0] != 1.f || factor[1] != 1.f)) {
#pragma unroll
      for (int n = 0; n < PANELS; ++n)
#pragma unroll
        for (int i = 0; i < PANEL_REGISTERS; ++i) out.panel[n][i] *= factor[i / 2 % 2];
    }
  }
  const u32 keys = stage_address(b, ring.stage);
  const Operand weights = operand(keys + WEIGHT_BOX * BOX_BYTES, 1024, 16);
  const Operand values = operand(keys + b.half * (HALF_BOXES * BOX_BYTES), 1024, BOX_BYTES);
  pin_outputs(out);
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < PANELS; ++n) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
      wgmma_values(out.panel[n], further(weights, k * 32),
                   further(values, n * (PANEL_COLUMNS * 128) + k * 2048));
    wgmma_commit();
  }
  if (PANELS > 1) {
    wgmma_wait<PANELS - 1>();
    give_back_part(b, ring, 0);
  }
  wgmma_wait<0>();
  pin_outputs(out);
  give_back_part(b, ring, PANELS - 1);
}

// Stores one row of a segment, to the output or as a partial.
DEVICE void store_row(const Block& b, const Job& j, int h,
                      const Outputs& out, float inverse) {
  const DenseParams& p = *b.params;
  const int row = tile_row(h), quad = threadIdx.x % 4, column = b.half * (VALUE_WIDTH / 2);
  const bool empty = inverse == 0.f;
  if (j.slot < 0) {
    char* to = p.out + (((u64)j.flat_row + row) * VALUE_WIDTH + column + quad * 2) * 2;
#pragma unroll
    for (int i = 0; i < VALUE_WIDTH / 16; ++i) {
      const float* pair = out.panel[i / (PANEL_COLUMNS / 8)] + i % (PANEL_COLUMNS / 8) * 4 + 2 * h;
      store_outputs(to + 16 * i, empty ? 0 : pack_bf16(pair[0] * inverse, pair[1] * inverse));
    }
    return;
  }
  char* to = partial_row(p, j.flat_row, j.slot, row) + (column + quad * 8) * PARTIAL_BYTES;
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

DEVICE void store_segment(const Block& b, const Job& j, int set, const Outputs& out) {
  const DenseParams& p = *b.params;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = tile_row(h);
    if (row >= j.rows) continue;
    const RowResult result = result_of_row(b, set, row);
    store_row(b, j, h, out, result.inverse);
    if (b.half != 0 || threadIdx.x % 4 != 0) continue;
    if (j.slot < 0)
      p.lse[(u64)j.flat_row + row] = result.lse * p.lse_scale;
    else
      *partial_lse(p, j.flat_row, j.slot, row) = result.lse;
  }
}

// ---- the role -----------------------------------------------------------------------------------

// From so many key blocks on, a segment whose keys several tiles read is bound by the tensor cores:
// there group 1 begins when group 0's scores are made, so that one group's softmax runs beside the
// other's products. Where memory is the bound, both begin when their keys are there, and group 1
// multiplies the first block's weights before its own softmax, which frees that block sooner. The
// sums are the same in both orders.
constexpr int STAGGERED_BLOCKS = 16;

// The key blocks of a segment, two at a time: the first is group 0's and the second, if there is
// one, group 1's. `scored`: the blocks of each group so far.
DEVICE void attend_segment(const Block& b, const Job& job, Rows& rows, Ring& ring,
                           u32 (&scored)[2], Outputs& out) {
  float s[SCORES];
  const bool staggered = job.shared && job.blocks >= STAGGERED_BLOCKS;
#pragma unroll 1
  for (int j = 0; j < job.blocks; j += 2) {
    const Ring first = ring;
    advance<STAGES>(ring);
    const Ring second = ring;
    const bool two = j + 1 < job.blocks, mine = b.half == 0 || two;
    const KeyBlock k = {b.half == 0 ? first : second, (job.first_block + j + b.half) * BLOCK_TOKENS,
                        j + b.half == 0, b.half == 0 ? scored[1] - 1 : scored[0]};
    if (mine) {
      if (staggered && b.half == 1) named_barrier(5, VALUE_THREADS);
      begin_scores(b, k.ring, s);
      finish_scores(b, s);
      if (staggered && b.half == 0 && two) named_barrier_arrive(5, VALUE_THREADS);
    }
    if (b.half == 1 && !staggered) add_values(b, first, job.rows, out);
    if (mine) weigh_and_hand_over(b, k, rows, s);
    if (b.half == 0 || staggered) add_values(b, first, job.rows, out);
    scored[0] += 1;
    if (!two) break;
    add_values(b, second, job.rows, out);
    advance<STAGES>(ring);
    scored[1] += 1;
  }
}

DEVICE void take_queries(const Block& b, const Job& job, Rows& rows) {
  begin_queries(b, job);
  start_rows(b, job, rows);
  finish_queries();
}

DEVICE void attend(const Block& b) {
  Rings rings = {{0, 0}, {0, 0}};
  Rows rows;
  take_queries(b, make_job(b.state->schedule.first, {}), rows);  // before its job is ready
  u32 scored[2] = {0, 0};
  int set = 0;
  for (Job job = take_job(b, rings.jobs); job.blocks > 0; job = take_job(b, rings.jobs)) {
    if (job.new_queries) take_queries(b, job, rows);
    reset_rows(rows);
    Outputs out;
    clear_outputs(out);
    attend_segment(b, job, rows, rings.keys, scored, out);
    exchange_sums(b, set, rows);
    store_segment(b, job, set, out);
    set ^= 1;
    advance<JOBS>(rings.jobs);
    announce_partials(b, job);
  }
}
