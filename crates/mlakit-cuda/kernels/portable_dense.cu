// Portable dense attention (sm_80 and newer): mma.sync, ldmatrix, cp.async, at most 99 KB of shared
// memory.
//
// For the pairs (row, head) of a tile and one split of their keys: scores z = scale (q . k),
// weights p = 2^(z - m), outputs sum p v / sum p where v is the beginning of k, and log-sum-exps.
// Shapes: any number of heads; even widths whose steps fit (the host computes KEYS and STAGES);
// BF16 or E4M3 records at any alignment, 16 bytes being the fast one; pages of any size.
//
// A block has 8 warps and takes its keys in steps of KEYS, in one order whatever the tile, so that
// a row's bits do not depend on the rows beside it.
//
//   scores   warp w multiplies quarter w / 2 of the query elements, which stay in registers, with
//            half w % 2 of the step's keys; the quarters' sums meet in shared memory
//   softmax  8 threads a row; running maximum and sum in registers
//   values   warp w has columns of its own and all keys of the step; outputs stay in registers
//   copies   every thread copies its share of one key of the step that comes STAGES - 1 steps later
//
// So a key is read from shared memory once for its score and once for its value, and an E4M3 key is
// decoded as often. Registers: 4 TILE_MATRICES (QK_WIDTH / 64 + VALUE_WIDTH / 64) for queries and
// outputs. Shared memory: STAGES steps of padded keys, four score tiles, one tile of weights.

constexpr int ELEMENT_BYTES = RECORD_E4M3 ? 1 : 2;
constexpr int KEY_BYTES = QK_WIDTH * ELEMENT_BYTES;
constexpr int CHUNKS = ceil_div(QK_WIDTH, 16) * ELEMENT_BYTES;  // of 16 bytes, of a key
constexpr int KEY_STRIDE = (CHUNKS | 1) * 16;  // odd: ldmatrix meets every bank once
constexpr int STEP_BYTES = KEYS * KEY_STRIDE;
constexpr int QUARTERS = 4;
constexpr int PRODUCTS = ceil_div(QK_WIDTH, 16);            // of 16 elements, of a score
constexpr int QUARTER_PRODUCTS = ceil_div(PRODUCTS, QUARTERS);
constexpr int COMMON_PRODUCTS = PRODUCTS - (QUARTERS - 1) * QUARTER_PRODUCTS;  // of all quarters
constexpr int KEY_TILES = KEYS / 16;                        // of 8 keys, of a warp's half
constexpr int COLUMN_GROUPS = ceil_div(VALUE_WIDTH, 16);    // of 16 columns
constexpr int WARP_GROUPS = ceil_div(COLUMN_GROUPS, WARPS);
constexpr int COMMON_GROUPS = COLUMN_GROUPS - (WARPS - 1) * WARP_GROUPS;  // of all warps
constexpr int SCORE_STRIDE = KEYS + 8;
constexpr int WEIGHT_STRIDE = KEYS + 8;
constexpr int ROW_THREADS = 8;                              // of softmax
constexpr int ROW_KEYS = KEYS / ROW_THREADS;
constexpr int KEY_THREADS = THREADS / KEYS;                 // that copy one key
constexpr bool SCORES_HALF = QUERY != 0;    // E4M3 queries are exact in F16, BF16 ones are not
constexpr bool VALUES_HALF = RECORD_E4M3;   // E4M3 values are exact in F16, and decoded in one step

static_assert(KEYS == 16 || KEYS == 32, "a warp's half has one or two tiles of 8 keys");
static_assert(TILE_ROWS * ROW_THREADS <= THREADS, "softmax has a thread for each share of a row");

struct Shared {
  u8 keys[STAGES][STEP_BYTES];
  float scores[QUARTERS][TILE_ROWS][SCORE_STRIDE];
  u16 weights[TILE_ROWS][WEIGHT_STRIDE];
  float factors[TILE_ROWS];   // by which a row's outputs shrink
  u8 there[STAGES][KEYS];     // 1: the key was copied; 0: it is not there
  WorkShared work;
};

#ifdef SHARED_BYTES
static_assert(sizeof(Shared) == SHARED_BYTES, "the host asks for this much");
#endif

// Where shared memory has room for one block of a multiprocessor, it may take all the registers.
#if __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
constexpr int MULTIPROCESSOR_BYTES = 100 * 1024;
#elif __CUDA_ARCH__ < 900
constexpr int MULTIPROCESSOR_BYTES = 164 * 1024;
#else
constexpr int MULTIPROCESSOR_BYTES = 228 * 1024;
#endif
constexpr bool TWO_FIT = 2 * (sizeof(Shared) + 1024) <= MULTIPROCESSOR_BYTES;

