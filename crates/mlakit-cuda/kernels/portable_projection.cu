// A matrix a head: y[r, h, o] = sum over i of x[r, h, i] w[h, i, o].
//
// Every width; heads may lie apart. A block has 64 outputs of one head and 8 * ROW_TILES rows; each
// of its 4 warps has 16 of the outputs. The weights, transposed on their way from shared memory,
// are the first operand of the tensor core products. Products follow in the order of i, 16 at a
// time: the bits of a row depend neither on the number of rows nor on ROW_TILES.
//
// Shared memory: STAGES * (8192 + 1024 * ROW_TILES), at most 49152. At most 128 registers; 168
// with 8 row tiles, whose sums do not fit 128 on Blackwell.

#ifndef ROW_TILES
#define ROW_TILES 1
#endif
#ifndef STAGES
#define STAGES 4
#endif

constexpr int THREADS = 128;
constexpr int OUTS = 64;
constexpr int INS = 64;  // of a stage
constexpr int ROWS = 8 * ROW_TILES;
constexpr int ROW_BYTES = 128;  // of 64 elements, of weights and of x
constexpr int WEIGHT_BYTES = INS * ROW_BYTES;
constexpr int STAGE_BYTES = WEIGHT_BYTES + ROWS * ROW_BYTES;

struct ProjectionParams {
  const u8* x;       // BF16 [rows, heads, in_width], heads in_stride apart
  const u8* weight;  // BF16 [heads, in_width, out_width]
  u8* y;             // BF16 or F32 [rows, heads, out_width], heads out_stride apart
  i64 rows;
  i64 heads;
  i64 in_width;
  i64 out_width;
  i64 in_stride;   // elements
  i64 out_stride;  // elements
  u32 row_tiles;
  u32 out_tiles;
  u32 y_f32;  // the dtype of y: F32, else BF16
};

static_assert(sizeof(ProjectionParams) == 88, "the host mirrors this");

struct Block {
  i64 head;
  i64 first_row;
  i64 first_out;
  const u8* weight;  // of the head
  bool weight_wide;
  bool x_wide;
};

// Where 16-byte word `word` of a row lies: moved, so that eight rows have it in different banks.
__device__ __forceinline__ u32 offset(int row, int word) {
  return u32(row * ROW_BYTES + (word ^ (row & 7)) * 16);
}

// Starts the copies of a stage, whose first element of a row of x is `first`.
__device__ __forceinline__ void fill(const ProjectionParams& p, const Block& block, u32 stage,
                                     i64 first) {
  int word = threadIdx.x % 8;
#pragma unroll
  for (int i = 0; i < INS / 16; i++) {
    int in = threadIdx.x / 8 + i * 16;
    bool inside = first + in < p.in_width;
    const u8* row = block.weight + (inside ? first + in : 0) * p.out_width * 2;
    fill16<2>(stage + offset(in, word), row, block.first_out + word * GROUP, p.out_width,
              block.weight_wide, inside);
  }
#pragma unroll
  for (int i = 0; i < (ROWS + 15) / 16; i++) {
    int row = threadIdx.x / 8 + i * 16;
    if (row >= ROWS) break;
    bool inside = block.first_row + row < p.rows;
    i64 at = (inside ? block.first_row + row : 0) * p.heads + block.head;
    fill16<2>(stage + WEIGHT_BYTES + offset(row, word), p.x + at * p.in_stride * 2,
              first + word * GROUP, p.in_width, block.x_wide, inside);
  }
}

__device__ __forceinline__ void add(u32 stage, float (&sums)[ROW_TILES][4]) {
  int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
  for (int in = 0; in < INS; in += 32) {
    u32 weights[2][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      // Matrices in the order of the operand: inputs 0-7 and outputs 0-7, outputs 8-15, then
      // inputs 8-15.
      int row = in + half * 16 + lane / 16 * 8 + lane % 8;
      Words w = load_matrices_transposed(stage + offset(row, warp * 2 + lane / 8 % 2));
      weights[half][0] = w.x;
      weights[half][1] = w.y;
      weights[half][2] = w.z;
      weights[half][3] = w.w;
    }
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++) {
      int row = tile * 8 + lane % 8;
      Words x = load_matrices(stage + WEIGHT_BYTES + offset(row, in / 8 + lane / 8));
      multiply(sums[tile], weights[0], x.x, x.y);
      multiply(sums[tile], weights[1], x.z, x.w);
    }
  }
}

__device__ __forceinline__ void store_all(const ProjectionParams& p, const Block& block,
                                          const float (&sums)[ROW_TILES][4]) {
  int warp = threadIdx.x / WARP, group = threadIdx.x % WARP / 4, place = threadIdx.x % 4;
#pragma unroll
  for (int tile = 0; tile < ROW_TILES; tile++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      i64 row = block.first_row + tile * 8 + place * 2 + i % 2;
      i64 out = block.first_out + warp * 16 + group + i / 2 * 8;
      if (row >= p.rows || out >= p.out_width) continue;
      i64 at = (row * p.heads + block.head) * p.out_stride + out;
      if (p.y_f32) {
        ((float*)p.y)[at] = sums[tile][i];
      } else {
        ((u16*)p.y)[at] = bf16_of_f32(sums[tile][i]);
      }
    }
  }
}

#if ROW_TILES >= 8 && __CUDA_ARCH__ >= 1000
#define BLOCKS 3
#else
#define BLOCKS 4
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    portable_projection(const __grid_constant__ ProjectionParams p) {
  extern __shared__ __align__(16) u8 shared[];
  follow_predecessor();
  Block block;
  u32 tile = blockIdx.x / p.row_tiles;  // neighbours share weights
  block.first_row = i64(blockIdx.x % p.row_tiles) * ROWS;
  block.first_out = i64(tile % p.out_tiles) * OUTS;
  block.head = tile / p.out_tiles;
  block.weight = p.weight + block.head * p.in_width * p.out_width * 2;
  block.weight_wide = aligned16(p.weight, p.out_width * 2);
  block.x_wide = aligned16(p.x, p.in_stride * 2);

  u32 base = shared_address(shared);
  i64 rounds = (p.in_width + INS - 1) / INS;
  float sums[ROW_TILES][4] = {};
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    if (i < rounds) fill(p, block, base + i * STAGE_BYTES, i64(i) * INS);
    commit_copies();
  }
  u32 stage = 0, ahead = STAGES - 1;
  for (i64 round = 0; round < rounds; round++) {
    wait_copies<STAGES - 2>();
    __syncthreads();  // the stage has arrived, and the one before it is no longer read
    if (round + STAGES - 1 < rounds) {
      fill(p, block, base + ahead * STAGE_BYTES, (round + STAGES - 1) * INS);
    }
    commit_copies();
    add(base + stage * STAGE_BYTES, sums);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    ahead = ahead + 1 == STAGES ? 0 : ahead + 1;
  }
  store_all(p, block, sums);
}
