// Root-mean-square normalisation: y = x / sqrt(mean(x^2) + eps) * weight, a block a row.
//
// Every width. No shared memory but one word a warp; at most 64 registers.
// A thread sums its groups of 8 elements in order, then warps and their sums are added in one
// order: the bits of a row depend on nothing but the row.
// Where the squares overflow F32 they are summed again of the row times 2^-80, which is exact and
// far enough from both ends for any finite row, however wide.

#ifndef X_F32
#define X_F32 0
#endif

constexpr int THREADS = 256;
constexpr float SCALE_DOWN = 0x1p-80f;

struct NormParams {
  const u8* x;          // BF16 or F32 [rows, width], rows in_stride apart
  const float* weight;  // [width]
  u16* narrow;          // BF16 [rows, width], rows out_stride apart; or null
  float* wide;          // F32 [rows, width]; or null
  i64 width;
  i64 in_stride;   // elements
  i64 out_stride;  // elements
  float eps;
};

static_assert(sizeof(NormParams) == 64, "the host mirrors this");

// The same sum in all threads. The first barrier keeps an earlier sum until all have read it.
__device__ __forceinline__ float block_sum(float value) {
  __shared__ float sums[THREADS / WARP];
  value = warp_sum(value);
  __syncthreads();
  if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = value;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < THREADS / WARP; i++) sum += sums[i];
  return sum;
}

// The sum of the squares of the row times `scale`, the same in all threads.
__device__ __forceinline__ float sum_of_squares(const u8* x, i64 width, bool x_wide, float scale) {
  float values[GROUP];
  float squares = 0.0f;
  for (i64 first = i64(threadIdx.x) * GROUP; first < width; first += THREADS * GROUP) {
    load_group<X_F32>(x, first, width, x_wide, values);
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
      float value = values[i] * scale;
      squares = fmaf(value, value, squares);
    }
  }
  return block_sum(squares);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    portable_norm(const __grid_constant__ NormParams p) {
  follow_predecessor();
  constexpr int BYTES = X_F32 ? 4 : 2;
  i64 row = blockIdx.x;
  const u8* x = p.x + row * p.in_stride * BYTES;
  u16* narrow = p.narrow + row * p.out_stride;
  float* wide = p.wide + row * p.width;
  bool x_wide = aligned16(x, 0);
  bool weight_wide = aligned16(p.weight, 0);
  bool narrow_wide = aligned16(narrow, 0);
  bool wide_wide = aligned16(wide, 0);

  float scale = 1.0f;
  float squares = sum_of_squares(x, p.width, x_wide, scale);
  if (!isfinite(squares)) {
    scale = SCALE_DOWN;
    squares = sum_of_squares(x, p.width, x_wide, scale);
  }
  float factor = 1.0f / sqrtf(squares / float(p.width) + p.eps * scale * scale);

  float values[GROUP];
  float weights[GROUP];
  for (i64 first = i64(threadIdx.x) * GROUP; first < p.width; first += THREADS * GROUP) {
    load_group<X_F32>(x, first, p.width, x_wide, values);
    load_group<true>(p.weight, first, p.width, weight_wide, weights);
#pragma unroll
    for (int i = 0; i < GROUP; i++) values[i] = values[i] * scale * factor * weights[i];
    if (p.narrow) store_group<false>(narrow, first, p.width, narrow_wide, values);
    if (p.wide) store_group<true>(wide, first, p.width, wide_wide, values);
  }
}