// ---- copies ----------------------------------------------------------------------------------

// Where a thread's share of the keys comes from, one key a step.
struct Source {
  const u8* pool;
  u64 pages;
  u64 page_stride_bytes;
  const int* entry;   // of the page table, for the next key
  int in_page;        // the next key's place in its page
  int position;       // of the next key
  int page;           // id of its page, fetched a step ahead; -1: none
  bool aligned;
};

DEVICE void fetch_page(Source& s, Range keys) {
  s.page = s.position >= keys.begin && s.position < keys.end ? *s.entry : -1;
}

DEVICE Source make_source(const DenseParams& p, const WorkShared& work, int first) {
  Source s;
  s.pool = (const u8*)p.view->base;
  s.pages = p.view->pages;
  s.page_stride_bytes = p.view->page_stride_bytes;
  s.position = first + (int)threadIdx.x / KEY_THREADS;
  const u32 entry = (u32)s.position / (u32)p.page_size;
  s.entry = p.page_table + (i64)work.tile.request * p.table_width + entry;
  s.in_page = s.position - (int)entry * p.page_size;
  s.aligned = ((p.view->base | s.page_stride_bytes | (u64)p.record_bytes) & 15) == 0;
  fetch_page(s, work.keys);
  return s;
}

// On to the key of the next step.
DEVICE void advance(const DenseParams& p, Source& s, Range keys) {
  s.position += KEYS;
  s.entry += p.step_pages;
  s.in_page += p.step_tokens;
  if (s.in_page >= p.page_size) {
    s.in_page -= p.page_size;
    ++s.entry;
  }
  fetch_page(s, keys);
}

// 16 bytes of a record that lies anywhere, zeros behind its first `bytes`.
DEVICE uint4 gather_16(const u8* from, int bytes) {
  u32 words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 16 / ELEMENT_BYTES; ++i) {
    if (i * ELEMENT_BYTES >= bytes) continue;
    const u32 element = RECORD_E4M3 ? from[i] : ((const u16*)from)[i];
    words[i * ELEMENT_BYTES / 4] |= element << (i * ELEMENT_BYTES % 4 * 8);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Starts to copy this thread's share of the next step. A key outside of the range, or of no page of
// the pool, becomes zeros: no byte of it is read.
DEVICE void copy_step(const DenseParams& p, Shared& shared, Source& s, Range keys, int stage) {
  const int key = threadIdx.x / KEY_THREADS, part = threadIdx.x % KEY_THREADS;
  const bool there = s.page >= 0 && (u64)s.page < s.pages;
  const u64 offset = (u64)s.page * s.page_stride_bytes + (u64)s.in_page * (u64)p.record_bytes;
  const u8* record = there ? s.pool + offset : (const u8*)p.faults;
  u8* to = shared.keys[stage] + key * KEY_STRIDE;
  if (part == 0) shared.there[stage][key] = there;
  if (s.aligned || !there) {
    const u32 into = shared_address(to);
#pragma unroll
    for (int i = 0; i < ceil_div(CHUNKS, KEY_THREADS); ++i) {
      const int at = (part + i * KEY_THREADS) * 16;
      if ((i + 1) * KEY_THREADS > CHUNKS && at >= CHUNKS * 16) break;
      copy_async_16(into + at, record + at, there ? clamp(KEY_BYTES - at, 0, 16) : 0);
    }
  } else {
#pragma unroll 1
    for (int at = part * 16; at < CHUNKS * 16; at += KEY_THREADS * 16)
      *(uint4*)(to + at) = gather_16(record + at, KEY_BYTES - at);
  }
  advance(p, s, keys);
}

// ---- queries ---------------------------------------------------------------------------------

// Elements `column` and the next of a query, as the scores multiply them. The query may begin at
// any element, so they are read one by one.
DEVICE u32 query_pair(const DenseParams& p, i64 vector, int column, float scale) {
  if (column >= QK_WIDTH) return 0;
  const i64 at = vector * QK_WIDTH + column;
  if (QUERY == 1) return decode_e4m3(p.q[at] | (u32)p.q[at + 1] << 8);
  const u32 low = ((const u16*)p.q)[at], high = ((const u16*)p.q)[at + 1];
  if (QUERY == 0) return low | high << 16;
  return decode_e4m3(encode_e4m3(bf16_low(low), scale) | encode_e4m3(bf16_low(high), scale) << 8);
}

// A warp's quarter of the queries, in the order in which the products take it. A thread of an E4M3
// product has four elements side by side, so that it reads four codes of a key at once.
struct Queries {
  u32 pairs[TILE_MATRICES][QUARTER_PRODUCTS][4];
};

DEVICE void load_queries(const DenseParams& p, const Tile& tile, float scale, Queries& q) {
  const int lane = threadIdx.x % 32, quarter = threadIdx.x / 64;
  const i64 first_vector = (i64)tile.first_row * p.heads + tile.first_pair;
#pragma unroll
  for (int m = 0; m < TILE_MATRICES; ++m)
#pragma unroll
    for (int i = 0; i < QUARTER_PRODUCTS; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = m * 16 + lane / 4 + j % 2 * 8;
        const int first = (quarter * QUARTER_PRODUCTS + i) * 16;
        const int column = RECORD_E4M3 ? lane % 4 * 4 + j / 2 * 2 : lane % 4 * 2 + j / 2 * 8;
        q.pairs[m][i][j] =
            row < tile.pairs ? query_pair(p, first_vector + row, first + column, scale) : 0;
      }
}

// ---- scores ----------------------------------------------------------------------------------

// The elements of `KEY_TILES` x 8 keys for one product, in pairs of 16 bits.
DEVICE void load_keys(u32 (&keys)[KEY_TILES][2], u32 step, int product) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 % 2 * (8 * KEY_TILES);
#if RECORD_E4M3
  u32 codes[KEY_TILES];
  const int key = first + lane % (8 * KEY_TILES);
  load_matrices(codes, step + key * KEY_STRIDE + product * 16);
#pragma unroll
  for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const u32 pair = decode_e4m3(codes[n] >> (16 * j));
      keys[n][j] = SCORES_HALF ? pair : f16_to_bf16(pair);
    }
