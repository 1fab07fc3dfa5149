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
//   warp group 0         scores: query . key, softmax against the running maximum, weights to
//                        shared memory
//   warp groups 1 and 2  values: each multiplies every block's weights into its half of the
//                        columns, stores the result, and merges
//   warp group 3         fills the ring of key blocks: one warp with tensor maps, all with cp.async
// The value groups work on a block while group 0 scores the next.
//
// Shared memory (576/512): queries 72 KiB, two key blocks of 72 KiB, 3 KiB of state: 1 block per
// SM.

// ---- scores and softmax (group 0) ---------------------------------------------------------------

constexpr int PANEL_COLUMNS = VALUE_WIDTH / 2 > 128 ? 128 : VALUE_WIDTH / 2;  // of one product
constexpr int PANELS = VALUE_WIDTH / 2 / PANEL_COLUMNS;  // of one value group
constexpr int PANEL_REGISTERS = PANEL_COLUMNS / 2;       // 64 x PANEL_COLUMNS over 128 threads
static_assert(PANELS == HALF_PARTS, "a panel's columns are given back together");
constexpr int SCORES = 32;                               // 64 rows x 64 keys over 128 threads

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

DEVICE void reset_rows(Rows& rows) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    rows.top[h] = NEGATIVE_INFINITY;
    rows.sum[h] = 0.f;
  }
}

DEVICE void score_block(const Block& b, const Ring& ring, float (&s)[SCORES]) {
  const u32 keys = stage_address(b, ring.stage);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < BOXES; ++i) {
    const int box = box_of_turn(i);
    mbarrier_wait(shared_address(&b.state->full[ring.stage][box]), ring.parity);
    if (!USE_TENSOR_MAP) fence_async_proxy();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      wgmma_64x64(s, operand(b.queries + box * QUERY_BOX_BYTES + k * 32, 1024, 16),
                  operand(keys + box * BOX_BYTES + k * 32, 1024, 16), i + k);
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin_registers(s);
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

// Softmax of one block against the running maximum; leaves weights and factors in shared memory.
DEVICE void weigh_block(const Block& b, const Ring& ring, int first_key, Rows& rows,
                        float (&s)[SCORES]) {
  State& state = *b.state;
  const int lane = threadIdx.x % 32;
  if (!rows.live) return;
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

// ---- values (groups 1 and 2) --------------------------------------------------------------------

// One value group's outputs: 64 rows, half of the columns.
struct Outputs {
  float panel[PANELS][PANEL_REGISTERS];
};

DEVICE int value_row(int h) { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + 8 * h; }

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
  for (int n = 0; n < PANELS; ++n) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
      wgmma_values(out.panel[n], operand(keys + WEIGHT_BOX * BOX_BYTES + k * 32, 1024, 16),
                   operand(half + n * (PANEL_COLUMNS * 128) + k * 2048, 1024, BOX_BYTES));
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
