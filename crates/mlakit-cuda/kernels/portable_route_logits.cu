// The logits of a router: products of rows and experts in F32.
//
// Every width and number of experts. The row of k is cut into SLICES; a lane of a warp takes every
// 32nd group of 4 elements of a slice, lanes are added by halves, slices in order. A block either
// has one expert and a warp for each slice (few rows: SLICED), or a warp for 4 experts and 4 rows
// that goes through the slices: the same bits.
//
// Shared memory: 64 bytes. At most 128 registers.

#ifndef SLICED
#define SLICED 1
#endif

constexpr int SLICES = 4;
constexpr int THREADS = SLICES * WARP;
constexpr int TILE_ROWS = 4;
constexpr int TILE_EXPERTS = SLICED ? 1 : 4;

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