#else
  u32 pairs[2 * KEY_TILES];
  const int key = first + lane / 16 % KEY_TILES * 8 + lane % 8;
  load_matrices(pairs, step + key * KEY_STRIDE + product * 32 + lane / 8 % 2 * 16);
#pragma unroll
  for (int n = 0; n < KEY_TILES; ++n) keys[n][0] = pairs[2 * n], keys[n][1] = pairs[2 * n + 1];
#endif
}

// This warp's quarter of the scores of its half of the keys, to shared memory.
DEVICE void multiply_queries(Shared& shared, const Queries& q, int stage) {
  const int lane = threadIdx.x % 32, quarter = threadIdx.x / 64;
  const u32 step = shared_address(shared.keys[stage]);
  float sums[TILE_MATRICES][KEY_TILES][4] = {};
#pragma unroll
  for (int i = 0; i < QUARTER_PRODUCTS; ++i) {
    const int product = quarter * QUARTER_PRODUCTS + i;
    if (i >= COMMON_PRODUCTS && product >= PRODUCTS) break;
    u32 keys[KEY_TILES][2];
    load_keys(keys, step, product);
#pragma unroll
    for (int m = 0; m < TILE_MATRICES; ++m)
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n)
        multiply<SCORES_HALF>(sums[m][n], q.pairs[m][i], keys[n][0], keys[n][1]);
  }
  const int first_key = threadIdx.x / 32 % 2 * (8 * KEY_TILES) + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < TILE_MATRICES; ++m)
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* to = &shared.scores[quarter][m * 16 + half * 8 + lane / 4][first_key + n * 8];
        *(float2*)to = make_float2(sums[m][n][2 * half], sums[m][n][2 * half + 1]);
      }
}

// ---- softmax ---------------------------------------------------------------------------------

// One row, as its 8 threads have it.
struct Row {
  Range keys;   // that it sees in this split
  float top;    // running maximum of z, to base 2; the same in all 8
  float sum;    // of this thread's weights, relative to `top`
};

DEVICE float top_of_row(float value) {
#pragma unroll
  for (int d = 1; d < ROW_THREADS; d *= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, d));
  return value;
}

