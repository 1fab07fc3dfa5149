// Which experts of a mixture a row uses, and how much each counts.
//
// `portable_route_logits`: products of rows and experts in F32. The row of k is cut into SLICES; a
// lane of a warp takes every 32nd group of 4 elements of a slice, lanes are added by halves, slices
// in order. A block either has one expert and a warp for each slice (few rows: SLICED), or a warp
// for 4 experts and 4 rows that goes through the slices: the same bits.
// `portable_route_select`: a warp a row: scores, groups, the best experts, gates.
//
// Shared memory of the second: 4 bytes an expert and 4 a group. At most 128 registers each.

#ifndef SLICED
#define SLICED 1
#endif
#ifndef SOFTMAX
#define SOFTMAX 0  // else sigmoid
#endif
#ifndef TOP_TWO
#define TOP_TWO 1  // the score of a group: its two best, else its best
#endif

// The key of what cannot be chosen, below all others.
constexpr u32 TAKEN = 0;

constexpr int SLICES = 4;
constexpr int THREADS = SLICES * WARP;
constexpr int TILE_ROWS = 4;
constexpr int TILE_EXPERTS = SLICED ? 1 : 4;

struct RouteParams {
  const float* x;       // [rows, hidden]
  const float* weight;  // [experts, hidden]
  const float* bias;    // [experts], or null
  float* scores;        // [rows, experts]: logits, then scores
  int* ids;             // [rows, used]
  float* gates;         // [rows, used]
  i64 rows;
  i64 hidden;
  u32 experts;
  u32 used;
  u32 groups;
  u32 used_groups;
  u32 normalize;
  float scale;
};

static_assert(sizeof(RouteParams) == 88, "the host mirrors this");

// 4 elements of a row; 0 behind its end.
__device__ __forceinline__ void load4(const float* row, i64 first, i64 width, bool wide,
                                      float (&values)[4]) {
  if (wide && first + 4 <= width) {
    Words v = load16(row + first);
    values[0] = __uint_as_float(v.x);
    values[1] = __uint_as_float(v.y);
    values[2] = __uint_as_float(v.z);
    values[3] = __uint_as_float(v.w);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) values[i] = first + i < width ? row[first + i] : 0.0f;
}

struct Tile {
  const float* xs[TILE_ROWS];
  const float* weights[TILE_EXPERTS];
  bool wide;
};

