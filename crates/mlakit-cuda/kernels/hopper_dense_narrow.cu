// Dense MLA decode on Hopper (sm_90a), BF16 records, at most 16 (row, head) pairs a request: keys
// as the rows of the matrix products. One launch.
//
// Computes what hopper_dense_wide.cu computes. The tensor cores work on 64 rows at a time: there,
// 16 heads fill a quarter of them. Here keys (scores) and columns (values) are those rows and the
// 16 pairs are the columns, so both products take half of the clocks (they are bound by reading the
// keys from shared memory once), softmax is spread over four warps, and outputs are 32 registers.
//
// Shapes: as hopper_dense_wide.cu with value width 512; tiles of 16 pairs (NARROW 1).
//
//   warp group 0         scores S^T[64 keys, 16] = keys . queries^T; each warp has 16 keys; maxima
//                        cross the warps through shared memory; weights P^T go there as [16][64]
//   warp groups 1 and 2  values O^T[64 columns, 16] += values^T . P^T, four boxes of columns each
//   warp group 3         the producer
//
// Shared memory: queries 18 KiB, two key blocks of 72 KiB, state 6 KiB.

static_assert(STAGES == 2, "the two sets of maxima alternate with the ring's slots");
static_assert(NARROW == 1 && TILE_ROWS == 16, "compile with NARROW 1");
static_assert(VALUE_WIDTH == 512, "a thread's eight outputs of a row are one group of a partial");

// ---- scores and softmax (group 0) ---------------------------------------------------------------

constexpr int SCORES = 8;  // 64 keys x 16 pairs over 128 threads
constexpr int SCORE_REGISTERS = 120;

// The four pairs of the tile that a thread of group 0 holds, for keys lane / 4 and lane / 4 + 8 of
// its warp's 16: score [pair, key] is register 4 (pair / 2) + 2 key + pair % 2.
struct Rows {
  int visible[4];   // keys that the pair sees; 0 beyond the tile's pairs
  int seen_by_all;  // keys that every pair of the tile sees
  float top[4];     // running maximum, base-2 units
  float sum[4];     // this thread's share of the softmax denominator, relative to top
};

DEVICE int tile_row(int pair) { return pair / 2 * 8 + threadIdx.x % 4 * 2 + pair % 2; }

DEVICE void start_rows(const Block& b, const Job& j, Rows& rows) {
  rows.seen_by_all = keys_seen_by_all(*b.params, j);
#pragma unroll
  for (int c = 0; c < 4; ++c) rows.visible[c] = visible_keys(*b.params, j, tile_row(c));
}

DEVICE void reset_rows(Rows& rows) {
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    rows.top[c] = NEGATIVE_INFINITY;
    rows.sum[c] = 0.f;
  }
}

DEVICE void score_block(const Block& b, const Ring& ring, float (&s)[SCORES]) {
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
      wgmma_64x16(s, further(keys, box * BOX_BYTES + k * 32),
                  further(queries, box * QUERY_BOX_BYTES + k * 32), fill + i);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin_registers(s);
}

// Sets scores of keys that a pair does not see, or whose page was out of bounds, to -inf.
DEVICE void mask_scores(u32 valid, int first_key, const Rows& rows, float (&s)[SCORES]) {
#pragma unroll
  for (int i = 0; i < SCORES; ++i) {
    const int key = threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
    const bool good = valid >> (key / 4 * 8 + key % 4) & 1;
    if (first_key + key >= rows.visible[i / 4 * 2 + i % 2] || !good) s[i] = NEGATIVE_INFINITY;
  }
}

// The largest of eight lanes that hold the same pairs.
DEVICE void reduce_tops(float (&top)[4]) {
#pragma unroll
  for (int d = 4; d < 32; d *= 2)
#pragma unroll
    for (int c = 0; c < 4; ++c) top[c] = fmaxf(top[c], __shfl_xor_sync(~0u, top[c], d));
}

// Raises the running maxima by the block's; all warps of the group agree. Two sets of maxima in
// turn: a warp writes a set again only after a barrier that follows all reads of it.
DEVICE void raise_tops(const Block& b, const Ring& ring, const float (&s)[SCORES], Rows& rows,
                       float (&factor)[4]) {
  State& state = *b.state;
  float(&tops)[4][TILE_ROWS] = state.warp_top[ring.stage % 2];
  const float scale = b.params->scale_log2;
  float top[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) top[c] = fmaxf(s[c / 2 * 4 + c % 2], s[c / 2 * 4 + c % 2 + 2]);
  reduce_tops(top);
  if (threadIdx.x % 32 < 4)
#pragma unroll
    for (int c = 0; c < 4; ++c) tops[threadIdx.x / 32][tile_row(c)] = top[c];
  named_barrier(2, 128);
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const int row = tile_row(c);
    const float all = fmaxf(fmaxf(tops[0][row], tops[1][row]), fmaxf(tops[2][row], tops[3][row]));
    const float raised = fmaxf(all * scale, rows.top[c]);
    factor[c] = raised == NEGATIVE_INFINITY ? 1.f : exp2_fast(rows.top[c] - raised);
    rows.top[c] = raised;
    if (threadIdx.x < 4) state.factor[ring.stage][row] = factor[c];
  }
}