// Turns the scores of the step at `first` into weights, and updates the row. True if some score of
// this thread, visible or not, is not finite: then a key or a query may hold such a number.
DEVICE bool softmax(Shared& shared, Row& r, float scale, int first, int stage) {
  const int row = threadIdx.x / ROW_THREADS, share = threadIdx.x % ROW_THREADS * ROW_KEYS;
  if (row >= TILE_ROWS) return false;
  u32 there = *(const u16*)&shared.there[stage][share];
  if (ROW_KEYS == 4) there |= (u32)*(const u16*)&shared.there[stage][share + 2] << 16;
  float z[ROW_KEYS];
  bool irregular = false;
  float top = -INFINITE;
#pragma unroll
  for (int i = 0; i < ROW_KEYS; ++i) {
    const int key = share + i, position = first + key;
    float dot = shared.scores[0][row][key];
#pragma unroll
    for (int quarter = 1; quarter < QUARTERS; ++quarter) dot += shared.scores[quarter][row][key];
    irregular |= !(fabsf(dot) < INFINITE);
    // Without branches, so that the loads of all keys are under way together.
    const bool in_range = (position >= r.keys.begin) & (position < r.keys.end);
    const bool seen = in_range & ((there >> 8 * i & 1) != 0);
    z[i] = seen ? __fmul_rn(dot, scale) : -INFINITE;
    top = fmaxf(top, z[i]);
  }
  top = fmaxf(r.top, top_of_row(top));  // of a number and NaN the number
  const float base = top == -INFINITE ? 0.f : top;
  const float factor = exp2_fast(r.top - base);
  r.top = top;
  float weights[ROW_KEYS], sum = 0.f;
#pragma unroll
  for (int i = 0; i < ROW_KEYS; ++i) {
    weights[i] = exp2_fast(z[i] - base);
    sum += weights[i];
  }
  r.sum = __fmaf_rn(r.sum, factor, sum);
#pragma unroll
  for (int i = 0; i < ROW_KEYS; i += 2)
    *(u32*)&shared.weights[row][share + i] = pack<VALUES_HALF>(weights[i], weights[i + 1]);
  if (share == 0) shared.factors[row] = factor;
  return irregular;
}

// ---- values ----------------------------------------------------------------------------------

// Outputs [TILE_ROWS, 16 columns a group], two product tiles a group.
struct Outputs {
  float sums[TILE_MATRICES][WARP_GROUPS][2][4];
};

// The group of columns, row and column of an accumulator. E4M3 values are read in pairs of columns,
// so the two tiles of a group have the even and the odd columns.
DEVICE int group_of(int i) { return threadIdx.x / 32 * WARP_GROUPS + i; }
DEVICE int row_of(int m, int e) { return m * 16 + threadIdx.x % 32 / 4 + e / 2 * 8; }
DEVICE int column_of(int i, int n, int e) {
  const int first = group_of(i) * 16, t = threadIdx.x % 4;
  return RECORD_E4M3 ? first + 4 * t + 2 * (e % 2) + n : first + 8 * n + 2 * t + e % 2;
}

DEVICE void shrink_outputs(const Shared& shared, Outputs& o) {
#pragma unroll
  for (int m = 0; m < TILE_MATRICES; ++m) {
    const float low = shared.factors[row_of(m, 0)], high = shared.factors[row_of(m, 2)];
    if (__all_sync(~0u, low == 1.f && high == 1.f)) continue;
#pragma unroll
    for (int i = 0; i < WARP_GROUPS; ++i)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        o.sums[m][i][n][0] *= low, o.sums[m][i][n][1] *= low;
        o.sums[m][i][n][2] *= high, o.sums[m][i][n][3] *= high;
      }
  }
}

// The values of 16 keys from `first` on, of 16 columns: two product tiles.
DEVICE void load_values(u32 (&values)[2][2], u32 step, int first, int group) {
  const int lane = threadIdx.x % 32;
  const u32 key = step + (first + lane % 16) * KEY_STRIDE;
#if RECORD_E4M3
  u32 codes[2];
  load_transposed(codes, key + group * 16);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    values[0][j] = decode_e4m3(__byte_perm(codes[j], 0, 0x4420));
    values[1][j] = decode_e4m3(__byte_perm(codes[j], 0, 0x4431));
  }
#else
  u32 pairs[4];
  load_transposed(pairs, key + group * 32 + lane / 16 * 16);
#pragma unroll
  for (int j = 0; j < 4; ++j) values[j / 2][j % 2] = pairs[j];
#endif
}

