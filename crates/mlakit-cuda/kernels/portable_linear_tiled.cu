// Linear layers of many rows: tiles of 64 outputs by 64 rows, 4 warps of 32 by 32.
//
// Chunks of k go through STAGES stages of shared memory, two a stage. The slices follow one
// another: each is summed on its own and added to the total, as the kernel for few rows does.
//
// Shared memory: STAGES * STAGE_BYTES, 49152 (BF16) or 73728 (F32). At most 168 registers.

#ifndef STAGES
#define STAGES 3
#endif

constexpr int THREADS = 128;
constexpr int OUTS = 64;
constexpr int ROWS = 64;
constexpr int CHUNKS = 2;  // of a stage
constexpr int WEIGHT_BYTES = OUTS * CHUNK * 2;
constexpr int ROW_BYTES = CHUNK * X_BYTES;  // of a row of x and a chunk
constexpr int CHUNK_BYTES = WEIGHT_BYTES + ROWS * ROW_BYTES;
constexpr int STAGE_BYTES = CHUNKS * CHUNK_BYTES;
constexpr int X_WORDS = ROW_BYTES / 16;           // 16-byte words of such a row
constexpr int X_STEP = THREADS / X_WORDS;         // rows that the block copies at once
constexpr int X_COPIES = ROWS / X_STEP;           // of a thread and chunk
constexpr int WEIGHT_COPIES = OUTS / (THREADS / 4);

// What a thread copies.
struct Copies {
  const u8* weights[WEIGHT_COPIES];
  const u8* xs[X_COPIES];
  u32 inside;  // bit i: weights[i] is a row of the matrix; bit 16 + i: xs[i] is a row of the block
  bool weights_wide;
  bool xs_wide;
};

__device__ __forceinline__ Copies copies_of(const LinearParams& p, const BlockRows& rows,
                                            i64 first_out) {
  Copies copies;
  copies.inside = 0;
#pragma unroll
  for (int i = 0; i < WEIGHT_COPIES; i++) {
    i64 out = first_out + threadIdx.x / 4 + i * (THREADS / 4);
    copies.weights[i] = rows.weight + min(out, p.out_width - 1) * p.in_width * 2;
    copies.inside |= u32(out < p.out_width) << i;
  }
#pragma unroll
  for (int i = 0; i < X_COPIES; i++) {
    int row = threadIdx.x / X_WORDS + i * X_STEP;
    copies.xs[i] = row_of_x(p, rows, row);
    copies.inside |= u32(row < rows.count) << (16 + i);
  }
  copies.weights_wide = aligned16(rows.weight, p.in_width * 2);
  copies.xs_wide = aligned16(p.x, p.in_width * X_BYTES);
  return copies;
}

// Where 16-byte word `word` of row `row` of x lies in its chunk. F32: the words of odd rows change
// places in pairs, so that a quarter of a warp reads from all banks.
__device__ __forceinline__ u32 x_offset(int row, int word) {
  return u32(row * ROW_BYTES + (X_F32 ? word ^ (row & 1) : word) * 16);
}

// Starts the copies of a stage, whose first chunk is `chunk`.
__device__ __forceinline__ void fill(const LinearParams& p, const Copies& copies, u32 stage,
                                     i64 chunk) {
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    u32 weights = stage + c * CHUNK_BYTES, xs = weights + WEIGHT_BYTES;
    i64 k = (chunk + c) * CHUNK;
#pragma unroll
    for (int i = 0; i < WEIGHT_COPIES; i++) {
      u32 to = weights + threadIdx.x * 16 + i * (THREADS * 16);
      fill16<2>(to, copies.weights[i], k + threadIdx.x % 4 * GROUP, p.in_width,
                copies.weights_wide, copies.inside >> i & 1);
    }
#pragma unroll
    for (int i = 0; i < X_COPIES; i++) {
      int row = threadIdx.x / X_WORDS + i * X_STEP, word = threadIdx.x % X_WORDS;
      fill16<X_BYTES>(xs + x_offset(row, word), copies.xs[i], k + word * (16 / X_BYTES),
                      p.in_width, copies.xs_wide, copies.inside >> (16 + i) & 1);
    }
  }
}