// Softmax of one block against the running maximum; leaves weights and factors in shared memory.
DEVICE void weigh_block(const Block& b, const Ring& ring, int first_key, Rows& rows,
                        float (&s)[SCORES]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float scale = b.params->scale_log2;
  const u32 valid = b.state->valid[ring.stage][warp];
  mask_scores(valid, first_key + warp * 16, rows, s);
  float factor[4];
  raise_tops(b, ring, s, rows, factor);
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float base = rows.top[c] == NEGATIVE_INFINITY ? 0.f : rows.top[c];
    float& first = s[c / 2 * 4 + c % 2];
    float& second = s[c / 2 * 4 + c % 2 + 2];
    first = exp2_fast(fmaf(first, scale, -base));
    second = exp2_fast(fmaf(second, scale, -base));
    rows.sum[c] *= factor[c];
  }
  // Tiles: pairs 0-7 of keys 0-7 and 8-15 of the warp, then pairs 8-15.
  const u32 weights = stage_address(b, ring.stage) + WEIGHT_BOX * BOX_BYTES;
  store_tiles_transposed(weights + swizzled(lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2),
                         pack_bf16(s[0], s[1]), pack_bf16(s[2], s[3]), pack_bf16(s[4], s[5]),
                         pack_bf16(s[6], s[7]));
}

DEVICE void add_to_sums(const float (&s)[SCORES], Rows& rows) {
#pragma unroll
  for (int c = 0; c < 4; ++c) rows.sum[c] += s[c / 2 * 4 + c % 2] + s[c / 2 * 4 + c % 2 + 2];
}

// Publishes the rows' results in a segment to the value groups.
DEVICE void publish_rows(const Block& b, const Ring& result, Rows& rows) {
  State& state = *b.state;
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
#pragma unroll
    for (int d = 4; d < 32; d *= 2) rows.sum[c] += __shfl_xor_sync(~0u, rows.sum[c], d);
    if (threadIdx.x % 32 < 4) state.warp_sum[warp][tile_row(c)] = rows.sum[c];
  }
  named_barrier(2, 128);
  if (threadIdx.x < 4)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int row = tile_row(c);
      const float sum = (state.warp_sum[0][row] + state.warp_sum[1][row]) +
                        (state.warp_sum[2][row] + state.warp_sum[3][row]);
      const RowResult done = finish_row(sum, rows.top[c]);
      state.inverse[result.stage][row] = done.inverse;
      state.lse[result.stage][row] = done.lse;
    }
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&state.published[result.stage]));
}

DEVICE void score_segment(const Block& b, const Job& job, Rows& rows, Ring& ring) {
  float s[SCORES];
#pragma unroll 1
  for (int j = 0; j < job.blocks; ++j) {
    const int first_key = (job.first_block + j) * BLOCK_TOKENS;
    score_block(b, ring, s);
    weigh_block(b, ring, first_key, rows, s);
    hand_over_weights(b, ring, first_key, rows.seen_by_all);
    add_to_sums(s, rows);
    advance<STAGES>(ring);
  }
}

DEVICE void take_queries(const Block& b, const Job& job, Rows& rows) {
  begin_queries(b, job);
  start_rows(b, job, rows);
  finish_queries();
}

DEVICE void score(const Block& b) {
  Rings rings = {{0, 0}, {0, 0}};
  Rows rows;
  take_queries(b, make_job(b.state->schedule.first, {}), rows);  // before its job is ready
  for (Job job = take_job(b, rings.jobs); job.blocks > 0; job = take_job(b, rings.jobs)) {
    if (job.new_queries) take_queries(b, job, rows);
    reset_rows(rows);
    score_segment(b, job, rows, rings.keys);
    publish_rows(b, rings.jobs, rows);
    advance<JOBS>(rings.jobs);
  }
}

// ---- values (groups 1 and 2) --------------------------------------------------------------------

