// Linear layers of few rows: bound by the bandwidth at which weights are read.
//
// A block has 16 * OUT_TILES outputs and up to 8 * ROW_TILES rows; each of its 8 warps sums one
// slice of k and the slices are added through shared memory. A lane copies ahead exactly the 16
// bytes of each row that it will multiply, STAGES - 1 chunks deep, so that no warp waits for
// another.
//
// Shared memory: STAGES * SLOTS * 4096 bytes, at most 98304. At most 128 registers, 160 with
// BLOCKS = 1.

#ifndef OUT_TILES
#define OUT_TILES 1
#endif
#ifndef ROW_TILES
#define ROW_TILES 1
#endif
#ifndef STAGES
#define STAGES 4
#endif

constexpr int THREADS = SLICES * WARP;
constexpr int OUTS = 16 * OUT_TILES;
constexpr int ROWS = 8 * ROW_TILES;
// 16-byte words of a lane and chunk: two rows of weights a tile of outputs, then x.
constexpr int SLOTS = 2 * OUT_TILES + X_SLOTS * ROW_TILES;
// Sums of a row in shared memory; the four words more keep the lanes of a warp in different banks.
constexpr int SUMS_STRIDE = OUTS + 4;

static_assert(SLICES * ROWS * SUMS_STRIDE * 4 <= STAGES * SLOTS * THREADS * 16, "the sums fit");

// What a lane reads: the rows of its place in the tiles.
struct Lane {
  const u8* weights[2 * OUT_TILES];
  const u8* xs[ROW_TILES];
  u32 slots;  // shared memory: slot s of stage i is at slots + (i * SLOTS + s) * 16 * THREADS
  u32 inside; // bit i: weights[i] is a row of the matrix; bit 16 + i: xs[i] is a row of the block
  bool weights_wide;
  bool xs_wide;
};

__device__ __forceinline__ u32 slot(const Lane& lane, int stage, int index) {
  return lane.slots + u32(stage * SLOTS + index) * (16 * THREADS);
}

// Starts the copies of a chunk.
__device__ __forceinline__ void fill(const LinearParams& p, const Lane& lane, int stage,
                                     i64 chunk) {
  i64 k = chunk * CHUNK + (threadIdx.x % 4) * GROUP;
#pragma unroll
  for (int i = 0; i < 2 * OUT_TILES; i++) {
    fill16<2>(slot(lane, stage, i), lane.weights[i], k, p.in_width, lane.weights_wide,
              lane.inside >> i & 1);
  }
#pragma unroll
  for (int i = 0; i < ROW_TILES * X_SLOTS; i++) {
    fill16<X_BYTES>(slot(lane, stage, 2 * OUT_TILES + i), lane.xs[i / X_SLOTS],
                    k + i % X_SLOTS * 4, p.in_width, lane.xs_wide,
                    lane.inside >> (16 + i / X_SLOTS) & 1);
  }
}

__device__ __forceinline__ void add(const Lane& lane, int stage,
                                    float (&sums)[OUT_TILES][ROW_TILES][4]) {
  Words weights[2 * OUT_TILES];
#pragma unroll
  for (int i = 0; i < 2 * OUT_TILES; i++) weights[i] = load_shared16(slot(lane, stage, i));
#pragma unroll
  for (int row = 0; row < ROW_TILES; row++) {
    Words slots[X_SLOTS];
#pragma unroll
    for (int i = 0; i < X_SLOTS; i++) {
      slots[i] = load_shared16(slot(lane, stage, 2 * OUT_TILES + row * X_SLOTS + i));
    }
    XOperand x = operand_of(slots);
#pragma unroll
    for (int out = 0; out < OUT_TILES; out++) {
      add_chunk(sums[out][row], weights[2 * out], weights[2 * out + 1], x);
    }
  }
}

__device__ __forceinline__ Lane lane_of(const LinearParams& p, const BlockRows& rows,
                                        i64 first_out, const u8* shared) {
  Lane lane;
  int group = threadIdx.x % WARP / 4;
  lane.inside = 0;
#pragma unroll
  for (int i = 0; i < 2 * OUT_TILES; i++) {
    i64 out = first_out + i * 8 + group;
    lane.weights[i] = rows.weight + min(out, p.out_width - 1) * p.in_width * 2;
    lane.inside |= u32(out < p.out_width) << i;
  }
#pragma unroll
  for (int i = 0; i < ROW_TILES; i++) {
    int row = i * 8 + group;
    lane.xs[i] = row_of_x(p, rows, row);
    lane.inside |= u32(row < rows.count) << (16 + i);
  }
  lane.slots = shared_address(shared) + threadIdx.x * 16;
  lane.weights_wide = aligned16(rows.weight, p.in_width * 2);
  lane.xs_wide = aligned16(p.x, p.in_width * X_BYTES);
  return lane;
}

// Adds the slices in order, and stores.
__device__ __forceinline__ void finish(const LinearParams& p, const BlockRows& rows, i64 first_out,
                                       float (&sums)[OUT_TILES][ROW_TILES][4], float* shared) {
  int slice = threadIdx.x / WARP, group = threadIdx.x % WARP / 4, place = threadIdx.x % 4;
  __syncthreads();
#pragma unroll
  for (int out = 0; out < OUT_TILES; out++) {
#pragma unroll
    for (int row = 0; row < ROW_TILES; row++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int r = row * 8 + place * 2 + i % 2, o = out * 16 + group + i / 2 * 8;
        shared[(slice * ROWS + r) * SUMS_STRIDE + o] = sums[out][row][i];
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < rows.count * OUTS; i += THREADS) {
    int r = i / OUTS, o = i % OUTS;
    if (first_out + o >= p.out_width) continue;
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < SLICES; s++) sum += shared[(s * ROWS + r) * SUMS_STRIDE + o];
    store(p, row_of_y(p, rows, r), first_out + o, sum);
  }
}

// Grouped rows of F32 in several tiles need a few registers more.
constexpr int BLOCKS = X_F32 && GROUPED && ROW_TILES > 1 ? 1 : 2;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    portable_linear_skinny(const __grid_constant__ LinearParams p) {
  extern __shared__ __align__(16) u8 shared[];
  follow_predecessor();
  BlockRows rows;
  if (!rows_of_block(p, ROWS, rows)) return;
  i64 first_out = i64(blockIdx.x / p.row_tiles) * OUTS;
  if (GROUPED && rows.expert == p.experts) return store_nothing(p, rows, first_out, OUTS);

  Lane lane = lane_of(p, rows, first_out, shared);
  i64 chunks = (p.in_width + CHUNK - 1) / CHUNK;
  i64 begin = slice_chunks(chunks) * (threadIdx.x / WARP);
  i64 end = min(begin + slice_chunks(chunks), chunks);
  float sums[OUT_TILES][ROW_TILES][4] = {};
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    if (begin + i < end) fill(p, lane, i, begin + i);
    commit_copies();
  }
  int stage = 0, ahead = STAGES - 1;
  for (i64 chunk = begin; chunk < end; chunk++) {
    wait_copies<STAGES - 2>();
    // The stage to fill was multiplied in the last round, by this lane alone.
    if (chunk + STAGES - 1 < end) fill(p, lane, ahead, chunk + STAGES - 1);
    commit_copies();
    add(lane, stage, sums);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    ahead = ahead + 1 == STAGES ? 0 : ahead + 1;
  }
  wait_copies<0>();
  finish(p, rows, first_out, sums, (float*)shared);
}