DEVICE void multiply_values(const Shared& shared, Outputs& o, int stage) {
  const int lane = threadIdx.x % 32;
  const u32 step = shared_address(shared.keys[stage]);
  const u32 weights = shared_address(&shared.weights[lane % 16][lane / 16 * 8]);
#pragma unroll
  for (int first = 0; first < KEYS; first += 16) {
    u32 w[TILE_MATRICES][4];
#pragma unroll
    for (int m = 0; m < TILE_MATRICES; ++m)
      load_matrices(w[m], weights + (m * 16 * WEIGHT_STRIDE + first) * 2);
#pragma unroll
    for (int i = 0; i < WARP_GROUPS; ++i) {
      if (i >= COMMON_GROUPS && group_of(i) >= COLUMN_GROUPS) break;
      u32 values[2][2];
      load_values(values, step, first, group_of(i));
#pragma unroll
      for (int m = 0; m < TILE_MATRICES; ++m)
#pragma unroll
        for (int n = 0; n < 2; ++n)
          multiply<VALUES_HALF>(o.sums[m][i][n], w[m], values[n][0], values[n][1]);
    }
  }
}

// ---- numbers that are not finite -------------------------------------------------------------

DEVICE bool is_finite(const u8* key, int column) {
  if (RECORD_E4M3) return (key[column] & 0x7f) != 0x7f;
  return (((const u16*)key)[column] & 0x7f80) != 0x7f80;
}

// A weight of 0 times a value that is not finite is NaN: that is right for a row that sees the key
// and wrong for one that does not. So the outputs of the rows that see it become NaN here, and then
// such values become 0 for all. Entered by the whole block, and almost never.
DEVICE void settle_values(Shared& shared, Outputs& o, int first, int stage) {
  u8* step = shared.keys[stage];
#pragma unroll 1
  for (int key = 0; key < KEYS; ++key) {
    const int position = first + key;
#pragma unroll
    for (int m = 0; m < TILE_MATRICES; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const Range seen = shared.work.rows[row_of(m, e)];
        if (position < seen.begin || position >= seen.end) continue;
#pragma unroll
        for (int i = 0; i < WARP_GROUPS; ++i)
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const int column = column_of(i, n, e);
            if (column < VALUE_WIDTH && !is_finite(step + key * KEY_STRIDE, column))
              o.sums[m][i][n][e] = __int_as_float(0x7fffffff);
          }
      }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < KEYS * VALUE_WIDTH; i += THREADS) {
    u8* key = step + i / VALUE_WIDTH * KEY_STRIDE;
    const int column = i % VALUE_WIDTH;
    if (is_finite(key, column)) continue;
    if (RECORD_E4M3)
      key[column] = 0;
    else
      ((u16*)key)[column] = 0;
  }
  __syncthreads();
}

// ---- results ---------------------------------------------------------------------------------

// The result of the tile's first pair in this split, counted in vectors of VALUE_WIDTH.
DEVICE i64 first_result(const DenseParams& p, const Tile& tile, int split) {
  const i64 vectors = (i64)p.rows * p.heads;
  return split * vectors + (i64)tile.first_row * p.heads + tile.first_pair;
}

// F32 results are partial ones, in aligned scratch; an output may begin at any element.
DEVICE void store_pair(const DenseParams& p, i64 at, float a, float b) {
  const u32 pair = pack<false>(a, b);
  if (p.out_f32) {
    *(float2*)(p.out + at * 4) = make_float2(a, b);
  } else if (((u64)p.out & 3) == 0) {
    *(u32*)(p.out + at * 2) = pair;
  } else {
    ((u16*)p.out)[at] = (u16)pair;
    ((u16*)p.out)[at + 1] = (u16)(pair >> 16);
  }
}

// No row sees a key: log-sum-exp -inf, and output 0. Of a partial result nobody reads the output.
DEVICE void store_nothing(const DenseParams& p, const Tile& tile, int split) {
  const i64 first = first_result(p, tile, split);
  for (int i = threadIdx.x; i < tile.pairs; i += THREADS) p.lse[first + i] = -INFINITE;
  if (p.splits > 1) return;
  for (int i = threadIdx.x * 2; i < tile.pairs * VALUE_WIDTH; i += THREADS * 2)
    store_pair(p, first * VALUE_WIDTH + i, 0.f, 0.f);
}