// One value group's outputs, transposed: box [i] has 64 columns x 16 pairs, register
// 4 (pair / 2) + 2 e + pair % 2 is column 16 warp + 8 e + lane / 4 of it.
struct Outputs {
  float box[HALF_BOXES][8];
};

DEVICE void clear_outputs(Outputs& out) {
#pragma unroll
  for (int n = 0; n < HALF_BOXES; ++n)
#pragma unroll
    for (int i = 0; i < 8; ++i) out.box[n][i] = 0.f;
}

DEVICE void pin_outputs(Outputs& out) {
#pragma unroll
  for (int n = 0; n < HALF_BOXES; ++n) pin_registers(out.box[n]);
}

// Multiplies one block's weights into this group's half of the columns, and gives the boxes back.
DEVICE void add_values(const Block& b, const Ring& ring, int rows, Outputs& out) {
  State& state = *b.state;
  mbarrier_wait(shared_address(&state.weighted[ring.stage]), ring.parity);
  float factor[4];
  bool same = true;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    factor[c] = state.factor[ring.stage][tile_row(c)];
    same = same && factor[c] == 1.f;
  }
  if (!__all_sync(~0u, same)) {
#pragma unroll
    for (int n = 0; n < HALF_BOXES; ++n)
#pragma unroll
      for (int i = 0; i < 8; ++i) out.box[n][i] *= factor[i / 4 * 2 + i % 2];
  }
  const u32 keys = stage_address(b, ring.stage);
  const Operand weights = operand(keys + WEIGHT_BOX * BOX_BYTES, 1024, 16);
  const Operand values = operand(keys + b.half * (HALF_BOXES * BOX_BYTES), 1024, BOX_BYTES);
  pin_outputs(out);
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < HALF_BOXES; ++n) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
      wgmma_columns(out.box[n], further(values, n * BOX_BYTES + k * 2048),
                    further(weights, k * 32));
    if (n % PART_BOXES == PART_BOXES - 1) wgmma_commit();
  }
  wgmma_wait<1>();
  give_back_part(b, ring, 0);
  wgmma_wait<0>();
  pin_outputs(out);
  give_back_part(b, ring, 1);
}

// Stores eight columns of one pair, to the output or as a group of a partial.
DEVICE void store_row(const Block& b, const Job& j, int pair, float inverse, const Outputs& out) {
  const DenseParams& p = *b.params;
  const int row = tile_row(pair), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  float v[GROUP_COLUMNS];
#pragma unroll
  for (int i = 0; i < GROUP_COLUMNS; ++i)
    v[i] = inverse == 0.f ? 0.f
                          : out.box[i / 2][pair / 2 * 4 + i % 2 * 2 + pair % 2] * inverse;
  if (j.slot >= 0) {
    const int group = b.half * 32 + warp * 8 + lane / 4;
    store_group(partial_row(p, j.flat_row, j.slot, row) + group * (GROUP_COLUMNS * PARTIAL_BYTES), v);
    return;
  }
  const int column = b.half * 256 + warp * 16 + lane / 4;
  unsigned short* to = (unsigned short*)p.out + ((u64)j.flat_row + row) * VALUE_WIDTH + column;
#pragma unroll
  for (int i = 0; i < GROUP_COLUMNS; ++i) to[i / 2 * 64 + i % 2 * 8] = pack_bf16(v[i], 0.f);
}

DEVICE void store_segment(const Block& b, const Job& j, const Ring& jobs, const Outputs& out) {
  const DenseParams& p = *b.params;
  State& state = *b.state;
  mbarrier_wait(shared_address(&state.published[jobs.stage]), jobs.parity);
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const int row = tile_row(c);
    if (row >= j.rows) continue;
    store_row(b, j, c, state.inverse[jobs.stage][row], out);
    if (b.half != 0 || threadIdx.x % 128 >= 4) continue;
    const float lse = state.lse[jobs.stage][row];
    if (j.slot < 0)
      p.lse[(u64)j.flat_row + row] = lse * p.lse_scale;
    else
      *partial_lse(p, j.flat_row, j.slot, row) = lse;
  }
}

DEVICE void attend(const Block& b) {
  Rings rings = {{0, 0}, {0, 0}};
  for (Job job = take_job(b, rings.jobs); job.blocks > 0; job = take_job(b, rings.jobs)) {
    Outputs out;
    clear_outputs(out);
#pragma unroll 1
    for (int j = 0; j < job.blocks; ++j) {
      add_values(b, rings.keys, job.rows, out);
      advance<STAGES>(rings.keys);
    }
    store_segment(b, job, rings.jobs, out);
    advance<JOBS>(rings.jobs);
    announce_partials(b, job);
  }
}
