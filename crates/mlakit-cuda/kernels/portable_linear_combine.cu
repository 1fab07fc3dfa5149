// Linear layers with experts, behind the products: the results of a row's experts, each times its
// gate, are summed in order. A thread an output.
//
// No shared memory; at most 64 registers.

constexpr int THREADS = 256;

struct CombineParams {
  const int* ids;      // [rows, used]
  const float* gates;  // [rows, used]
  const float* sums;   // [rows, used, out_width]
  u8* y;               // BF16 or F32 [rows, out_width]
  i64 rows;
  i64 out_width;
  u32 used;
  u32 experts;
  u32 y_f32;
  u32 accumulate;
};

static_assert(sizeof(CombineParams) == 64, "the host mirrors this");

extern "C" __global__ void __launch_bounds__(THREADS)
    portable_linear_combine(const __grid_constant__ CombineParams p) {
  follow_predecessor();
  i64 at = i64(blockIdx.x) * THREADS + threadIdx.x;
  i64 row = at / p.out_width;
  if (row >= p.rows) return;
  float value = 0.0f;
  for (u32 j = 0; j < p.used; j++) {
    i64 pair = row * p.used + j;
    // A gate that is not a number must not count where there is no expert.
    if (u32(p.ids[pair]) >= p.experts) continue;
    value += p.gates[pair] * p.sums[pair * p.out_width + at % p.out_width];
  }
  if (p.y_f32) {
    float* y = (float*)p.y + at;
    *y = p.accumulate ? *y + value : value;
  } else {
    ((u16*)p.y)[at] = bf16_of_f32(value);
  }
}