// Products of a slice; the same in all lanes.
__device__ __forceinline__ void slice_sums(const RouteParams& p, const Tile& tile, int slice,
                                           float (&sums)[TILE_ROWS][TILE_EXPERTS]) {
  constexpr int STEP = 4 * WARP;
  i64 steps = (p.hidden + STEP - 1) / STEP;
  i64 each = (steps + SLICES - 1) / SLICES;
  i64 end = min(each * (slice + 1), steps) * STEP;
#pragma unroll
  for (int i = 0; i < TILE_ROWS * TILE_EXPERTS; i++) sums[i / TILE_EXPERTS][i % TILE_EXPERTS] = 0;
#pragma unroll 2
  for (i64 at = each * slice * STEP + threadIdx.x % WARP * 4; at < end; at += STEP) {
    float w[TILE_EXPERTS][4], x[4];
#pragma unroll
    for (int e = 0; e < TILE_EXPERTS; e++) load4(tile.weights[e], at, p.hidden, tile.wide, w[e]);
#pragma unroll
    for (int r = 0; r < TILE_ROWS; r++) {
      load4(tile.xs[r], at, p.hidden, tile.wide, x);
#pragma unroll
      for (int e = 0; e < TILE_EXPERTS; e++) {
#pragma unroll
        for (int i = 0; i < 4; i++) sums[r][e] = fmaf(x[i], w[e][i], sums[r][e]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < TILE_ROWS; r++) {
#pragma unroll
    for (int e = 0; e < TILE_EXPERTS; e++) sums[r][e] = warp_sum(sums[r][e]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    portable_route_logits(const __grid_constant__ RouteParams p) {
  follow_predecessor();
  int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  constexpr int BLOCK_EXPERTS = SLICED ? 1 : SLICES * TILE_EXPERTS;
  u32 blocks = (p.experts + BLOCK_EXPERTS - 1) / BLOCK_EXPERTS;
  u32 first_expert = blockIdx.x % blocks * BLOCK_EXPERTS + (SLICED ? 0 : warp * TILE_EXPERTS);
  i64 first_row = i64(blockIdx.x / blocks) * TILE_ROWS;
  Tile tile;
#pragma unroll
  for (int r = 0; r < TILE_ROWS; r++) {
    tile.xs[r] = p.x + min(first_row + r, p.rows - 1) * p.hidden;
  }
#pragma unroll
  for (int e = 0; e < TILE_EXPERTS; e++) {
    tile.weights[e] = p.weight + i64(min(first_expert + e, p.experts - 1)) * p.hidden;
  }
  tile.wide = aligned16(p.x, p.hidden * 4) && aligned16(p.weight, 0);

  float sums[TILE_ROWS][TILE_EXPERTS], total[TILE_ROWS][TILE_EXPERTS] = {};
#if SLICED
  __shared__ float slices[SLICES][TILE_ROWS];
  slice_sums(p, tile, warp, sums);
#pragma unroll
  for (int r = 0; r < TILE_ROWS; r++) {
    if (lane == r) slices[warp][r] = sums[r][0];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < SLICES * TILE_ROWS; i++) {
    total[i % TILE_ROWS][0] += slices[i / TILE_ROWS][i % TILE_ROWS];
  }
  if (warp > 0) return;
#else
  for (int slice = 0; slice < SLICES; slice++) {
    slice_sums(p, tile, slice, sums);
#pragma unroll
    for (int i = 0; i < TILE_ROWS * TILE_EXPERTS; i++) {
      total[i / TILE_EXPERTS][i % TILE_EXPERTS] += sums[i / TILE_EXPERTS][i % TILE_EXPERTS];
    }
  }
#endif
#pragma unroll
  for (int i = 0; i < TILE_ROWS * TILE_EXPERTS; i++) {
    i64 row = first_row + i / TILE_EXPERTS;
    u32 expert = first_expert + i % TILE_EXPERTS;
    if (lane != i || row >= p.rows || expert >= p.experts) continue;
    p.scores[row * p.experts + expert] = total[i / TILE_EXPERTS][i % TILE_EXPERTS];
  }
}

// Logits to scores, in place; each lane its own experts, which are every 32nd.
__device__ __forceinline__ void score(float* scores, u32 experts) {
  u32 lane = threadIdx.x;
#if SOFTMAX
  float top = -infinity();
  for (u32 i = lane; i < experts; i += WARP) top = fmaxf(top, scores[i]);
  top = warp_max(top);
  float sum = 0.0f;
  for (u32 i = lane; i < experts; i += WARP) {
    float value = expf(scores[i] - top);
    scores[i] = value;
    sum += value;
  }
  sum = warp_sum(sum);
  for (u32 i = lane; i < experts; i += WARP) scores[i] = scores[i] / sum;
#else
  for (u32 i = lane; i < experts; i += WARP) scores[i] = 1.0f / (1.0f + expf(-scores[i]));
#endif
}

// What a group of experts counts.
__device__ __forceinline__ float group_score(const float* compared, u32 size) {
  float first = compared[0], second = 0.0f;
  bool have_second = false;
  for (u32 i = 1; i < size; i++) {
    float next = compared[i];
    if (selection_key(next) > selection_key(first)) {
      second = first;
      first = next;
      have_second = true;
    } else if (!have_second || selection_key(next) > selection_key(second)) {
      second = next;
      have_second = true;
    }
  }
  return TOP_TWO && have_second ? first + second : first;
}

// Marks the groups that a row does not use; `compared` becomes keys.
__device__ __forceinline__ void exclude_groups(const RouteParams& p, u32* keys, u32* group_keys) {
  u32 size = p.experts / p.groups;
  for (u32 g = threadIdx.x; g < p.groups; g += WARP) {
    group_keys[g] = selection_key(group_score((const float*)keys + g * size, size));
  }
  __syncwarp();
  for (u32 g = threadIdx.x; g < p.groups; g += WARP) {
    u32 before = 0, own = group_keys[g];
    for (u32 other = 0; other < p.groups; other++) {
      u32 key = group_keys[other];
      before += key > own || (key == own && other < g);
    }
    bool used = before < p.used_groups;
    for (u32 i = g * size; i < (g + 1) * size; i++) {
      keys[i] = used ? selection_key(__uint_as_float(keys[i])) : TAKEN;
    }
  }
}

extern "C" __global__ void __launch_bounds__(WARP)
    portable_route_select(const __grid_constant__ RouteParams p) {
  extern __shared__ u32 keys[];  // [experts]; behind them those of groups
  follow_predecessor();
  i64 row = blockIdx.x;
  u32 lane = threadIdx.x;
  float* scores = p.scores + row * p.experts;
  bool grouped = p.used_groups < p.groups;
  score(scores, p.experts);
  for (u32 i = lane; i < p.experts; i += WARP) {
    float compared = p.bias ? scores[i] + p.bias[i] : scores[i];
    // Groups are scored by numbers, one expert is chosen by its key.
    keys[i] = grouped ? __float_as_uint(compared) : selection_key(compared);
  }
  __syncwarp();
  if (grouped) exclude_groups(p, keys, keys + p.experts);
  __syncwarp();

  int* ids = p.ids + row * p.used;
  float* gates = p.gates + row * p.used;
  float sum = 0.0f;
  for (u32 place = 0; place < p.used; place++) {
    u64 best = 0;
    for (u32 i = lane; i < p.experts; i += WARP) {
      u64 next = u64(keys[i]) << 32 | u32(~i);
      best = next > best ? next : best;
    }
    u32 expert = ~u32(warp_max(best));
    float gate = scores[expert];
    sum += gate;
    // Lane `place % 32` writes what it will read again below.
    if (lane == place % WARP) {
      ids[place] = int(expert);
      gates[place] = gate;
    }
    if (lane == 0) keys[expert] = TAKEN;
    __syncwarp();
  }
  float divisor = p.normalize ? sum + 1e-20f : 1.0f;
  for (u32 place = lane; place < p.used; place += WARP) {
    gates[place] = gates[place] / divisor * p.scale;
  }
}