typedef float Sums[2][4][4];

// Adds a chunk to the sums of a warp: 2 tiles of 16 outputs, 4 of 8 rows.
__device__ __forceinline__ void add(u32 chunk, Sums& sums) {
  int warp = threadIdx.x / WARP, group = threadIdx.x % WARP / 4, place = threadIdx.x % 4;
  Words weights[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int out = warp % 2 * 32 + i * 8 + group;
    weights[i] = load_shared16(chunk + out * (CHUNK * 2) + place * 16);
  }
#pragma unroll
  for (int tile = 0; tile < 4; tile++) {
    int row = warp / 2 * 32 + tile * 8 + group;
    Words slots[X_SLOTS];
#pragma unroll
    for (int i = 0; i < X_SLOTS; i++) {
      slots[i] = load_shared16(chunk + WEIGHT_BYTES + x_offset(row, place * X_SLOTS + i));
    }
    XOperand x = operand_of(slots);
#pragma unroll
    for (int out = 0; out < 2; out++) {
      add_chunk(sums[out][tile], weights[2 * out], weights[2 * out + 1], x);
    }
  }
}

__device__ __forceinline__ void end_slice(Sums& total, Sums& slice) {
#pragma unroll
  for (int i = 0; i < 32; i++) {
    total[i / 16][i / 4 % 4][i % 4] += slice[i / 16][i / 4 % 4][i % 4];
    slice[i / 16][i / 4 % 4][i % 4] = 0.0f;
  }
}

__device__ __forceinline__ void store_all(const LinearParams& p, const BlockRows& rows,
                                          i64 first_out, const Sums& total) {
  int warp = threadIdx.x / WARP, group = threadIdx.x % WARP / 4, place = threadIdx.x % 4;
#pragma unroll
  for (int pair = 0; pair < 8; pair++) {
    int row = warp / 2 * 32 + pair / 2 * 8 + place * 2 + pair % 2;
    if (row >= rows.count) continue;
    i64 y = row_of_y(p, rows, row);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      i64 out = first_out + warp % 2 * 32 + i * 8 + group;
      if (out < p.out_width) store(p, y, out, total[i / 2][pair / 2][i % 2 * 2 + pair % 2]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
    portable_linear_tiled(const __grid_constant__ LinearParams p) {
  extern __shared__ __align__(16) u8 shared[];
  follow_predecessor();
  BlockRows rows;
  if (!rows_of_block(p, ROWS, rows)) return;
  i64 first_out = i64(blockIdx.x / p.row_tiles) * OUTS;
  if (GROUPED && rows.expert == p.experts) return store_nothing(p, rows, first_out, OUTS);

  Copies copies = copies_of(p, rows, first_out);
  u32 base = shared_address(shared);
  i64 chunks = (p.in_width + CHUNK - 1) / CHUNK;
  i64 rounds = (chunks + CHUNKS - 1) / CHUNKS;
  i64 per_slice = slice_chunks(chunks);
  i64 left = per_slice;  // chunks until the slice ends
  Sums total = {}, slice = {};
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    if (i < rounds) fill(p, copies, base + i * STAGE_BYTES, i64(i) * CHUNKS);
    commit_copies();
  }
  u32 stage = 0, ahead = STAGES - 1;
  for (i64 round = 0; round < rounds; round++) {
    wait_copies<STAGES - 2>();
    __syncthreads();  // the stage has arrived, and the one before it is no longer read
    if (round + STAGES - 1 < rounds) {
      fill(p, copies, base + ahead * STAGE_BYTES, (round + STAGES - 1) * CHUNKS);
    }
    commit_copies();
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      // A chunk behind the last is all zeros and ends no slice that counts.
      add(base + stage * STAGE_BYTES + c * CHUNK_BYTES, slice);
      if (--left == 0) {
        end_slice(total, slice);
        left = per_slice;
      }
    }
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    ahead = ahead + 1 == STAGES ? 0 : ahead + 1;
  }
  end_slice(total, slice);
  store_all(p, rows, first_out, total);
}