// The row's log-sum-exp, and the factor that makes its outputs the result. Rounded to F32 in base 2
// first whatever the base, as a partial result is: then one live split and one split alone give the
// same bits.
DEVICE void finish_row(const DenseParams& p, Shared& shared, const Row& r, int split) {
  const int row = threadIdx.x / ROW_THREADS;
  if (row >= TILE_ROWS) return;
  float sum = r.sum;
#pragma unroll
  for (int d = 1; d < ROW_THREADS; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (threadIdx.x % ROW_THREADS != 0) return;
  const float value_scale = p.kv_scale ? *p.kv_scale : 1.f;
  const bool nothing = sum == 0.f, valid = sum > 0.f && sum < INFINITE;
  const float nan = __int_as_float(0x7fffffff);
  shared.factors[row] = nothing ? 0.f : valid ? __fdiv_rn(value_scale, sum) : nan;
  const float lse = __fmul_rn(__fadd_rn(r.top, log2f(sum)), p.lse_scale);
  if (row < shared.work.tile.pairs)
    p.lse[first_result(p, shared.work.tile, split) + row] = nothing ? -INFINITE : valid ? lse : nan;
}

DEVICE void store_outputs(const DenseParams& p, const Shared& shared, const Outputs& o, int split) {
  const Tile& tile = shared.work.tile;
  const i64 first = first_result(p, tile, split);
#pragma unroll
  for (int m = 0; m < TILE_MATRICES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(m, 2 * half);
      if (row >= tile.pairs) continue;
      const float factor = shared.factors[row];
#pragma unroll
      for (int i = 0; i < WARP_GROUPS; ++i)
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          // The two columns of a pair lie side by side in one tile, or one in each.
          const int column = RECORD_E4M3 ? column_of(i, 0, n) : column_of(i, n, 0);
          const float a = RECORD_E4M3 ? o.sums[m][i][0][2 * half + n] : o.sums[m][i][n][2 * half];
          const float b =
              RECORD_E4M3 ? o.sums[m][i][1][2 * half + n] : o.sums[m][i][n][2 * half + 1];
          if (column < VALUE_WIDTH)
            store_pair(p, (first + row) * VALUE_WIDTH + column, a * factor, b * factor);
        }
    }
}

// ---- the kernel ------------------------------------------------------------------------------

// Multiplies a sum of products of stored elements: z to base 2.
DEVICE float score_scale(const DenseParams& p, float q_scale) {
  const double kv_scale = p.kv_scale ? *p.kv_scale : 1.f;
  return (float)(p.softmax_scale * kv_scale * q_scale * 1.4426950408889634);
}

DEVICE void attend(const DenseParams& p, Shared& shared, int split) {
  const Range keys = shared.work.keys;
  const int begin = keys.begin / KEYS * KEYS;
  Source source = make_source(p, shared.work, begin);
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    copy_step(p, shared, source, keys, stage);
    commit_copies();
  }
  const float q_scale = p.q_scale ? *p.q_scale : 1.f;
  Queries queries;
  load_queries(p, shared.work.tile, q_scale, queries);
  count_pages(p, shared.work, split);
  const float scale = score_scale(p, q_scale);
  Row row = {shared.work.rows[threadIdx.x / ROW_THREADS % TILE_ROWS], -INFINITE, 0.f};
  Outputs outputs = {};
  int stage = 0;
#pragma unroll 1
  for (int first = begin; first < keys.end; first += KEYS) {
    wait_copies<STAGES - 2>();
    __syncthreads();  // the step is there, and nobody reads the one before any more
    const int free = stage == 0 ? STAGES - 1 : stage - 1;
    copy_step(p, shared, source, keys, free);
    commit_copies();
    multiply_queries(shared, queries, stage);
    __syncthreads();
    const bool irregular = softmax(shared, row, scale, first, stage);
    if (__syncthreads_or(irregular)) settle_values(shared, outputs, first, stage);
    shrink_outputs(shared, outputs);
    multiply_values(shared, outputs, stage);
    stage = stage == STAGES - 1 ? 0 : stage + 1;
  }
  allow_successor();
  __syncthreads();
  finish_row(p, shared, row, split);
  __syncthreads();
  store_outputs(p, shared, outputs, split);
}

extern "C" __global__ void __launch_bounds__(THREADS, TWO_FIT ? BLOCKS_PER_SM : 1)
    portable_dense(const __grid_constant__ DenseParams p) {
  extern __shared__ __align__(16) u8 memory[];
  Shared& shared = *(Shared*)memory;
  wait_for_predecessor();
  const u32 tile = blockIdx.x % p.tiles;
  const int split = (int)(blockIdx.x / p.tiles);
  if (!find_work(p, shared.work, tile, split)) return;
  if (!shared.work.keys.empty()) {
    attend(p, shared, split);
  } else {
    count_pages(p, shared.work, split);
    store_nothing(p, shared.work.tile, split);
  }
}
