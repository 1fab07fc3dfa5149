// Root-mean-square normalisation: y = x / sqrt(mean(x^2) + eps) * weight, a block a row.
//
// Every width. No shared memory but one word a warp; at most 64 registers.
// A thread sums its groups of 8 elements in order, then warps and their sums are added in one
// order: the bits of a row depend on nothing but the row.

#ifndef X_F32
#define X_F32 0
#endif

constexpr int THREADS = 256;

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

// The same sum in all threads.
__device__ __forceinline__ float block_sum(float value) {
  __shared__ float sums[THREADS / WARP];
  value = warp_sum(value);
  if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = value;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < THREADS / WARP; i++) sum += sums[i];
  return sum;
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

  float values[GROUP];
  float squares = 0.0f;
  for (i64 first = i64(threadIdx.x) * GROUP; first < p.width; first += THREADS * GROUP) {
    load_group<X_F32>(x, first, p.width, x_wide, values);
#pragma unroll
    for (int i = 0; i < GROUP; i++) squares = fmaf(values[i], values[i], squares);
  }
  float mean = block_sum(squares) / float(p.width);
  float factor = 1.0f / sqrtf(mean + p.eps);

  float weights[GROUP];
  for (i64 first = i64(threadIdx.x) * GROUP; first < p.width; first += THREADS * GROUP) {
    load_group<X_F32>(x, first, p.width, x_wide, values);
    load_group<true>(p.weight, first, p.width, weight_wide, weights);
#pragma unroll
    for (int i = 0; i < GROUP; i++) values[i] = values[i] * factor * weights[i];
    if (p.narrow) store_group<false>(narrow, first, p.width, narrow_wide, values);
    if (p.wide) store_group<true>(wide, first, p.width, wide_wide, values);
  }
}
